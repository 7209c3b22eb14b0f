"""scan on whole arrays, as CUDA kernels written through Mosaic GPU.

Every tree policy runs as `fixed_tree` within a tile: totals go up, prefixes come down.
From tile to tile a warp carries the prefix, or under `fixed_tree` the partial trees that
make it up. Few long fibres are cut: totals of chunks, their prefixes, then the chunks.
Folds give each fibre one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _plan, whole_reduce
from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._shown import Shown
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres, Reader, Stretch
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State
from jaxtile.policy import Kind, Policy
from jaxtile.primitives import _prefix
from jaxtile.primitives._operands import unpack

_WARPS = 4


@dataclass(frozen=True)
class Seed:
    """What is before each fibre, and after each of its chunks.

    Args:
        leaves: of the seed of each fibre; empty for none.
        chunks: leaves of the prefix after each chunk, (outer, chunks, inner); empty
            where there is one chunk.
        exists: whether those prefixes exist, or None.
    """

    leaves: tuple[jax.Array, ...] = ()
    chunks: tuple[jax.Array, ...] = ()
    exists: jax.Array | None = None

    @property
    def operands(self) -> list[jax.Array]:
        """In the order that `Before` expects."""
        flags = () if self.exists is None else (self.exists,)
        return [*self.leaves, *self.chunks, *flags]


class Before:
    """Loads what is before and after a chunk.

    Args:
        fibres: the contributions.
        seed: the arrays.
        buffers: the same in a kernel.
    """

    def __init__(self, fibres: Fibres, seed: Seed, buffers: Sequence):
        self.algebra, self.seed = fibres.algebra, seed
        k, c = len(seed.leaves), len(seed.chunks)
        self._leaves, self._chunks = buffers[:k], buffers[k : k + c]
        self._flag = buffers[k + c] if seed.exists is not None else None
        # A prefix may not exist, and nothing neutral stands in for it.
        may_lack = fibres.mask is not None or not self.algebra.neutral
        self.tracked = may_lack and not seed.leaves

    def _start(self, fibre) -> State:
        if not self._leaves:
            none = self.algebra.nothing() if self.tracked else self.algebra.identity()
            return none
        return State(tuple(b.load(fibre)[0] for b in self._leaves))

    def after(self, unit) -> State:
        """The prefix after a chunk."""
        leaves = tuple(b.load(unit)[0] for b in self._chunks)
        if not self.tracked or self._flag is None:
            return State(leaves)
        return State(leaves, self._flag.load(unit)[0])

    def first(self, fibre, chunk, unit, inner: int) -> State:
        """The prefix before a chunk: the seed, or what is after the one before it."""
        start = self._start(fibre)
        if not self._chunks:
            return start
        head = th.equal(chunk, th.i64(0))
        previous = arith.subi(unit, th.i64(inner))
        found = self.after(arith.select(head, unit, previous))
        return self.algebra.choose(head, start, found)


class Carry:
    """What goes from block to block: the prefix, or the trees that it consists of.

    Args:
        algebra: the reducer.
        fixed: keep the partial trees of `fixed_tree`.
        blocks: how many blocks there may be.
        first: what is before the first block.
        like: a block's state.
    """

    def __init__(self, algebra: Algebra, fixed: bool, blocks: int, first, like):
        self.algebra, self.first = algebra, first
        levels = max(1, blocks.bit_length()) if fixed and blocks > 1 else 0
        self.counter = st.Counter(algebra, levels, like) if levels else None

    def start(self) -> list[ir.Value]:
        """Before the first block."""
        if self.counter is not None:
            return self.counter.empty()
        return self.algebra.pack(self.first)

    def before(self, count, carry) -> State:
        """The prefix before block number `count`."""
        if self.counter is None:
            return self.algebra.unpack(carry, self.first)
        found = self.counter.prefix(count, carry, self.first)
        return self.algebra.tracked(found, self.first)

    def push(self, count, carry, block: State) -> tuple[list[ir.Value], State]:
        """The carry and the prefix after one more block."""
        if self.counter is not None:
            carry = self.counter.push(count, carry, block)
            after = self.before(arith.addi(count, th.i32(1)), carry)
            return carry, after
        before = self.algebra.unpack(carry, self.first)
        after = self.algebra.merge(before, block)
        after = self.algebra.tracked(after, self.first)
        if self.first.exists is None:
            after = State(after.leaves)
        return self.algebra.pack(after), after


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


def _pick(algebra: Algebra, warp, states: Sequence[State]) -> State:
    """The state of this warp, of one for each warp."""
    found = states[0]
    for w, state in enumerate(states[1:], 1):
        found = algebra.choose(th.equal(warp, th.i32(w)), state, found)
    return found


def _rows(fibres: Fibres, seed: Seed, shown: Shown, plan: _plan.Rows, fixed: bool):
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
            places = whole_reduce.load_tile(
                reader, plan, lane, start, base, offset, limit if ragged else None
            )
            states = [[reader.state(p) for p in r] for r in places]
            found = _Tile(algebra, lane, states)
            before, total = carry.before(t, values), found.total
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
                before = _pick(algebra, part, starts)
                after = _pick(algebra, part, [*starts[1:], after])
            _show_rows(program, shown, plan, found, before, after, lane, inside,
                       (row, base, start, offset, limit if ragged else None))
            return values

        th.loop(arith.trunci(ir.IntegerType.get_signless(32), count), tile,
                carry.start())

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


def _columns(fibres, seed: Seed, shown: Shown, plan: _plan.Columns, chain, fixed):
    outer, n, inner = fibres.shape
    algebra, v = fibres.algebra, plan.vector
    groups = outer * inner // v
    spread = len(fibres.operands)

    def body(program: Program):
        reader = Reader(fibres, program.inputs[:spread])
        thread = arith.addi(
            arith.muli(th.i64(th.block()), th.i64(th.WARP * _WARPS)),
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
            walk = _Walk(program, reader, shown, plan, (start, base, fibre))
            walk.begin(Before(fibres, seed, program.inputs[spread:]), chunk, unit)
            (walk.chain if chain else walk.tree)(fixed)

    threads = groups * plan.chunks
    return launch(
        body,
        shown.outs,
        [*fibres.operands, *seed.operands],
        blocks=-(-threads // (th.WARP * _WARPS)),
        warps=_WARPS,
    )


class _Walk:
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
        shown, inner = self.shown, self.shown.shape[2]
        position = arith.addi(self.start, local)
        source = position
        if shown.flipped:
            source = arith.subi(th.i64(self.n - 1), position)
        columns = [shown.values(position, *pair) for pair in pairs]
        offset = arith.addi(self.base, arith.muli(source, th.i64(inner)))

        def store():
            shown.store(self.program, offset, columns)
            for j, (_, after) in enumerate(pairs):
                fibre = arith.addi(self.fibre, th.i64(j))
                shown.store_final(self.program, fibre, position, after)

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

        def body(t, raw, values):
            first = arith.muli(th.i64(t), th.i64(plan.block))
            rows = self._states(raw, first, ragged)
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
        th.pipelined(count, lambda t: self._fetch(t, ragged), body, carry)

    def _at_end(self, k, first, after, fixed):
        """Under `fixed_tree` a chunk's last prefix joins larger blocks than its own."""
        if not fixed or self.plan.chunks == 1:
            return after
        end = arith.addi(first, th.i64(self.plan.block))
        return self.algebra.choose(
            th.equal(end, th.i64(self.plan.chunk)), self.lasts[k], after
        )

    def _exists(self, local, ragged):
        return th.less(local, self.limit) if ragged else None

    def _fetch(self, t, ragged):
        first, raw = arith.muli(th.i64(t), th.i64(self.plan.block)), []
        for j in range(self.plan.block):
            local = arith.addi(first, th.i64(j))
            place, exists = arith.addi(self.start, local), self._exists(local, ragged)
            raw += self.reader.fetch(self.base, place, self.plan.vector, exists, False)
        return raw

    def _states(self, raw, first, ragged):
        size, v = self.plan.vector * len(self.reader.buffers), self.plan.vector
        places = []
        for j in range(self.plan.block):
            local = arith.addi(first, th.i64(j))
            place, exists = arith.addi(self.start, local), self._exists(local, ragged)
            mine = raw[j * size : (j + 1) * size]
            places.append(self.reader.places(mine, place, v, exists, False))
        fibres = zip(*places, strict=True)
        return [[self.reader.state(p) for p in f] for f in fibres]

    def chain(self, fixed: bool) -> None:
        """The strict chain, one place after the other."""
        del fixed
        algebra = self.algebra
        source = Stretch(self.reader, self.base, self.plan.vector)

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
        whole_reduce.chain_blocks(
            algebra, self.n, self.plan.block, source, states, advance
        )


def _scan(fibres: Fibres, seed: Seed, shown: Shown, policy: Policy) -> list[jax.Array]:
    """All launches of one scan."""
    outer, n, inner = fibres.shape
    leaves = len(fibres.algebra.dtypes)
    chain = policy.kind in (Kind.LEFT, Kind.RIGHT)
    fixed = policy.kind is Kind.FIXED
    rows = inner == 1 and n > _plan.SHORT_ROW and not chain
    if rows:
        plan = _plan.scan_rows(outer, n, fibres.vector(n), leaves)
    else:
        vector = fibres.vector(inner)
        plan = _plan.scan_columns(outer * inner, n, vector, leaves, chain)
    if plan.chunks > 1:
        seed = _chunk_seeds(fibres, seed, plan, policy, rows)
    if rows:
        return _rows(fibres, seed, shown, plan, fixed)
    return _columns(fibres, seed, shown, plan, chain, fixed)


def _chunk_seeds(fibres: Fibres, seed: Seed, plan, policy: Policy, rows) -> Seed:
    """What is after each chunk: the totals of chunks, then their prefixes."""
    outer, n, inner = fibres.shape
    *totals, exists = whole_reduce.chunk_states(fibres, plan, rows)
    shape = (outer, plan.chunks, inner)
    algebra = fibres.algebra.of_states()
    states = Fibres(algebra, tuple(totals), exists, shape)
    shown = Shown(algebra, shape, False, False, bool(seed.leaves), True, False)
    *leaves, exists = _scan(states, seed, shown, policy)
    return Seed(seed.leaves, tuple(leaves), exists)


def run(
    *operands, spec, axis, policy, direction, exclusive, final, seeded, masked, finish, out
) -> Sequence:
    """`scan_p` on whole arrays."""
    elements, init, mask = unpack(spec, operands, seeded, masked)
    shape = elements[0].shape
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if direction == "suffix":
        spec = _prefix.swapped(spec)
    algebra = Algebra(spec, False, out, finish)
    view = (outer, shape[axis], inner)
    flipped = direction != "prefix"
    fibres = Fibres(algebra, tuple(elements), mask, view, flipped)
    seed = Seed() if init is None else Seed(tuple(v.reshape(-1) for v in init))
    shown = Shown(algebra, view, exclusive, final, seeded, False, flipped)
    outs = _scan(fibres, seed, shown, policy)
    kept = (*shape[:axis], *shape[axis + 1 :])
    k = len(outs) - len(spec.states) * final
    return [v.reshape(shape) for v in outs[:k]] + [v.reshape(kept) for v in outs[k:]]
