"""What a scan stores at each place."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State


class Shown:
    """A scan's results: prefixes, and the state after everything.

    Args:
        algebra: the reducer.
        shape: (outer, n, inner) of the prefixes.
        exclusive: leave the place's own contribution out.
        final: also store the last state.
        seeded: something is before the first place.
        partial: store raw states and whether they exist.
        flipped: the order along n is the last position's first.
    """

    def __init__(
        self, algebra: Algebra, shape, exclusive, final, seeded, partial, flipped
    ):
        self.flipped = flipped
        self.algebra, self.shape = algebra, shape
        self.exclusive, self.final = exclusive, final
        self.seeded, self.partial = seeded, partial
        kinds = [*algebra.dtypes, np.dtype(bool)] if partial else algebra.out
        outer, _, inner = shape
        self.outs = [jax.ShapeDtypeStruct(shape, d) for d in kinds]
        if final:
            last = [jax.ShapeDtypeStruct((outer, inner), d) for d in algebra.dtypes]
            self.outs += last

    def values(self, position, before: State, after: State) -> list[ir.Value]:
        """What one place shows, of the prefixes before and after it."""
        state = before if self.exclusive else after
        if self.exclusive and not self.seeded and state.exists is None:
            # The value of nothing may differ from the identity in bits.
            some = th.less(th.i64(0), position)
            state = State(state.leaves, some)
        if self.partial:
            flag = th.true() if state.exists is None else state.exists
            return [*state.leaves, flag]
        return self.algebra.result(state)

    def store(self, program: Program, offset, columns: Sequence[Sequence]) -> None:
        """Neighbouring places: `columns[i]` are the values of one."""
        buffers = program.outputs[: len(columns[0])]
        for buffer, values in zip(buffers, zip(*columns, strict=True), strict=True):
            buffer.store(values, offset)

    def place(self, program: Program, base, fibre, position, pairs: Sequence) -> None:
        """Store one place of neighbouring fibres.

        Args:
            program: the arrays.
            base, fibre: the offset of the first fibre's first place, and its number.
            position: of the place, in the scan's order.
            pairs: of each fibre the prefixes before and after it.
        """
        n, inner = self.shape[1:]
        source = arith.subi(th.i64(n - 1), position) if self.flipped else position
        offset = arith.addi(base, arith.muli(source, th.i64(inner)))
        self.store(program, offset, [self.values(position, *pair) for pair in pairs])
        for j, (_, after) in enumerate(pairs):
            mine = arith.addi(fibre, th.i64(j))
            self.store_final(program, mine, position, after)

    def store_final(self, program: Program, fibre, position, after: State) -> None:
        """The raw state, in the thread that shows the last place."""
        if not self.final:
            return
        last = th.equal(position, th.i64(self.shape[1] - 1))
        with th.when(last):
            leaves = self.algebra.settled(after).leaves
            buffers = program.outputs[-len(leaves) :]
            for buffer, value in zip(buffers, leaves, strict=True):
                buffer.store([value], fibre)
