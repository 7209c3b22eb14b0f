"""Sorting and selecting in columns of registers, one column a lane.

A tile is a list of groups of 8 rows, each a plane of (8, 128). Rows in the same sublane of
two groups are compared register with register and move nowhere; between sublanes a group
is permuted first, so `sort_columns` has few of those steps. Each row is a tuple: ranks,
source indices and what is carried along, or ranks alone, where equal ones are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SUBLANES, LANES = 8, 128
LAST = np.int32(np.iinfo(np.int32).max)

# The planes of 8 rows of a tile.
Group = tuple


def _before(a: Group, b: Group):
    if len(a) == 1:
        return a[0] < b[0]
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def _pick(where, a: Group, b: Group) -> Group:
    return tuple(jnp.where(where, v, w) for v, w in zip(a, b, strict=True))


def _exchange(a: Group, b: Group) -> tuple[Group, Group]:
    """The two in order."""
    keep = _before(a, b)
    return _pick(keep, a, b), _pick(keep, b, a)


def _sublane() -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)


def _across(group: Group, bits: int) -> Group:
    """What stands at the sublane that differs in these bits."""
    other = _sublane() ^ bits
    # By default indices would be wrapped and compared first.
    mode = "promise_in_bounds"
    return tuple(jnp.take_along_axis(v, other, 0, mode=mode) for v in group)


def _odd_even(n: int) -> list[tuple[int, int]]:
    """Batcher's odd-even merge sort of a power of two: pairs to put in order."""
    pairs = []
    for run in (1 << p for p in range(n.bit_length() - 1)):
        apart = run
        while apart:
            pairs += [
                (i, i + apart)
                for i in range(apart % run, n - apart)
                if (i - apart % run) // apart % 2 == 0
                and i // (2 * run) == (i + apart) // (2 * run)
            ]
            apart //= 2
    return pairs


def sort_columns(groups: Sequence[Group], count: int) -> list[Group]:
    """Every column in order.

    A column has `count` neighbouring sublanes: its rows are those of the first of them in
    all groups, then those of the next.

    Args:
        groups: 2 or more, a power of two.
        count: a power of two, at most 8.
    """
    groups = list(groups)
    for i, j in _odd_even(len(groups)):
        groups[i], groups[j] = _exchange(groups[i], groups[j])
    span = 1
    while span < count:
        groups = _merged(groups, span)
        span *= 2
    return groups


def _merged(groups: list[Group], span: int) -> list[Group]:
    """Runs in order of twice as many sublanes, from runs of `span`.

    The second run is read from its end, so that all runs ascend.
    """
    first = (_sublane() & span) == 0
    for i in range(len(groups) // 2):
        a, b = groups[i], _across(groups[-1 - i], 2 * span - 1)
        keep = _before(a, b) == first
        groups[i], groups[-1 - i] = (
            _pick(keep, a, b),
            _across(_pick(keep, b, a), 2 * span - 1),
        )
    while span > 1:
        span //= 2
        first = (_sublane() & span) == 0
        others = [_across(g, span) for g in groups]
        groups = [
            _pick(_before(g, other) == first, g, other)
            for g, other in zip(groups, others, strict=True)
        ]
    return _cleaned(groups)


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
