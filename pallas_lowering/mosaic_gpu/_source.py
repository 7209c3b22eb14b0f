"""Where a kernel's contributions lie, and how a launch reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._ops import type_of
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State


@dataclass(frozen=True)
class Fibres:
    """Arrays viewed as (outer, n, inner), and what is taken from them along n.

    Args:
        algebra: the reducer.
        leaves: the element leaves, or a partial state's.
        mask: what exists, or None.
        shape: (outer, n, inner).
        flipped: the order along n is the last position's first.
    """

    algebra: Algebra
    leaves: tuple[jax.Array, ...]
    mask: jax.Array | None
    shape: tuple[int, int, int]
    flipped: bool = False

    @property
    def operands(self) -> list[jax.Array]:
        """In the order that `reader` expects."""
        return [*self.leaves, *(() if self.mask is None else (self.mask,))]

    @property
    def widest(self) -> int:
        """Bytes of the widest operand's elements."""
        return max(v.dtype.itemsize for v in self.operands)

    def vector(self, length: int) -> int:
        """How many neighbours along an axis of a length one load may take."""
        v = max(1, 16 // self.widest)
        while length % v:
            v //= 2
        return v


class Reader:
    """Loads contributions in a thread.

    Args:
        fibres: the arrays.
        buffers: the same in a kernel.
    """

    def __init__(self, fibres: Fibres, buffers: Sequence[th.Buffer]):
        self.fibres, self.algebra = fibres, fibres.algebra
        self.buffers = list(buffers[: len(fibres.operands)])
        self.masked = fibres.mask is not None

    def _source(self, position, n: int, exists):
        """Where `n` places lie along the fibre; inside it, whether they exist or not."""
        source = position
        if self.fibres.flipped:
            source = arith.subi(th.i64(self.fibres.shape[1] - n), position)
        return source if exists is None else arith.select(exists, source, th.i64(0))

    def offset(self, base, position, n: int, exists, along: bool) -> ir.Value:
        """Where the load of these places begins: the arguments of `fetch`."""
        source = self._source(position, n if along else 1, exists)
        if not along:
            source = arith.muli(source, th.i64(self.fibres.shape[2]))
        return arith.addi(base, source)

    def fetch(self, base, position, n: int, exists, along: bool) -> list[ir.Value]:
        """What one load of each operand gives: `n` values of each, one after the other.

        Args:
            base: offset of the fibre's first place.
            position: of the first place, as 64 bits; along a row a multiple of n.
            n: successive places of a row (`along`), or neighbouring fibres.
            exists: the bit for all of them, or None.
            along: which of the two.
        """
        offset = self.offset(base, position, n, exists, along)
        found = [b.load(offset, n) for b in self.buffers]
        if along and self.fibres.flipped:
            found = [f[::-1] for f in found]
        return [v for f in found for v in f]

    def places(self, raw: Sequence, position, n: int, exists, along: bool) -> list:
        """`[leaves, exists]` of each of the `n` fetched places, in order."""
        packs = [raw[k * n : (k + 1) * n] for k in range(len(self.buffers))]
        bits = packs.pop() if self.masked else None
        places = []
        for j in range(n):
            flag = exists if bits is None else bits[j]
            if bits is not None and exists is not None:
                flag = arith.andi(bits[j], exists)
            at = arith.addi(position, th.i64(j)) if along and j else position
            places.append([[p[j] for p in packs] + self._index(at), flag])
        return places

    def read(self, base, position, n: int, exists, along: bool) -> list:
        """Fetched places."""
        raw = self.fetch(base, position, n, exists, along)
        return self.places(raw, position, n, exists, along)

    def state(self, place: Sequence) -> State:
        """The state of one place."""
        return self.algebra.element(*place, track=self.masked)

    def like(self, ragged: bool) -> State:
        """Whether the states of places carry a bit for their existence."""
        tracked = self.masked or (ragged and not self.algebra.neutral)
        return State((), th.true() if tracked else None)

    def _index(self, position):
        dtype = self.algebra.spec.index
        if dtype is None or self.algebra.lifted:
            return []
        if self.fibres.flipped:
            position = arith.subi(th.i64(self.fibres.shape[1] - 1), position)
        kind = type_of(dtype)
        is_wide = kind == ir.IntegerType.get_signless(64)
        return [position if is_wide else arith.trunci(kind, position)]


class Source:
    """Places that a walk takes block by block."""

    def fetch(self, first: ir.Value, times: int) -> list[ir.Value]:
        """The loads of `times` places from `first` on."""
        raise NotImplementedError

    def loop(self, count, first: Callable, times: int, body: Callable, carry: Sequence):
        """Walk over blocks, each loaded while the one before it is computed.

        Args:
            count: how many blocks, at least one.
            first: `block -> its first place`.
            times: places of a block.
            body: `(block, loaded, carry) -> carry`.
            carry: what goes from block to block.
        """
        return th.pipelined(count, lambda t: self.fetch(first(t), times), body, carry)


class Stretch(Source):
    """Successive places of neighbouring fibres, for a walk along them.

    Args:
        reader: loads.
        base: offset of the first fibre's first place.
        fibres: how many neighbours one thread walks.
    """

    def __init__(self, reader: Reader, base, fibres: int):
        self.reader, self.base, self.fibres = reader, base, fibres
        _, length, inner = reader.fibres.shape
        self._vector = reader.fibres.vector(length) if inner == 1 else 1

    def _step(self, times):
        return self._vector if times % self._vector == 0 else 1

    def fetch(self, first, times: int) -> list[ir.Value]:
        """The loads of `times` places."""
        raw, v = [], self._step(times)
        for j in range(0, times, v):
            at, n = arith.addi(first, th.i64(j)), v if v > 1 else self.fibres
            raw += self.reader.fetch(self.base, at, n, None, v > 1)
        return raw

    def places(self, raw: Sequence, first, times: int) -> list[list]:
        """For each place, what each fibre has there."""
        found, v = [], self._step(times)
        n = v if v > 1 else self.fibres
        size = n * len(self.reader.buffers)
        for k, j in enumerate(range(0, times, v)):
            at, mine = arith.addi(first, th.i64(j)), raw[k * size : (k + 1) * size]
            places = self.reader.places(mine, at, n, None, v > 1)
            found += [[p] for p in places] if v > 1 else [places]
        return found


class Block:
    """Successive places of neighbouring fibres, a block at a time, where some may lack.

    Args:
        reader: loads.
        plan: neighbours of a thread, and places of a block.
        start: the first block's first place.
        base: offset of the first fibre's first place.
        limit: how many places there are, where the last block may be short; else None.
    """

    def __init__(self, reader: Reader, plan, start, base, limit):
        self.reader, self.plan = reader, plan
        self.start, self.base, self.limit = start, base, limit

    def _at(self, t):
        first = arith.muli(th.i64(t), th.i64(self.plan.block))
        for j in range(self.plan.block):
            local = arith.addi(first, th.i64(j))
            exists = None if self.limit is None else th.less(local, self.limit)
            yield arith.addi(self.start, local), exists

    def fetch(self, t: ir.Value) -> list[ir.Value]:
        """The loads of block `t`."""
        raw = []
        for place, exists in self._at(t):
            raw += self.reader.fetch(self.base, place, self.plan.vector, exists, False)
        return raw

    def places(self, t: ir.Value, raw: Sequence) -> list[list]:
        """For each place of block `t`, what each fibre has there."""
        v = self.plan.vector
        size, found = v * len(self.reader.buffers), []
        for j, (place, exists) in enumerate(self._at(t)):
            mine = raw[j * size : (j + 1) * size]
            found.append(self.reader.places(mine, place, v, exists, False))
        return found
