"""Fibres through shared memory, for orders that no layout of registers gives.

A warpgroup writes the elements of some fibres at their logical positions; each of its
threads walks fibres of its own there; and all read back what they are to hold. Places of
neighbouring fibres are neighbours, so that threads meet no common bank on their walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._lanes import Form, Thread
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program
from jaxtile.pallas_lowering.mosaic_gpu._ops import constant
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra

_ALIGNED = 16
# Shared memory of a warpgroup: alone in its CTA, or perhaps one of eight. A single fibre
# may have more; trees are staged in odd cases only, and get by with less.
_ALONE, _SEVERAL = 32 * 1024, 8 * 1024
_FIBRE_ALONE, _FIBRE_OF_SEVERAL = 128 * 1024, 24 * 1024
_LESS_FOR_TREES = 4


@dataclass(frozen=True)
class Stage:
    """How fibres lie in shared memory, as many at a time as it takes.

    Args:
        length: places of a fibre.
        fibres: how many fibres there are.
        places, seeds: dtypes of what each place, and each fibre, brings.
        shown, totals: of what each place, and each fibre, gets.
        each: fibres at a time.
    """

    length: int
    fibres: int
    places: tuple
    seeds: tuple
    shown: tuple
    totals: tuple
    each: int

    @property
    def pitch(self) -> int:
        """From place to place: odd, so that lanes along a fibre meet no common bank."""
        return self.each | 1

    @property
    def offsets(self) -> tuple[list[list[int]], int]:
        """Byte offsets of the arrays of the four kinds, and of their end."""
        end, free, found = 0, [], []

        def take(dtype, count):
            nonlocal end
            start, size = end, np.dtype(dtype).itemsize * count
            end += -(-size // _ALIGNED) * _ALIGNED
            return start

        area = self.length * self.pitch
        found.append([take(d, area) for d in self.places])
        found.append([take(d, self.each) for d in self.seeds])
        # A thread has read a place when it shows it: of one width, both share it.
        free = list(zip(self.places, found[0], strict=True))
        shown = []
        for d in self.shown:
            width = np.dtype(d).itemsize
            k = next((k for k, f in enumerate(free) if f[0].itemsize == width), None)
            shown.append(take(d, area) if k is None else free.pop(k)[1])
        found.append(shown)
        found.append([take(d, self.each) for d in self.totals])
        return found, end

    @property
    def bytes(self) -> int:
        """Shared memory of a warpgroup."""
        return self.offsets[1]

    def view(self, algebra: Algebra, masked: bool, flipped: bool) -> Fibres:
        """The fibres in shared memory, as walks take them."""
        shape = (1, self.length, self.pitch)
        leaves: list[Any] = [jax.ShapeDtypeStruct(shape, d) for d in self.places]
        mask = leaves.pop() if masked else None
        return Fibres(algebra, tuple(leaves), mask, shape, flipped)

    def program(self, memory: ir.Value) -> Program:
        """The arrays: places and seeds, then what is shown and the totals."""
        places, seeds, shown, totals = self.offsets[0]
        kinds = [
            (places, self.places),
            (seeds, self.seeds),
            (shown, self.shown),
            (totals, self.totals),
        ]
        arrays = [
            [th.Shared(memory, o, d) for o, d in zip(offsets, dtypes, strict=True)]
            for offsets, dtypes in kinds
        ]
        return Program(arrays[0] + arrays[1], arrays[2] + arrays[3], None)


def plan(length: int, fibres: int, dtypes: Sequence, fold: bool, several: bool):
    """The stage of these fibres, or None where one does not fit.

    Args:
        length, fibres: places of a fibre, and how many there are.
        dtypes: of places, seeds, what is shown, and totals.
        fold: the order is strict.
        several: other warpgroups need as much.
    """
    places, seeds, shown, totals = (tuple(map(np.dtype, d)) for d in dtypes)
    most = _SEVERAL if several else _ALONE

    def stage(each):
        return Stage(length, fibres, places, seeds, shown, totals, each)

    room = most if fold else most // _LESS_FOR_TREES
    one, two = stage(1).bytes, stage(3).bytes
    each = max(1, min(fibres, room * 2 // max(1, two - one)))
    while each > 1 and stage(each).bytes > room:
        each -= max(1, each // 16)
    found = stage(each)
    limit = _FIBRE_OF_SEVERAL if several else _FIBRE_ALONE
    return found if found.bytes <= limit else None


class Placed:
    """Where each of a thread's scalars lies: its fibre, and its place in that.

    Args:
        form: of the value.
        fibre_axes, place_axes: axes that number the fibres, and their places.
    """

    def __init__(
        self, form: Form, fibre_axes: Sequence[int], place_axes: Sequence[int]
    ):
        self.form = form
        self.fibre = list(form.along(fibre_axes).flat)
        self.place = list(form.along(place_axes).flat) if place_axes else None
        self.present = list(form.present.flat)

    def local(self, stage: Stage, first: ir.Value | None):
        """(offset, whether it is there) of each scalar, of fibres from `first` on."""
        for k, fibre in enumerate(self.fibre):
            inside = self.present[k]
            if first is not None:
                fibre = arith.subi(fibre, first)
                # Of a fibre before the first, a huge number without a sign.
                there = arith.cmpi(arith.CmpIPredicate.ult, fibre, th.i32(stage.each))
                inside = there if inside is None else arith.andi(inside, there)
            if self.place is not None:
                across = arith.muli(self.place[k], th.i32(stage.pitch))
                fibre = arith.addi(fibre, across)
            if inside is not None:
                fibre = arith.select(inside, fibre, th.i32(0))
            yield fibre, inside


def run(
    stage: Stage,
    memory: ir.Value,
    thread: Thread,
    brings: Sequence[tuple[Placed, np.ndarray]],
    gets: Sequence[Placed],
    walk: Callable[[Program, ir.Value], None],
) -> list[list[ir.Value]]:
    """Walk every fibre in shared memory.

    Args:
        stage, memory: the plan, and its place.
        thread: which thread this is.
        brings: a thread's scalars of places and seeds.
        gets: where the thread's scalars of what is shown and of totals lie.
        walk: writes one fibre's results, of the program and the fibre's 64-bit number.

    Returns:
        The scalars that the thread gets.
    """
    program = stage.program(memory)
    rounds = -(-stage.fibres // stage.each)

    def once(first, held):
        # What an earlier op left there may be read still.
        thread.barrier()
        # Threads of a layout that repeats elements write the same bytes.
        for buffer, (placed, scalars) in zip(program.inputs, brings, strict=True):
            spots = placed.local(stage, first)
            for value, (offset, inside) in zip(scalars.flat, spots, strict=True):
                _put(buffer, value, offset, inside)
        thread.barrier()
        _walk_all(stage, program, thread, first, walk)
        thread.barrier()
        out = []
        for buffer, placed, old in zip(program.outputs, gets, held, strict=True):
            mine = []
            for k, (offset, inside) in enumerate(placed.local(stage, first)):
                (value,) = buffer.load(offset)
                if inside is not None and old[k] is not None:
                    value = th.select(inside, value, old[k])
                mine.append(value)
            out.append(mine)
        return out

    sizes = [math.prod(p.form.counts) for p in gets]
    if rounds == 1:
        held = once(None, [[None] * n for n in sizes])
    else:
        held = _loop(rounds, stage.each, once, sizes, program)
    # The memory may serve another op next.
    thread.barrier()
    return held


def _loop(rounds, each, once, sizes, program):
    empty = [
        constant(0, b.dtype)
        for b, n in zip(program.outputs, sizes, strict=True)
        for _ in range(n)
    ]

    def split(flat):
        ends = np.cumsum(sizes)
        return [list(flat[e - n : e]) for e, n in zip(ends, sizes, strict=True)]

    def body(r, carry):
        out = once(arith.muli(r, th.i32(each)), split(carry))
        return [v for part in out for v in part]

    return split(th.loop(th.i32(rounds), body, empty))


def _put(buffer, value, offset, inside):
    if inside is None:
        buffer.store([value], offset)
        return
    with th.when(inside):
        buffer.store([value], offset)


def _walk_all(stage, program, thread, first, walk):
    """Threads take fibres in turn."""
    limit = th.i32(min(stage.each, stage.fibres))
    if first is not None:
        limit = arith.minsi(limit, arith.subi(th.i32(stage.fibres), first))
    for k in range(0, stage.each, thread.count):
        fibre = arith.addi(thread.number, th.i32(k))
        with th.when(th.less(fibre, limit)):
            walk(program, th.i64(fibre))
