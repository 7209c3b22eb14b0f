"""What reduce and scan share in taking arguments: tiles, axes, seeds, masks, dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import _edges, formats
from jaxtile._checks import as_array, integer, operand
from jaxtile._jax_private import align_varying
from jaxtile._join import placed, spell
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives._bits import place_dtype
from jaxtile.primitives._functions import attempt, spelled
from jaxtile.primitives._parts import holds, same_structure
from jaxtile.primitives._scalar import convert
from jaxtile.primitives._spec import Spec, make_spec
from jaxtile.reducers import Reducer
from jaxtile.tile import Tile


def _untile(op: str, x: Any):
    """The pytree with arrays for tiles, and the dims they all have (None: arrays)."""
    leaves = jax.tree.leaves(x, is_leaf=is_tile)
    tiles = [v for v in leaves if is_tile(v)]
    if not tiles:
        return x, None
    dims = tiles[0].dims
    if len(tiles) != len(leaves) or any(t.dims != dims for t in tiles):
        raise TileShapeError(
            message(
                op,
                expected="element leaves that are all tiles of the same dims",
                got=f"{[t.dims for t in tiles]} among {len(leaves)} leaves",
                way_out="Broadcast or transpose the tiles to the same dims.",
            )
        )
    return jax.tree.map(lambda t: t.array, x, is_leaf=is_tile), dims


def _arrays(op: str, leaves: Sequence) -> list:
    out = []
    for leaf in leaves:
        array = as_array(op, leaf)
        formats.require_arithmetic(array.dtype, op)
        out.append(array)
    if not out:
        raise TileTypeError(
            message(op, expected="at least one array", got="none", way_out="Pass x.")
        )
    return out


def axis_of(op: str, axis: Any, ndim: int, dims) -> int:
    """The place of an axis that is an integer or, with dims, a `Dim`."""
    if isinstance(axis, Dim):
        if dims is None or axis not in dims:
            raise TileShapeError(
                message(
                    op,
                    expected=f"one of the tile's dims {dims}",
                    got=repr(axis),
                    way_out="Pass a Dim of the tile, or an integer axis of an array.",
                )
            )
        return dims.index(axis)
    way_out = "Name the axis to work along."
    if isinstance(getattr(axis, "dim", None), Dim):  # a handle of a kernel's nest
        way_out = "Pass its .dim."
    place = integer(op, "an integer axis or a Dim", axis, way_out)
    if not -ndim <= place < ndim:
        raise TileShapeError(
            message(
                op,
                expected=f"an axis in [{-ndim}, {ndim})",
                got=str(place),
                way_out="Axes count from 0, or from the end with negative numbers.",
            )
        )
    return place % ndim


def axes_of(op: str, axis: Any, ndim: int, dims) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    many = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(sorted(axis_of(op, a, ndim, dims) for a in many))
    if len(set(axes)) != len(axes):
        raise TileShapeError(
            message(
                op,
                expected="each axis once",
                got=str(many),
                way_out="Drop the repetition.",
            )
        )
    return axes


def _spec(op, reducer, tree, arrays, axes, acc_dtype) -> Spec:
    if not isinstance(reducer, Reducer):
        raise TileTypeError(
            message(
                op,
                expected="a Reducer",
                got=repr(reducer),
                way_out="Pass jt.add, jt.maximum, ... or jt.Reducer(merge=...).",
            )
        )
    index = place_dtype(math.prod(arrays[0].shape[a] for a in axes))
    return make_spec(reducer, tree, [v.dtype for v in arrays], acc_dtype, index, op)


def by_dims(op: str, what: str, value: Any, dims) -> jax.Array:
    """An argument beside the elements: a tile goes by its dims, an array by its axes."""
    if not is_tile(value):
        return as_array(op, value)
    if dims is None or not set(value.dims) <= set(dims):
        raise TileShapeError(
            message(
                op,
                expected=f"{what} an array"
                + ("" if dims is None else f", or a tile of dims among {spell(dims)}"),
                got=f"a tile of {spell(value.dims)}",
                way_out="Name the axes of x with jaxtile.tile, or pass the tile's .array.",
            )
        )
    return placed(op, value, dims)


def seed_of(op, spec: Spec, init: Any, shape, dims) -> list | None:
    """Seed leaves of the fibres' shape in the state's dtypes."""
    if init is None:
        return None
    leaves, tree = jax.tree.flatten(init, is_leaf=is_tile)
    leaves = [v if _is_number(v) else by_dims(op, "init", v, dims) for v in leaves]
    init = jax.tree.unflatten(tree, [operand(op, v) for v in leaves])
    resume, state = spec.reducer.resume, init
    result = jax.tree.unflatten(spec.result_tree, spec.results)
    if resume is not None and same_structure(init, result):
        given = jax.tree.unflatten(spec.result_tree, leaves)
        expected = f"{spec.reducer!r}'s resume to take its result"
        state = attempt(op, lambda: (expected, "Seed with a state."), resume, given)
    wanted = jax.tree.unflatten(spec.state_tree, spec.states)
    if not same_structure(state, wanted):
        raise TileTypeError(
            message(
                op,
                expected=f"init like the state, {spelled(wanted)}",
                got=spelled(init),
                way_out="Seed with a state: what return_final gives, or the identity's "
                "structure.",
            )
        )
    pairs = zip(jax.tree.leaves(state), spec.states, strict=True)
    way_out = "One seed a fibre: the shape without the reduced axes."
    leaves = [seed_leaf(op, "init", v, d, shape, way_out) for v, d in pairs]
    return [_edges.apart(v, dims, dims) for v in leaves]


def _is_number(value: Any) -> bool:
    """A Python or NumPy scalar, which counts by its value."""
    return isinstance(value, bool | int | float | np.integer | np.floating)


def seed_leaf(op: str, name: str, value: Any, dtype, shape, way_out: str):
    """A seed in the state's dtype and the result's shape; a number counts by its value.

    Raises:
        TileTypeError: it is wider than the state.
        TileShapeError: it does not broadcast, with the way out.
    """
    if _is_number(value):
        fits, got = holds(dtype, value), str(value)
        array = jnp.asarray(value if fits else 0, dtype)
    else:
        array = as_array(op, value)
        formats.require_arithmetic(array.dtype, op)
        got = array.dtype.name
        fits = jnp.promote_types(array.dtype, dtype) == dtype or (
            array.weak_type and np.can_cast(array.dtype, dtype, "same_kind")
        )
    if not fits:
        way_out = f"Cast {name}, or state acc_dtype=."
        if _is_number(value) and jnp.issubdtype(dtype, jnp.floating):
            got += f", which {dtype.name} does not represent"
            way_out = "Write jnp.inf where that is meant, or state acc_dtype=."
        raise TileTypeError(
            message(
                op, expected=f"{name} of dtype {dtype.name}", got=got, way_out=way_out
            )
        )
    return broadcast(op, name, convert(array, dtype), shape, way_out)


def _mask(op, where: Any, shape, dims):
    if where is None:
        return None
    mask = by_dims(op, "where", where, dims)
    return broadcast(op, "a mask", mask, shape, "Give where= the elements' shape.")


def broadcast(op, what, array, shape, way_out):
    """An array of that shape."""
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError as error:
        raise TileShapeError(
            message(
                op,
                expected=f"{what} that broadcasts to {tuple(shape)}",
                got=str(array.shape),
                way_out=way_out,
            )
        ) from error


def out_dtypes(op, spec: Spec, out_dtype: Any) -> tuple:
    """The dtype of each result leaf; one dtype narrows the leaves of its kind."""
    if out_dtype is None:
        return spec.results
    leaves, tree = jax.tree.flatten(out_dtype, is_leaf=lambda v: v is None)
    if tree == jax.tree.structure(0):
        one = len(spec.results) == 1
        wanted = [
            out_dtype if one or _kind(op, r) == _kind(op, out_dtype) else r
            for r in spec.results
        ]
    elif tree == spec.result_tree:
        wanted = [
            r if d is None else d for d, r in zip(leaves, spec.results, strict=True)
        ]
    else:
        result = jax.tree.unflatten(spec.result_tree, spec.results)
        raise TileTypeError(
            message(
                op,
                expected=f"out_dtype one dtype, or like the result, {spelled(result)}",
                got=repr(out_dtype),
                way_out="None in a place keeps the accumulator's dtype there.",
            )
        )
    for dtype in wanted:
        formats.require_arithmetic(dtype, op)
    return tuple(formats.require_enabled(d, op) for d in wanted)


def _kind(op: str, dtype: Any) -> bool:
    return bool(
        jnp.issubdtype(formats.require_arithmetic(dtype, op).dtype, jnp.floating)
    )


def parts(op, x, axis, reducer, init, where, acc_dtype, one_axis):
    """A call's arguments as operands: (spec, elements, seed, mask, axes, dims)."""
    x, dims = _untile(op, x)
    leaves, tree = jax.tree.flatten(x)
    arrays = _arrays(op, leaves)
    shape = arrays[0].shape
    if one_axis and (axis is None or isinstance(axis, (tuple, list))):
        raise TileTypeError(
            message(op, expected="one axis", got=repr(axis), way_out="Scan one axis.")
        )
    for array in arrays:
        if array.shape != shape:
            raise TileShapeError(
                message(
                    op,
                    expected=f"element leaves of one shape, {shape}",
                    got=str(array.shape),
                    way_out="Broadcast them first.",
                )
            )
    axes = axes_of(op, axis, len(shape), dims)
    spec = _spec(op, reducer, tree, arrays, axes, acc_dtype)
    kept = [d for d in range(len(shape)) if d not in axes]
    fibres = None if dims is None else tuple(dims[d] for d in kept)
    seed = seed_of(op, spec, init, tuple(shape[d] for d in kept), fibres)
    mask = _mask(op, where, shape, dims)
    inside = _edges.inside(dims, axes, shape)
    if inside is not None:
        mask = inside if mask is None else mask & inside
    aligned = align_varying(
        [*arrays, *(seed or ()), *(() if mask is None else (mask,))]
    )
    n = len(arrays)
    arrays, rest = aligned[:n], aligned[n:]
    if seed is not None:
        seed, rest = rest[: len(seed)], rest[len(seed) :]
    return spec, arrays, seed, rest[0] if mask is not None else None, axes, dims


def retile(tree, leaves, dims) -> Any:
    """Result leaves as their pytree, of tiles where the operands were tiles."""
    if dims is not None:
        leaves = [Tile(v, dims) for v in leaves]
    return jax.tree.unflatten(tree, leaves)
