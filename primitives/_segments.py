"""Elements brought together by their target, and each target's own combined.

A stable sort by target makes one run of each target's elements, in source order. Orders
are those of the run alone: the `fixed_tree` of a target is the tree of its own elements,
whatever lies between them, wherever they lie, and however many targets there are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile._jax_private import align_varying, placed_like
from jaxtile.policy import Kind, fold_left, ordered_tree
from jaxtile.primitives._bind import bind_scan, flip
from jaxtile.primitives._bits import inside, place_dtype
from jaxtile.primitives._moves import (
    before,
    bind_gather,
    numbers_of_scatter,
    pick,
    spread,
)
from jaxtile.primitives._spec import Spec
from jaxtile.reducers import Laws, Provenance, Reducer


@dataclass(frozen=True)
class Runs:
    """Where each target's run lies in the sorted elements.

    Args:
        ids: the target of each sorted element; -1 or past the last for none.
        order: the source place of each sorted element; None where they were sorted.
        rank: the place of each element in its run.
        length: the length of each element's run, 0 for elements without a target.
        start, count: of each target, where its run starts and how long it is.
        axis, batch: as of the index.
    """

    ids: Any
    order: Any
    rank: Any
    length: Any
    start: Any
    count: Any
    axis: int
    batch: tuple[int, ...]

    @property
    def heads(self) -> Any:
        """The first element of each run."""
        along = before(self.axis, self.batch)
        cut = functools.partial(lax.slice_in_dim, self.ids, axis=along)
        first = jnp.ones_like(cut(0, 1), bool)
        return lax.concatenate([first, cut(0, -1) != cut(1, None)], along)

    def wide(self, value: Any, like: Any) -> Any:
        """A value for each place of the index, for each element."""
        return placed_like(spread(value, like.shape, self.axis, self.batch), like)

    def at_targets(self, value: Any, shape: Sequence[int]) -> Any:
        """A value for each target, for each place of the result."""
        return spread(value, tuple(shape), self.axis, self.batch)


def targets(index: Any, size: int) -> Any:
    """The target of each element: `size` for those above, -1 for those below."""
    above = jnp.where(index > 0, size, -1)
    return jnp.where(inside(index, size), index, above).astype(place_dtype(size + 2))


def count_targets(places: Any, size: int, axis: int, batch: Sequence[int]) -> Any:
    """How many elements each of `size` targets has; integers, so in any order."""
    along = before(axis, batch)
    shape = (*places.shape[:along], size, *places.shape[along + 1 :])
    inner = [d for d in range(places.ndim) if d != along]
    numbers = numbers_of_scatter(places.ndim, along, inner, places.ndim)
    ones = jnp.ones(places.shape, place_dtype(places.shape[along]))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    zero = jnp.zeros(shape, ones.dtype)
    return lax.scatter_add(zero, places[..., None], ones, numbers, mode=mode)


def reached(index: Any, axis: int, batch: Sequence[int], size: int) -> Any:
    """Which targets an element reaches, in the index's layout."""
    counts = count_targets(targets(index, size), size, axis, batch)
    return counts > 0


def runs_of(
    index: Any,
    size: int,
    axis: int,
    batch: Sequence[int],
    is_sorted: bool,
    search: bool = False,
) -> Runs:
    """Sort an index, stably.

    Args:
        index, size, axis, batch, is_sorted: of the scatter.
        search: look for where each run starts instead of counting; counting is many
            additions to few places, which some platforms do one after the other.
    """
    along, batch = before(axis, batch), tuple(batch)
    n = index.shape[along]
    ids, order = targets(index, size), None
    source = lax.broadcasted_iota(place_dtype(n), ids.shape, along)
    if not is_sorted:
        ids, order = lax.sort((ids, source), dimension=along, is_stable=True)
    if search and ids.ndim == 1:
        every = jnp.arange(-1, size + 2, dtype=ids.dtype)
        ends = jnp.searchsorted(ids, every, side="left", method="scan_unrolled").astype(
            source.dtype
        )
        starts, counts = ends[:-1], ends[1:] - ends[:-1]
    else:
        counts = count_targets(ids + 1, size + 2, axis, batch)
        starts = jnp.cumsum(counts, along, dtype=counts.dtype) - counts
    inner = [d for d in range(index.ndim) if d != along]
    rank = source - pick(starts, ids + 1, along, inner)
    place = lax.broadcasted_iota(np.int32, counts.shape, along)
    counts = jnp.where((place == 0) | (place == size + 1), 0, counts)
    length = pick(counts, ids + 1, along, inner)
    start, count = (
        lax.slice_in_dim(v, 1, size + 1, axis=along) for v in (starts, counts)
    )
    return Runs(ids, order, rank, length, start, count, axis, batch)


def arranged(leaves: Sequence, runs: Runs) -> list:
    """Leaves in the order of the runs."""
    if runs.order is None:
        return list(leaves)
    zeros = [jnp.zeros((), v.dtype) for v in leaves]
    return [
        bind_gather(v, runs.order, z, runs.axis, runs.batch)
        for v, z in zip(leaves, zeros, strict=True)
    ]


def at_place(leaves: Sequence, place: Any, runs: Runs) -> list:
    """Leaves at one place of each target's run; zeros for targets without elements."""
    none = jnp.full_like(place, -1)
    index = jnp.where(runs.count > 0, place, none)
    zeros = [jnp.zeros((), v.dtype) for v in leaves]
    return [
        bind_gather(v, index, z, runs.axis, runs.batch)
        for v, z in zip(leaves, zeros, strict=True)
    ]


def _plain(fn, *args):
    return fn(*args)


def _leaves(tree):
    return jax.tree.leaves(tree)


def _merge(spec, a, b):
    """The later run starts anew where it has a head."""
    (a_head, *a_state), (b_head, *b_state) = a, b
    joined = spec.merge(a_state, b_state, _plain)
    state = [jnp.where(b_head, s, j) for s, j in zip(b_state, joined, strict=True)]
    return (a_head | b_head, *state)


def _tangent_merge(spec, a, b):
    (a_head, *a_state), (b_head, *b_state) = a, b
    tree = spec.state_tree
    a_tree, b_tree = (jax.tree.unflatten(tree, s) for s in (a_state, b_state))
    joined = _leaves(spec.reducer.tangent_merge(a_tree, b_tree))
    state = [jnp.where(b_head, s, j) for s, j in zip(b_state, joined, strict=True)]
    return (a_head | b_head, *state)


def _lift(spec, element):
    head, *leaves = element
    return (head, *spec.lift(leaves, _plain))


def _update(spec, right, fresh, state, element):
    """A fold's step that starts anew at a head: from a seed, else by lifting."""
    _, *state = state
    head, *leaves = element
    k = len(spec.states) if fresh else 0
    seed, leaves = leaves[:k], leaves[k:]
    if fresh:
        state = [jnp.where(head, z, s) for z, s in zip(seed, state, strict=True)]
    if right:
        new = spec.update_right(leaves, state, _plain)
    else:
        new = spec.update(state, leaves, _plain)
    if not fresh:
        lone = spec.lift(leaves, _plain)
        new = [jnp.where(head, z, s) for z, s in zip(lone, new, strict=True)]
    return (head, *new)


def _begin(spec, right, fresh, element):
    """The state after a head, which every run's first element is."""
    head, *leaves = element
    if not fresh:
        return (head, *spec.lift(leaves, _plain))
    zeros = [jnp.zeros((), d) for d in spec.states]
    always = jnp.ones_like(head)
    _, *state = _update(spec, right, fresh, (head, *zeros), (always, *leaves))
    return (head, *state)


def _start(spec, like):
    return (np.zeros((), bool), *(np.zeros((), d) for d in spec.states))


def _spec_of(reducer: Reducer, elements: Sequence, states: Sequence) -> Spec:
    def tree(leaves):
        return jax.tree.structure((0,) * len(leaves))

    raw = tuple(map(np.dtype, elements))
    states = tuple(map(np.dtype, states))
    return Spec(
        reducer, tree(raw), raw, raw, tree(states), states, tree(states), states
    )


def segmented(spec: Spec) -> Spec:
    """The reducer restarted at heads: of elements (head, its element, its index)."""
    own = spec.reducer.tangent_merge
    reducer = Reducer(
        merge=functools.partial(_merge, spec),
        lift=functools.partial(_lift, spec),
        laws=Laws(spec.reducer.laws.associative, False, False, Provenance.DERIVED),
        name=f"segmented({spec.reducer!r})",
        tangent_merge=functools.partial(_tangent_merge, spec) if own else None,
    )
    index = [spec.index] if spec.index is not None else []
    return _spec_of(reducer, (bool, *spec.raw, *index), (bool, *spec.states))


def folding(spec: Spec, right: bool, fresh: bool) -> Spec:
    """The reducer's own chain restarted at heads, from a seed in the element if fresh."""
    step = functools.partial(_update, spec, right, fresh)
    reducer = Reducer(
        merge=_never,
        identity=functools.partial(_start, spec),
        lift=functools.partial(_begin, spec, right, fresh),
        update=step,
        name=f"segmented({spec.reducer!r})",
    )
    seed = spec.states if fresh else ()
    index = [spec.index] if spec.index is not None else []
    raw = (bool, *seed, *spec.raw, *index)
    return _spec_of(reducer, raw, (bool, *spec.states))


def _never(a, b):
    return a


def scanned(spec: Spec, elements: Sequence, runs: Runs) -> list:
    """Each run's last prefix under `ordered_tree`: the derivative goes through it."""
    heads = runs.wide(runs.heads, elements[0])
    states = bind_scan(
        segmented(spec),
        align_varying([heads, *elements]),
        None,
        None,
        axis=runs.axis,
        policy=ordered_tree,
        finish=False,
    )
    return at_place(states[1:], runs.start + runs.count - 1, runs)


def folded(spec: Spec, elements: Sequence, init: Any, runs: Runs, kind: Kind) -> list:
    """Each run's own chain, seeded where there is a seed or the reducer starts from one."""
    right, like = kind is Kind.RIGHT, elements[0]
    axis, seeds = runs.axis, []
    fresh = init is not None or spec.starts_from_identity
    heads = runs.heads
    if right:
        heads = (runs.rank == runs.length - 1) | (runs.length == 0)
    if init is not None:
        zeros = [jnp.zeros((), v.dtype) for v in init]
        seeds = [
            bind_gather(v, runs.ids, z, axis, runs.batch)
            for v, z in zip(init, zeros, strict=True)
        ]
    elif fresh:
        seeds = [placed_like(v, like) for v in spec.identity(like.shape)]
    leaves = align_varying([runs.wide(heads, like), *seeds, *elements])
    leaves = flip(leaves, axis) if right else leaves
    states = bind_scan(
        folding(spec, right, fresh),
        leaves,
        None,
        None,
        axis=axis,
        policy=fold_left,
        finish=False,
    )[1:]
    states = flip(states, axis) if right else states
    last = runs.start if right else runs.start + runs.count - 1
    return at_place(states, last, runs)
