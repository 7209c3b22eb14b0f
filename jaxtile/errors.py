"""The errors that jaxtile raises: each says op, expected, got, and the way out.

Every error also inherits the builtin that a caller would guess, so `except ValueError`
keeps working.
"""

from __future__ import annotations


class TileError(Exception):
    """Base of every jaxtile error.

    Example:
        >>> import jaxtile as jt
        >>> issubclass(jt.errors.TileShapeError, jt.errors.TileError)
        True
    """


class TileTypeError(TileError, TypeError):
    """A dtype, or the kind of an argument, does not fit the op."""


class TileShapeError(TileError, ValueError):
    """Shapes, axes or dims do not fit the op or each other."""


class TileValueError(TileError, ValueError):
    """An argument has a value outside its domain."""


class ContractError(TileError, ValueError):
    """A reducer lacks a law that the policy needs."""


class PolicyError(TileError, ValueError):
    """A policy does not exist, or contradicts the op."""


class UnsupportedOnBackend(TileError, NotImplementedError):
    """A backend was asked for by name and refuses, with its reason."""


class NoDerivativeError(TileError, NotImplementedError):
    """The op has no derivative for these operands, and says why."""


def message(op: str, *, expected: str, got: str, way_out: str) -> str:
    """The one shape of every message: op, expected, got, way out."""
    return f"{op}: expected {expected}; got {got}. {way_out}"
