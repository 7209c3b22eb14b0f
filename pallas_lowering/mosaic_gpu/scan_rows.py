"""Rows scanned by warps: up a tile for its total, down it with what is before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _plan
from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._before import Before, Carry, Seed
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._shown import Shown
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres, Reader
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State
from jaxtile.pallas_lowering.mosaic_gpu.reduce_rows import load_tile

_WARPS = 4


class _Tile:
    """One warp's tile on its way up and down."""

    def __init__(self, algebra: Algebra, lane, rows: Sequence[Sequence[State]]):
        self.algebra, self.lane, self.rows = algebra, lane, rows
        found = [st.before_lane(algebra, lane, st.tree(algebra, r)) for r in rows]
        self.totals, self.down = zip(*found, strict=True)
        self.total = st.tree(algebra, self.totals)

    def prefixes(self, first: State, after: State):
        """(before, after) of each place, by rows."""
        algebra = self.algebra
        starts = [*st.before_each(algebra, list(self.totals), first), after]
        last_lane = th.equal(self.lane, th.i32(th.WARP - 1))
        for k, row in enumerate(self.rows):
            mine = self.down[k](starts[k])
            before = st.before_each(algebra, list(row), mine)
            beyond = algebra.moved(mine, lambda v: th.shuffle(v, "down", 1))
            end = algebra.choose(last_lane, starts[k + 1], beyond)
            yield list(zip(before, [*before[1:], end], strict=True))


class _FreeTile:
    """A tile in any grouping: chains of neighbours, then lanes."""

    def __init__(self, algebra: Algebra, lane, rows: Sequence[Sequence[State]]):
        self.algebra, self.lane = algebra, lane
        merge = algebra.merge
        self.chains = [list(itertools.accumulate(row, merge)) for row in rows]
        found = [st.lane_prefixes(algebra, lane, chain[-1]) for chain in self.chains]
        self.totals, self.lefts = zip(*found, strict=True)
        self.total = st.tree(algebra, self.totals)

    def prefixes(self, first: State, after: State):
        """(before, after) of each place, by rows."""
        del after
        algebra = self.algebra
        leads = th.equal(self.lane, th.i32(0))
        starts = st.before_each(algebra, list(self.totals), first)
        for start, left, chain in zip(starts, self.lefts, self.chains, strict=True):
            mine = algebra.choose(leads, start, algebra.merge(start, left))
            ends = [algebra.merge(mine, state) for state in chain]
            yield list(zip([mine, *ends[:-1]], ends, strict=True))


def _exchange(program: Program, algebra: Algebra, warp, lane, turn, state, warps):
    """The totals of a unit's warps; slots alternate, so that one barrier suffices."""
    values = algebra.pack(state)
    width = len(values)
    base = arith.muli(arith.andi(turn, th.i32(1)), th.i32(warps * width))
    with th.when(th.equal(lane, th.i32(0))):
        for k, v in enumerate(values):
            slot = arith.addi(arith.muli(warp, th.i32(width)), th.i32(k))
            program.words.write(arith.addi(base, slot), v)
    th.barrier()
    totals = []
    for w in range(warps):
        read = [
            program.words.read(arith.addi(base, th.i32(w * width + k)), v.type)
            for k, v in enumerate(values)
        ]
        totals.append(algebra.unpack(read, state))
    return totals


def rows(fibres: Fibres, seed: Seed, shown: Shown, plan: _plan.Rows, fixed: bool):
    outer, n, _ = fibres.shape
    algebra, units = fibres.algebra, outer * plan.chunks
    step = plan.tile * plan.warps
    ragged = n % step != 0
    each = max(1, _WARPS // plan.warps)
    spread = len(fibres.operands)

    def body(program: Program):
        reader = Reader(fibres, program.inputs[:spread])
        warp, lane = th.divided(th.thread_in_block(), th.WARP)
        group, part = th.divided(warp, plan.warps)
        unit = arith.addi(arith.muli(th.block(), th.i32(each)), group)
        inside = th.less(unit, th.i32(units))
        unit = th.i64(arith.minsi(unit, th.i32(units - 1)))
        row, chunk = th.divided(unit, plan.chunks)
        start = arith.muli(chunk, th.i64(plan.chunk))
        base = arith.muli(row, th.i64(n))
        limit = arith.minsi(arith.subi(th.i64(n), start), th.i64(plan.chunk))
        count = arith.divui(arith.addi(limit, th.i64(step - 1)), th.i64(step))
        before_all = Before(fibres, seed, program.inputs[spread:])
        first = before_all.first(row, chunk, unit, 1)
        like = reader.like(ragged)
        carry = Carry(algebra, fixed, -(-min(n, plan.chunk) // step), first, like)

        def tile(t, values):
            offset = arith.addi(
                arith.muli(th.i64(t), th.i64(step)),
                arith.muli(th.i64(part), th.i64(plan.tile)),
            )
            places = load_tile(
                reader, plan, lane, start, base, offset, limit if ragged else None
            )
            states = [[reader.state(p) for p in r] for r in places]
            found = (_Tile if fixed else _FreeTile)(algebra, lane, states)
            before, total = carry.before(t, values), found.total
            starts = [before]
            if plan.warps > 1:
                totals = _exchange(program, algebra, warp, lane, t, total, plan.warps)
                starts = st.before_each(algebra, totals, before)
                total = st.tree(algebra, totals)
            values, after = carry.push(t, values, total)
            if fixed and plan.chunks > 1:
                # A chunk's last prefix joins larger blocks than its own.
                end = arith.muli(th.i64(arith.addi(t, th.i32(1))), th.i64(step))
                whole = th.equal(end, th.i64(plan.chunk))
                after = algebra.choose(whole, before_all.after(unit), after)
            if plan.warps > 1:
                before = st.of_index(algebra, part, starts)
                after = st.of_index(algebra, part, [*starts[1:], after])
            _show_rows(
                program,
                shown,
                plan,
                found,
                before,
                after,
                lane,
                inside,
                (row, base, start, offset, limit if ragged else None),
            )
            return values

        th.loop(
            arith.trunci(ir.IntegerType.get_signless(32), count), tile, carry.start()
        )

    width = len(algebra.dtypes) + 1
    return launch(
        body,
        shown.outs,
        [*fibres.operands, *seed.operands],
        blocks=-(-units // each),
        warps=max(_WARPS, plan.warps),
        slots=2 * plan.warps * width if plan.warps > 1 else 0,
    )


def _show_rows(program, shown, plan, tile, before, after, lane, inside, where):
    """Store a warp's tile."""
    row, base, start, offset, limit = where
    n, v, flipped = shown.shape[1], plan.vector, shown.flipped
    mine = th.i64(arith.muli(lane, th.i32(v)))
    for r, pairs in enumerate(tile.prefixes(before, after)):
        local = arith.addi(arith.addi(offset, mine), th.i64(r * 32 * v))
        position = arith.addi(start, local)
        columns = [
            shown.values(arith.addi(position, th.i64(j)), *pair)
            for j, pair in enumerate(pairs)
        ]
        there = inside if limit is None else arith.andi(inside, th.less(local, limit))
        source = position
        if flipped:
            source = arith.subi(th.i64(n - v), position)
            columns = columns[::-1]
        with th.when(there):
            shown.store(program, arith.addi(base, source), columns)
            last = (n - 1) % v
            shown.store_final(
                program, row, arith.addi(position, th.i64(last)), pairs[last][1]
            )
