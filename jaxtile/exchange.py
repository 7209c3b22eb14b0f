"""gather, take, scatter and segment_reduce: elements by an index, to targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jaxtile import _edges, backends
from jaxtile._arguments import axis_of, out_dtypes, parts, retile, seed_of
from jaxtile._checks import flag
from jaxtile._exchange import (
    fill_of,
    placed_index,
    require_free,
    target_of,
    whole,
)
from jaxtile._jax_private import align_varying
from jaxtile.catalogue import minimum
from jaxtile.dims import Dim
from jaxtile.errors import ContractError, message
from jaxtile.policy import Policy, as_policy, unordered_tree
from jaxtile.primitives._bits import place_dtype
from jaxtile.primitives._moves import before, bind_gather, bind_scatter
from jaxtile.primitives._spec import make_spec
from jaxtile.reducers import Reducer


def gather(
    x: Any,
    index: Any,
    axis: int | Dim,
    fill: Any = None,
    *,
    batch: int | Sequence[int] | str = (),
    implementation: str | None = None,
) -> Any:
    """Elements along an axis, picked by an index: a copy of their bits.

    y[b, m, r] = x[b, index[b, m], r] where 0 <= index < n, else fill

    b are the dims that x and index share, m those of the index alone, r those of x alone.
    Nothing wraps: a negative index is outside. Signs of zeros, subnormals and NaN payloads
    survive in every format; what is not picked is never looked at.

    Args:
        x: an array or tile of any format, storage formats too.
        index: integers of any width, an array, tile or number. A tile shares with x the
            dims that both have; `axis` itself may be one of its dims, and is then new.
        axis: the axis of x that the index runs along; m takes its place.
        fill: what stands for an index outside, in x's format: a number, or an array or tile
            that broadcasts to the result. None is the value whose bits are all zero.
        batch: the axes of arrays that x and index share, or "all" for all but `axis`. In
            the index those before `axis` lead, those after it end its shape.
        implementation: None picks when the call is lowered; "reference", "triton",
            "mosaic_gpu" or "tpu" insists.

    Returns:
        An array of x's dtype with the index's own axes in the place of `axis`, or a `Tile`.

    Raises:
        TileTypeError: an operand that is no array, tile or number; an index that is not of
            integers; a fill that x's format does not hold.
        TileShapeError: no such axis or dim; shared axes of different sizes.
        UnsupportedOnBackend: the implementation that was asked for refuses.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([10, 20, 30])
        >>> print(jt.gather(x, jnp.array([2, 0, -1, 3]), 0, fill=-5))
        [30 10 -5 -5]
        >>> rows = jnp.array([[1, 2, 3], [4, 5, 6]])
        >>> print(jt.gather(rows, jnp.array([[2], [0]]), 1, batch="all"))
        [[3]
         [4]]
    """
    return _gather("gather", x, index, axis, fill, batch, implementation)


def take(x: Any, index: Any, axis: int | Dim, fill: Any = None) -> Any:
    """Whole slices along an axis, picked by an index: a `gather` that shares nothing.

    y[m, r] = x[index[m], r] where 0 <= index < n, else fill

    Args:
        x: an array or tile of any format.
        index: integers of any width and shape; a tile whose dims x does not have, `axis`
            apart.
        axis: the axis of x that the index runs along.
        fill: as in `gather`.

    Returns:
        As `gather`.

    Raises:
        As `gather`; TileShapeError also for a tile that shares a dim with x.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> table = jnp.array([[1, 2], [3, 4], [5, 6]])
        >>> print(jt.take(table, jnp.array([2, 2, 7]), 0, fill=-1))
        [[ 5  6]
         [ 5  6]
         [-1 -1]]
    """
    require_free("take", x, index, axis)
    return _gather("take", x, index, axis, fill, (), None)


def _gather(op, x, index, axis, fill, batch, implementation):
    array, dims = whole(op, x)
    place = axis_of(op, axis, array.ndim, dims)
    _edges.require_whole(op, dims, (place,), array.shape)
    index, shared, own = placed_index(op, index, place, array, dims, batch)
    shape = list(array.shape)
    head = before(place, shared)
    shape[place : place + 1] = index.shape[head : index.ndim - len(shared) + head]
    out = None if dims is None else (*dims[:place], *own, *dims[place + 1 :])
    fill = fill_of(op, fill, array.dtype, tuple(shape), out)
    array, index, fill = align_varying([array, index, fill])
    how = backends.asked(op, implementation)
    found = bind_gather(array, index, fill, place, shared, how)
    if out is not None:
        found = _edges.apart(found, out, own)
    return retile(jax.tree.structure(0), [found], out)


def scatter(
    x: Any,
    index: Any,
    axis: int | Dim,
    size: int | Mapping[Dim, int],
    reducer: Reducer | None = None,
    *,
    unique: bool = False,
    init: Any = None,
    policy: Policy | str = unordered_tree,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    batch: int | Sequence[int] | str = (),
    is_sorted: bool = False,
) -> Any:
    """Elements along an axis sent to targets; those of one target meet in a reducer.

    y[b, t, r] = finish(init . lift(x[b, i0, r]) . lift(x[b, i1, r]) ...)

    over the places i0 < i1 < ... where index[b, i] = t, in the order of the policy. Each
    target is a fibre of its own: `fixed_tree` is the tree of its own elements in source
    order. Results are the same in every run, however the work is divided. An index
    outside [0, size) drops its element; nothing wraps.

    Args:
        x: an array or tile, or a pytree of equally shaped ones.
        index: integers, the target of each place of `axis`; with the axes of `batch`, or
            the dims of x that a tile has.
        axis: the axis of x that the index runs along; the targets take its place.
        size: how many targets there are; of tiles a mapping from their `Dim` to it.
        reducer: how the elements of one target combine.
        unique: instead of a reducer, a promise that no target has two elements: each is
            copied bit for bit, in any format.
        init: a seed state for every target, used exactly once. With `unique`, the value of
            targets without an element; None is the value whose bits are all zero.
        policy, acc_dtype, out_dtype: as in `reduce`.
        batch: the axes of arrays that x and index share, as in `gather`.
        is_sorted: a promise that the index never falls along `axis`; the order is then
            not looked for.

    Returns:
        The reducer's result for each target. A target without elements gives the seed,
        else the reducer's empty value, else its identity, else zeros.

    Raises:
        ContractError: neither or both of reducer and unique; a dtype with unique; a law
            that the policy needs.
        PolicyError: no such policy.
        TileTypeError: an operand that is no array, tile or number, or has a storage format
            that a reducer cannot combine; an index that is not of integers.
        TileShapeError: axes, shapes or dims do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x, to = jnp.array([1.0, 2.0, 4.0]), jnp.array([2, 0, 2])
        >>> print(jt.scatter(x, to, 0, 4, jt.add))
        [2. 0. 5. 0.]
        >>> print(jt.scatter(x, jnp.array([2, 0, 1]), 0, 4, unique=True))
        [2. 4. 1. 0.]
    """
    unique = flag("scatter", "unique", unique)
    if unique is (reducer is not None):
        raise ContractError(
            message(
                "scatter",
                expected="either a reducer or unique=True",
                got="both" if unique else "neither",
                way_out="Elements that meet need a reducer, as jaxtile.add; unique=True "
                "promises that none do.",
            )
        )
    if unique:
        as_policy(policy)  # without collisions every order is kept
        _forbid_dtypes(acc_dtype, out_dtype)
        return _scatter_unique(x, index, axis, size, init, batch, is_sorted)
    options = dict(policy=policy, acc_dtype=acc_dtype, out_dtype=out_dtype)
    options |= dict(init=init, batch=batch, is_sorted=is_sorted)
    return _scatter("scatter", x, index, axis, size, reducer, **options)


def segment_reduce(
    x: Any,
    ids: Any,
    size: int | Mapping[Dim, int],
    reducer: Reducer,
    *,
    axis: int | Dim = 0,
    is_sorted: bool = False,
    init: Any = None,
    policy: Policy | str = unordered_tree,
    acc_dtype: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Each segment of an axis combined by a reducer; ids say which elements are its own.

    y[t, r] = finish(init . lift(x[i0, r]) . lift(x[i1, r]) ...), ids[i] = t

    Args:
        x: an array or tile, or a pytree of equally shaped ones.
        ids: integers, the segment of each place of `axis`, in any order. One outside
            [0, size) drops its element.
        size: how many segments there are; of tiles a mapping from their `Dim` to it.
        reducer: how the elements of one segment combine.
        axis: the axis of x that ids run along.
        is_sorted: a promise that ids never fall; the order is then not looked for.
        init, policy, acc_dtype, out_dtype: as in `scatter`.

    Returns:
        As `scatter`, with the segments in the place of `axis`.

    Raises:
        As `scatter`.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([0.0, 1.0, 2.0])
        >>> print(jt.segment_reduce(x, jnp.array([0, 0, 2]), 3, jt.maximum))
        [  1. -inf   2.]
    """
    options = dict(policy=policy, acc_dtype=acc_dtype, out_dtype=out_dtype)
    options |= dict(init=init, batch=(), is_sorted=is_sorted)
    return _scatter("segment_reduce", x, ids, axis, size, reducer, **options)


def _scatter(
    op,
    x,
    index,
    axis,
    size,
    reducer,
    *,
    init,
    policy,
    acc_dtype,
    out_dtype,
    batch,
    is_sorted,
):
    order, is_sorted = as_policy(policy), flag(op, "is_sorted", is_sorted)
    spec, arrays, _, _, axes, dims = parts(
        op, x, axis, reducer, None, None, acc_dtype, True
    )
    (place,) = axes
    _edges.require_whole(op, dims, axes, arrays[0].shape)
    index, shared, _ = placed_index(op, index, place, arrays[0], dims, batch, True)
    count, named = target_of(op, size, dims, place)
    shape = (*arrays[0].shape[:place], count, *arrays[0].shape[place + 1 :])
    seed = seed_of(op, spec, init, shape, named)
    aligned = align_varying([*arrays, index, *(seed or ())])
    k = len(arrays)
    leaves = bind_scatter(
        spec,
        aligned[:k],
        aligned[k],
        None if seed is None else aligned[k + 1 :],
        axis=place,
        batch=shared,
        size=count,
        policy=order,
        is_sorted=is_sorted,
        out=out_dtypes(op, spec, out_dtype),
    )
    return retile(spec.result_tree, leaves, named)


def _forbid_dtypes(acc_dtype, out_dtype):
    if not (acc_dtype is None and out_dtype is None):
        raise ContractError(
            message(
                "scatter",
                expected="acc_dtype= and out_dtype= with a reducer only",
                got=f"{acc_dtype} and {out_dtype} with unique=True",
                way_out="It copies bits: leave them out, and jaxtile.cast the result.",
            )
        )


def _scatter_unique(x, index, axis, size, init, batch, is_sorted):
    """Each target looks up its source: the lowest, should the promise not hold."""
    op = "scatter"
    is_sorted = flag(op, "is_sorted", is_sorted)
    array, dims = whole(op, x)
    place = axis_of(op, axis, array.ndim, dims)
    _edges.require_whole(op, dims, (place,), array.shape)
    index, shared, _ = placed_index(op, index, place, array, dims, batch, True)
    count, named = target_of(op, size, dims, place)
    shape = (*array.shape[:place], count, *array.shape[place + 1 :])
    fill = fill_of(op, init, array.dtype, shape, named)
    array, index, fill = align_varying([array, index, fill])
    along = before(place, shared)
    n = place_dtype(array.shape[place])
    source = lax.broadcasted_iota(n, index.shape, along)
    source, index = align_varying([source, index])
    (inverse,) = bind_scatter(
        make_spec(minimum, jax.tree.structure(0), (n,), None, None, op),
        [source],
        index,
        None,
        axis=along,
        batch=[d for d in range(index.ndim) if d != along],
        size=count,
        is_sorted=is_sorted,
    )
    found = bind_gather(array, inverse, fill, place, shared)
    return retile(jax.tree.structure(0), [found], named)
