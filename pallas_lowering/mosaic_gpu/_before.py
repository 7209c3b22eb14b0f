"""What a scan starts from, and carries from block to block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._counter import Counter
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State


@dataclass(frozen=True)
class Seed:
    """What is before each fibre, and after each of its chunks.

    Args:
        leaves: of the seed of each fibre; empty for none.
        chunks: leaves of the prefix after each chunk, (outer, chunks, inner); empty
            where there is one chunk.
        exists: whether those prefixes exist, or None.
    """

    leaves: tuple[jax.Array, ...] = ()
    chunks: tuple[jax.Array, ...] = ()
    exists: jax.Array | None = None

    @property
    def operands(self) -> list[jax.Array]:
        """In the order that `Before` expects."""
        flags = () if self.exists is None else (self.exists,)
        return [*self.leaves, *self.chunks, *flags]


class Before:
    """Loads what is before and after a chunk.

    Args:
        fibres: the contributions.
        seed: the arrays.
        buffers: the same in a kernel.
    """

    def __init__(self, fibres: Fibres, seed: Seed, buffers: Sequence):
        self.algebra, self.seed = fibres.algebra, seed
        k, c = len(seed.leaves), len(seed.chunks)
        self._leaves, self._chunks = buffers[:k], buffers[k : k + c]
        self._flag = buffers[k + c] if seed.exists is not None else None
        # A prefix may not exist, and nothing neutral stands in for it.
        may_lack = fibres.mask is not None or not self.algebra.neutral
        self.tracked = may_lack and not seed.leaves

    def _start(self, fibre) -> State:
        if not self._leaves:
            none = self.algebra.nothing() if self.tracked else self.algebra.identity()
            return none
        return State(tuple(b.load(fibre)[0] for b in self._leaves))

    def after(self, unit) -> State:
        """The prefix after a chunk."""
        leaves = tuple(b.load(unit)[0] for b in self._chunks)
        if not self.tracked or self._flag is None:
            return State(leaves)
        return State(leaves, self._flag.load(unit)[0])

    def first(self, fibre, chunk, unit, inner: int) -> State:
        """The prefix before a chunk: the seed, or what is after the one before it."""
        start = self._start(fibre)
        if not self._chunks:
            return start
        head = th.equal(chunk, th.i64(0))
        previous = arith.subi(unit, th.i64(inner))
        found = self.after(arith.select(head, unit, previous))
        return self.algebra.choose(head, start, found)


class Carry:
    """What goes from block to block: the prefix, or the trees that it consists of.

    Args:
        algebra: the reducer.
        fixed: keep the partial trees of `fixed_tree`.
        blocks: how many blocks there may be.
        first: what is before the first block.
        like: a block's state.
    """

    def __init__(self, algebra: Algebra, fixed: bool, blocks: int, first, like):
        self.algebra, self.first = algebra, first
        levels = max(1, blocks.bit_length()) if fixed and blocks > 1 else 0
        self.counter = Counter(algebra, levels, like) if levels else None

    def start(self) -> list[ir.Value]:
        """Before the first block."""
        if self.counter is not None:
            return self.counter.empty()
        return self.algebra.pack(self.first)

    def before(self, count, carry) -> State:
        """The prefix before block number `count`."""
        if self.counter is None:
            return self.algebra.unpack(carry, self.first)
        found = self.counter.prefix(count, carry, self.first)
        return self.algebra.tracked(found, self.first)

    def push(self, count, carry, block: State) -> tuple[list[ir.Value], State]:
        """The carry and the prefix after one more block."""
        if self.counter is not None:
            carry = self.counter.push(count, carry, block)
            after = self.before(arith.addi(count, th.i32(1)), carry)
            return carry, after
        before = self.algebra.unpack(carry, self.first)
        after = self.algebra.merge(before, block)
        after = self.algebra.tracked(after, self.first)
        if self.first.exists is None:
            after = State(after.leaves)
        return self.algebra.pack(after), after
