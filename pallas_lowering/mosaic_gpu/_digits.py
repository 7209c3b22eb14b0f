"""Reductions and scans in registers: digit by digit of an axis, minor to major.

Combining the neighbours of each digit in turn is `fixed_tree`, as all digits but the
most major have powers of two for sizes. A scan hands totals up in the same way, and what
is before and after each block down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._lanes import Digit, Thread
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State


def is_power_of_two(n: int) -> bool:
    """Whether a size is one, two, four, ..."""
    return n & (n - 1) == 0


def keeps_tree(order: Sequence[Digit]) -> bool:
    """Whether combining these digits, minor to major, is `fixed_tree`."""
    return all(is_power_of_two(d.size) for d in order[:-1])


def in_thread(order: Sequence[Digit]) -> bool:
    """Whether each thread holds the axis wholly."""
    return all(d.place == "register" for d in order)


def registers_first(order: Sequence[Digit]) -> list[Digit]:
    """The order that moves the fewest values between threads."""
    return sorted(order, key=lambda d: ("register", "lane", "warp").index(d.place))


def _bits(digit: Digit) -> range:
    """The bits of the lane's number that a digit has."""
    low = digit.stride.bit_length() - 1
    return range(low, low + digit.size.bit_length() - 1)


def each(fn: Callable, *arrays: np.ndarray) -> np.ndarray:
    """`fn` of the items at each place; the items may be tuples."""
    out = np.empty(arrays[0].shape, object)
    for place in np.ndindex(*out.shape):
        out[place] = fn(*(a[place] for a in arrays))
    return out


def _parts(states: np.ndarray, dim: int) -> list[np.ndarray]:
    return [np.take(states, [i], axis=dim) for i in range(states.shape[dim])]


def _of_warps(
    algebra: Algebra, thread: Thread, states: np.ndarray, digit: Digit
) -> list[np.ndarray]:
    """The states of the warps of a digit, one array for each of its values."""
    like = list(states.flat)
    packed = [algebra.pack(s) for s in like]
    found = thread.of_warps([v for p in packed for v in p], digit)
    out = []
    for values in found:
        rest, part = list(values), np.empty(states.shape, object)
        for place, state, mine in zip(
            np.ndindex(*states.shape), like, packed, strict=True
        ):
            part[place] = algebra.unpack(rest[: len(mine)], state)
            rest = rest[len(mine) :]
        out.append(part)
    return out


def _tree(algebra: Algebra, parts: Sequence[np.ndarray]) -> np.ndarray:
    return each(lambda *states: st.tree(algebra, states), *parts)


def reduce_digits(
    algebra: Algebra, thread: Thread, states: np.ndarray, order: Sequence[Digit]
) -> np.ndarray:
    """The tree over the digits in their order; their extents become 1.

    Args:
        algebra: the reducer.
        thread: which thread this is.
        states: of each scalar of a thread.
        order: the digits to combine.
    """
    for digit in order:
        if digit.place == "register":
            states = _tree(algebra, _parts(states, digit.dim))
        elif digit.place == "lane":
            bits = _bits(digit)
            states = each(
                lambda s, bits=bits: st.over_lanes(algebra, thread.lane, s, bits),
                states,
            )
        else:
            states = _tree(algebra, _of_warps(algebra, thread, states, digit))
    return states


def fibres(array: np.ndarray, order: Sequence[Digit]) -> tuple[list, Callable]:
    """The places of each fibre whose digits are all registers, in source order.

    Returns:
        `[[item, ...], ...]`, and the way from one list a fibre, or one item a fibre,
        back to an array.
    """
    dims = [d.dim for d in reversed(order)]
    kept = [d for d in range(array.ndim) if d not in dims]
    moved = array.transpose(*kept, *dims)
    ends = moved.shape[: len(kept)]
    items, length = list(moved.flat), math.prod(moved.shape[len(kept) :])
    rows = [items[k : k + length] for k in range(0, len(items), length)]

    def back(rows: Sequence, whole: bool) -> np.ndarray:
        shape = moved.shape if whole else (*ends, *(1,) * len(dims))
        out = np.empty(shape, object)
        items = [v for row in rows for v in row] if whole else rows
        for place, item in zip(np.ndindex(*shape), items, strict=True):
            out[place] = item
        return out.transpose(*np.argsort([*kept, *dims]))

    return rows, back


def chain(algebra: Algebra, places: Sequence, start: State | None, right: bool) -> list:
    """(before, after) of each `[leaves, exists]` of a strict chain."""
    masked = any(exists is not None for _, exists in places)
    if start is None and (algebra.spec.has_update or masked):
        start = algebra.start()
    pairs, state = [], start
    for leaves, exists in places:
        before = algebra.nothing() if state is None else state
        if state is None:
            state = algebra.element(leaves, exists)
        else:
            state = algebra.step(state, leaves, exists, right)
        pairs.append((before, state))
    return pairs


def after_all(algebra: Algebra, parts: Sequence[State], first: State) -> State:
    """`first`, then the maximal aligned blocks of the parts, largest first."""
    state, done = first, 0
    for bit in reversed(range(len(parts).bit_length())):
        if len(parts) >> bit & 1:
            block = st.tree(algebra, parts[done : done + (1 << bit)])
            state, done = algebra.merge(state, block), done + (1 << bit)
    return state


class _Level:
    """One digit of a scan on its way up and down.

    Args:
        algebra, thread, digit: what is combined where.
        flipped: the order is the last position's first.
    """

    def __init__(self, algebra: Algebra, thread: Thread, digit: Digit, flipped: bool):
        self.algebra, self.thread = algebra, thread
        self.digit, self.flipped = digit, flipped

    def up(self, states: np.ndarray) -> np.ndarray:
        """The totals of the digit's blocks."""
        if self.digit.place == "lane":
            return self._up_lanes(states)
        if self.digit.place == "register":
            parts = _parts(states, self.digit.dim)
        else:
            parts = _of_warps(self.algebra, self.thread, states, self.digit)
        self.parts = parts[::-1] if self.flipped else parts
        return _tree(self.algebra, self.parts)

    def _up_lanes(self, states):
        lane = self.thread.lane
        if self.flipped:
            lane = arith.xori(lane, th.i32(th.WARP - 1))
        found = each(
            lambda s: st.before_lane(self.algebra, lane, s, _bits(self.digit)), states
        )
        self.downs = each(lambda f: f[1], found)
        totals = each(lambda f: f[0], found)
        self.parts = [totals]
        return totals

    def end(self, first: np.ndarray) -> np.ndarray:
        """What is after all blocks, with `first` before them."""
        return each(
            lambda f, *parts: after_all(self.algebra, parts, f), first, *self.parts
        )

    def down(self, first: np.ndarray, end: np.ndarray):
        """(before, after) of each block, from what is before and after all of them."""
        if self.digit.place == "lane":
            return self._down_lanes(first, end)
        befores = each(
            lambda f, *parts: st.before_each(self.algebra, parts, f), first, *self.parts
        )
        edges = [each(lambda b, i=i: b[i], befores) for i in range(self.digit.size)] + [
            end
        ]
        sides = edges[:-1], edges[1:]
        if self.digit.place == "register":
            turned = [s[::-1] if self.flipped else s for s in sides]
            return tuple(np.concatenate(s, axis=self.digit.dim) for s in turned)
        mine = self.thread.digit(self.digit)
        if self.flipped:
            mine = arith.subi(th.i32(self.digit.size - 1), mine)
        return tuple(
            each(lambda *s: st.of_index(self.algebra, mine, s), *side) for side in sides
        )

    def _down_lanes(self, first, end):
        algebra, digit, thread = self.algebra, self.digit, self.thread
        befores = each(lambda down, f: down(f), self.downs, first)
        move = arith.subi if self.flipped else arith.addi
        beyond = move(thread.lane, th.i32(digit.stride))
        last = 0 if self.flipped else digit.size - 1
        is_last = th.equal(thread.digit(digit), th.i32(last))

        def after(before, end):
            next_one = algebra.moved(before, lambda v: th.shuffle(v, "idx", beyond))
            return algebra.choose(is_last, end, next_one)

        return befores, each(after, befores, end)


def scan_digits(
    algebra: Algebra,
    thread: Thread,
    states: np.ndarray,
    order: Sequence[Digit],
    first: np.ndarray,
    flipped: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is before and after each place of a scan, and after everything.

    Prefixes are the left folds of the maximal aligned blocks, as `fixed_tree` says.

    Args:
        algebra, thread, states, order: as `reduce_digits` has them.
        first: what is before each fibre; extents of 1 for the digits.
        flipped: the order is the last position's first.
    """
    levels = [_Level(algebra, thread, d, flipped) for d in order]
    for level in levels:
        states = level.up(states)
    if not levels:
        after = each(algebra.merge, first, states)
        return first, after, after
    end = last = levels[-1].end(first)
    before, after = first, end
    for level in reversed(levels):
        before, after = level.down(before, after)
    return before, after, last


def position(along: ir.Value, n: int, flipped: bool) -> ir.Value:
    """A place's number in the order of the scan, as 64 bits."""
    if flipped:
        along = arith.subi(th.i32(n - 1), along)
    return th.i64(along)
