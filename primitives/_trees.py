"""The `fixed_tree` of each run's own elements: by doubling steps, or by rows of elements."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jaxtile.primitives import _fold
from jaxtile.primitives._segments import Runs
from jaxtile.primitives._spec import Spec


def trees(spec: Spec, states: Sequence, runs: Runs) -> list:
    """Each run's `fixed_tree`, at its first element.

    At step s, what stands at a rank that is a multiple of 2 s is the tree of the s
    elements from there, and its neighbour's stands s further on.
    """
    axis = runs.axis
    n = states[0].shape[axis]
    rank, length = (v.astype(jnp.uint32) for v in (runs.rank, runs.length))
    longest = jnp.max(length, initial=0)

    def ahead(v, step):
        twice = lax.concatenate([v, v], axis)
        return lax.dynamic_slice_in_dim(twice, step.astype(jnp.int32), n, axis)

    def body(carry):
        step, states = carry
        here = (rank % (2 * step) == 0) & (rank + step < length)
        merged = spec.merge(states, [ahead(v, step) for v in states])
        return 2 * step, _fold.pick(runs.wide(here, states[0]), merged, states)

    def more(carry):
        return carry[0] < longest

    return lax.while_loop(more, body, (jnp.uint32(1), list(states)))[1]


# Elements of a row of `packed_trees`; with fewer a row saves too little.
_WIDEST, _NARROWEST = 32, 4


def row_width(n: int, size: int) -> int:
    """How many elements a row has, so that rows half empty are not most of the work."""
    return min(_WIDEST, 1 << max(2 * n // max(size, 1), 1).bit_length() - 1)


def packs(runs: Runs, n: int) -> bool:
    """`packed_trees` has less to do than `trees`."""
    size = runs.count.size
    if runs.batch or not (isinstance(n, int) and isinstance(size, int)):  # symbolic
        return False
    return row_width(n, size) >= _NARROWEST


def packed_trees(spec: Spec, states: Sequence, runs: Runs) -> list:
    """Each target's `fixed_tree`, one for each target.

    A row is a stretch of one target's elements, as long as a power of two: its tree is
    a subtree of the target's. The trees of a target's rows are elements of the next pass.
    """
    states = [jnp.moveaxis(v, runs.axis, 0) for v in states]
    size, n = runs.count.size, states[0].shape[0]
    start, count, width = runs.start, runs.count, row_width(n, size)
    for _ in range(2):
        rows = states[0].shape[0] // width + size
        states, start, count = _rows_of_trees(spec, states, start, count, width, rows)
    rows = states[0].shape[0]

    def body(carry):
        states, start, count = carry
        return _rows_of_trees(spec, states, start, count, width, rows)

    def more(carry):
        return jnp.any(carry[2] > 1)

    states, start, _ = lax.while_loop(more, body, (states, start, count))
    found = [jnp.take(v, start, 0, mode="clip") for v in states]
    return [jnp.moveaxis(v, 0, runs.axis) for v in found]


def _rows_of_trees(spec, states, start, count, width, rows):
    """The tree of each row, and where each target's rows start and how many they are."""
    each = (count + (width - 1)) // width
    first = jnp.cumsum(each, dtype=each.dtype) - each
    row = jnp.arange(rows, dtype=each.dtype)
    target = jnp.searchsorted(first, row, side="right", method="scan_unrolled") - 1
    skipped = (row - first[target]) * width
    length = (count[target] - skipped)[:, None]
    places = (start[target] + skipped)[:, None] + jnp.arange(width, dtype=each.dtype)
    states = [jnp.take(v, places, 0, mode="clip") for v in states]
    step = 1
    while step < width:
        left, right = ([v[:, k::2] for v in states] for k in (0, 1))
        there = jnp.arange(step, width, 2 * step, dtype=each.dtype) < length
        there = lax.broadcast_in_dim(there, left[0].shape, (0, 1))
        states = _fold.pick(there, spec.merge(left, right), left)
        step *= 2
    return [v[:, 0] for v in states], first, each
