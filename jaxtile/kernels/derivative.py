"""Derivatives that the author of a kernel gives, in place of those of plain jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtile._checks import as_array
from jaxtile._jax_private import align_varying
from jaxtile._join import spell
from jaxtile._operators import is_tile
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.kernels import tangent

_ZERO = jax.dtypes.float0
_PAIR = "Return (results, residuals), as fwd of jax.custom_vjp does."
_EACH = "Return a tuple with one entry for each operand, None where it is zero."


class Rule(NamedTuple):
    """What a kernel's derivative is.

    Args:
        op: for messages.
        fwd: `(*operands) -> (results, residuals)`, after the kernel's settings.
        bwd: `(residuals, cotangents) -> cotangents of the operands`, likewise.
        forward_mode: plain jax has it.
    """

    op: str
    fwd: Callable
    bwd: Callable
    forward_mode: bool = False

    def attach(self, run: Callable, settings: tuple, operands: Sequence, out: Any):
        """The results of `run(*operands)`, with this derivative.

        Args:
            run: the kernel as it runs without a derivative.
            settings: what `fwd` and `bwd` take first.
            operands: arrays and tiles.
            out: the results' structure.
        """
        # Shared operands get sums of cotangents.
        operands = _varying(list(operands), operands)
        wanted = [_cotangent_of(v) for v in operands]

        def primal(*operands):
            return _varying(run(*operands), operands)

        def forward(*operands):
            results, residuals = _pair(self.op, self.fwd(*settings, *operands), out)
            return _varying(results, operands), residuals

        def backward(residuals, cotangents):
            found = self.bwd(*settings, residuals, cotangents)
            return _varying(_cotangents(self.op, found, wanted), taken(cotangents))

        if self.forward_mode:
            return tangent.attach(primal, forward, backward, operands)
        kernel = jax.custom_vjp(primal)
        kernel.defvjp(forward, backward)
        return kernel(*tangent.reverse_only(operands, self.op))


def _varying(tree: Any, like: Any) -> Any:
    """A pytree whose arrays vary along every manual mesh axis that one of `like`'s does."""
    leaves, structure = jax.tree.flatten(tree)
    given = [k for k, v in enumerate(leaves) if getattr(v, "dtype", _ZERO) != _ZERO]
    aligned = align_varying([leaves[k] for k in given] + jax.tree.leaves(like))
    for k, v in zip(given, aligned, strict=False):
        leaves[k] = v
    return jax.tree.unflatten(structure, leaves)


def taken(value: Any) -> list:
    """The arrays and tiles of a pytree that a kernel can take, in order.

    Cotangents of integers, which say nothing, are left out.
    """
    leaves = jax.tree.leaves(value, is_leaf=is_tile)
    return [v for v in leaves if getattr(v, "dtype", None) != _ZERO]


def _pair(op: str, found: Any, out: Any) -> tuple[Any, Any]:
    if not (isinstance(found, tuple | list) and len(found) == 2):
        raise TileTypeError(
            message(
                op,
                expected="fwd to return (results, residuals)",
                got=_shown(found),
                way_out=_PAIR,
            )
        )
    results = _arrays(op, found[0])
    _require(op, "fwd's results like the kernel's", results, out, _PAIR)
    return results, _arrays(op, found[1])


def _cotangents(op: str, found: Any, wanted: Sequence) -> tuple:
    if len(wanted) == 1 and (is_tile(found) or hasattr(found, "dtype")):
        found = (found,)
    if not (isinstance(found, tuple | list) and len(found) == len(wanted)):
        raise TileTypeError(
            message(
                op,
                expected=f"bwd to return a cotangent for each of {len(wanted)} operands",
                got=_shown(found),
                way_out=_EACH,
            )
        )
    given = []
    for place, (cotangent, like) in enumerate(zip(found, wanted, strict=True)):
        if cotangent is not None and getattr(cotangent, "dtype", None) != _ZERO:
            cotangent = _arrays(op, cotangent)
            what = f"bwd's cotangent like operand {place}"
            _require(op, what, cotangent, like, _EACH)
        given.append(cotangent)
    return tuple(given)


def _arrays(op: str, tree: Any) -> Any:
    def array(leaf):
        return leaf if getattr(leaf, "dtype", None) == _ZERO else as_array(op, leaf)

    return jax.tree.map(array, tree)


def _cotangent_of(operand: Any) -> Any:
    """The shape and dtype of an operand's cotangents; None for integers."""
    array = operand.array if is_tile(operand) else operand
    tangent = jax.typeof(array).to_tangent_aval()
    if tangent.dtype == _ZERO:
        return None
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, tangent.dtype), operand)


def _require(op: str, what: str, found: Any, wanted: Any, way_out: str) -> None:
    """Refuse a pytree of another structure, or with leaves of other shapes or dtypes."""
    same = jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=same))
    shapes = all(a.shape == b.shape for a, b in pairs)
    if same and shapes and all(a.dtype == b.dtype for a, b in pairs):
        return
    kind = TileShapeError if same and not shapes else TileTypeError
    raise kind(
        message(
            op,
            expected=f"{what}, {_shown(wanted)}",
            got=_shown(found),
            way_out=way_out,
        )
    )


def _shown(tree: Any) -> str:
    """A pytree of arrays or of their shapes and dtypes, as messages show it."""

    def leaf(value):
        if not hasattr(value, "dtype"):
            return repr(value)
        text = f"{np.dtype(value.dtype).name}{list(value.shape)}"
        return f"{text} with dims {spell(value.dims)}" if is_tile(value) else text

    return str(jax.tree.map(leaf, tree, is_leaf=is_tile)).replace("'", "")
