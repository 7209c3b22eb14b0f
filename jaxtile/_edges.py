"""The blocks that are being traced: how large a dim's block is, and what lies inside.

A block at the ragged end of an axis is as large as every other, and its last elements
stand for nothing. Ops that combine elements along a dim ask here which ones count.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, message


class Edge(NamedTuple):
    """The block of a dim.

    Args:
        size: of the block.
        start: the coordinate of its first element along the axis.
        extent: where the coordinates of the block end, at most the size of the axis.
        ragged: some elements may lie outside of the axis.
    """

    size: int
    start: Any
    extent: Any
    ragged: bool

    def coordinates(self) -> Any:
        """The coordinate of each element."""
        return lax.iota(jnp.int32, self.size) + jnp.asarray(self.start, jnp.int32)


_ACTIVE: contextvars.ContextVar[Mapping[Dim, Edge] | None] = contextvars.ContextVar(
    "edges", default=None
)


_DERIVED: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "derived", default=False
)


@contextlib.contextmanager
def scope(derived: bool | None = None) -> Iterator[None]:
    """A block in which dims get edges that are forgotten at its end.

    Args:
        derived: what is traced may be differentiated; None is as outside of the block.
    """
    token = _ACTIVE.set(dict(_ACTIVE.get() or {}))
    before = _DERIVED.set(_DERIVED.get() if derived is None else derived)
    try:
        yield
    finally:
        _DERIVED.reset(before)
        _ACTIVE.reset(token)


def add(dim: Dim, edge: Edge) -> None:
    """Say what the block of a dim is, within the innermost scope."""
    active = _ACTIVE.get()
    assert isinstance(active, dict)  # kernels open a scope
    active[dim] = edge


def of(dim: Dim) -> Edge | None:
    """The block of a dim, where it is one of a kernel's."""
    return (_ACTIVE.get() or {}).get(dim)


def inside(dims: Any, axes: Any, shape: Any) -> Any:
    """Which elements of a tile lie inside along some axes; None where all do."""
    found = None
    for axis in axes:
        edge = of(dims[axis]) if dims is not None else None
        if edge is None or not edge.ragged or edge.size != shape[axis]:
            continue
        # In the shape of the tile: not every backend reshapes a mask.
        place = lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
        place = place + jnp.asarray(edge.start, jnp.int32)
        mask = (place >= 0) & (place < edge.extent)
        found = mask if found is None else found & mask
    return found


def require_whole(op: str, dims: Any, axes: Any, shape: Any) -> None:
    """Refuse to order or move elements along a block whose end stands for nothing.

    Raises:
        TileShapeError: an axis of these is a ragged block.
    """
    for axis in axes:
        if inside(dims, (axis,), shape) is not None:
            raise TileShapeError(
                message(
                    op,
                    expected=f"every element along {dims[axis]} to lie inside its axis",
                    got=f"ragged blocks of {shape[axis]}",
                    way_out="Take a block that divides the axis, or the whole axis.",
                )
            )


def cleared(array: Any, dims: Any, along: Any, summed_later: Any = ()) -> Any:
    """An array with zeros outside, along some of its dims.

    Args:
        array, dims: the operand of a sum.
        along: the dims that the sum is over.
        summed_later: those that its derivatives sum over.
    """
    along = {*along, *(summed_later if _DERIVED.get() else ())}
    axes = [axis for axis, d in enumerate(dims) if d in along]
    mask = inside(dims, axes, array.shape)
    return array if mask is None else jnp.where(mask, array, jnp.zeros_like(array))


def apart(array: Any, dims: Any, lacked: Any) -> Any:
    """An array that was spread along some dims; its cotangents outside count for nothing.

    What lies outside stands for nothing, and its derivative may be no number: log(0). Such
    a cotangent may not enter the sum that is the cotangent of what was spread.
    """
    if dims is None or not (
        _DERIVED.get() and jnp.issubdtype(array.dtype, jnp.inexact)
    ):
        return array
    axes = [axis for axis, d in enumerate(dims) if d in lacked]
    mask = inside(dims, axes, array.shape)
    if mask is None:
        return array
    return lax.select(mask, array, lax.stop_gradient(array))
