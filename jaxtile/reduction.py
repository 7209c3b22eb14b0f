"""reduce, scan and linear_recurrence, on arrays with axes and on tiles with dims."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import backends, formats
from jaxtile._jax_private import align_varying
from jaxtile.composite import affine
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError, message
from jaxtile.policy import Policy, as_policy, ordered_tree, unordered_tree
from jaxtile.primitives._bind import bind_reduce, bind_scan
from jaxtile.primitives._scalar import convert
from jaxtile.primitives._spec import Spec, make_spec
from jaxtile.reducers import Reducer
from jaxtile.tile import Tile

_DIRECTIONS = ("prefix", "suffix", "reverse")


def _is_tile(value: Any) -> bool:
    return isinstance(value, Tile)


def _untile(op: str, x: Any):
    """The pytree with arrays for tiles, and the dims they all have (None: arrays)."""
    leaves = jax.tree.leaves(x, is_leaf=_is_tile)
    tiles = [v for v in leaves if _is_tile(v)]
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
    return jax.tree.map(lambda t: t.array, x, is_leaf=_is_tile), dims


def _arrays(op: str, leaves: Sequence) -> list:
    out = []
    for leaf in leaves:
        try:
            array = jnp.asarray(leaf)
        except TypeError as error:
            raise TileTypeError(
                message(
                    op,
                    expected="arrays, numbers or tiles",
                    got=type(leaf).__name__,
                    way_out="Pass a pytree of arrays.",
                )
            ) from error
        formats.require_arithmetic(array.dtype, op)
        out.append(array)
    if not out:
        raise TileTypeError(
            message(op, expected="at least one array", got="none", way_out="Pass x.")
        )
    return out


def _one_axis(op: str, axis: Any, ndim: int, dims) -> int:
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
    try:
        place = operator.index(axis)
    except TypeError as error:
        raise TileTypeError(
            message(
                op,
                expected="an integer axis or a Dim",
                got=repr(axis),
                way_out="Name the axis to work along.",
            )
        ) from error
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


def _axes(op: str, axis: Any, ndim: int, dims) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    many = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(sorted(_one_axis(op, a, ndim, dims) for a in many))
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
    count = int(np.prod([arrays[0].shape[a] for a in axes], dtype=np.int64))
    index = jnp.int32 if count < 2**31 else jnp.int64
    return make_spec(reducer, tree, [v.dtype for v in arrays], acc_dtype, index, op)


def _seed(op, spec: Spec, init: Any, shape) -> list | None:
    """Seed leaves of the fibres' shape in the state's dtypes."""
    if init is None:
        return None
    init = jax.tree.map(lambda v: v.array if _is_tile(v) else v, init, is_leaf=_is_tile)
    leaves, tree = jax.tree.flatten(init)
    if tree != spec.state_tree and len(leaves) != len(spec.states):
        raise TileTypeError(
            message(
                op,
                expected=f"init like the state, {spec.state_tree}",
                got=str(tree),
                way_out="Seed with a state: what return_final gives, or the identity's "
                "structure.",
            )
        )
    out = []
    for leaf, dtype in zip(leaves, spec.states, strict=True):
        array = jnp.asarray(leaf)
        if not np.can_cast(array.dtype, dtype, "same_kind") and not (
            jnp.issubdtype(array.dtype, jnp.integer)
            and np.array(leaf).ndim == 0
            and jnp.issubdtype(dtype, jnp.floating)
        ):
            raise TileTypeError(
                message(
                    op,
                    expected=f"init of dtype {dtype.name}",
                    got=array.dtype.name,
                    way_out="Cast init, or state acc_dtype=.",
                )
            )
        try:
            out.append(jnp.broadcast_to(convert(array, dtype), shape))
        except ValueError as error:
            raise TileShapeError(
                message(
                    op,
                    expected=f"init that broadcasts to {tuple(shape)}",
                    got=str(array.shape),
                    way_out="One seed a fibre: the shape without the reduced axes.",
                )
            ) from error
    return out


def _mask(op, where: Any, shape):
    if where is None:
        return None
    mask = jnp.asarray(where.array if _is_tile(where) else where)
    if mask.dtype != bool:
        raise TileTypeError(
            message(
                op,
                expected="a bool mask",
                got=str(mask.dtype),
                way_out="Pass where=mask != 0.",
            )
        )
    try:
        return jnp.broadcast_to(mask, shape)
    except ValueError as error:
        raise TileShapeError(
            message(
                op,
                expected=f"a mask that broadcasts to {tuple(shape)}",
                got=str(mask.shape),
                way_out="Give where= the elements' shape.",
            )
        ) from error


def _out_dtypes(op, spec: Spec, out_dtype: Any) -> tuple:
    if out_dtype is None:
        return spec.results
    leaves, tree = jax.tree.flatten(out_dtype, is_leaf=lambda v: v is None)
    if tree == spec.result_tree and len(leaves) > 1:
        wanted = [
            r if d is None else d for d, r in zip(leaves, spec.results, strict=True)
        ]
    else:
        wanted = [
            out_dtype if _kind(r) == _kind(out_dtype) or len(spec.results) == 1 else r
            for r in spec.results
        ]
    for dtype in wanted:
        formats.require_arithmetic(dtype, op)
        formats.require_enabled(dtype, op)
    return tuple(np.dtype(d) for d in wanted)


def _kind(dtype: Any) -> bool:
    return bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))


def _parts(op, x, axis, reducer, init, where, acc_dtype, one_axis):
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
    axes = _axes(op, axis, len(shape), dims)
    spec = _spec(op, reducer, tree, arrays, axes, acc_dtype)
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    seed = _seed(op, spec, init, kept)
    mask = _mask(op, where, shape)
    parts = [*arrays, *(seed or ()), *(() if mask is None else (mask,))]
    aligned = align_varying(parts)
    n = len(arrays)
    arrays, rest = aligned[:n], aligned[n:]
    if seed is not None:
        seed, rest = rest[: len(seed)], rest[len(seed) :]
    return spec, arrays, seed, rest[0] if mask is not None else None, axes, dims


def _retile(tree, leaves, dims) -> Any:
    if dims is not None:
        leaves = [Tile(v, dims) for v in leaves]
    return jax.tree.unflatten(tree, leaves)


def reduce(
    x: Any,
    axis: int | Dim | Sequence | None,
    reducer: Reducer,
    *,
    init: Any = None,
    where: Any = None,
    policy: Policy | str = unordered_tree,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    keepdims: bool = False,
    implementation: str | None = None,
) -> Any:
    """Combine the elements along the axes with a reducer, in the order of a policy.

    y[g] = finish(init . lift(x[g, 0]) . lift(x[g, 1]) ...)

    Args:
        x: an array or tile of any arithmetic dtype and rank, or a pytree of equally
            shaped ones.
        axis: an integer axis or `Dim`, several, or None for all. Several are taken in
            lexicographic order of the array's axes.
        reducer: how elements combine; see `jaxtile.catalogue`.
        init: a seed state for every fibre, used exactly once.
        where: a bool mask; masked elements are skipped whatever they hold.
        policy: one of the five orders, or its name.
        acc_dtype: the accumulator, to which each combine rounds. By default floats and
            integers below 32 bits that are summed accumulate in 32 bits.
        out_dtype: the dtype to narrow to once, after `finish`.
        keepdims: keep the reduced axes with size 1.
        implementation: None picks; "reference", "triton", "mosaic_gpu" or "tpu" insists.

    Returns:
        The reducer's result without the axes, in the accumulator's dtype or `out_dtype`.

    Raises:
        ContractError: the policy needs a law that the reducer lacks.
        PolicyError: no such policy.
        TileShapeError: axes, shapes or dims do not fit; an empty fibre without a seed of
            a reducer that has no empty value; a sharded axis on an explicit mesh.
        TileTypeError: a storage format, a 64-bit dtype with x64 off, a mask that is not
            bool, a seed or a merge of other dtypes.
        UnsupportedOnBackend: the implementation that was asked for refuses.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> print(jt.reduce(x, 1, jt.add, policy="fixed_tree"))
        [3. 7.]
        >>> print(jt.reduce(jnp.ones(5000, jnp.bfloat16), 0, jt.add))
        5000.0
    """
    order = as_policy(policy)
    spec, arrays, seed, mask, axes, dims = _parts(
        "reduce", x, axis, reducer, init, where, acc_dtype, False
    )
    out = _out_dtypes("reduce", spec, out_dtype)
    backends.choose("reduce", implementation, spec=spec, policy=order, axes=axes)
    leaves = bind_reduce(spec, arrays, seed, mask, axes=axes, policy=order, out=out)
    if dims is not None and not keepdims:
        dims = tuple(d for i, d in enumerate(dims) if i not in axes)
    if keepdims:
        leaves = [jnp.expand_dims(v, axes) for v in leaves]
    return _retile(spec.result_tree, leaves, dims)


def scan(
    x: Any,
    axis: int | Dim,
    reducer: Reducer,
    *,
    init: Any = None,
    where: Any = None,
    exclusive: bool = False,
    direction: str = "prefix",
    return_final: bool = False,
    policy: Policy | str = ordered_tree,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Any:
    """Every prefix along an axis, combined by a reducer in the order of a policy.

    prefix: y_i = init . x_0 ... x_i; suffix: y_i = x_i ... x_(n-1) . init; reverse: the
    prefix scan of the flipped sequence, flipped back.

    Args:
        x: an array or tile of any arithmetic dtype and rank, or a pytree of equally
            shaped ones.
        axis: the integer axis or `Dim`.
        reducer: how elements combine; the earlier run is always merge's left operand.
        init: a seed state for every fibre.
        where: a bool mask; a masked element is skipped, its place shows the prefix so far.
        exclusive: leave x_i out of y_i (never by subtraction).
        direction: "prefix", "suffix" or "reverse".
        return_final: also return the raw state over everything, the next call's `init`.
        policy: one of the five orders, or its name.
        acc_dtype: the accumulator, to which each combine rounds.
        out_dtype: the dtype that the prefixes narrow to, once, after `finish`.
        implementation: None picks; "reference", "triton", "mosaic_gpu" or "tpu" insists.

    Returns:
        The prefixes, shaped like x, or `(prefixes, final_state)`.

    Raises:
        ContractError: the policy needs a law that the reducer lacks.
        PolicyError: no such policy.
        TileValueError: no such direction.
        TileShapeError: axis, shapes or dims do not fit; the prefix of nothing of a
            reducer without identity; a sharded axis on an explicit mesh.
        TileTypeError: a storage format, a 64-bit dtype with x64 off, a mask that is not
            bool, a seed or a merge of other dtypes.
        UnsupportedOnBackend: the implementation that was asked for refuses.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.scan(jnp.array([1, 2, 3]), 0, jt.add))
        [1 3 6]
        >>> print(jt.scan(jnp.array([1, 2, 3]), 0, jt.add, exclusive=True, init=10))
        [10 11 13]
    """
    order = as_policy(policy)
    if direction not in _DIRECTIONS:
        raise TileValueError(
            message(
                "scan",
                expected=f"direction in {_DIRECTIONS}",
                got=repr(direction),
                way_out='"reverse" scans the flipped sequence, "suffix" keeps the earlier '
                "element on the left.",
            )
        )
    spec, arrays, seed, mask, axes, dims = _parts(
        "scan", x, axis, reducer, init, where, acc_dtype, True
    )
    out = _out_dtypes("scan", spec, out_dtype)
    backends.choose("scan", implementation, spec=spec, policy=order, axes=axes)
    leaves = bind_scan(
        spec,
        arrays,
        seed,
        mask,
        axis=axes[0],
        policy=order,
        direction=direction,
        exclusive=bool(exclusive),
        final=bool(return_final),
        out=out,
    )
    k = len(spec.results)
    prefixes = _retile(spec.result_tree, leaves[:k], dims)
    if not return_final:
        return prefixes
    rest = (
        None if dims is None else tuple(d for i, d in enumerate(dims) if i != axes[0])
    )
    return prefixes, _retile(spec.state_tree, leaves[k:], rest)


def linear_recurrence(
    a: Any,
    b: Any,
    axis: int | Dim,
    h0: Any = None,
    *,
    direction: str = "prefix",
    policy: Policy | str = ordered_tree,
    implementation: str | None = None,
) -> Any:
    """The first-order linear recurrence along an axis.

    h_t = a_t h_(t-1) + b_t, with h_(-1) = h0; "reverse" runs it from the end.

    Args:
        a: decay, a float array or tile, or one that broadcasts to b.
        b: drive, a float array or tile.
        axis: the time axis.
        h0: the state before the first step, of b's shape without the axis.
        direction: "prefix" or "reverse" (also "suffix": the merge's sides swapped).
        policy: one of the five orders, or its name.
        implementation: None picks; a backend's name insists.

    Returns:
        h, shaped like b.

    Raises:
        As `scan`.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.linear_recurrence(jnp.full(3, 0.5), jnp.ones(3), 0))
        [1.   1.5  1.75]
    """
    if not _is_tile(a) and not _is_tile(b):
        a, b = jnp.asarray(a), jnp.asarray(b)
        shape = jnp.broadcast_shapes(a.shape, b.shape)
        a, b = jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape)
    init = None
    if h0 is not None:
        init = (jax.tree.map(jnp.ones_like, h0), h0)
    return scan(
        (a, b),
        axis,
        affine,
        init=init,
        direction=direction,
        policy=policy,
        implementation=implementation,
    )
