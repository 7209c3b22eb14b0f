"""Fibres scanned by a thread each, or by a thread for each chunk of one."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _plan
from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._before import Before, Carry, Seed
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._plan import WARPS
from jaxtile.pallas_lowering.mosaic_gpu._ring import Ring, slots
from jaxtile.pallas_lowering.mosaic_gpu._shown import Shown
from jaxtile.pallas_lowering.mosaic_gpu._source import Block, Reader, Stretch
from jaxtile.pallas_lowering.mosaic_gpu.reduce_columns import chain_blocks


def columns(fibres, seed: Seed, shown: Shown, plan: _plan.Columns, chain, fixed):
    outer, n, inner = fibres.shape
    v = plan.vector
    groups = outer * inner // v
    spread = len(fibres.operands)
    blocks = -(-groups * plan.chunks // (th.WARP * WARPS))

    def body(program: Program):
        reader = Reader(fibres, program.inputs[:spread])
        thread = arith.addi(
            arith.muli(th.i64(th.block()), th.i64(th.WARP * WARPS)),
            th.i64(th.thread_in_block()),
        )
        with th.when(th.less(thread, th.i64(groups * plan.chunks))):
            chunk, group = th.divided(thread, groups)
            o, i = th.divided(arith.muli(group, th.i64(v)), inner)
            unit = arith.addi(arith.muli(o, th.i64(plan.chunks)), chunk)
            unit = arith.addi(arith.muli(unit, th.i64(inner)), i)
            start = arith.muli(chunk, th.i64(plan.chunk))
            base = arith.addi(arith.muli(o, th.i64(n * inner)), i)
            fibre = arith.addi(arith.muli(o, th.i64(inner)), i)
            walk = Walk(program, reader, shown, plan, (start, base, fibre))
            walk.begin(Before(fibres, seed, program.inputs[spread:]), chunk, unit)
            (walk.chain if chain else walk.tree)(fixed)

    return launch(
        body,
        shown.outs,
        [*fibres.operands, *seed.operands],
        blocks=blocks,
        warps=WARPS,
        slots=slots(fibres, plan),
    )


class Walk:
    """One thread's way along its neighbouring fibres."""

    def __init__(self, program, reader, shown, plan, where):
        self.program, self.reader, self.shown = program, reader, shown
        self.plan = plan
        self.start, self.base, self.fibre = where
        self.algebra, self.n = reader.algebra, reader.fibres.shape[1]
        left = arith.subi(th.i64(self.n), self.start)
        self.limit = arith.minsi(left, th.i64(plan.chunk))

    def begin(self, before: Before, chunk, unit) -> None:
        """Load what is before and after the thread's chunk of each fibre."""
        inner = self.reader.fibres.shape[2]
        self.firsts, self.lasts = [], []
        for j in range(self.plan.vector):
            mine = arith.addi(unit, th.i64(j))
            fibre = arith.addi(self.fibre, th.i64(j))
            self.firsts.append(before.first(fibre, chunk, mine, inner))
            self.lasts.append(before.after(mine) if self.plan.chunks > 1 else None)

    def _show(self, local, pairs, guarded):
        """Store one place of every fibre."""
        position = arith.addi(self.start, local)

        def store():
            self.shown.place(self.program, self.base, self.fibre, position, pairs)

        if not guarded:
            store()
            return
        with th.when(th.less(local, self.limit)):
            store()

    def tree(self, fixed: bool) -> None:
        """Blocks of places, each a small tree after the carry."""
        plan, algebra = self.plan, self.algebra
        ragged = self.n % plan.chunk != 0 or plan.chunk % plan.block != 0
        like = self.reader.like(ragged)
        blocks = -(-min(self.n, plan.chunk) // plan.block)
        carries = [Carry(algebra, fixed, blocks, f, like) for f in self.firsts]
        starts = [c.start() for c in carries]
        size = len(starts[0])
        limit = self.limit if ragged else None
        source = Block(self.reader, plan, self.start, self.base, limit)

        def body(t, raw, values):
            first = arith.muli(th.i64(t), th.i64(plan.block))
            fibres = zip(*source.places(t, raw), strict=True)
            rows = [[self.reader.state(p) for p in f] for f in fibres]
            out, shown = [], []
            for k, (carry, states) in enumerate(zip(carries, rows, strict=True)):
                mine = values[k * size : (k + 1) * size]
                before = st.before_each(algebra, states, carry.before(t, mine))
                mine, after = carry.push(t, mine, st.tree(algebra, states))
                after = self._at_end(k, first, after, fixed)
                out += mine
                shown.append(list(zip(before, [*before[1:], after], strict=True)))
            for j, pairs in enumerate(zip(*shown, strict=True)):
                self._show(arith.addi(first, th.i64(j)), pairs, ragged)
            return out

        span = arith.addi(self.limit, th.i64(plan.block - 1))
        count = arith.divui(span, th.i64(plan.block))
        count = arith.trunci(ir.IntegerType.get_signless(32), count)
        carry = [v for s in starts for v in s]
        th.pipelined(count, source.fetch, body, carry)

    def _at_end(self, k, first, after, fixed):
        """Under `fixed_tree` a chunk's last prefix joins larger blocks than its own."""
        if not fixed or self.plan.chunks == 1:
            return after
        end = arith.addi(first, th.i64(self.plan.block))
        return self.algebra.choose(
            th.equal(end, th.i64(self.plan.chunk)), self.lasts[k], after
        )

    def _source(self):
        if self.plan.ring:
            return Ring(self.reader, self.base, self.plan, self.program.words)
        return Stretch(self.reader, self.base, self.plan.vector)

    def chain(self, fixed: bool) -> None:
        """The strict chain, one place after the other."""
        del fixed
        algebra = self.algebra
        source = self._source()

        def advance(states, raw, first, times):
            for j, places in enumerate(source.places(raw, first, times)):
                if states is None:
                    new = [self.reader.state(p) for p in places]
                    old = [algebra.nothing()] * len(new)
                else:
                    old = states
                    new = [
                        algebra.step(s, *p, False)
                        for s, p in zip(states, places, strict=True)
                    ]
                pairs = list(zip(old, new, strict=True))
                self._show(arith.addi(first, th.i64(j)), pairs, False)
                states = new
            return states

        states = list(self.firsts) if self.shown.seeded else None
        if states is None and (algebra.spec.has_update or self.reader.masked):
            states = [algebra.start()] * self.plan.vector
        chain_blocks(algebra, self.n, self.plan, source, states, advance)
