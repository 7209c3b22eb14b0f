"""The derivative of scatter.

Let T be the scatter. For add, dT is the same scatter of the tangents, whose transpose is
a gather. A selection gathers the tangent of its winner, lowest source first; logaddexp
scatters the weighted tangents. Anything else is the last state of each run's scan, through
which jax differentiates: an affine scan of the run (see `_tangent`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtile._jax_private import placed_like
from jaxtile.policy import Kind, ordered_tree
from jaxtile.primitives import _fold, _segments
from jaxtile.primitives._bits import place_dtype
from jaxtile.primitives._define import zero_tangent
from jaxtile.primitives._moves import (
    add_spec,
    bind_gather,
    bind_scatter,
    scatter_p,
    spread,
    unpack_scatter,
)
from jaxtile.primitives._scalar import convert, elementwise
from jaxtile.primitives._spec import make_spec
from jaxtile.primitives._tangent import (
    elementwise_jvp,
    finish_tangents,
    float_tangent,
    is_float,
    is_zero,
)


def _order(params) -> dict:
    names = ("axis", "batch", "size", "policy", "is_sorted")
    return {name: params[name] for name in names}


def _winner_tangent(spec, elements, index, init, de, dz, order):
    axis, batch = order["axis"], order["batch"]
    if order["policy"].kind is not Kind.TREE:
        order = {**order, "policy": ordered_tree}
    count = place_dtype(elements[0].shape[axis])
    op = "scatter"
    winner = make_spec(spec.reducer.winner, spec.tree, spec.raw, None, count, op)
    value, where = bind_scatter(winner, elements, index, None, finish=False, **order)
    seen = _segments.reached(index, axis, batch, order["size"])
    seen = placed_like(spread(seen, value.shape, axis, batch), value)
    dtype = spec.states[0]
    value = convert(value, dtype)
    zero = jnp.zeros((), dtype)
    where = jnp.where(seen, where, -1)
    every = tuple(d for d in range(value.ndim) if d != axis)
    d = bind_gather(convert(de[0], dtype), where, zero, axis, every)
    if init is not None:
        step = spec.reducer.tangent_merge
        both = elementwise_jvp(step, [init[0], value], [dz[0], d])
        d = jnp.where(seen, both, convert(dz[0], dtype))
    return [d]


def _weighted_tangent(spec, elements, index, init, de, dz, total, order):
    axis, batch, dtype = order["axis"], order["batch"], spec.states[0]

    def weights(x, total):
        return elementwise(spec.reducer.weights, x, total)

    zero = jnp.zeros((), dtype)
    x, mine = convert(elements[0], dtype), _segments.targets(index, order["size"])
    w = weights(x, bind_gather(total[0], mine, zero, axis, batch))
    dropped = (mine < 0) | (mine >= order["size"])
    w = jnp.where(spread(dropped, w.shape, axis, batch), 0, w)
    terms = w * convert(de[0], dtype)
    (d,) = bind_scatter(add_spec(dtype, "scatter"), [terms], index, None, **order)
    return [d if init is None else d + weights(init[0], total[0]) * dz[0]]


def _through_scan(spec, elements, index, init, de, dz, order):
    """The tangent of each float leaf of the raw state, by each run's scan."""
    axis, batch, size = order["axis"], order["batch"], order["size"]
    kind = order["policy"].kind
    runs = _segments.runs_of(index, size, axis, batch, order["is_sorted"])
    chain = kind in (Kind.LEFT, Kind.RIGHT) or not spec.reducer.laws.associative
    shape = (*elements[0].shape[:axis], size, *elements[0].shape[axis + 1 :])
    seen = runs.at_targets(runs.count > 0, shape)
    index_leaf = _fold.index_leaf(spec, elements[0].shape, axis)

    def last(elements, init):
        leaves = _segments.arranged([*elements, *index_leaf], runs)
        if chain:
            return _segments.folded(spec, leaves, init, runs, kind)
        return _segments.scanned(spec, leaves, runs)

    point = (list(elements), init if chain else None)
    moving = (list(de), dz if chain else None)
    state, dstate = jax.jvp(last, point, moving)
    seen = placed_like(seen, state[0])
    if init is None:
        zeros = [jnp.zeros_like(v) for v in state]
        dstate = _where_float(seen, state, dstate, zeros)
    elif chain:
        dstate = _where_float(seen, state, dstate, dz)
    else:
        step = spec.reducer.tangent_merge
        merge = spec.merge if step is None else _flat_merge(spec, step)
        dstate = _joined(merge, init, state, dz, dstate, seen)
    return dstate


def _flat_merge(spec, step):
    def merge(a, b, run):
        tree = spec.state_tree
        return jax.tree.leaves(
            run(step, jax.tree.unflatten(tree, a), jax.tree.unflatten(tree, b))
        )

    return merge


def _joined(merge, init, state, dz, dstate, seen):
    def both(a, b):
        return merge(a, b, elementwise)

    joined = jax.jvp(both, (list(init), list(state)), (list(dz), list(dstate)))[1]
    return _where_float(seen, state, joined, dz)


def _where_float(seen, state, a, b):
    return [
        jnp.where(seen, x, y)
        for v, x, y in zip(state, a, b, strict=True)
        if is_float(v.dtype)
    ]


def jvp(primals, tangents, **params):
    """The tangents of a scatter, linear tile ops of those of its operands."""
    outs = scatter_p.bind(*primals, **params)
    spec, seeded = params["spec"], params["seeded"]
    elements, index, init = unpack_scatter(spec, primals, seeded)
    de, _, dz = unpack_scatter(spec, tangents, seeded)
    if all(is_zero(t) for t in (*de, *(dz or ()))):
        return outs, [zero_tangent(v) for v in outs]
    de = [float_tangent(p, t) for p, t in zip(elements, de, strict=True)]
    dz = init and [float_tangent(p, t) for p, t in zip(init, dz, strict=True)]
    if init is not None:
        init = [placed_like(z, outs[0]) for z in init]
        dz = [
            t if t.dtype == jax.dtypes.float0 else placed_like(t, outs[0]) for t in dz
        ]
    order = _order(params)
    if spec.reducer.native == "add":
        return outs, bind_scatter(spec, de, index, dz, out=params["out"], **order)
    state = bind_scatter(spec, elements, index, init, finish=False, **order)
    if 0 in elements[0].shape:
        dstate = [jnp.zeros_like(v) for v in state if is_float(v.dtype)]
        if dz is not None:
            dstate = [t for t in dz if t.dtype != jax.dtypes.float0]
    elif spec.reducer.winner is not None:
        dstate = _winner_tangent(spec, elements, index, init, de, dz, order)
    elif spec.reducer.weights is not None:
        dstate = _weighted_tangent(spec, elements, index, init, de, dz, state, order)
    else:
        dstate = _through_scan(spec, elements, index, init, de, dz, order)
    return outs, finish_tangents(spec, state, dstate, params["finish"], params["out"])
