"""The identity join: how operands with dims, or with axes, come to one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import _edges
from jaxtile._checks import operand
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, message
from jaxtile.primitives.map import map_arrays


def spell(dims: Sequence[Dim]) -> str:
    """Dims as messages show them."""
    return f"({', '.join(map(repr, dims))})"


def distinct(op: str, dims: Sequence[Dim]) -> None:
    """Refuse a dim that is given twice."""
    if len(set(dims)) != len(dims):
        raise TileShapeError(
            message(
                op,
                expected="distinct dims",
                got=spell(dims),
                way_out="Make another Dim for the second axis.",
            )
        )


def lift_arrays(op: str, fn: Callable[..., Any], *values: Any) -> tuple[Any, Any]:
    """`fn` of pytrees of tiles, arrays and Python scalars, as one elementwise op.

    Without tiles, arrays broadcast by NumPy's rules; with tiles, by the identity join.
    Returns the pytree of arrays, and the joined dims or None.
    """
    leaves, tree = jax.tree.flatten(values, is_leaf=is_tile)
    leaves = [operand(op, leaf) for leaf in leaves]
    if leaves and all(map(is_constant, leaves)):
        leaves[0] = jnp.asarray(leaves[0])
    arrays, dims = meet(op, leaves)

    def spread(scalar, shape):
        return _edges.apart(jnp.broadcast_to(scalar, shape), dims, dims)

    values = jax.tree.unflatten(tree, arrays)
    return map_arrays(fn, *values, name=op, spread=spread), dims


def meet(op: str, leaves: Sequence[Any]) -> tuple[list, tuple[Dim, ...] | None]:
    """Operands as arrays of one shape, and their joined dims; numbers stay numbers."""
    dims = join(op, [leaf for leaf in leaves if is_tile(leaf)])
    arrays = [placed(op, leaf, dims) for leaf in leaves]
    shape = _broadcast_shape(op, arrays)
    settled = _settle_weak(arrays)

    def spread(leaf, v):
        if is_constant(v):
            return v
        lacked = set(dims or ()) - set(leaf.dims if is_tile(leaf) else ())
        return _edges.apart(jnp.broadcast_to(v, shape), dims, lacked)

    return list(map(spread, leaves, settled)), dims


def is_constant(value: Any) -> bool:
    # NumPy's float64 is a Python float, but its dtype counts.
    return isinstance(value, bool | int | float) and not isinstance(value, np.generic)


def join(op: str, tiles: Sequence[Any]) -> tuple[Dim, ...] | None:
    """The dims that contain every other tile's dims; None without tiles."""
    if not tiles:
        return None
    sizes: dict[Dim, int] = {}
    for t in tiles:
        check_rank(op, t)
        for dim, size in zip(t.dims, t.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise TileShapeError(
                    message(
                        op,
                        expected=f"one size for dim {dim!r}",
                        got=f"{sizes[dim]} and {size}",
                        way_out="Slice or pad one of the arrays so that the sizes agree; "
                        "size 1 does not stretch.",
                    )
                )
    widest = max((t.dims for t in tiles), key=len)
    if set(widest) != set(sizes):
        spelled = " and ".join(spell(t.dims) for t in tiles)
        raise TileShapeError(
            message(
                op,
                expected="one operand whose dims contain every other's",
                got=spelled,
                way_out="Say what you mean: jaxtile.broadcast or jaxtile.reindex one to "
                "the dims of both, or reshape its .array and name the axes by "
                "jaxtile.tile; dims are identities, equal labels do not suffice.",
            )
        )
    return widest


def check_rank(op: str, t: Any) -> None:
    if t.array.ndim != len(t.dims):
        raise TileShapeError(
            message(
                op,
                expected=f"one axis for each of the dims {spell(t.dims)}",
                got=f"an array of shape {t.shape}",
                way_out="A tile does not cross vmap or scan's leading axis: map over "
                "its array, and make the tile inside.",
            )
        )


def placed(op: str, value: Any, joined: tuple[Dim, ...] | None) -> Any:
    """The operand's array with its axes in the order of the joined dims."""
    if is_constant(value):
        return value
    if joined is None or np.ndim(getattr(value, "array", value)) == 0:
        return value.array if is_tile(value) else jnp.asarray(value)
    if not is_tile(value):
        raise TileShapeError(
            message(
                op,
                expected="tiles and scalars",
                got=f"a tile and an array of shape {np.shape(value)}",
                way_out="Name its axes with jaxtile.tile(array, dims).",
            )
        )
    order = [value.dims.index(d) for d in joined if d in value.dims]
    shape = [value.shape[value.dims.index(d)] if d in value.dims else 1 for d in joined]
    return lax.transpose(value.array, order).reshape(shape)


def _broadcast_shape(op: str, arrays: Sequence[Any]) -> tuple[int, ...]:
    shapes = [np.shape(v) for v in arrays]
    try:
        return jnp.broadcast_shapes(*shapes)  # symbolic sizes too
    except ValueError:
        raise TileShapeError(
            message(
                op,
                expected="shapes that broadcast by NumPy's rules",
                got=" and ".join(map(str, shapes)),
                way_out="Insert axes of size 1 where an operand should stretch.",
            )
        ) from None


def _settle_weak(arrays: Sequence[Any]) -> list[Any]:
    """Weakly typed arrays in the dtype of the others of their kind, as jax promotes."""
    strong = [v for v in arrays if not (is_constant(v) or v.weak_type)]

    def settle(v):
        if is_constant(v) or not v.weak_type:
            return v
        kind = jnp.inexact if jnp.issubdtype(v.dtype, jnp.inexact) else jnp.integer
        alike = [s.dtype for s in strong if jnp.issubdtype(s.dtype, kind)]
        return v.astype(jnp.result_type(*alike)) if alike else v

    return [settle(v) for v in arrays]
