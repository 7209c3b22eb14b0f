"""Fibres reduced by a thread each, or by a thread for each stretch of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _plan, _row_ring
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._counter import Counter
from jaxtile.pallas_lowering.mosaic_gpu._launch import MOST_SLOTS, Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._plan import STAGE, WARPS
from jaxtile.pallas_lowering.mosaic_gpu._sink import Sink
from jaxtile.pallas_lowering.mosaic_gpu._source import Block, Fibres, Reader, Stretch
from jaxtile.pallas_lowering.mosaic_gpu._staged import Staged
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State
from jaxtile.policy import Kind, Policy


def stretch(reader: Reader, plan, start, base) -> list[State]:
    """The states of one thread's neighbouring fibres over its stretch."""
    algebra, n = reader.algebra, reader.fibres.shape[1]
    whole = arith.subi(th.i64(n), start)
    length = arith.minsi(whole, th.i64(plan.chunk))
    ragged = n % plan.chunk != 0 or plan.chunk % plan.block != 0
    like = reader.like(ragged)
    levels = (plan.chunk // plan.block).bit_length()
    counter = Counter(algebra, levels, like)
    blocks = arith.divui(arith.addi(length, th.i64(plan.block - 1)), th.i64(plan.block))
    count = arith.trunci(ir.IntegerType.get_signless(32), blocks)

    rows = Block(reader, plan, start, base, length if ragged else None)

    def states(t, raw):
        fibres = zip(*rows.places(t, raw), strict=True)
        return [algebra.tile(None, [f], reader.masked) for f in fibres]

    if plan.chunk == plan.block:
        return states(th.i32(0), rows.fetch(th.i32(0)))
    empty = counter.empty()
    size = len(empty)

    def body(t, raw, carry):
        out = []
        for v, state in enumerate(states(t, raw)):
            out += counter.push(t, carry[v * size : (v + 1) * size], state)
        return out

    carry = th.pipelined(count, rows.fetch, body, empty * plan.vector)
    parts = [carry[v * size : (v + 1) * size] for v in range(plan.vector)]
    return [counter.total(count, p) for p in parts]


def chain(reader: Reader, plan, right: bool, seeds, source) -> list[State]:
    """Strict folds of one thread's neighbouring fibres."""
    algebra, n = reader.algebra, reader.fibres.shape[1]

    def advance(states, raw, first, times):
        for places in source.places(raw, first, times):
            if states is None:
                states = [reader.state(p) for p in places]
                continue
            states = [
                algebra.step(s, *p, right) for s, p in zip(states, places, strict=True)
            ]
        return states

    if seeds is None and (algebra.spec.has_update or reader.masked):
        seeds = [algebra.start()] * plan.vector
    return chain_blocks(algebra, n, plan, source, seeds, advance)


def chain_blocks(algebra: Algebra, n: int, plan, source, states, advance):
    """A chain over n places, `block` of them in a loop's body.

    Args:
        algebra: the reducer.
        n: how many places.
        plan: how many at once.
        source: loads them.
        states: where to start, or None to start from the first place.
        advance: `(states, loaded, first, times) -> states`.

    Returns:
        The last states.
    """
    # The first block is written out, so that no step asks whether it is the first.
    block = plan.block
    head = min(block, n)
    zero = th.i64(0)
    like = states = advance(states, source.fetch(zero, head), zero, head)

    def run(states, done, times, count):
        if count == 0:
            return states

        def first(t):
            return arith.addi(arith.muli(th.i64(t), th.i64(times)), th.i64(done))

        def body(t, raw, carry):
            states = _unpacked(algebra, carry, like)
            return _packed(algebra, advance(states, raw, first(t), times))

        start = _packed(algebra, states)
        carry = source.loop(th.i32(count), first, times, body, start)
        return _unpacked(algebra, carry, like)

    whole = (n - head) // block
    states = run(states, head, block, whole)
    done = head + whole * block
    return run(states, done, 1, n - done)


def _packed(algebra, states):
    return [v for s in states for v in algebra.pack(s)]


def _unpacked(algebra, values, like):
    size = len(values) // len(like)
    parts = [values[i * size : (i + 1) * size] for i in range(len(like))]
    return [algebra.unpack(p, s) for p, s in zip(parts, like, strict=True)]


def columns(fibres: Fibres, seed, plan: _plan.Columns, policy: Policy, partial):
    outer, n, inner = fibres.shape
    algebra = fibres.algebra
    groups = outer * inner // plan.vector
    fold, right = policy.kind in (Kind.LEFT, Kind.RIGHT), policy.kind is Kind.RIGHT
    fibres = replace(fibres, flipped=fibres.flipped != right)
    sink = Sink(algebra, outer * inner * plan.chunks, seed, partial)
    sink.seed, seeds = ([], sink.seed) if fold else (sink.seed, [])
    rows, slots = fold and inner == 1, 0
    ringed = _row_ring.planned(fibres, plan) if rows else None
    staged = rows and n >= 2 * STAGE and WARPS * Staged.slots(fibres) <= MOST_SLOTS
    if ringed is not None:
        plan, slots = ringed, _row_ring.slots(fibres, ringed)
    elif staged:
        slots = WARPS * Staged.slots(fibres)

    def body(program: Program):
        reader = Reader(fibres, program.inputs)
        thread = arith.addi(
            arith.muli(th.i64(th.block()), th.i64(32 * WARPS)),
            th.i64(th.thread_in_block()),
        )
        # Idle threads repeat the last one's work and store nothing.
        inside, own = th.less(thread, th.i64(groups * plan.chunks)), thread
        thread = arith.minsi(thread, th.i64(groups * plan.chunks - 1))
        chunk, group = th.divided(thread, groups)
        fibre = arith.muli(group, th.i64(plan.vector))
        o, i = th.divided(fibre, inner)
        base = arith.addi(arith.muli(o, th.i64(n * inner)), i)
        if fold:
            start = seed_states(program, len(seeds), fibre, plan.vector)
            source: Any = Stretch(reader, base, plan.vector)
            if ringed is not None:
                source = _row_ring.RowRing(reader, program.words, own, groups, plan)
            elif staged:
                source = Staged(reader, program.words, own, groups)
            states = chain(reader, plan, right, start, source)
        else:
            start = arith.muli(chunk, th.i64(plan.chunk))
            states = stretch(reader, plan, start, base)
        # Partial states lie as (outer, chunks, inner).
        unit = arith.addi(arith.muli(o, th.i64(plan.chunks)), chunk)
        unit = arith.addi(arith.muli(unit, th.i64(inner)), i)
        with th.when(inside):
            for v, state in enumerate(states):
                sink.write(program, arith.addi(unit, th.i64(v)), state)

    return launch(
        body,
        sink.outs,
        [*fibres.operands, *seeds, *sink.seed],
        blocks=-(-groups * plan.chunks // (32 * WARPS)),
        warps=WARPS,
        slots=slots,
    )


def seed_states(program, k, fibre, vector):
    if not k:
        return None
    packs = [b.load(fibre, vector) for b in program.inputs[-k:]]
    return [State(tuple(p[v] for p in packs)) for v in range(vector)]
