"""Rows that a thread each folds, through a ring of blocks in shared memory.

As `_staged`, but copied asynchronously: a warp copies whole stretches of its 32 rows some
blocks ahead, and each lane reads its own row's in chunks of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._plan import WARPS, Columns
from jaxtile.pallas_lowering.mosaic_gpu._ring import bytes_each
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres, Reader
from jaxtile.pallas_lowering.mosaic_gpu._staged import Staged

# What a lane copies or reads at once, and what of a row a warp copies at once: less reads
# memory in pieces that it does not like.
_CHUNK, _STRETCH, _MOST_PLACES = 16, 256, 64
# Two blocks are under way while one is read. Two such CTAs share a multiprocessor.
_RING, _BYTES = 3, 100 * 1024
# Chunks that lanes read at once without a common bank.
_BANKS = 8


def planned(fibres: Fibres, plan: Columns) -> Columns | None:
    """The plan of a chain along rows with its ring, or None where copies do not serve."""
    n, size = fibres.shape[1], fibres.widest
    if any(v.dtype.itemsize != size for v in fibres.operands):
        return None
    block = min(_MOST_PLACES, _STRETCH // size)
    while block * size > _CHUNK and _bytes(fibres, block) > _BYTES:
        block //= 2
    if fibres.vector(n) * size != _CHUNK or n < (_RING + 1) * block:
        return None
    return replace(plan, block=block, ring=_RING)


def _bytes(fibres: Fibres, block: int) -> int:
    return WARPS * th.WARP * _RING * block * bytes_each(fibres)


def slots(fibres: Fibres, plan: Columns) -> int:
    """64-bit slots of shared memory of a CTA."""
    return _bytes(fibres, plan.block) // 8


class RowRing(Staged):
    """A `Staged` source whose whole blocks come through a ring.

    Args:
        reader, words, thread, rows: as of `Staged`.
        plan: places of a block, and blocks of the ring.
    """

    def __init__(
        self, reader: Reader, words: th.Words, thread, rows: int, plan: Columns
    ):
        super().__init__(reader, words, thread, rows)
        self.block, self.ring = plan.block, plan.ring
        self.chunks = plan.block // self.vector
        self.warp, _ = th.divided(th.thread_in_block(), th.WARP)
        each = WARPS * th.WARP * plan.ring * plan.block
        self.shared, start = [], 0
        for buffer in reader.buffers:
            self.shared.append(words.array(start, buffer.dtype))
            start += each * buffer.bytes

    def loop(self, count, first: Callable, times: int, body: Callable, carry: Sequence):
        """As `Source.loop`."""
        if times != self.block:
            return super().loop(count, first, times, body, carry)
        th.warp_barrier()
        for k in range(self.ring - 1):
            self._begin(th.i32(k), count, first)

        def step(t, values):
            # All but the newest `ring - 2` groups: this lane's part of block t is there.
            nvvm.cp_async_wait_group(self.ring - 2)
            # So are the others', and none reads the block before it any more.
            th.warp_barrier()
            self._begin(arith.addi(t, th.i32(self.ring - 1)), count, first)
            return body(t, self._read(t), values)

        return th.loop(count, step, carry)

    def fetch(self, first: ir.Value, times: int) -> list[ir.Value]:
        """This row's places: of a whole block through shared memory."""
        if times != self.block:
            return self._alone(first, times)
        zero = th.i32(0)
        self._copy(zero, first)
        nvvm.cp_async_commit_group()
        nvvm.cp_async_wait_group(0)
        th.warp_barrier()
        return self._read(zero)

    def places(self, raw: Sequence, first: ir.Value, times: int) -> list[list]:
        """This lane's row, place by place."""
        return self._in_order(raw, first, times)

    def _begin(self, t, count, first):
        """Begin to copy block t; beyond the last, a group of nothing."""
        with th.when(arith.cmpi(arith.CmpIPredicate.ult, t, count)):
            self._copy(t, first(t))
        nvvm.cp_async_commit_group()

    def _copy(self, t, start):
        lanes = min(self.chunks, th.WARP)
        row, column = th.divided(self.lane, lanes)
        for k in range(lanes):
            mine = arith.addi(row, th.i32(k * (th.WARP // lanes)))
            line = arith.minsi(arith.addi(self.lead, th.i64(mine)), self.last)
            base = arith.muli(line, th.i64(self.length))
            place = arith.muli(column, th.i32(self.vector))
            at = arith.addi(start, th.i64(place))
            at = self.reader.offset(base, at, self.vector, None, True)
            spot = self._spot(t, mine, column)
            for shared, buffer in zip(self.shared, self.reader.buffers, strict=True):
                shared.copy(buffer, at, spot, self.vector)

    def _read(self, t) -> list[ir.Value]:
        flipped, found = self.reader.fibres.flipped, []
        for k in range(self.chunks):
            spot = self._spot(t, self.lane, th.i32(k))
            packs = [v.load(spot, self.vector) for v in self.shared]
            packs = [p[::-1] if flipped else p for p in packs]
            found += [p[j] for j in range(self.vector) for p in packs]
        return found

    def _spot(self, t, row, chunk):
        """Where a row's chunk of block t lies: rows that meet in a bank are turned."""
        turned = row
        if self.chunks < _BANKS:
            turned = arith.divui(row, th.i32(_BANKS // self.chunks))
        turned = arith.andi(turned, th.i32(min(self.chunks, _BANKS) - 1))
        slot = arith.remui(t, th.i32(self.ring))
        slot = arith.addi(arith.muli(self.warp, th.i32(self.ring)), slot)
        line = arith.addi(arith.muli(slot, th.i32(th.WARP)), row)
        line = arith.muli(line, th.i32(self.chunks))
        place = arith.addi(line, arith.xori(chunk, turned))
        return arith.muli(place, th.i32(self.vector))
