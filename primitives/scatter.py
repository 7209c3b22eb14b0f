r"""scatter: elements sent along one axis to targets, each target's combined by a reducer.

    y[b, t, r] = finish(seed . lift(x[b, i0, r]) . lift(x[b, i1, r]) ...)

over the places i0 < i1 < ... where index[b, i] = t, in source order: the policy says how
the dots associate, over the elements of this target alone. b are the dims that x and
index share, r the others of x. An index outside [0, size) drops its element; nothing
wraps. A target without elements has the seed, else the reducer's empty value, its
identity, or zeros where it has neither. The bits depend on no launch and no block.

Operands: element leaves, index, then seed leaves of the result's shape (if `seeded`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.policy import Kind
from jaxtile.primitives import _fold, _native, _segments, _trees
from jaxtile.primitives._define import Out, define
from jaxtile.primitives._moves import (
    before,
    bind_gather,
    numbers_of_scatter,
    scatter_p,
    spread,
    unpack_scatter,
)
from jaxtile.primitives._operands import check_operands
from jaxtile.primitives._scalar import convert, elementwise
from jaxtile.primitives._scatter_rules import jvp
from jaxtile.primitives._spec import Spec
from jaxtile.primitives._tangent import is_float, require_linear
from jaxtile.primitives._unknown import unknown_seed
from jaxtile.primitives.gather import check_index


def _abstract(
    *avals, spec: Spec, axis, batch, size, policy, is_sorted, seeded, finish, out
):
    elements, index, init = unpack_scatter(spec, avals, seeded)
    x = elements[0]
    kept = tuple(d for d in range(x.ndim) if d != axis)
    check_operands("scatter", spec, policy, elements, None, None, kept, (axis,))
    check_index("scatter", x, index, axis, batch)
    along = before(axis, batch)
    if index.ndim != len(batch) + 1 or index.shape[along] != x.shape[axis]:
        raise TileShapeError(
            message(
                "scatter",
                expected=f"a target for each of the {x.shape[axis]} places of axis "
                f"{axis}",
                got=f"an index of shape {index.shape}",
                way_out="Reshape x and the index so that it has one axis of its own.",
            )
        )
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    for leaf, dtype in zip(init or (), spec.states, strict=seeded):
        if leaf.shape != shape or leaf.dtype != dtype:
            raise TileTypeError(
                message(
                    "scatter",
                    expected=f"init leaves of shape {shape} in the state's dtypes "
                    f"{[d.name for d in spec.states]}",
                    got=f"{leaf.dtype.name}{list(leaf.shape)}",
                    way_out="One seed for each target: the shape of the result.",
                )
            )
    dims = (*range(axis), -1, *range(axis + 1, x.ndim))
    return [Out(shape, d, dims) for d in out]


# XLA's own scatter, which takes elements in any order: on the CPU in source order, one
# after the other; elsewhere by atomics.
_EXACT = {"add": lax.scatter_add, "max": lax.scatter_max, "min": lax.scatter_min}


def _native_kind(spec, policy, platform) -> str | None:
    """The scatter of XLA's that keeps the contract, or None."""
    name, dtype = spec.reducer.native, spec.states[0]
    if name not in _EXACT or policy.kind is not Kind.TREE or dtype.kind == "b":
        return None
    if is_float(dtype) and name == "add":
        wide = dtype.itemsize >= 4
        return name if platform == "cpu" and wide else None
    return name


def _native_state(spec, name, elements, index, axis, batch, size):
    """The state of every target by XLA's own scatter, and what exists (None: all)."""
    (x,) = spec.lift(elements, elementwise)
    keyed = is_float(x.dtype) and name != "add"
    (start,) = spec.identity(())
    sign = 1 if name == "max" else -1
    if keyed:
        x, start = _native.keys(x, sign), _native.keys(start, sign)
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    places = _segments.targets(index, size)[..., None]
    numbers = numbers_of_scatter(x.ndim, axis, batch, index.ndim)
    mode = lax.GatherScatterMode.FILL_OR_DROP
    base = jnp.full(shape, start, x.dtype)
    y = _EXACT[name](base, places, x, numbers, mode=mode)
    if keyed:
        y = _native.values(y, spec.states[0])
    if name != "add" or not is_float(y.dtype):
        return [y], None
    seen = _segments.reached(index, axis, batch, size)
    return [y], spread(seen, shape, axis, batch)


def _sorted_state(
    spec, elements, index, init, axis, batch, size, policy, is_sorted, platform
):
    """The state of every target by way of its run, and what exists."""
    n = elements[0].shape[axis]
    shape = (*elements[0].shape[:axis], size, *elements[0].shape[axis + 1 :])
    search = platform == "cuda"
    runs = _segments.runs_of(index, size, axis, batch, is_sorted, search)
    index_leaf = _fold.index_leaf(spec, elements[0].shape, axis)
    leaves = _segments.arranged([*elements, *index_leaf], runs)
    seen = runs.at_targets(runs.count > 0, shape)
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        state = _segments.folded(spec, leaves, init, runs, policy.kind)
        if init is not None:
            return _fold.pick(seen, state, init), None
        return state, seen
    state = spec.hidden_state(spec.lift(leaves))
    if _trees.packs(runs, n):
        return _trees.packed_trees(spec, state, runs), seen
    if n != 1:  # symbolic too
        state = _trees.trees(spec, state, runs)
    return _segments.at_place(state, runs.start, runs), seen


def _state(elements, index, init, spec, axis, batch, size, policy, is_sorted, platform):
    """The raw state of every target."""
    shape = (*elements[0].shape[:axis], size, *elements[0].shape[axis + 1 :])
    if elements[0].shape[axis] == 0 or 0 in shape:
        return list(init) if init is not None else spec.filler(shape)
    fold = policy.kind in (Kind.LEFT, Kind.RIGHT)
    name = _native_kind(spec, policy, platform)
    if name is not None:
        found = _native_state(spec, name, elements, index, axis, batch, size)
    else:
        found = _sorted_state(
            spec, elements, index, init, axis, batch, size, policy, is_sorted, platform
        )
    state, seen = found
    if init is not None and not (fold and seen is None):
        return _fold.join(spec, init, None, state, seen)[0]
    return state if seen is None else _fold.pick(seen, state, spec.filler(shape))


def _reference(
    *operands,
    spec,
    axis,
    batch,
    size,
    policy,
    is_sorted,
    seeded,
    finish,
    out,
    platform="",
):
    elements, index, init = unpack_scatter(spec, operands, seeded)
    init = init and unknown_seed(init)
    state = _state(
        elements, index, init, spec, axis, batch, size, policy, is_sorted, platform
    )
    result = spec.finish(state) if finish else state
    return [convert(v, d) for v, d in zip(result, out, strict=True)]


def _transpose(cotangents, *operands, spec, axis, batch, seeded, **params):
    elements, index, init = unpack_scatter(spec, operands, seeded)
    require_linear("scatter", spec)
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [
            ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in operands
        ]
    outs: list[Any] = [None] * len(operands)
    if ad.is_undefined_primal(elements[0]):
        zero = jnp.zeros((), ct.dtype)
        back = bind_gather(ct, index, zero, axis, batch)
        outs[0] = convert(back, elements[0].aval.dtype)
    if init is not None and ad.is_undefined_primal(init[0]):
        outs[2] = convert(ct, init[0].aval.dtype)
    return outs


def _batch(args, dims, *, spec, axis, batch, seeded, **params):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)

    def front(value, dim):
        if dim is None:
            return jnp.broadcast_to(value, (size, *value.shape))
        return jnp.moveaxis(value, dim, 0)

    args = list(args)
    k, shared = spec.n_elements, tuple(d + 1 for d in batch)
    for i, dim in enumerate(dims):
        if i != k:
            args[i] = front(args[i], dim)
    if dims[k] is not None:
        args[k], shared = front(args[k], dims[k]), (0, *shared)
    more = dict(spec=spec, axis=axis + 1, batch=shared, seeded=seeded)
    outs = scatter_p.bind(*args, **more, **params)
    return outs, [0] * len(outs)


define(
    scatter_p,
    abstract=_abstract,
    reference=_reference,
    jvp=jvp,
    transpose=_transpose,
    batch=_batch,
)
