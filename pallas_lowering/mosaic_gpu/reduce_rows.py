"""Rows reduced by warps: tiles, spans of tiles, and chunks of a row."""

from __future__ import annotations

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _plan
from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._counter import Counter
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._sink import Sink
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres, Reader
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State

_WARPS = 4


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
    counter = Counter(algebra, (plan.span // tile).bit_length(), like)
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


def rows(fibres: Fibres, seed, plan: _plan.Rows, partial: bool) -> list[jax.Array]:
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
        inside = arith.andi(th.less(unit, th.i32(units)), th.less(group, th.i32(each)))
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
