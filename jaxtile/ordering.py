"""sort, argsort and topk: values in order, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export

from jaxtile import _edges, backends, formats
from jaxtile._arguments import axis_of, broadcast, by_dims, retile
from jaxtile._checks import as_array, choice, flag, integer
from jaxtile._jax_private import align_varying
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives._order import NAN_RULES
from jaxtile.primitives.sort import bind_sort
from jaxtile.primitives.topk import bind_topk, check_k
from jaxtile.tile import Tile

NAN_WAY_OUT = (
    '"last" and "first" hold in both directions; "largest" and "smallest" rank NaN.'
)
_TIES = "Ties go by source index, descending too."
_STATIC_K = (
    "k is the size of a result: pass a Python integer, and valid_count= for how many of "
    "them are wanted when it runs."
)


class Ranked(NamedTuple):
    """Values in order, and the source index of each.

    Args:
        values: the values, in their own bits.
        indices: where each came from, int32 for axes below 2**31.
    """

    values: Any
    indices: Any


jax.export.register_namedtuple_serialization(Ranked, serialized_name="jaxtile.Ranked")


def _taken(op: str, x: Any, axis: Any, payload: Any):
    """(x, its axis, payload leaves, their tree, dims) as arrays."""
    dims = x.dims if is_tile(x) else None
    array = x.array if is_tile(x) else as_array(op, x)
    formats.require_arithmetic(array.dtype, op)
    place = axis_of(op, axis, array.ndim, dims)
    _edges.require_whole(op, dims, (place,), array.shape)
    leaves, tree = jax.tree.flatten(payload, is_leaf=is_tile)
    leaves = [by_dims(op, "a payload", leaf, dims) for leaf in leaves]
    return array, place, leaves, tree, dims


def _rules(op: str, nan: Any, ties: Any) -> None:
    choice(op, "nan", nan, NAN_RULES, NAN_WAY_OUT)
    choice(op, "ties", ties, ("stable",), _TIES)


def sort(
    x: Any,
    axis: int | Dim,
    payload: Any = None,
    *,
    descending: bool = False,
    nan: str = "last",
    ties: str = "stable",
    return_indices: bool = False,
    implementation: str | None = None,
) -> Any:
    """The values along an axis in order.

        y[j] = x[p(j)], p stable: equal values stay in source order

    in both directions. -0 equals +0, NaNs of any sign and payload are one class, and
    every value keeps its bits. The tangent of a value goes with it.

    Args:
        x: the keys, an array or a tile of an arithmetic format.
        axis: the axis, or the tile's Dim.
        payload: a pytree of arrays of x's shape, of any format, that follow their keys;
            with tiles, tiles of x's dims.
        descending: large values first.
        nan: "last" or "first" in either direction; or "largest" or "smallest", as a
            value above or below every number.
        ties: "stable", the only rule there is.
        return_indices: also give the source indices.
        implementation: None picks when the call is lowered; "reference", "triton",
            "mosaic_gpu" or "tpu" insists.

    Returns:
        The sorted values, or `Ranked(values, indices)`; with a payload, a pair of that
        and the payload.

    Raises:
        TileTypeError: x is no array or tile of an arithmetic format, or overflows in 32
            bits with x64 off; a flag that is not bool.
        TileShapeError: the axis, or the shape or dims of a payload, does not fit; a
            sharded axis on an explicit mesh.
        TileValueError: no such rule for NaN or ties.
        UnsupportedOnBackend: the implementation that was asked for refuses.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([2.0, jnp.nan, 1.0])
        >>> print(jt.sort(x, 0), jt.sort(x, 0, descending=True))
        [ 1.  2. nan] [ 2.  1. nan]
        >>> _, name = jt.sort(x, 0, jnp.array([20, 0, 10]))
        >>> print(name)
        [10 20  0]
    """
    _rules("sort", nan, ties)
    descending = flag("sort", "descending", descending)
    return_indices = flag("sort", "return_indices", return_indices)
    array, place, leaves, tree, dims = _taken("sort", x, axis, payload)
    array, *leaves = align_varying([array, *leaves])
    outs = bind_sort(
        array,
        leaves,
        axis=place,
        descending=descending,
        nan=nan,
        indices=return_indices,
        implementation=backends.asked("sort", implementation),
    )
    ranks = 1 + return_indices
    found = outs[:ranks] if dims is None else [Tile(v, dims) for v in outs[:ranks]]
    result = Ranked(*found) if return_indices else found[0]
    return result if not leaves else (result, retile(tree, outs[ranks:], dims))


def argsort(
    x: Any,
    axis: int | Dim,
    *,
    descending: bool = False,
    nan: str = "last",
    ties: str = "stable",
    implementation: str | None = None,
) -> Any:
    """The source indices of the values along an axis in order.

    Args:
        x: the keys, an array or a tile of an arithmetic format.
        axis: the axis, or the tile's Dim.
        descending, nan, ties, implementation: as in `sort`.

    Returns:
        The permutation that sorts: int32 for axes below 2**31.

    Raises:
        The errors of `sort`.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.argsort(jnp.array([0.0, -0.0, -1.0]), 0))
        [2 0 1]
    """
    _rules("argsort", nan, ties)
    descending = flag("argsort", "descending", descending)
    array, place, _, _, dims = _taken("argsort", x, axis, None)
    (index,) = bind_sort(
        array,
        axis=place,
        descending=descending,
        nan=nan,
        indices=True,
        values=False,
        implementation=backends.asked("argsort", implementation),
    )
    return index if dims is None else Tile(index, dims)


def topk(
    x: Any,
    axis: int | Dim,
    k: int,
    payload: Any = None,
    *,
    largest: bool = True,
    nan: str = "last",
    ties: str = "stable",
    valid_count: Any = None,
    dim: Dim | None = None,
    implementation: str | None = None,
) -> Any:
    """The k largest or smallest values along an axis, the best first: a stable sort's.

    Exact for every k. `largest=False` reverses the order, not the values: it is right for
    the least integer, for unsigned integers and for bool.

    Args:
        x: the keys, an array or a tile of an arithmetic format.
        axis: the axis, or the tile's Dim.
        k: how many, at most the axis' size, known while tracing.
        payload: as in `sort`.
        largest: large values first; else small ones.
        nan, ties, implementation: as in `sort`.
        valid_count: how many of the k are wanted, an integer or an array of them that
            broadcasts to x's shape without the axis, known only when it runs: places from
            there on have index -1 and zeros.
        dim: the Dim of the k places of a tile's result; by default a new one of the same
            label.

    Returns:
        `Ranked(values, indices)`; with a payload, a pair of that and the payload.

    Raises:
        TileTypeError: k is no integer known while tracing, or valid_count no integer.
        TileValueError: k is not known to be in [0, size].
        TileShapeError: valid_count does not broadcast.
        The errors of `sort`.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> values, indices = jt.topk(jnp.array([5, 7, 7, 1]), 0, 3)
        >>> print(values, indices)
        [7 7 5] [1 2 0]
        >>> print(jt.topk(jnp.array([5, 7, 7, 1]), 0, 3, valid_count=2).indices)
        [ 1  2 -1]
    """
    _rules("topk", nan, ties)
    largest = flag("topk", "largest", largest)
    array, place, leaves, tree, dims = _taken("topk", x, axis, payload)
    k = integer("topk", "an integer k", k, _STATIC_K)
    check_k(k, array.shape[place])
    count = _count(valid_count, array.shape, place, dims)
    counts = [] if count is None else [count]
    array, *rest = align_varying([array, *leaves, *counts])
    outs = bind_topk(
        array,
        rest[: len(leaves)],
        rest[-1] if counts else None,
        axis=place,
        k=k,
        largest=largest,
        nan=nan,
        implementation=backends.asked("topk", implementation),
    )
    dims = _ranked_dims(dims, place, dim)
    found = outs[:2] if dims is None else [Tile(v, dims) for v in outs[:2]]
    result = Ranked(*found)
    return result if not leaves else (result, retile(tree, outs[2:], dims))


def _count(value: Any, shape: Sequence[int], axis: int, dims) -> Any:
    if value is None:
        return None
    fibres = tuple(s for d, s in enumerate(shape) if d != axis)
    kept = None if dims is None else tuple(v for d, v in enumerate(dims) if d != axis)
    count = by_dims("topk", "valid_count", value, kept)
    way_out = "One count for every fibre: the shape without the axis."
    return broadcast("topk", "valid_count", count, fibres, way_out)


def _ranked_dims(dims, place: int, dim: Any):
    """The result's dims: the places of the k are a dim of their own."""
    if dim is not None and (dims is None or not isinstance(dim, Dim)):
        raise TileTypeError(
            message(
                "topk",
                expected="dim= a Dim, with x a tile",
                got=f"{dim!r} with {'an array' if dims is None else 'a tile'}",
                way_out="Leave it out, or name x's axes with jaxtile.tile.",
            )
        )
    if dims is None:
        return None
    if dim is not None and dim in dims:
        raise TileShapeError(
            message(
                "topk",
                expected="dim= a Dim that x lacks",
                got=repr(dim),
                way_out="Make one with jaxtile.Dim: it names k places, not x's.",
            )
        )
    new = Dim(dims[place].label) if dim is None else dim
    return (*dims[:place], new, *dims[place + 1 :])
