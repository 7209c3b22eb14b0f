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

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxtile.errors import NoDerivativeError, TileShapeError, TileTypeError, message
from jaxtile.policy import Kind, ordered_tree
from jaxtile.primitives import _fold, _native, _segments
from jaxtile.primitives._bits import place_dtype
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._moves import (
    add_spec,
    before,
    bind_gather,
    bind_scatter,
    numbers_of_scatter,
    scatter_p,
    spread,
)
from jaxtile.primitives._operands import check_operands
from jaxtile.primitives._scalar import convert, elementwise
from jaxtile.primitives._spec import Spec, make_spec
from jaxtile.primitives._tangent import (
    elementwise_jvp,
    finish_tangents,
    float_tangent,
    is_float,
    is_zero,
)
from jaxtile.primitives.gather import check_index


def unpack(spec: Spec, operands, seeded: bool) -> tuple[list, Any, Any]:
    """Positional operands as (elements, index, init or None)."""
    n = spec.n_elements
    init = list(operands[n + 1 :]) if seeded else None
    return list(operands[:n]), operands[n], init


def _abstract(
    *avals, spec: Spec, axis, batch, size, policy, is_sorted, seeded, finish, out
):
    elements, index, init = unpack(spec, avals, seeded)
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
    (x,) = spec.lift(elements)
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
    seen = _reached(index, axis, batch, size)
    return [y], spread(seen, shape, axis, batch)


def _sorted_state(spec, elements, index, init, axis, batch, size, policy, is_sorted):
    """The state of every target by way of its run, and what exists."""
    n = elements[0].shape[axis]
    shape = (*elements[0].shape[:axis], size, *elements[0].shape[axis + 1 :])
    runs = _segments.runs_of(index, size, axis, batch, is_sorted)
    index_leaf = _fold.index_leaf(spec, elements[0].shape, axis)
    leaves = _segments.arranged([*elements, *index_leaf], runs)
    seen = runs.at_targets(runs.count > 0, shape)
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        state = _segments.folded(spec, leaves, init, runs, policy.kind)
        if init is not None:
            return _fold.pick(seen, state, init), None
        return state, seen
    state = spec.lift(leaves)
    if n > 1:
        state = _segments.trees(spec, state, runs)
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
            spec, elements, index, init, axis, batch, size, policy, is_sorted
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
    elements, index, init = unpack(spec, operands, seeded)
    state = _state(
        elements, index, init, spec, axis, batch, size, policy, is_sorted, platform
    )
    result = spec.finish(state) if finish else state
    return [convert(v, d) for v, d in zip(result, out, strict=True)]


# Let T be the scatter. For add, dT is the same scatter of the tangents, whose transpose
# is a gather. A selection gathers the tangent of its winner, lowest source first;
# logaddexp scatters the weighted tangents. Anything else is the last state of each run's
# scan, through which jax differentiates: an affine scan of the run (see _tangent.py).


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
    seen = _reached(index, axis, batch, order["size"])
    seen = spread(seen, value.shape, axis, batch)
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


def _reached(index, axis, batch, size):
    """Which targets an element reaches, in the index's layout."""
    counts = _segments.count_targets(_segments.targets(index, size), size, axis, batch)
    return counts > 0


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


def _jvp(primals, tangents, **params):
    outs = scatter_p.bind(*primals, **params)
    spec, seeded = params["spec"], params["seeded"]
    elements, index, init = unpack(spec, primals, seeded)
    de, _, dz = unpack(spec, tangents, seeded)
    if all(is_zero(t) for t in (*de, *(dz or ()))):
        return outs, [zero_tangent(v) for v in outs]
    de = [float_tangent(p, t) for p, t in zip(elements, de, strict=True)]
    dz = init and [float_tangent(p, t) for p, t in zip(init, dz, strict=True)]
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


def _transpose(cotangents, *operands, spec, axis, batch, seeded, **params):
    elements, index, init = unpack(spec, operands, seeded)
    if spec.reducer.native != "add":
        raise NoDerivativeError(
            message(
                "scatter",
                expected="a linear reducer (add) to transpose",
                got=repr(spec.reducer),
                way_out="Only add is linear in its elements; use jax.vjp.",
            )
        )
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
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
