r"""reduce: the contributions of each fibre combined by a reducer, in a stated order.

    y[g] = finish(seed . lift(x[g, 0]) . lift(x[g, 1]) . ... )

where the policy says how the dots associate (see `jaxtile.policy`). Order over several
axes is lexicographic in array-axis order. A masked element is skipped whatever it
holds. An empty fibre gives the seed, else the reducer's empty value, else an error at
trace time. NaN, signed zeros and ties are the reducer's.

Operands: element leaves, then seed leaves (if `seeded`), then a mask (if `masked`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtile._jax_private import iota_like
from jaxtile.catalogue import add as ADD
from jaxtile.errors import TileShapeError, message
from jaxtile.policy import Kind, Transform, ordered_tree
from jaxtile.primitives import _fold, _native
from jaxtile.primitives._bind import bind_reduce, of_tangent, reduce_p
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._operands import (
    batch_fibres,
    check_operands,
    check_symbolic,
    unpack,
)
from jaxtile.primitives._scalar import convert, elementwise
from jaxtile.primitives._spec import Spec, make_spec
from jaxtile.primitives._tangent import (
    elementwise_jvp,
    finish_tangents,
    float_tangent,
    is_zero,
    prefix_tangents,
    require_linear,
)
from jaxtile.primitives._unknown import unknown_seed


def _abstract(*avals, spec: Spec, axes, policy, seeded, masked, finish, out):
    elements, init, mask = unpack(spec, avals, seeded, masked)
    shape = elements[0].shape
    kept = tuple(d for d in range(len(shape)) if d not in axes)
    check_operands("reduce", spec, policy, elements, init, mask, kept, axes)
    sizes = [shape[d] for d in axes]
    check_symbolic("reduce", sizes, policy)
    # A mask may leave nothing too, but only at run time; see _settle.
    if 0 in sizes and not seeded and not spec.has_empty:
        raise TileShapeError(
            message(
                "reduce",
                expected=f"at least one element along axes {axes} for {spec.reducer!r}",
                got=f"shape {shape}",
                way_out="Pass init=, the value of an empty fibre.",
            )
        )
    return [Out(tuple(shape[d] for d in kept), d, kept) for d in out]


def _settle(spec, state, valid, shape):
    """The state, or the empty value where no contribution was seen."""
    if valid is None:
        return state
    return _fold.pick(valid, state, spec.filler(shape))


def _native_tree(spec, elements, mask, axes, platform):
    """The state by XLA's own reduction and what exists, or None."""
    name = spec.reducer.native
    if name == "topk":
        return _native.ranked(spec, elements, mask, axes, platform), None
    if name in ("argmax", "argmin") and mask is None:
        x = convert(elements[0], spec.elements[0])
        return _native.argument(name, x, axes, spec.index), None
    if name not in _native.VALUES or not _native.keeps_rounding(spec):
        return None
    (x,) = spec.lift(elements, elementwise)
    valid = None
    if mask is not None:
        (neutral,) = spec.identity(())
        x = jnp.where(mask, x, neutral)
        valid = lax.reduce(mask, np.asarray(False), lax.bitwise_or, axes)
    elif name == "add" and jnp.issubdtype(elements[0].dtype, jnp.floating):
        return [_native.add(x, axes, elements[0])], None
    return [_native.VALUES[name](x, axes)], valid


def _any_tree(spec, elements, mask, axis, policy, platform):
    """A grouping that the policy permits and the platform does well."""
    shape = elements[0].shape
    if platform != "cpu":
        free = policy.permits(Transform.PERMUTE) and spec.reducer.exact_identity
        if free and mask is None:
            return _native.variadic(spec, spec.lift(elements), axis), None
        if isinstance(shape[axis], int):
            return _fold.tree(spec, spec.lift(elements), mask, axis)
    chunks = _fold.chunk_count(shape, axis)
    if chunks == 1:
        return _fold.fold(spec, elements, axis, None, mask)
    n = shape[axis]
    parts = _fold.split([*elements, *(() if mask is None else (mask,))], axis, chunks)
    length = parts[0].shape[axis + 1]
    mask = parts.pop() if mask is not None else None
    if chunks * length != n:
        place = lax.broadcasted_iota(np.int32, parts[0].shape, axis) * length
        inside = place + lax.broadcasted_iota(np.int32, parts[0].shape, axis + 1) < n
        mask = inside if mask is None else mask & inside
    state, valid = _fold.fold(spec, parts, axis + 1, None, mask)
    return _fold.tree(spec, state, valid, axis)


def _state(elements, init, mask, spec, axes, policy, platform):
    """The raw state of every fibre."""
    shape = elements[0].shape
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    if 0 in [shape[d] for d in axes]:
        return list(init) if init is not None else spec.empty(kept)
    if _native.permitted(spec, policy):
        found = _native_tree(spec, elements, mask, axes, platform)
        if found is not None:
            return _seeded(spec, init, *found, kept)
    elements = [_fold.collapse(v, axes) for v in elements]
    mask = None if mask is None else _fold.collapse(mask, axes)
    axis = len(kept)
    elements += _fold.index_leaf(spec, elements[0].shape, axis)
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        right = policy.kind is Kind.RIGHT
        state, valid = _fold.fold(spec, elements, axis, init, mask, right)
        return _settle(spec, state, valid, kept)
    if policy.kind is Kind.FIXED:
        state, valid = _fold.tree(spec, spec.lift(elements), mask, axis)
    else:
        state, valid = _any_tree(spec, elements, mask, axis, policy, platform)
    return _seeded(spec, init, state, valid, kept)


def _seeded(spec, init, state, valid, shape):
    if init is None:
        return _settle(spec, state, valid, shape)
    return _fold.join(spec, init, None, state, valid)[0]


def _reference(*operands, spec, axes, policy, seeded, masked, finish, out, platform=""):
    elements, init, mask = unpack(spec, operands, seeded, masked)
    init = init and unknown_seed(init)
    state = _state(elements, init, mask, spec, axes, policy, platform)
    result = spec.finish(state) if finish else state
    return [convert(v, d) for v, d in zip(result, out, strict=True)]


def _share(parts, *, spec, axes, policy, seeded, masked, finish, out, implementation):
    """Each device reduces its part; the states merge in mesh order on all of them.

    Parts of the first axis are runs of the sequence; those of a later one interleave.
    """
    permute = policy.permits(Transform.PERMUTE) or set(parts) == {axes[0]}
    if spec.index or not (permute and policy.permits(Transform.REGROUP)):
        return None
    names = tuple(name for d in sorted(parts) for name in parts[d])
    gather = functools.partial(lax.all_gather, axis_name=names)
    order = dict(axes=axes, policy=policy, implementation=implementation)

    def run(*shards, platform):
        elements, init, mask = unpack(spec, shards, seeded, masked)
        state = bind_reduce(spec, elements, None, mask, finish=False, **order)
        valid = None
        if mask is not None:
            valid = gather(lax.reduce(mask, np.asarray(False), lax.bitwise_or, axes))
        state, valid = _fold.tree(spec, list(map(gather, state)), valid, 0)
        state = _seeded(spec, init, state, valid, state[0].shape)
        result = spec.finish(state) if finish else state
        return [convert(v, d) for v, d in zip(result, out, strict=True)]

    return run


# Let T be the reduction. For add, dT is the same reduction of the tangents. A selection
# hands the tangent of its winner on, lowest source index first. logaddexp has the
# weights exp(x_i - T). Everything else is the last state of its scan, whose derivative is
# an affine scan: dy_i = A_i dy_(i-1) + B_i dx_i (see _tangent.py). No rule divides or
# reorders, and each is a linear tile op of the tangents.


def _sum(values, axes, order, acc):
    spec = make_spec(ADD, _LEAF, (values.dtype,), acc, None, "reduce")
    return bind_reduce(spec, [values], None, None, axes=axes, **order)[0]


def _tangent_of_winner(index, dx, axes, order, acc, own=None):
    place = _fold.collapse(dx, axes)
    last = place.ndim - 1
    own = iota_like(place, index.dtype, last) if own is None else own
    chosen = jnp.where(
        own == lax.expand_dims(index, (last,)), place, jnp.zeros_like(place)
    )
    return _sum(chosen, (last,), order, acc)


def _select_jvp(spec, elements, init, mask, de, dz, axes, order):
    """The tangent of maximum and minimum: the winner's."""
    if order["policy"].kind is not Kind.TREE:
        order = {**order, "policy": ordered_tree}
    index = jnp.int32
    winner = make_spec(spec.reducer.winner, spec.tree, spec.raw, None, index, "reduce")
    value, where = bind_reduce(
        winner, elements, None, mask, axes=axes, finish=False, **order
    )
    value = convert(value, spec.states[0])
    d = _tangent_of_winner(where, de[0], axes, order, spec.states[0])
    if init is not None:
        step = spec.reducer.tangent_merge
        d = elementwise_jvp(step, [init[0], value], [dz[0], d])
    if mask is None:
        return [d]
    # A mask that leaves nothing leaves no winner: the seed's tangent, or none.
    some = lax.reduce(mask, np.asarray(False), lax.bitwise_or, axes)
    none = jnp.zeros_like(d) if init is None else convert(dz[0], d.dtype)
    return [jnp.where(some, d, none)]


def _ranked_jvp(spec, elements, de, axes, state, order):
    """The tangent of each place of topk_merge: that of the element with its index."""
    index = None
    if not spec.index:
        index = _fold.collapse(elements[1], axes)
    return [
        _tangent_of_winner(place, de[0], axes, order, spec.states[0], index)
        for place in state[len(state) // 2 :]
    ]


def _weighted_jvp(spec, elements, init, mask, de, dz, total, axes, order):
    weights = functools.partial(elementwise, spec.reducer.weights)
    x = convert(elements[0], spec.states[0])
    kept = [d for d in range(x.ndim) if d not in axes]
    w = weights(x, lax.broadcast_in_dim(total[0], x.shape, kept))
    if mask is not None:
        w = jnp.where(mask, w, 0)
    d = _sum(w * convert(de[0], w.dtype), axes, order, spec.states[0])
    return [d if init is None else d + weights(init[0], total[0]) * dz[0]]


def _tangents(spec, elements, init, mask, de, dz, axes, state, **order):
    """The tangent of each float leaf of the raw state."""
    if spec.reducer.winner is not None:
        return _select_jvp(spec, elements, init, mask, de, dz, axes, order)
    if spec.reducer.native == "topk" and init is None:
        return _ranked_jvp(spec, elements, de, axes, state, order)
    if spec.reducer.weights is not None:
        return _weighted_jvp(spec, elements, init, mask, de, dz, state, axes, order)
    elements = [_fold.collapse(v, axes) for v in elements]
    de = [_fold.collapse(v, axes) for v in de]
    mask = None if mask is None else _fold.collapse(mask, axes)
    axis = elements[0].ndim - 1
    elements += [iota_like(elements[0], spec.index, axis)] if spec.index else []
    if order["policy"].kind is Kind.RIGHT:
        flip = functools.partial(lax.rev, dimensions=(axis,))
        elements, de = list(map(flip, elements)), list(map(flip, de))
        mask = None if mask is None else flip(mask)
        spec = replace(spec, swapped=True)
    name = order["implementation"]
    dy = prefix_tangents(spec, elements, init, mask, de, dz, axis, name)
    n = elements[0].shape[axis]
    return [lax.index_in_dim(v, n - 1, axis, keepdims=False) for v in dy]


def _jvp(primals, tangents, **params):
    outs = reduce_p.bind(*primals, **params)
    seeded, masked = params["seeded"], params["masked"]
    spec, axes, finish, out = (params[k] for k in ("spec", "axes", "finish", "out"))
    name = of_tangent(params["implementation"])
    order: dict[str, Any] = dict(
        axes=axes, policy=params["policy"], implementation=name
    )
    elements, init, mask = unpack(spec, primals, seeded, masked)
    de, dz, _ = unpack(spec, tangents, seeded, masked)
    if all(is_zero(t) for t in (*de, *(dz or ()))):
        return outs, [zero_tangent(v) for v in outs]
    de = [float_tangent(p, t) for p, t in zip(elements, de, strict=True)]
    dz = init and [float_tangent(p, t) for p, t in zip(init, dz, strict=True)]
    if spec.reducer.native == "add":
        d = bind_reduce(spec, de, dz, mask, out=out, **order)
        return outs, d
    empty = 0 in [elements[0].shape[d] for d in axes]
    state = bind_reduce(spec, elements, init, mask, finish=False, **order)
    if empty:
        dstate = [t for t in dz if t.dtype != jax.dtypes.float0]
    else:
        dstate = _tangents(spec, elements, init, mask, de, dz, state=state, **order)
    return outs, finish_tangents(spec, state, dstate, finish, out)


def _transpose(cotangents, *operands, spec, axes, seeded, masked, **params):
    elements, init, mask = unpack(spec, operands, seeded, masked)
    require_linear("reduce", spec)
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [
            ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in operands
        ]
    outs = []
    if ad.is_undefined_primal(elements[0]):
        x = elements[0].aval
        kept = [d for d in range(x.ndim) if d not in axes]
        wide = lax.broadcast_in_dim(convert(ct, x.dtype), x.shape, kept)
        outs.append(wide if mask is None else jnp.where(mask, wide, 0))
    else:
        outs.append(None)
    if init is not None:
        z = init[0]
        undefined = ad.is_undefined_primal(z)
        outs.append(convert(ct, z.aval.dtype) if undefined else None)
    return outs + [None] * masked


_LEAF = jax.tree.structure(0)

define(
    reduce_p,
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=batch_fibres(reduce_p, "axes"),
    along=lambda *, axes, **_: axes,
    share=_share,
)
