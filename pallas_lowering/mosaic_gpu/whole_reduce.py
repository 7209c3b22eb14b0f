"""reduce on whole arrays, as CUDA kernels written through Mosaic GPU.

All tree policies run as `fixed_tree`, which here costs what any order costs: a thread
combines its neighbours, lanes pair up, warps meet in shared memory, and a chunk's
partial state goes to the next launch. Folds give each fibre one thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _plan
from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres, Reader, Stretch
from jaxtile.pallas_lowering.mosaic_gpu._staged import STAGE, Staged
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State
from jaxtile.pallas_lowering.mosaic_gpu._tiles import algebra_of
from jaxtile.policy import Kind, Policy, ordered_tree
from jaxtile.primitives import _fold
from jaxtile.primitives._operands import unpack

_WARPS = 4


class Sink:
    """Where a launch's states go: results at the end, else partial states.

    Args:
        algebra: the reducer.
        units: how many states.
        seed: leaves of each unit's seed, or None.
        partial: write raw states and whether they exist.
    """

    def __init__(self, algebra: Algebra, units: int, seed, partial: bool):
        self.algebra, self.partial = algebra, partial
        self.seed = [] if seed is None or partial else list(seed)
        dtypes = [*algebra.dtypes, jnp.bool_] if partial else algebra.out
        self.outs = [jax.ShapeDtypeStruct((units,), d) for d in dtypes]

    def write(self, program: Program, unit: ir.Value, state: State) -> None:
        """Store the state of one unit; `unit` is a 64-bit offset."""
        if self.partial:
            exists = th.true() if state.exists is None else state.exists
            values = [*state.leaves, exists]
        else:
            buffers = program.inputs[len(program.inputs) - len(self.seed) :]
            seed = None
            if self.seed:
                seed = State(tuple(b.load(unit)[0] for b in buffers))
            values = self.algebra.result(state, seed)
        for buffer, value in zip(program.outputs, values, strict=True):
            buffer.store([value], unit)


def load_tile(reader: Reader, plan, lane, start, base, first, left) -> list:
    """A warp's tile of places, by rows of lanes' vectors.

    Args:
        reader, plan, lane: what loads, how much, and where.
        start, base: the span's first position, and its row's offset.
        first: where the tile begins in the span.
        left: how many elements the span has, where the tile may be short; else None.

    Returns:
        `[leaves, exists]` of each place, by rows.
    """
    mine = th.i64(arith.muli(lane, th.i32(plan.vector)))
    mine = arith.addi(first, mine)
    rows = []
    for r in range(plan.registers):
        local = arith.addi(mine, th.i64(r * 32 * plan.vector))
        exists = None if left is None else th.less(local, left)
        place = arith.addi(start, local)
        rows.append(reader.read(base, place, plan.vector, exists, True))
    return rows


def _warp_span(reader: Reader, plan, lane, start, base) -> State:
    """The tree over one warp's span of a row."""
    algebra, n = reader.algebra, reader.fibres.shape[1]
    masked, tile = reader.masked, plan.tile
    left = arith.subi(th.i64(n), start)
    left = arith.minsi(arith.maxsi(left, th.i64(0)), th.i64(plan.span))
    ragged = n % plan.span != 0
    like = reader.like(ragged)

    def tile_state(first, bound):
        rows = load_tile(reader, plan, lane, start, base, first, bound)
        return algebra.tracked(algebra.tile(lane, rows, masked), like)

    def at(first):
        if not ragged:
            return tile_state(first, None)
        # Only the last tile asks at every load whether it is inside.
        whole = th.less(arith.addi(first, th.i64(tile - 1)), left)
        values = th.branch(
            whole,
            algebra.kinds(like),
            lambda: algebra.pack(tile_state(first, None)),
            lambda: algebra.pack(tile_state(first, left)),
        )
        return algebra.unpack(values, like)

    if plan.span == tile:
        return at(th.i64(0))
    counter = st.Counter(algebra, (plan.span // tile).bit_length(), like)
    count = arith.trunci(
        ir.IntegerType.get_signless(32),
        arith.divui(arith.addi(left, th.i64(tile - 1)), th.i64(tile)),
    )

    def body(t, carry):
        return counter.push(t, carry, at(arith.muli(th.i64(t), th.i64(tile))))

    return counter.total(count, th.loop(count, body, counter.empty()))


def _share(program: Program, algebra: Algebra, warp, lane, state):
    """Hand every warp's state to shared memory, and wait for all."""
    values = algebra.pack(state)
    with th.when(th.equal(lane, th.i32(0))):
        for k, v in enumerate(values):
            slot = arith.addi(arith.muli(warp, th.i32(len(values))), th.i32(k))
            program.words.write(slot, v)
    th.barrier()


def _shared(program: Program, algebra: Algebra, group, like: State, warps: int):
    """The tree over the states that the warps of a unit shared."""
    kinds = algebra.kinds(like)
    width = len(kinds)
    first = arith.muli(group, th.i32(warps * width))
    parts = []
    for w in range(warps):
        slots = [arith.addi(first, th.i32(w * width + k)) for k in range(width)]
        read = [program.words.read(s, t) for s, t in zip(slots, kinds, strict=True)]
        parts.append(algebra.unpack(read, like))
    return st.tree(algebra, parts)


def _rows(fibres: Fibres, seed, plan: _plan.Rows, partial: bool) -> list[jax.Array]:
    outer, n, _ = fibres.shape
    algebra, units = fibres.algebra, outer * plan.chunks
    sink = Sink(algebra, units, seed, partial)
    each = max(1, _WARPS // plan.warps)
    warps = -(-each * plan.warps // _WARPS) * _WARPS

    def body(program: Program):
        reader = Reader(fibres, program.inputs)
        warp, lane = th.divided(th.thread_in_block(), th.WARP)
        group, part = th.divided(warp, plan.warps)
        unit = arith.addi(arith.muli(th.block(), th.i32(each)), group)
        # Idle warps repeat the last unit and store nothing.
        inside = arith.andi(
            th.less(unit, th.i32(units)), th.less(group, th.i32(each))
        )
        unit = th.i64(arith.minsi(unit, th.i32(units - 1)))
        row, chunk = th.divided(unit, plan.chunks)
        start = arith.addi(
            arith.muli(chunk, th.i64(plan.chunk)),
            arith.muli(th.i64(part), th.i64(plan.span)),
        )
        base = arith.muli(row, th.i64(n))
        state = _warp_span(reader, plan, lane, start, base)
        if plan.warps > 1:
            _share(program, algebra, warp, lane, state)
        leads = arith.andi(th.equal(lane, th.i32(0)), th.equal(part, th.i32(0)))
        with th.when(arith.andi(leads, inside)):
            if plan.warps > 1:
                state = _shared(program, algebra, group, state, plan.warps)
            sink.write(program, unit, state)

    width = len(algebra.dtypes) + 1
    return launch(
        body,
        sink.outs,
        [*fibres.operands, *sink.seed],
        blocks=-(-units // each),
        warps=warps,
        slots=warps * width if plan.warps > 1 else 0,
    )


def _stretch(reader: Reader, plan, start, base) -> list[State]:
    """The states of one thread's neighbouring fibres over its stretch."""
    algebra, n = reader.algebra, reader.fibres.shape[1]
    whole = arith.subi(th.i64(n), start)
    length = arith.minsi(whole, th.i64(plan.chunk))
    ragged = n % plan.chunk != 0 or plan.chunk % plan.block != 0
    like = reader.like(ragged)
    levels = (plan.chunk // plan.block).bit_length()
    counter = st.Counter(algebra, levels, like)
    blocks = arith.divui(arith.addi(length, th.i64(plan.block - 1)), th.i64(plan.block))
    count = arith.trunci(ir.IntegerType.get_signless(32), blocks)

    def block(first):
        places = []
        for j in range(plan.block):
            local = arith.addi(first, th.i64(j))
            exists = th.less(local, length) if ragged else None
            place = arith.addi(start, local)
            places.append(reader.read(base, place, plan.vector, exists, False))
        fibres = zip(*places, strict=True)
        return [algebra.tile(None, [f], reader.masked) for f in fibres]

    if plan.chunk == plan.block:
        return block(th.i64(0))
    empty = counter.empty()
    size = len(empty)

    def body(t, carry):
        states = block(arith.muli(th.i64(t), th.i64(plan.block)))
        out = []
        for v, state in enumerate(states):
            out += counter.push(t, carry[v * size : (v + 1) * size], state)
        return out

    carry = th.loop(count, body, empty * plan.vector)
    parts = [carry[v * size : (v + 1) * size] for v in range(plan.vector)]
    return [counter.total(count, p) for p in parts]


def _chain(reader: Reader, plan, right: bool, seeds, source) -> list[State]:
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
    return chain_blocks(algebra, n, plan.block, source, seeds, advance)


def chain_blocks(algebra: Algebra, n: int, block: int, source, states, advance):
    """A chain over n places, `block` of them in a loop's body.

    Args:
        algebra: the reducer.
        n, block: how many places, and how many at once.
        source: `fetch(first, times)` loads them.
        states: where to start, or None to start from the first place.
        advance: `(states, loaded, first, times) -> states`.

    Returns:
        The last states.
    """
    # The first block is written out, so that no step asks whether it is the first.
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

        carry = th.pipelined(
            th.i32(count),
            lambda t: source.fetch(first(t), times),
            body,
            _packed(algebra, states),
        )
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


def _columns(fibres: Fibres, seed, plan: _plan.Columns, policy: Policy, partial):
    outer, n, inner = fibres.shape
    algebra = fibres.algebra
    groups = outer * inner // plan.vector
    fold, right = policy.kind in (Kind.LEFT, Kind.RIGHT), policy.kind is Kind.RIGHT
    fibres = replace(fibres, flipped=fibres.flipped != right)
    sink = Sink(algebra, outer * inner * plan.chunks, seed, partial)
    sink.seed, seeds = ([], sink.seed) if fold else (sink.seed, [])
    staged = fold and inner == 1 and n >= 2 * STAGE

    def body(program: Program):
        reader = Reader(fibres, program.inputs)
        thread = arith.addi(
            arith.muli(th.i64(th.block()), th.i64(32 * _WARPS)),
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
            start = _seed_states(program, len(seeds), fibre, plan.vector)
            source: Any = Stretch(reader, base, plan.vector)
            if staged:
                source = Staged(reader, program.words, own, groups)
            states = _chain(reader, plan, right, start, source)
        else:
            start = arith.muli(chunk, th.i64(plan.chunk))
            states = _stretch(reader, plan, start, base)
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
        blocks=-(-groups * plan.chunks // (32 * _WARPS)),
        warps=_WARPS,
        slots=_WARPS * Staged.slots(fibres) if staged else 0,
    )


def _seed_states(program, k, fibre, vector):
    if not k:
        return None
    packs = [b.load(fibre, vector) for b in program.inputs[-k:]]
    return [State(tuple(p[v] for p in packs)) for v in range(vector)]


def chunk_states(fibres: Fibres, plan, rows: bool) -> list[jax.Array]:
    """The state of each chunk of each fibre, as (outer, chunks, inner), and existence."""
    found = (
        _rows(fibres, None, plan, True)
        if rows
        else _columns(fibres, None, plan, ordered_tree, True)
    )
    shape = (fibres.shape[0], plan.chunks, fibres.shape[2])
    return [v.reshape(shape) for v in found]


def reduce_fibres(fibres: Fibres, seed, policy: Policy) -> list[jax.Array]:
    """All launches of one reduction.

    Args:
        fibres: the contributions.
        seed: leaves of shape (outer * inner,), or None.
        policy: the order.

    Returns:
        The results, flat over (outer, inner).
    """
    outer, n, inner = fibres.shape
    algebra, leaves = fibres.algebra, fibres.algebra.width
    fold = policy.kind in (Kind.LEFT, Kind.RIGHT)
    if inner == 1 and n > _plan.SHORT_ROW and not fold:
        plan = _plan.reduce_rows(outer, n, fibres.vector(n), leaves)
        found = _rows(fibres, seed, plan, plan.chunks > 1)
    else:
        vector = fibres.vector(inner)
        plan = _plan.reduce_columns(outer * inner, n, vector, leaves, fold)
        found = _columns(fibres, seed, plan, policy, plan.chunks > 1)
    if plan.chunks == 1:
        return found
    partial = algebra.of_states()
    shape = (outer, plan.chunks, inner)
    rest = Fibres(partial, tuple(found[:-1]), found[-1], shape)
    return reduce_fibres(rest, seed, policy)


def run(*operands, spec, axes, policy, seeded, masked, finish, out) -> Sequence:
    """`reduce_p` on whole arrays."""
    elements, init, mask = unpack(spec, operands, seeded, masked)
    shape = elements[0].shape
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    if axes and axes == tuple(range(axes[0], axes[-1] + 1)):
        outer = math.prod(shape[: axes[0]])
        inner = math.prod(shape[axes[-1] + 1 :])
    else:
        collapse = functools.partial(_fold.collapse, axes=axes)
        elements = list(map(collapse, elements))
        mask = None if mask is None else collapse(mask)
        outer, inner = math.prod(kept), 1
    n = math.prod([shape[d] for d in axes])
    algebra = algebra_of(spec, policy, out, finish)
    fibres = Fibres(algebra, tuple(elements), mask, (outer, n, inner))
    seed = None if init is None else [v.reshape(-1) for v in init]
    return [v.reshape(kept) for v in reduce_fibres(fibres, seed, policy)]
