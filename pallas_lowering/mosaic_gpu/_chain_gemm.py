"""Products of matrices with the order of K kept: a chain for each element of the result.

Each product rounds, then each sum, on the ordinary units: tensor cores have an order of
their own. A thread keeps 8 x 8 chains in registers, so that what it reads from shared
memory serves eight of them; blocks of K come ahead by asynchronous copies.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._ops import constant
from jaxtile.pallas_lowering.mosaic_gpu._region import Region

TILE, BLOCK = 128, 8
_WARPS, _RING, _VECTOR = 8, 4, 4
_SIDE = 16
_SLICE = BLOCK * TILE
_FLOAT = 4


def _quads(number: ir.Value) -> list[ir.Value]:
    """The first of each four neighbours that a thread has along one side of a tile."""
    first = arith.muli(number, th.i32(_VECTOR))
    return [first, arith.addi(first, th.i32(TILE // 2))]


class _Cta:
    """One tile of the result.

    Args:
        program: the arrays: a, b, perhaps the seed, and the result.
        shape: (batch, K as it lies in memory, m, n).
        count: how many products there are.
    """

    def __init__(self, program: Program, shape, count: int):
        self.program, self.shape, self.count = program, shape, count
        _, _, m, n = shape
        rows, columns = m // TILE, n // TILE
        rest, column = th.divided(th.i64(th.block()), columns)
        self.batch, row = th.divided(rest, rows)
        self.thread = th.thread_in_block()
        y, x = th.divided(self.thread, _SIDE)
        self.rows, self.columns = _quads(y), _quads(x)
        self.row, self.column = (arith.muli(v, th.i64(TILE)) for v in (row, column))
        side = _RING * _SLICE * _FLOAT
        self.shared = [program.words.array(k * side, jnp.float32) for k in (0, 1)]

    def _copy(self, t):
        """Begin to copy block t of K; beyond the last, a group of nothing."""
        _, k, m, n = self.shape
        blocks = -(-self.count // BLOCK)
        with th.when(arith.cmpi(arith.CmpIPredicate.slt, t, th.i32(blocks))):
            step, place = th.divided(self.thread, TILE // _VECTOR)
            place = arith.muli(place, th.i32(_VECTOR))
            at = arith.addi(arith.muli(t, th.i32(BLOCK)), step)
            line = arith.addi(arith.muli(self.batch, th.i64(k)), th.i64(at))
            into = arith.addi(arith.muli(step, th.i32(TILE)), place)
            into = arith.addi(self._slot(t), into)
            for shared, source, size, start in zip(
                self.shared,
                self.program.inputs[:2],
                (m, n),
                (self.row, self.column),
                strict=True,
            ):
                offset = arith.addi(arith.muli(line, th.i64(size)), start)
                offset = arith.addi(offset, th.i64(place))
                shared.copy(source, offset, into, _VECTOR)
        nvvm.cp_async_commit_group()

    def _slot(self, t):
        return arith.muli(arith.remui(t, th.i32(_RING)), th.i32(_SLICE))

    def _steps(self, t, sums, times: int):
        """The chains after `times` products of block t."""
        for k in range(times):
            line = arith.addi(self._slot(t), th.i32(k * TILE))
            left, right = (
                [v for q in quads for v in shared.load(arith.addi(line, q), _VECTOR)]
                for shared, quads in zip(
                    self.shared, (self.rows, self.columns), strict=True
                )
            )
            pairs = [(x, y) for x in left for y in right]
            # Two ops without flags: nothing contracts them.
            sums = [
                arith.addf(z, arith.mulf(x, y))
                for z, (x, y) in zip(sums, pairs, strict=True)
            ]
        return sums

    def chains(self, sums):
        """All chains, over the whole of K."""
        for t in range(_RING - 1):
            self._copy(th.i32(t))

        def ahead(t):
            nvvm.cp_async_wait_group(_RING - 2)
            # Block t is there for all, and all have done with the one before it.
            th.barrier()
            self._copy(arith.addi(t, th.i32(_RING - 1)))

        def step(t, values):
            ahead(t)
            return self._steps(t, values, BLOCK)

        whole, rest = divmod(self.count, BLOCK)
        sums = th.loop(th.i32(whole), step, sums)
        if rest:
            ahead(th.i32(whole))
            sums = self._steps(th.i32(whole), sums, rest)
        return sums

    def places(self):
        """The offset in the result of each four neighbours of this thread."""
        _, _, m, n = self.shape
        for quad in self.rows:
            for i in range(_VECTOR):
                row = arith.addi(self.row, th.i64(arith.addi(quad, th.i32(i))))
                row = arith.addi(arith.muli(self.batch, th.i64(m)), row)
                line = arith.addi(arith.muli(row, th.i64(n)), self.column)
                for column in self.columns:
                    yield arith.addi(line, th.i64(column))


def multiply(
    a: jax.Array, b: jax.Array, c: jax.Array | None, count: int, out, finish: Callable
) -> jax.Array:
    """Run the launch.

    Args:
        a, b: float32, (batch, K, m) and (batch, K, n); m and n are multiples of `TILE`,
            K of `BLOCK`.
        c: (batch, m, n), float32, or None: then chains start from -0.0.
        count: how many products there are, at most K.
        out: dtype of the result.
        finish: the epilogue on scalars, `accumulator -> [result]`.

    Returns:
        The result, (batch, m, n).
    """
    batch, k, m = a.shape
    n = b.shape[2]
    region = Region(finish, [jnp.float32])

    def body(program: Program):
        cta = _Cta(program, (batch, k, m, n), count)
        if c is None:
            sums = [constant(-0.0, jnp.float32)] * (len(cta.rows) * _VECTOR) ** 2
        else:
            sums = [
                v for at in cta.places() for v in program.inputs[2].load(at, _VECTOR)
            ]
        sums = cta.chains(sums)
        for q, at in enumerate(cta.places()):
            found = [region(z)[0] for z in sums[q * _VECTOR : (q + 1) * _VECTOR]]
            program.outputs[0].store(found, at)

    (z,) = launch(
        body,
        [jax.ShapeDtypeStruct((batch, m, n), out)],
        [a, b, *(() if c is None else (c,))],
        blocks=batch * (m // TILE) * (n // TILE),
        warps=_WARPS,
        slots=2 * _RING * _SLICE * _FLOAT // 8,
    )
    return z
