"""Python's operators on tiles, each lifted through the tile's own `lift_map`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxtile.errors import TileTypeError, message


def is_tile(value: Any) -> bool:
    """True for a tile: the leaf test of pytrees of tiles."""
    return isinstance(value, Operators)


def is_operand(value: Any) -> bool:
    """True for what a lifted function takes: tiles, arrays, Python scalars."""
    kinds = (Operators, jax.Array, np.ndarray, np.generic, bool, int, float)
    return isinstance(value, kinds)


def _unary(fn: Callable) -> Callable[[Any], Any]:
    def method(self):
        return self.lift_map(fn, self)

    return method


def _binary(fn: Callable) -> Callable[[Any, Any], Any]:
    def method(self, other):
        if not is_operand(other):
            return NotImplemented
        return self.lift_map(fn, self, other)

    return method


def _reflected(fn: Callable) -> Callable[[Any, Any], Any]:
    def method(self, other):
        if not is_operand(other):
            return NotImplemented
        return self.lift_map(fn, other, self)

    return method


def _refuse_matmul(self, other):
    raise TileTypeError(
        message(
            "@",
            expected="an elementwise operator",
            got="a matrix product of tiles",
            way_out="Write jaxtile.matmul(a, b), which states the accumulator.",
        )
    )


class Operators:
    """Arithmetic, comparison and bit operators in terms of `lift_map`."""

    __slots__ = ()
    __array_ufunc__ = None  # NumPy arrays leave the operators to us
    __hash__ = None  # pyright: ignore[reportAssignmentType] (== is elementwise)

    def lift_map(self, fn: Callable[..., Any], *states: Any) -> Any:
        """`fn` elementwise; the subclass says how."""
        raise NotImplementedError

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)
    __matmul__ = __rmatmul__ = _refuse_matmul
