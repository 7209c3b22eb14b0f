"""How the axes of a kernel's values lie in registers, lanes and warps.

Every axis lies in one way in the whole kernel, so that broadcasts, transposes and what
is left by a reduction move nothing between threads. Axes that meet in a value have
threads of their own; where a value lacks an axis, the threads along it hold the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._body import (
    Axis,
    Body,
    Place,
    Step,
    Value,
    elements,
    fibres_of,
    read_p,
    write_p,
)
from jaxtile.pallas_lowering.mosaic_gpu._lanes import Digit, Form, Thread
from jaxtile.pallas_lowering.mosaic_gpu._plan import power_of_two

_LANES = 5
# Bytes that one load takes at most.
MOST_BYTES = 16


@dataclass(frozen=True)
class Spread:
    """One axis: registers of warps of lanes of vectors, major to minor.

    Args:
        size: of the axis; what is beyond stands for nothing.
        vector: neighbours in one thread.
        lanes, warps: how many threads, and the distance of neighbours in lanes, warps.
    """

    size: int
    vector: int = 1
    lanes: tuple[int, int] = (1, 1)
    warps: tuple[int, int] = (1, 1)

    @property
    def span(self) -> int:
        """Elements that one register of each thread covers."""
        return self.vector * self.lanes[0] * self.warps[0]

    @property
    def registers(self) -> int:
        """Vectors of one thread."""
        return -(-self.size // self.span)

    @property
    def bits(self) -> int:
        """The bits of a thread's number that it takes."""
        (lanes, lane), (warps, warp) = self.lanes, self.warps
        return (lanes - 1) * lane | (warps - 1) * warp << _LANES


def _free(taken: int, first: int, count: int) -> tuple[int, int]:
    """The first bit, and the number, of the longest run of free bits."""
    best, k = (first, 0), first
    while k < first + count:
        run = 0
        while k + run < first + count and not taken >> (k + run) & 1:
            run += 1
        best = max(best, (k, run), key=lambda b: b[1])
        k += run + 1
    return best


class _Assignment:
    """Gives the axes of a body their spreads."""

    def __init__(self, body: Body, warps: int):
        self.bits = warps.bit_length() - 1
        self.values = [v for v in body.values() if v.axes]
        self.steps = list(body.every())
        tiles = [t for t, _ in places(self.steps)]
        by_size = functools.partial(sorted, key=elements, reverse=True)
        self.order: list[Axis] = []
        for value in (*by_size(tiles), *by_size(self.values)):
            for axis in reversed(value.roots):
                if axis not in self.order:
                    self.order.append(axis)
        self.found = {a: Spread(a.size) for a in self.order}
        self.meets = {a: set() for a in self.order}
        for value in self.values:
            for axis in value.roots:
                self.meets[axis] |= set(value.roots) - {axis}
        self.scanned = self._along("tile_scan")
        self.combined = self.scanned | self._along("tile_reduce")

    def _along(self, name: str) -> set[Axis]:
        """The axes along which an op combines."""
        found = set()
        for step in self.steps:
            if step.name == name:
                at_places, _, axes = fibres_of(step)
                found |= {at_places[0].roots[k] for k in axes}
        return found

    def run(self) -> dict[Axis, Spread]:
        """How each axis lies."""
        for axis in self.order:
            self.found[axis] = replace(self.found[axis], vector=self._vector(axis))
        for axis in self.order:
            self._lanes(axis)
        # What no op combines takes warps first: nothing crosses them then.
        alone = [a for a in reversed(self.order) if a not in self.combined]
        for axis in alone:
            self._warps(axis, exact=True)
        for axis in [*alone, *(a for a in self.order if a in self.combined)]:
            self._warps(axis, exact=False)
        for axis in self.combined:
            self._gather(axis)
        return self.found

    def _vector(self, axis: Axis) -> int:
        """Neighbours that a load or store of the axis can take as one."""
        # A warp's lanes go first; warps too where a scan would cross them otherwise.
        ahead = _LANES + (self.bits if self.meets[axis] & self.scanned else 0)
        most = power_of_two((axis.size >> ahead) + 1) // 2
        return max(1, min(max(self._widths(axis), default=1), most))

    def _widths(self, axis: Axis) -> list[int]:
        """The neighbours that lie together in each array whose last axis it is."""
        return [
            neighbours(place)
            for tile, place in places(self.steps)
            if tile.axes and tile.roots[-1] is axis
        ]

    def _taken(self, axis: Axis) -> int:
        taken = self.found[axis].bits
        for other in self.meets[axis]:
            taken |= self.found[other].bits
        return taken

    def _lanes(self, axis: Axis) -> None:
        first, most = _free(self._taken(axis), 0, _LANES)
        blocks = -(-axis.size // self.found[axis].vector)
        count = min(power_of_two(blocks), 1 << most)
        if count > 1:
            self.found[axis] = replace(self.found[axis], lanes=(count, 1 << first))

    def _warps(self, axis: Axis, exact: bool) -> None:
        mine = self.found[axis]
        first, most = _free(self._taken(axis), _LANES, self.bits)
        if mine.warps[0] > 1 or not most:
            return
        blocks = mine.registers
        fits = blocks & -blocks if exact else power_of_two(blocks)
        count = min(fits, 1 << most)
        if count > 1:
            spread = count, 1 << (first - _LANES)
            self.found[axis] = replace(mine, warps=spread)

    def _gather(self, axis: Axis) -> None:
        """Neighbours into one thread, where memory does not ask for others.

        What is combined first then needs no other thread.
        """
        mine = self.found[axis]
        if mine.lanes[0] == 1 and not self._widths(axis):
            each = power_of_two(-(-axis.size // mine.warps[0]))
            self.found[axis] = replace(mine, vector=each)


def places(steps: Sequence[Step]) -> Iterator[tuple[Value, Place]]:
    """Every tile that is read or written, and where it lies."""
    for step in steps:
        if step.primitive is read_p:
            yield step.gives[0], step.params["place"]
        elif step.primitive is write_p:
            yield step.reads[1], step.params["place"]


def neighbours(place: Place) -> int:
    """How many elements along the last axis of an array one load may take."""
    last = place.pieces[-1] if place.pieces else None
    if last is None or last.dim is None:
        return 1
    width = MOST_BYTES // np.dtype(place.dtype).itemsize
    return math.gcd(width, last.extent, last.size, last.step)


def assign(body: Body, warps: int) -> dict[Axis, Spread]:
    """How each axis of a body lies in a number of warps, a power of two."""
    return _Assignment(body, warps).run()


def most_each(body: Body, spreads: dict[Axis, Spread]) -> tuple[int, Value | None]:
    """The most scalars that a thread has of one value, and the value."""

    def each(value: Value) -> int:
        mine = (spreads[a] for a in value.roots)
        return math.prod(s.registers * s.vector for s in mine)

    return max(
        ((each(v), v) for v in body.values()), key=lambda p: p[0], default=(0, None)
    )


class Line:
    """One axis in one thread.

    Args:
        spread: how it lies.
        thread: which thread this is. What every block of code may use is written here.
    """

    def __init__(self, spread: Spread, thread: Thread):
        self.spread = spread
        self.mine = _of_thread(spread, thread)
        self.padding = self.inside(None)

    @property
    def counts(self) -> tuple[int, int]:
        """Registers, and neighbours in a vector."""
        return self.spread.registers, self.spread.vector

    def at(self, place: int) -> ir.Value:
        """The coordinate of a scalar, numbered over registers and vectors."""
        fixed = self.fixed(place)
        return arith.addi(self.mine, th.i32(fixed)) if fixed else self.mine

    def fixed(self, place: int) -> int:
        """What is the same in all threads of it."""
        register, v = divmod(place, self.spread.vector)
        return register * self.spread.span + v

    def inside(self, limit: ir.Value | None) -> list[Any]:
        """Whether each scalar lies below a limit, or the size; None: it surely does."""
        s, found = self.spread, []
        for place in range(s.registers * s.vector):
            beyond = place // s.vector * s.span + s.span > s.size
            end = th.i32(s.size) if limit is None else limit
            some = beyond or limit is not None
            found.append(th.less(self.at(place), end) if some else None)
        return found


class Grid(Form):
    """The scalars that a thread has of a value.

    Their array has two dimensions for each axis: registers, and neighbours in a vector.

    Args:
        lines: the axes.
        thread: which thread this is.
    """

    def __init__(self, lines: Sequence[Line], thread: Thread):
        self.lines, self.thread = tuple(lines), thread
        self.shape = tuple(v.spread.size for v in lines)
        self.layout: Any = tuple(v.spread for v in lines)
        self.strided = False

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The shape of a thread's scalars."""
        return tuple(n for v in self.lines for n in v.counts) or (1,)

    def digits(self, axes: Sequence[int]) -> list[Digit]:
        """The digits of the axes, taken as one, minor to major."""
        found = []
        for a in reversed(axes):
            s = self.lines[a].spread
            found += [
                Digit(2 * a + 1, "register", s.vector, 0),
                Digit(2 * a, "lane", *s.lanes),
                Digit(2 * a, "warp", *s.warps),
                Digit(2 * a, "register", s.registers, 0),
            ]
        return [d for d in found if d.size > 1]

    def closed(self, axes: Sequence[int], flipped: bool) -> bool:
        """Whether the axes, taken as one, have no gaps but at the order's end."""
        gaps = [a for a in axes if self.shape[a] % self.lines[a].spread.span]
        return not gaps or (gaps == [axes[0]] and not flipped)

    def along(self, axes: Sequence[int]) -> np.ndarray:
        """The position of each scalar along the axes, taken as one, as 32 bits."""
        out = np.empty(self.counts, object)
        for place, where in self.places():
            found = th.i32(0)
            for a in axes:
                found = arith.muli(found, th.i32(self.shape[a]))
                found = arith.addi(found, self.lines[a].at(where[a]))
            out[place] = found
        return out

    def places(self) -> Iterator[tuple[tuple, list[int]]]:
        """The index of each scalar, and its place along each axis."""
        for place in np.ndindex(*self.counts):
            pairs = zip(place[0::2], place[1::2], self.lines, strict=False)
            yield place, [r * v.spread.vector + k for r, k, v in pairs]

    def all_of(self, sides: Sequence[Sequence]) -> np.ndarray:
        """The conjunction of what holds of the places along each axis."""
        out = np.full(self.counts, None, object)
        for place, where in self.places():
            for flags, w in zip(sides, where, strict=True):
                out[place] = both(out[place], flags[w])
        return out

    @property
    def present(self) -> np.ndarray:
        """Whether each scalar is one of the value's; None: it surely is."""
        return self.all_of([v.padding for v in self.lines])

    def first_of_alike(self) -> ir.Value | None:
        """Whether a thread is the first of those that hold the same; None: all are."""
        mine, every = 0, self.thread.count - 1
        for line in self.lines:
            mine |= line.spread.bits
        if mine == every:
            return None
        rest = arith.andi(self.thread.number, th.i32(every & ~mine))
        return th.equal(rest, th.i32(0))


def both(a: Any, b: Any) -> Any:
    """The conjunction of two bits, of which None is true."""
    if a is None or b is None:
        return b if a is None else a
    return arith.andi(a, b)


def _of_thread(spread: Spread, thread: Thread) -> ir.Value:
    """What a thread adds to the coordinate along an axis."""
    mine, step = th.i32(0), spread.vector
    for place, (count, stride) in (("lane", spread.lanes), ("warp", spread.warps)):
        if count > 1:
            digit = thread.digit(Digit(0, place, count, stride))
            mine = arith.addi(mine, arith.muli(digit, th.i32(step)))
        step *= count
    return mine
