"""Reference realisations of prefix scans: every function returns inclusive states.

A suffix or reverse scan is the prefix scan of the flipped sequence (the suffix with the
merge's sides swapped), so that only one direction is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.primitives import _fold, _native
from jaxtile.primitives._scalar import as_closed, elementwise, inner_jaxpr, trace
from jaxtile.primitives._spec import Spec

# Columns that one step of the row scan computes at once: a cache line of float32.
_LINE = 16
# Columns of a line of `in_lines`: one vector of float32, whose chain is eight selects.
_VECTOR = 8
# Axes of at most this many elements are scanned a step at a time.
_SHORT = 256
# Merges of at most this many operations are cheap enough to repeat across a line.
_CHEAP = 8


def _operations(jaxpr: Any) -> int:
    count = 0
    for eqn in as_closed(jaxpr)[0].eqns:
        inner = inner_jaxpr(eqn)
        heavy = eqn.primitive.name in ("exp", "log1p", "log", "div", "pow", "tanh")
        count += _operations(inner) if inner is not None else 1 + 10 * heavy
    return count


def _is_cheap(spec: Spec) -> bool:
    state = jax.tree.unflatten(spec.state_tree, list(range(len(spec.states))))
    tree = jax.tree.structure((state, state))
    return _operations(trace(spec.reducer.merge, tree, spec.states * 2)[0]) <= _CHEAP


def _write(outs, state, i, axis):
    return [
        lax.dynamic_update_index_in_dim(o, s, i, axis)
        for o, s in zip(outs, state, strict=True)
    ]


def _masked(outs: Sequence, valid, spec: Spec) -> list:
    """Where nothing was seen yet, the empty value."""
    if valid is None:
        return list(outs)
    return _fold.pick(valid, outs, spec.filler(outs[0].shape))


def _shown(spec: Spec, before, state, valid) -> list:
    """What a scan shows at a place: the chunk's own chain after all before the chunk.

    Starting the chain from the total before it would be one merge less, and would lose
    small elements beside a large total: 2^24 ones, and not one more.
    """
    if before is not None:
        states, known = before
        shape = state[0].shape
        states = [jnp.broadcast_to(v, shape) for v in states]
        known = None if known is None else jnp.broadcast_to(known, shape)
        state, valid = _fold.join(spec, states, known, state, valid)
    return _masked(state, valid, spec)


def sequential(spec: Spec, elements, axis, init, mask, before=None) -> list:
    """The strict chain, one step an element, vectorised over everything else."""
    shape = elements[0].shape
    n, fibre = shape[axis], tuple(s for d, s in enumerate(shape) if d != axis)
    state, valid = _fold.start(spec, fibre, init, mask is not None)
    if valid is not None and mask is None:
        # The first element exists: peel it, and no step needs the flag.
        state, valid = spec.lift(spec.hidden(_fold.at(elements, 0, axis))), None
        outs = [jnp.zeros(shape, d) for d in spec.states]
        outs = _write(outs, _shown(spec, before, state, valid), 0, axis)
        first = 1
    else:
        outs, first = [jnp.zeros(shape, d) for d in spec.states], 0

    def body(i, carry):
        state, valid, outs = carry
        i = i + first
        m = None if mask is None else _fold.at([mask], i, axis)[0]
        state, valid = _fold.advance(spec, state, valid, _fold.at(elements, i, axis), m)
        shown = _shown(spec, before, state, valid)
        return state, valid, _write(outs, shown, i, axis)

    unroll = _fold.unrolled(spec, 4)
    return _fold.steps(n - first, body, (state, valid, outs), unroll)[2]


def _line(spec: Spec, block, mask, state, valid):
    """The chain over a few last-axis columns: every column computes all before it."""
    shape = block[0].shape
    axis = len(shape) - 1
    column = lax.broadcasted_iota(np.int32, shape, axis)

    def widen(v, j=None):
        v = v[..., None] if j is None else lax.slice_in_dim(v, j, j + 1, axis=axis)
        return jnp.broadcast_to(v, shape)

    wide = [widen(s) for s in state]
    known = None if valid is None else widen(valid)
    for j in range(shape[-1]):
        here = None if mask is None else widen(mask, j)
        element = [widen(v, j) for v in block]
        new, seen = _fold.advance(spec, wide, known, element, here)
        wide = _fold.pick(column >= j, new, wide)
        if known is not None and seen is not None:
            known = jnp.where(column >= j, seen, known)
    return wide, known


def _neutral_line(spec: Spec, lines, exclusive: bool):
    """As `_line`, of terms that are neutral before their place: an op less for each."""
    (neutral,) = spec.identity(())
    column = lax.broadcasted_iota(np.int32, lines.shape, lines.ndim - 1)
    terms = [
        jnp.where(column >= j + exclusive, lines[..., j : j + 1], neutral)
        for j in range(lines.shape[-1] - exclusive)
    ]
    return functools.reduce(lambda a, b: spec.merge([a], [b])[0], terms)


def by_lines(spec: Spec, elements, axis, init, mask, before=None) -> list:
    """The strict chain along the last axis, a line of columns at a time.

    Column j of a line is the chain up to j, recomputed: line-wide arithmetic is cheaper
    than stepping through memory one column at a time, and the order is the same.
    """
    shape = elements[0].shape
    n = shape[axis]
    state, valid = _fold.start(spec, shape[:axis], init, mask is not None)
    width = min(_LINE, n)

    def line(start, width, carry):
        state, valid, outs = carry
        block = [lax.dynamic_slice_in_dim(v, start, width, axis) for v in elements]
        m = None
        if mask is not None:
            m = lax.dynamic_slice_in_dim(mask, start, width, axis)
        wide, known = _line(spec, block, m, state, valid)
        shown = _shown(spec, over, wide, known)
        outs = [
            lax.dynamic_update_slice_in_dim(o, s, start, axis)
            for o, s in zip(outs, shown, strict=True)
        ]
        state = [s[..., -1] for s in wide]
        return state, None if known is None else known[..., -1], outs

    over = None
    if before is not None:
        over = [v if v is None else v[..., None] for v in (*before[0], before[1])]
        over = (over[:-1], over[-1])
    carry = (state, valid, [jnp.zeros(shape, d) for d in spec.states])
    whole = n // width
    carry = lax.fori_loop(0, whole, lambda k, c: line(k * width, width, c), carry)
    if whole * width < n:
        carry = line(whole * width, n - whole * width, carry)
    return carry[2]


def _line_totals(spec: Spec, lines):
    """The total of a short last axis as strided reads that XLA vectorises.

    lax.reduce over so few columns goes to a library call on the CPU at half the speed.
    Neighbours merge pairwise: a chain of eight waits for each of its steps.
    """
    columns = [lines[..., j] for j in range(lines.shape[-1])]
    while len(columns) > 1:
        even = len(columns) // 2 * 2
        pairs = zip(columns[:even:2], columns[1:even:2], strict=True)
        columns = [spec.merge([a], [b])[0] for a, b in pairs] + columns[even:]
    return columns[0]


def _by_levels(spec: Spec, x, exclusive: bool):
    """Prefixes along the last axis: a chain in each line, after all lines before it.

    The barriers keep apart passes that XLA would fuse, computing the totals anew for
    every element; the last one also keeps a line as the inner loop, whose comparisons
    are constants then.
    """
    n, axis = x.shape[-1], x.ndim - 1
    if n <= _VECTOR:
        return _neutral_line(spec, x, exclusive)
    # The padding is in the totals, so it must be neutral to the bit.
    (neutral,) = spec.identity(())
    (lines,) = _fold.split([x], axis, -(-n // _VECTOR), neutral)
    totals = lax.optimization_barrier(_line_totals(spec, lines))
    before = lax.optimization_barrier(_by_levels(spec, totals, True))
    before = jnp.broadcast_to(before[..., None], lines.shape)
    out = spec.merge([before], [_neutral_line(spec, lines, exclusive)])[0]
    flat = lax.optimization_barrier(out).reshape(*x.shape[:-1], -1)
    return lax.slice_in_dim(flat, 0, n, axis=axis)


def in_lines(spec: Spec, elements) -> list:
    """Any grouping along the last axis, without a loop over the data.

    Every pass is a single fusion, which XLA runs on every core; a loop it runs on one.
    """
    (x,) = spec.lift(elements, elementwise)
    return [_by_levels(spec, x, False)]


def _suits_lines(spec: Spec, shape, axis, init, mask) -> bool:
    """A native sum, product or extreme along a last axis that is worth it."""
    native = spec.reducer.native in ("add", "mul", "max", "min") and not spec.swapped
    known = all(isinstance(n, int) for n in shape)  # not symbolic
    last = known and axis == len(shape) - 1 and shape[axis] > _SHORT and 0 not in shape
    plain = init is None and mask is None and _native.keeps_rounding(spec)
    return native and last and plain


def chain(spec: Spec, elements, axis, init, mask, platform, before=None) -> list:
    """The strict chain in the form that suits the layout."""
    last = axis == elements[0].ndim - 1
    if platform == "cpu" and last and elements[0].ndim > 1:
        known = isinstance(elements[0].shape[axis], int)  # not symbolic
        if known and _is_cheap(spec):
            return by_lines(spec, elements, axis, init, mask, before)
        front = [jnp.moveaxis(v, axis, 0) for v in elements]
        m = None if mask is None else jnp.moveaxis(mask, axis, 0)
        outs = sequential(spec, front, 0, init, m, before)
        return [jnp.moveaxis(v, 0, axis) for v in outs]
    return sequential(spec, elements, axis, init, mask, before)


def chunked(spec: Spec, elements, axis, init, mask, platform) -> list:
    """Any grouping in source order: totals of chunks first, then chains side by side."""
    shape = elements[0].shape
    if platform == "cpu" and _suits_lines(spec, shape, axis, init, mask):
        return in_lines(spec, elements)
    chunks = _fold.chunk_count(shape, axis)
    if chunks == 1:
        return chain(spec, elements, axis, init, mask, platform)
    parts = _fold.split([*elements, *(() if mask is None else (mask,))], axis, chunks)
    m = parts.pop() if mask is not None else None
    totals, valid = _fold.fold(spec, parts, axis + 1, None, m)
    valid = None if mask is None else valid  # only the padding lacks elements
    begin = _exclusive_totals(spec, totals, valid, init, axis, mask is None)
    outs = chain(spec, parts, axis + 1, None, m, platform, begin)
    n = parts[0].shape[axis] * parts[0].shape[axis + 1]
    merged = [v.reshape(*v.shape[:axis], n, *v.shape[axis + 2 :]) for v in outs]
    return [lax.slice_in_dim(v, 0, shape[axis], axis=axis) for v in merged]


def _exclusive_totals(spec, totals, valid, init, axis, mask_free):
    """The state before each chunk and whether there is one."""
    shape = totals[0].shape
    n, fibre = shape[axis], tuple(s for d, s in enumerate(shape) if d != axis)
    if init is not None:
        state, known = list(init), jnp.ones(fibre, bool)
    else:
        state, known = spec.filler(fibre), jnp.zeros(fibre, bool)
        if spec.starts_from_identity:
            state = spec.origin(fibre)

    def body(i, carry):
        state, known, outs, flags = carry
        outs = _write(outs, state, i, axis)
        flags = _write([flags], [known], i, axis)[0]
        there = (
            jnp.ones(fibre, bool) if valid is None else _fold.at([valid], i, axis)[0]
        )
        total = _fold.at(totals, i, axis)
        state, known = _fold.join(spec, state, known, total, there)
        return state, known, outs, flags

    outs = [jnp.zeros(shape, d) for d in spec.states]
    carry = (state, known, outs, jnp.zeros(shape, bool))
    _, _, outs, flags = lax.fori_loop(0, n, body, carry)
    if init is not None or spec.has_update or (mask_free and spec.starts_from_identity):
        return outs, None
    return outs, flags


def windowed(spec: Spec, elements, axis, init, mask) -> list:
    """XLA's own tree of windows for one cheap exact state, else the fixed tree."""
    one = len(spec.states) == 1 and spec.reducer.exact_identity and not spec.swapped
    if not one or mask is not None or not _is_cheap(spec):
        return fixed(spec, elements, axis, init, mask)
    (x,) = spec.lift(elements)
    states = [_native.prefixes(spec, x, axis)]
    if init is None:
        return states
    seed = [
        jnp.broadcast_to(lax.expand_dims(v, (axis,)), states[0].shape) for v in init
    ]
    return spec.merge(seed, states)


def fixed(spec: Spec, elements, axis, init, mask) -> list:
    """Prefix i: the left fold of the maximal aligned blocks of [0, i]; seed leftmost."""
    ones = jnp.ones(elements[0].shape, bool)
    # Prefix i is what comes before i + 1: one more block, which does not exist.
    level = _pad([*spec.lift(elements), ones if mask is None else mask], 1, axis)
    lefts, hide = [], spec.hidden_state
    while level[-1].shape[axis] > 1:
        even = _even(level, axis)
        left, right = (
            [*hide(states), there]
            for *states, there in (_every_other(even, k, axis) for k in (0, 1))
        )
        lefts.append((left, level[-1].shape[axis]))
        states, valid = _fold.join(spec, left[:-1], left[-1], right[:-1], right[-1])
        level, hide = [*states, valid], list
    fibre = tuple(s for d, s in enumerate(elements[0].shape) if d != axis)
    first = list(init) if init is not None else spec.filler(fibre)
    before = [lax.expand_dims(v, (axis,)) for v in first]
    before.append(jnp.full(before[0].shape, init is not None))
    for left, n in reversed(lefts):
        # before(left of pair p) = before(p); before(right of p) = before(p) . left.
        states, valid = _fold.join(spec, before[:-1], before[-1], left[:-1], left[-1])
        after = [*states, valid]
        both = [_interleave(a, b, axis) for a, b in zip(before, after, strict=True)]
        before = [lax.slice_in_dim(v, 0, n, axis=axis) for v in both]
    n = elements[0].shape[axis]
    *outs, seen = [lax.slice_in_dim(v, 1, n + 1, axis=axis) for v in before]
    return _masked(outs, seen, spec)


def _even(values, axis):
    """An even number of blocks: the last may be one that does not exist."""
    return _pad(values, values[0].shape[axis] % 2, axis)


def _pad(values, count, axis):
    width = [(0, 0, 0)] * values[0].ndim
    width[axis] = (0, count, 0)
    return [lax.pad(v, jnp.zeros((), v.dtype), width) for v in values]


def _every_other(values, first, axis):
    n = values[0].shape[axis]
    return [lax.slice_in_dim(v, first, n, 2, axis) for v in values]


def _interleave(a, b, axis):
    pair = jnp.stack([a, b], axis + 1)
    n = 2 * a.shape[axis]  # not -1, which is ambiguous in an empty batch
    return pair.reshape(*a.shape[:axis], n, *a.shape[axis + 1 :])


def right_nested(spec: Spec, elements, axis, init, mask) -> list:
    """Each prefix as its own right fold: n steps over all n prefixes at once.

    The chains of different prefixes share nothing, so this is quadratic by definition.
    """
    shape = elements[0].shape
    n = shape[axis]
    if init is not None:
        init = [jnp.broadcast_to(lax.expand_dims(v, (axis,)), shape) for v in init]
    state, valid = _fold.start(spec, shape, init, True)
    row = lax.broadcasted_iota(np.int32, shape, axis)

    def body(k, carry):
        state, valid = carry
        i = n - 1 - k
        e = _fold.at(elements, i, axis)
        wide = [jnp.broadcast_to(lax.expand_dims(v, (axis,)), shape) for v in e]
        inside = row >= i
        if mask is not None:
            m = lax.expand_dims(_fold.at([mask], i, axis)[0], (axis,))
            inside &= m
        return _fold.advance(spec, state, valid, wide, inside, right=True)

    state, valid = lax.fori_loop(0, n, body, (state, valid))
    return _masked(state, valid, spec)


def swapped(spec: Spec) -> Spec:
    """The spec whose merge takes the later contribution on the left."""
    return replace(spec, swapped=not spec.swapped)
