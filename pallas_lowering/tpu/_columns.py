"""Sorting and selecting in columns of registers, one column a lane.

A tile is a list of groups of 8 rows, each a plane of (8, 128), so that partners 8 rows or
more apart are two registers, compared once and moved nowhere. Each row of a tile is a
tuple of planes: ranks, source indices, and what is carried along.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

SUBLANES, LANES = 8, 128
LAST = np.int32(np.iinfo(np.int32).max)

# The planes of 8 rows of a tile.
Group = tuple


def _before(a: Group, b: Group):
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def _pick(where, a: Group, b: Group) -> Group:
    return tuple(jnp.where(where, v, w) for v, w in zip(a, b, strict=True))


def _exchange(a: Group, b: Group) -> tuple[Group, Group]:
    """The two in order."""
    keep = _before(a, b)
    return _pick(keep, a, b), _pick(keep, b, a)


def _across(group: Group, step: int) -> Group:
    """What stands at the sublane that differs in one bit."""
    if step == SUBLANES // 2:
        return tuple(pltpu.roll(v, step, 0) for v in group)
    low = (_sublane(group) & step) == 0
    down = (pltpu.roll(v, SUBLANES - step, 0) for v in group)
    up = (pltpu.roll(v, step, 0) for v in group)
    return tuple(jnp.where(low, v, w) for v, w in zip(down, up, strict=True))


def _sublane(group: Group):
    return lax.broadcasted_iota(jnp.int32, group[0].shape, 0)


def _within(group: Group, p: int, q: int, row: int) -> Group:
    """One step of the network between rows of a group, which starts at `row`."""
    other = _across(group, 1 << q)
    first = (_sublane(group) >> q & 1) == (row >> p & 1)
    if 1 << p < SUBLANES:
        first = ((_sublane(group) >> q) ^ (_sublane(group) >> p)) & 1 == 0
    return _pick(_before(group, other) == first, group, other)


def sort_columns(groups: Sequence[Group]) -> list[Group]:
    """Every column in order, by a bitonic network; a power of two of groups."""
    groups = list(groups)
    for p in range(1, (SUBLANES * len(groups)).bit_length()):
        for q in reversed(range(p)):
            apart = (1 << q) // SUBLANES
            if not apart:
                groups = [_within(g, p, q, SUBLANES * i) for i, g in enumerate(groups)]
                continue
            for i in range(len(groups)):
                if not i & apart:
                    pair = _exchange(groups[i], groups[i + apart])
                    descends = (SUBLANES * i) >> p & 1
                    groups[i], groups[i + apart] = pair[::-1] if descends else pair
    return groups


def first_of_columns(groups: Sequence[Group], k: int) -> list[Group]:
    """The first k of every column, each in all sublanes of its group.

    Each sublane keeps the first of its own rows by insertion, then the sublanes merge.
    """
    count = 1 << (k - 1).bit_length()
    best: list[Group] = []
    for group in groups:
        best = _inserted(best, group)[:count]
    if len(best) < count:
        empty = tuple(
            jnp.full_like(v, LAST if leaf < 2 else 0) for leaf, v in enumerate(best[0])
        )
        best += [empty] * (count - len(best))
    for step in (4, 2, 1):
        other = [_across(b, step) for b in best]
        best = [_exchange(a, b)[0] for a, b in zip(best, other[::-1], strict=True)]
        best = _cleaned(best)
    return best[:k]


def _inserted(best: list[Group], group: Group) -> list[Group]:
    """Sorted rows and one that comes later in the source; an equal one stays ahead."""
    ahead = [group[0] < b[0] for b in best]
    moved = [_pick(a, b, group) for a, b in zip(ahead, best, strict=True)]
    rows = zip(ahead, [group, *moved[:-1]], best, strict=True) if best else ()
    return [_pick(a, m, b) for a, m, b in rows] + [moved[-1] if best else group]


def _cleaned(best: list[Group]) -> list[Group]:
    """A bitonic run in order."""
    apart = len(best) // 2
    while apart:
        for i in range(len(best)):
            if not i & apart:
                best[i], best[i + apart] = _exchange(best[i], best[i + apart])
        apart //= 2
    return best
