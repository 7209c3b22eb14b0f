"""A warp's bitonic sort: unsigned integers of 32 bits, or of 63, some in each lane.

Place p of the sorted sequence is register p % n of lane p // n. A merge of 2k begins with a
mirrored step, each place with its image in the other half, so that every later step
ascends. Steps within a lane are written out; those between lanes are loops, which keep the
code short.

Batcher, Sorting networks and their applications (1968).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th

_LEVELS = 5  # of 32 lanes


def _less(x, y):
    """Whether one of 63 bits is smaller, as doubles: one instruction, of another unit.

    Positive doubles are ordered as their bits, subnormal ones too, up to infinity's.
    """
    kind = ir.F64Type.get()
    x, y = arith.bitcast(kind, x), arith.bitcast(kind, y)
    return arith.cmpf(arith.CmpFPredicate.OLT, x, y)


def _ordered(values: list, a: int, b: int) -> None:
    x, y = values[a], values[b]
    if x.type.width <= 32:
        values[a], values[b] = arith.minui(x, y), arith.maxui(x, y)
        return
    less = _less(x, y)
    values[a], values[b] = arith.select(less, x, y), arith.select(less, y, x)


def _merge_in_lane(values: Sequence[ir.Value], size: int) -> list[ir.Value]:
    """Ascending steps of distances below `size`, all within the lane."""
    values, distance = list(values), size // 2
    while distance:
        for k in range(len(values)):
            if not k & distance:
                _ordered(values, k, k | distance)
        distance //= 2
    return values


def _sort_in_lane(values: Sequence[ir.Value]) -> list[ir.Value]:
    values, size = list(values), 2
    while size <= len(values):
        for k in range(len(values)):
            image = k ^ (size - 1)
            if k < image:
                _ordered(values, k, image)
        values = _merge_in_lane(values, size // 2)
        size *= 2
    return values


def _with_lane(values, others, upper) -> list[ir.Value]:
    """The lower lane keeps the smaller of each pair."""
    return [_kept(a, b, upper) for a, b in zip(values, others, strict=True)]


def _kept(mine, other, upper):
    if mine.type.width <= 32:
        return arith.select(upper, arith.maxui(mine, other), arith.minui(mine, other))
    less = _less(mine, other)
    return arith.select(arith.xori(less, upper), mine, other)


def _bit(lane, level):
    one = arith.andi(arith.shrui(lane, level), th.i32(1))
    return arith.cmpi(arith.CmpIPredicate.ne, one, th.i32(0))


def _across(values, lane, level):
    """A step with the lane that differs in one bit."""
    distance = arith.shli(th.i32(1), level)
    others = [th.shuffle(v, "bfly", distance) for v in values]
    return _with_lane(values, others, _bit(lane, level))


def _mirrored(values, lane, level):
    """The first step of the merge of 2^(level + 1) lanes."""
    images = arith.subi(arith.shli(th.i32(2), level), th.i32(1))
    others = [th.shuffle(v, "bfly", images) for v in reversed(values)]
    return _with_lane(values, others, _bit(lane, level))


def sort(values: Sequence[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """The warp's values in ascending order.

    Args:
        values: a power of two of them in each lane; of 64 bits less than infinity's as a
            double.
        lane: this lane's number.
    """

    def level(t, carry):
        carry = _mirrored(carry, lane, t)

        def step(j, inner):
            return _across(inner, lane, arith.subi(arith.subi(t, j), th.i32(1)))

        return _merge_in_lane(th.loop(t, step, carry), len(carry))

    return th.loop(th.i32(_LEVELS), level, _sort_in_lane(values))
