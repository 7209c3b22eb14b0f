"""Trees over a stream of blocks, whose number is known only at run time."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._ops import constant
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State


class Counter:
    """Partial trees of a stream of equal aligned blocks: one for each set bit of a count.

    Args:
        algebra: the reducer.
        levels: how many bits the count may have.
        like: a block's state, for the structure of what is carried.
    """

    def __init__(self, algebra: Algebra, levels: int, like: State):
        self.algebra, self.levels, self.like = algebra, levels, like

    def empty(self) -> list[ir.Value]:
        """The carry before the first block."""
        zeros = [constant(0, d) for d in self.algebra.dtypes]
        flag = [] if self.like.exists is None else [th.true()]
        return [*zeros, *flag] * self.levels

    def _stack(self, carry):
        k = len(carry) // self.levels if self.levels else 0
        parts = [carry[i * k : i * k + k] for i in range(self.levels)]
        return [self.algebra.unpack(p, self.like) for p in parts]

    def push(self, count: ir.Value, carry: Sequence, block: State) -> list[ir.Value]:
        """The carry after block number `count`."""
        going, out = th.true(), []
        for level, held in enumerate(self._stack(carry)):
            full = th.bit_of(count, level)
            put = arith.andi(going, arith.xori(full, th.true()))
            out += self.algebra.pack(self.algebra.choose(put, block, held))
            joined = self.algebra.merge(held, block)
            going = arith.andi(going, full)
            block = self.algebra.choose(going, joined, block)
        return out

    def total(self, count: ir.Value, carry: Sequence) -> State:
        """The tree over the first `count` blocks; of none, what does not exist.

        Without a bit for existence, and without an exact identity, the count is the
        largest possible one: only its highest bit is set.
        """
        stack = self._stack(carry)
        if self.like.exists is None and not self.algebra.neutral:
            return stack[-1]
        tracked = self.like.exists is not None
        total = self.algebra.nothing() if tracked else self.algebra.identity()
        for level, held in enumerate(stack):
            total = self.algebra.merge(self._guarded(held, count, level), total)
        return total

    def prefix(self, count: ir.Value, carry: Sequence, first: State) -> State:
        """The left fold of the held trees, the largest first, after `first`."""
        state = first
        for level, held in reversed(list(enumerate(self._stack(carry)))):
            state = self.algebra.merge(state, self._guarded(held, count, level))
        return state

    def _guarded(self, state, count, level):
        there = th.bit_of(count, level)
        tracked = state.exists is not None or not self.algebra.neutral
        exists = there if state.exists is None else arith.andi(there, state.exists)
        leaves = state.leaves
        if self.algebra.neutral:
            leaves = self.algebra.pick(exists, leaves, self.algebra.identity().leaves)
        return State(leaves, exists if tracked else None)
