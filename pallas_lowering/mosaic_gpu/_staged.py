"""Rows that a thread each folds, loaded by whole warps through shared memory.

A thread that walks its own row reads far from its neighbours. A warp instead loads
32 x 32 blocks along the rows, and each lane takes its row's places from shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._plan import STAGE
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres, Reader, Source

# One slot more, so that lanes that read one column meet no common bank.
_PITCH = STAGE + 1


class Staged(Source):
    """A source of chains over rows, as `Stretch` is, for blocks of `STAGE` places.

    Args:
        reader: loads.
        words: shared memory of the CTA.
        thread: this thread's row; beyond the last one it repeats that.
        rows: how many there are.
    """

    def __init__(self, reader: Reader, words: th.Words, thread: ir.Value, rows: int):
        self.reader, self.words = reader, words
        self.length = reader.fibres.shape[1]
        self.vector = reader.fibres.vector(self.length)
        self.last = th.i64(rows - 1)
        own = arith.minsi(thread, self.last)
        self.own = arith.muli(own, th.i64(self.length))
        local = th.thread_in_block()
        warp, self.lane = th.divided(local, th.WARP)
        size = th.i32(self.slots(reader.fibres))
        self.region = arith.muli(warp, size)
        self.lead = arith.subi(thread, th.i64(self.lane))

    @staticmethod
    def slots(fibres: Fibres) -> int:
        """Shared memory of one warp."""
        return th.WARP * _PITCH * len(fibres.operands)

    def loop(self, count, first, times, body, carry):
        """As `Source.loop`; a step alone is a tenth faster than two written out."""
        return th.prefetched(count, lambda t: self.fetch(first(t), times), body, carry)

    def _rows(self):
        """(row in the block, column) of each of this lane's loads."""
        lanes = STAGE // self.vector
        row, column = th.divided(self.lane, lanes)
        column = arith.muli(column, th.i32(self.vector))
        rows = th.WARP // lanes
        return [
            (arith.addi(row, th.i32(k * rows)), column) for k in range(th.WARP // rows)
        ]

    def fetch(self, first: ir.Value, times: int) -> list[ir.Value]:
        """This lane's part of the warp's block; of fewer places, its own row's."""
        if times != STAGE:
            return self._alone(first, times)
        raw = []
        for row, column in self._rows():
            line = arith.minsi(arith.addi(self.lead, th.i64(row)), self.last)
            base = arith.muli(line, th.i64(self.length))
            at = arith.addi(first, th.i64(column))
            raw += self.reader.fetch(base, at, self.vector, None, True)
        return raw

    def _alone(self, first: ir.Value, times: int) -> list[ir.Value]:
        raw = []
        for j in range(times):
            at = arith.addi(first, th.i64(j))
            raw += self.reader.fetch(self.own, at, 1, None, True)
        return raw

    def places(self, raw: Sequence, first: ir.Value, times: int) -> list[list]:
        """This lane's row, place by place."""
        raw = self._exchange(raw) if times == STAGE else raw
        return self._in_order(raw, first, times)

    def _in_order(self, raw: Sequence, first: ir.Value, times: int) -> list[list]:
        n = len(self.reader.buffers)
        found = []
        for j in range(times):
            at = arith.addi(first, th.i64(j))
            mine = raw[j * n : (j + 1) * n]
            found.append(self.reader.places(mine, at, 1, None, True))
        return found

    def _exchange(self, raw):
        n, v = len(self.reader.buffers), self.vector
        kinds = [raw[b * v].type for b in range(n)]
        th.warp_barrier()
        for k, (row, column) in enumerate(self._rows()):
            slot = arith.addi(arith.muli(row, th.i32(_PITCH)), column)
            for b in range(n):
                for j in range(v):
                    value = raw[(k * n + b) * v + j]
                    self.words.write(self._slot(slot, b, j), value)
        th.warp_barrier()
        slot = arith.muli(self.lane, th.i32(_PITCH))
        return [
            self.words.read(self._slot(slot, b, j), kinds[b])
            for j in range(STAGE)
            for b in range(n)
        ]

    def _slot(self, slot, buffer, j):
        fixed = th.i32(buffer * th.WARP * _PITCH + j)
        return arith.addi(arith.addi(self.region, slot), fixed)
