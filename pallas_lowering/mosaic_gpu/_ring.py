"""Neighbouring fibres that come through a ring of blocks in shared memory.

Few threads cannot keep enough loads in flight in registers. Asynchronous copies to
shared memory need none: a thread copies places of its own fibres some blocks ahead, and
waits for nothing but its own copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._plan import WARPS, Columns
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres, Reader, Stretch

# What one asynchronous copy may take.
COPIES = (4, 8, 16)
_THREADS = th.WARP * WARPS


def serves(fibres: Fibres, vector: int) -> bool:
    """Whether every operand's neighbours are of a size that a copy takes."""
    return all(v.dtype.itemsize * vector in COPIES for v in fibres.operands)


def bytes_each(fibres: Fibres) -> int:
    """Bytes of one place of a fibre."""
    return sum(v.dtype.itemsize for v in fibres.operands)


def slots(fibres: Fibres, plan: Columns) -> int:
    """64-bit slots of shared memory of a CTA."""
    places = plan.ring * plan.block * plan.vector * _THREADS
    return -(-places * bytes_each(fibres) // 8)


class Ring(Stretch):
    """A `Stretch` whose whole blocks come through a ring.

    Args:
        reader: loads.
        base: offset of the first fibre's first place.
        plan: neighbours of a thread, places of a block, and blocks of the ring.
        words: shared memory of the CTA.
    """

    def __init__(self, reader: Reader, base, plan: Columns, words: th.Words):
        super().__init__(reader, base, plan.vector)
        self.plan = plan
        places, start = plan.ring * plan.block * _THREADS * plan.vector, 0
        self.shared = []
        for buffer in reader.buffers:
            self.shared.append(words.array(start, buffer.dtype))
            start += places * buffer.bytes

    def loop(self, count, first: Callable, times: int, body: Callable, carry: Sequence):
        """As `Stretch.loop`."""
        if times != self.plan.block:
            return super().loop(count, first, times, body, carry)
        depth = self.plan.ring
        for k in range(depth - 1):
            self._copy(th.i32(k), count, first)

        def step(t, values):
            # All but the newest `depth - 2` groups: block t is there.
            nvvm.cp_async_wait_group(depth - 2)
            raw = self._read(t)
            self._copy(arith.addi(t, th.i32(depth - 1)), count, first)
            return body(t, raw, values)

        return th.loop(count, step, carry)

    def _spot(self, t, j):
        """Where place j of block t lies in the arrays of the ring."""
        slot = arith.remui(t, th.i32(self.plan.ring))
        row = arith.addi(arith.muli(slot, th.i32(self.plan.block)), th.i32(j))
        thread = th.thread_in_block()
        place = arith.addi(arith.muli(row, th.i32(_THREADS)), thread)
        return arith.muli(place, th.i32(self.plan.vector))

    def _copy(self, t, count, first):
        """Begin to copy block t; beyond the last, a group of nothing."""
        with th.when(arith.cmpi(arith.CmpIPredicate.ult, t, count)):
            start = first(t)
            for j in range(self.plan.block):
                at = self.reader.offset(
                    self.base, arith.addi(start, th.i64(j)), 1, None, False
                )
                for shared, buffer in zip(
                    self.shared, self.reader.buffers, strict=True
                ):
                    shared.copy(buffer, at, self._spot(t, j), self.plan.vector)
        nvvm.cp_async_commit_group()

    def _read(self, t) -> list[ir.Value]:
        return [
            value
            for j in range(self.plan.block)
            for shared in self.shared
            for value in shared.load(self._spot(t, j), self.plan.vector)
        ]
