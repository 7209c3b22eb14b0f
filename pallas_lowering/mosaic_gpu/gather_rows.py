"""Elements picked along rows: a CTA a row, which lies in shared memory if it fits."""

from __future__ import annotations

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._ring import COPIES

_WARPS = 8
_THREADS = th.WARP * _WARPS
# Index vectors that a thread reads ahead, and their length.
_AHEAD, _VECTOR = 4, 4
_MOST_BYTES = 96 * 1024


def _copied(n: int, itemsize: int) -> int:
    """Elements of one asynchronous copy, or 0: the row stays where it is."""
    if n * itemsize > _MOST_BYTES:
        return 0
    sizes = [b // itemsize for b in COPIES if b >= itemsize]
    return max((v for v in sizes if n % v == 0), default=0)


class _Row:
    """One CTA's row.

    Args:
        program: x, index and fill; the result.
        n, m: places of a row, and how many are picked.
    """

    def __init__(self, program: Program, n: int, m: int):
        self.x, self.index, self.fill = program.inputs
        self.out, self.words = program.outputs[0], program.words
        self.n, self.m = n, m
        self.v = _VECTOR if m % _VECTOR == 0 else 1
        row = th.i64(th.block())
        self.source, self.target = (arith.muli(row, th.i64(k)) for k in (n, m))
        self.thread = th.thread_in_block()
        self.table = self.x
        self.copy = _copied(n, self.x.bytes)

    def bring(self) -> None:
        """Begin to copy the row to shared memory."""
        if not self.copy:
            return
        shared = self.words.array(0, self.x.dtype)
        every = _THREADS * self.copy
        for k in range(0, self.n, every):
            place = arith.muli(self.thread, th.i32(self.copy))
            place = arith.addi(place, th.i32(k))
            with th.when(th.less(place, th.i32(self.n))):
                at = arith.addi(self.source, th.i64(place))
                shared.copy(self.x, at, place, self.copy)
        nvvm.cp_async_commit_group()
        self.table, self.source = shared, th.i64(0)

    def _places(self, t):
        """The first place of each of this thread's index vectors of turn t."""
        first = arith.muli(t, th.i32(_AHEAD * _THREADS * self.v))
        mine = arith.addi(first, arith.muli(self.thread, th.i32(self.v)))
        for k in range(_AHEAD):
            place = arith.addi(mine, th.i32(k * _THREADS * self.v))
            yield place, th.less(place, th.i32(self.m))

    def fetch(self, t) -> list[ir.Value]:
        """The indices of turn t."""
        found = []
        for place, there in self._places(t):
            at = arith.select(there, place, th.i32(0))
            found += self.index.load(arith.addi(self.target, th.i64(at)), self.v)
        return found

    def pick(self, t, indices) -> None:
        """What the indices of turn t name."""
        (other,) = self.fill.load(th.i64(0))
        for k, (place, there) in enumerate(self._places(t)):
            found = []
            for index in indices[k * self.v : (k + 1) * self.v]:
                # As a number without a sign what is negative is beyond the end.
                inside = arith.cmpi(arith.CmpIPredicate.ult, index, th.i32(self.n))
                at = arith.select(inside, index, th.i32(0))
                (value,) = self.table.load(arith.addi(self.source, th.i64(at)))
                found.append(arith.select(inside, value, other))
            with th.when(there):
                self.out.store(found, arith.addi(self.target, th.i64(place)))


def gather_rows(x: jax.Array, index: jax.Array, fill: jax.Array) -> jax.Array:
    """Run the launch.

    Args:
        x: (rows, n) of unsigned integers.
        index: (rows, m), int32.
        fill: (1,), for an index outside [0, n).

    Returns:
        The result, (rows, m).
    """
    (rows, n), m = x.shape, index.shape[1]

    def body(program: Program):
        row = _Row(program, n, m)
        row.bring()
        turns = -(-m // (_AHEAD * _THREADS * row.v))
        first = row.fetch(th.i32(0))
        if row.copy:
            nvvm.cp_async_wait_group(0)
            th.barrier()

        def step(t, indices):
            next_turn = arith.minsi(arith.addi(t, th.i32(1)), th.i32(turns - 1))
            ahead = row.fetch(next_turn)
            row.pick(t, indices)
            return ahead

        th.loop(th.i32(turns), step, first)

    itemsize = np.dtype(x.dtype).itemsize
    slots = -(-n * itemsize // 8) if _copied(n, itemsize) else 0
    (found,) = launch(
        body,
        [jax.ShapeDtypeStruct(index.shape, x.dtype)],
        [x, index, fill],
        blocks=rows,
        warps=_WARPS,
        slots=slots,
    )
    return found
