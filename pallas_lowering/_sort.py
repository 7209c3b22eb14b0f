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

from jaxtile.primitives._order import Order, ranks_of

LONGEST = 4096
UNSORTED = (
    "it has no rule there; sort outside the kernel, or keep the best few of a stream "
    "with jt.reduce and jt.topk_merge"
)


def sorted_planes(
    x: Any, payload: Sequence, axis: int, order: Order, partner: Callable
) -> list:
    """The source indices in order, then x and the payload in that order.

    Args:
        x: the keys; their extent along the axis is a power of two.
        payload: values of x's shape.
        axis: the sorted axis.
        order: the order asked for.
        partner: `(value, distance) -> value` at the place that differs in that bit.

    Returns:
        Values of x's shape.
    """
    place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    planes = [ranks_of(x, order), place, x, *payload]
    size = 2
    while size <= x.shape[axis]:
        distance = size // 2
        while distance:
            planes = _step(planes, place, size, distance, partner)
            distance //= 2
        size *= 2
    return planes[1:]


def _step(planes, place, size, distance, partner):
    """Each pair in ascending order, or in descending order where `size` is a bit."""
    others = [partner(v, distance) for v in planes]
    (rank, index), (other_rank, other_index) = planes[:2], others[:2]
    ahead = (rank < other_rank) | ((rank == other_rank) & (index < other_index))
    # The two bits agree where the first of the pair belongs here.
    bits = (place // size + place // distance) % 2
    keep = ahead == (bits == 0)
    return [lax.select(keep, v, w) for v, w in zip(planes, others, strict=True)]


def refuse_length(n: int, aligned: int) -> str | None:
    """Why an extent is not sorted, or None.

    Args:
        n: the extent.
        aligned: the least extent of a block of several elements.
    """
    if n > LONGEST:
        return (
            f"an extent of {n} is above {LONGEST}, the longest network; sort outside the "
            "kernel"
        )
    if n & (n - 1) or 1 < n < aligned:
        return (
            f"an extent of {n} is no power of two from {aligned} on; pad the block with "
            "values that come last, or sort outside the kernel"
        )
    return None
