"""Neighbouring fibres scanned by a CTA in one reading: lanes share a place, warps a fibre.

A step takes a block of places for each warp. Each thread chains its own; the totals of
the warps meet in shared memory, and every thread chains those after the carry.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _plan
from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._before import Before, Seed
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._plan import STRIPE_WARPS
from jaxtile.pallas_lowering.mosaic_gpu._shown import Shown
from jaxtile.pallas_lowering.mosaic_gpu._source import Block, Fibres, Reader
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State


def stripes(fibres: Fibres, seed: Seed, shown: Shown, plan: _plan.Columns):
    outer, n, inner = fibres.shape
    algebra, v, step = fibres.algebra, plan.vector, STRIPE_WARPS * plan.block
    groups, spread = outer * inner // v, len(fibres.operands)
    ragged = n % step != 0

    def body(program: Program):
        reader = Reader(fibres, program.inputs[:spread])
        warp, lane = th.divided(th.thread_in_block(), th.WARP)
        group = arith.addi(arith.muli(th.block(), th.i32(th.WARP)), lane)
        # Idle lanes repeat the last group's work and store nothing.
        inside = th.less(group, th.i32(groups))
        group = th.i64(arith.minsi(group, th.i32(groups - 1)))
        o, i = th.divided(arith.muli(group, th.i64(v)), inner)
        base = arith.addi(arith.muli(o, th.i64(n * inner)), i)
        fibre = arith.addi(arith.muli(o, th.i64(inner)), i)
        before = Before(fibres, seed, program.inputs[spread:])
        zero = th.i64(0)
        firsts = [
            before.first(arith.addi(fibre, th.i64(j)), zero, zero, inner)
            for j in range(v)
        ]
        limit = th.i64(n) if ragged else None
        source = Block(reader, plan, zero, base, limit)

        def block_of(t):
            return arith.addi(arith.muli(t, th.i32(STRIPE_WARPS)), warp)

        def advance(t, raw, values):
            mine = block_of(t)
            places = zip(*source.places(mine, raw), strict=True)
            rows = [[reader.state(p) for p in f] for f in places]
            chains = [list(itertools.accumulate(r, algebra.merge)) for r in rows]
            totals = _exchange(program, algebra, warp, lane, t, [c[-1] for c in chains])
            size, out, columns = len(values) // v, [], []
            for k, (chain, first) in enumerate(zip(chains, firsts, strict=True)):
                start = algebra.unpack(values[k * size : (k + 1) * size], first)
                starts = _after_each(algebra, start, [w[k] for w in totals])
                out += algebra.pack(starts[-1])
                start = st.of_index(algebra, warp, starts[:-1])
                ends = _after_each(algebra, start, chain, apart=True)
                columns.append(list(itertools.pairwise(ends)))
            at = arith.muli(th.i64(mine), th.i64(plan.block))
            for j, pairs in enumerate(zip(*columns, strict=True)):
                place = arith.addi(at, th.i64(j))
                there = inside
                if limit is not None:
                    there = arith.andi(inside, th.less(place, limit))
                with th.when(there):
                    shown.place(program, base, fibre, place, pairs)
            return out

        carry = [value for s in firsts for value in algebra.pack(s)]
        count = th.i32(-(-n // step))
        th.pipelined(count, lambda t: source.fetch(block_of(t)), advance, carry)

    width = len(algebra.dtypes) + 1
    return launch(
        body,
        shown.outs,
        [*fibres.operands, *seed.operands],
        blocks=-(-groups // th.WARP),
        warps=STRIPE_WARPS,
        slots=2 * STRIPE_WARPS * th.WARP * v * width,
    )


def _after_each(algebra: Algebra, start: State, states: Sequence, apart=False) -> list:
    """The prefix `start`, and that after each state; `apart` of chains of their own."""
    found = [start]
    for state in states:
        after = algebra.merge(start if apart else found[-1], state)
        after = algebra.tracked(after, start)
        found.append(after if start.exists is not None else State(after.leaves))
    return found


def _exchange(program: Program, algebra: Algebra, warp, lane, turn, states) -> list:
    """By warp the states of each fibre; slots alternate, so that one barrier suffices."""
    packs = [algebra.pack(s) for s in states]
    size = len(packs[0])
    width = len(packs) * size
    half = arith.muli(arith.andi(turn, th.i32(1)), th.i32(STRIPE_WARPS))

    def slot(w, k):
        row = arith.addi(arith.muli(arith.addi(half, w), th.i32(width)), th.i32(k))
        return arith.addi(arith.muli(row, th.i32(th.WARP)), lane)

    values: list[ir.Value] = [value for p in packs for value in p]
    for k, value in enumerate(values):
        program.words.write(slot(warp, k), value)
    th.barrier()
    found = []
    for w in range(STRIPE_WARPS):
        read = [
            program.words.read(slot(th.i32(w), k), value.type)
            for k, value in enumerate(values)
        ]
        parts = [read[k * size : (k + 1) * size] for k in range(len(states))]
        found.append([algebra.unpack(p, s) for p, s in zip(parts, states, strict=True)])
    return found
