"""sort and topk in kernels: a bitonic network over ranks and source indices.

Every comparison is of two 32-bit integers, and ties go by index, so that the network,
which is not stable itself, has one result: the stable order. Values are carried along as
they are. A step needs each element's partner, whose place differs in one bit: how it is
reached is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

LONGEST = 4096
UNSORTED = (
    "it has no rule there; sort outside the kernel, or keep the best few of a stream "
    "with jt.reduce and jt.topk_merge"
)


def sorted_planes(planes: Sequence, axis: int, partner: Callable) -> list:
    """Planes in the order of the first two, whose pairs are distinct, all steps written.

    Args:
        planes: ranks, source indices, and what is carried along, of one shape; their
            extent along the axis is a power of two.
        axis: the sorted axis.
        partner: `(value, q) -> value` at the place that differs in bit q.

    Returns:
        The planes in order.
    """
    planes = list(planes)
    place = lax.broadcasted_iota(jnp.int32, planes[0].shape, axis)
    for p in range(1, planes[0].shape[axis].bit_length()):
        for q in reversed(range(p)):
            others = [partner(v, q) for v in planes]
            planes = exchanged(planes, others, place, p, q)
    return planes


def exchanged(planes: Sequence, others: Sequence, place: Any, p: Any, q: Any) -> list:
    """One step: pairs that differ in bit q, in descending order where bit p is set."""
    (rank, index), (other_rank, other_index) = planes[:2], others[:2]
    ahead = (rank < other_rank) | ((rank == other_rank) & (index < other_index))
    # The first of a pair belongs here where the two bits agree.
    first = (((place >> p) ^ (place >> q)) & 1) == 0
    keep = ahead == first
    return [jnp.where(keep, v, w) for v, w in zip(planes, others, strict=True)]


def refuse_length(n: int) -> str | None:
    """Why an extent is not sorted, or None."""
    if n <= LONGEST:
        return None
    return (
        f"an extent of {n} is above {LONGEST}, the longest network; sort outside the "
        "kernel, or keep the best few of a stream with jt.reduce and jt.topk_merge"
    )
