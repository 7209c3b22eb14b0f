"""Thread code for kernels on whole arrays: addresses, loads, loops, shuffles, barriers.

A kernel body is one block of inline code that every thread of a CTA runs, written in the
arith, llvm, scf and nvvm dialects. Global memory is reached by 64-bit element offsets,
so neither size nor alignment of an array is limited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf, vector

from jaxtile.pallas_lowering.mosaic_gpu._ops import type_of
from jaxtile.pallas_lowering.mosaic_gpu._region import known

WARP, WARPGROUP = 32, 128
_INT = arith.CmpIPredicate


def _bits(width: int) -> ir.Type:
    return ir.IntegerType.get_signless(width)


def i32(value: int) -> ir.Value:
    """A 32-bit constant."""
    return arith.constant(_bits(32), value)


def i64(value: Any) -> ir.Value:
    """A 64-bit constant, or a 32-bit count widened."""
    if isinstance(value, ir.Value):
        return value if value.type == _bits(64) else arith.extui(_bits(64), value)
    return arith.constant(_bits(64), value)


def true() -> ir.Value:
    """The one-bit constant."""
    return arith.constant(_bits(1), 1)


def less(a: ir.Value, b: ir.Value) -> ir.Value:
    """a < b of signed integers."""
    return arith.cmpi(_INT.slt, a, b)


def equal(a: ir.Value, b: ir.Value) -> ir.Value:
    """a == b of integers."""
    return arith.cmpi(_INT.eq, a, b)


def bit_of(value: ir.Value, bit: int) -> ir.Value:
    """Whether a 32-bit value has a bit set."""
    return arith.cmpi(_INT.ne, arith.andi(value, i32(1 << bit)), i32(0))


def divided(value: ir.Value, by: int) -> tuple[ir.Value, ir.Value]:
    """Quotient and remainder by a positive constant."""
    if by == 1:
        return value, arith.constant(value.type, 0)
    d = arith.constant(value.type, by)
    return arith.divui(value, d), arith.remui(value, d)


def thread_in_block() -> ir.Value:
    """This thread's number in its CTA."""
    return utils.thread_idx()


def block() -> ir.Value:
    """This CTA's number in the grid, as 32 bits."""
    parts = [gpu.block_id(d) for d in gpu.Dimension]
    sizes = [gpu.grid_dim(d) for d in gpu.Dimension]
    flat = arith.addi(parts[1], arith.muli(sizes[1], parts[2]))
    flat = arith.addi(parts[0], arith.muli(sizes[0], flat))
    return arith.index_cast(_bits(32), flat)


class Buffer:
    """An array in global memory, addressed by element offset; bool as bytes.

    Args:
        ref: the memref.
        dtype: of its elements in registers.
    """

    def __init__(self, ref: ir.Value, dtype: Any):
        # The global address space makes plain global loads of generic ones.
        base = llvm.addrspacecast(llvm.PointerType.get(1), utils.memref_ptr(ref))
        self._begin(base, dtype)

    def _begin(self, base: ir.Value, dtype: Any) -> None:
        self.base, self.dtype = base, np.dtype(dtype)
        # LLVM has no types of bool in memory, or of 8-bit floats.
        self._as_byte = self.dtype.itemsize == 1 and self.dtype.kind not in "iu"
        stored = np.int8 if self._as_byte else self.dtype
        self.kind, self.bytes = type_of(stored), self.dtype.itemsize

    def _at(self, offset):
        return utils.getelementptr(self.base, [i64(offset)], self.kind)

    def load(self, offset: ir.Value, n: int = 1) -> list[ir.Value]:
        """`n` neighbouring elements; the offset is a multiple of `n`."""
        loaded: list[Any]
        if n == 1:
            loaded = [llvm.load(self.kind, self._at(offset), alignment=self.bytes)]
        else:
            kind = ir.VectorType.get((n,), self.kind)
            pack = llvm.load(kind, self._at(offset), alignment=n * self.bytes)
            loaded = [vector.extract(pack, [], [k]) for k in range(n)]
        if self.dtype == bool:
            zero = arith.constant(self.kind, 0)
            loaded = [arith.cmpi(_INT.ne, v, zero) for v in loaded]
        elif self._as_byte:
            loaded = [utils.bitcast(v, type_of(self.dtype)) for v in loaded]
        return loaded

    def store(self, values: Sequence[ir.Value], offset: ir.Value) -> None:
        """Neighbouring elements; the offset is a multiple of their number."""
        if self.dtype == bool:
            values = [arith.extui(self.kind, v) for v in values]
        elif self._as_byte:
            values = [utils.bitcast(v, self.kind) for v in values]
        n = len(values)
        if n == 1:
            llvm.store(values[0], self._at(offset), alignment=self.bytes)
            return
        pack = llvm.mlir_undef(ir.VectorType.get((n,), self.kind))
        for k, v in enumerate(values):
            pack = vector.insert(v, pack, [], [k])
        llvm.store(pack, self._at(offset), alignment=n * self.bytes)


def loop(count: ir.Value, body: Callable, carry: Sequence[ir.Value]) -> list[ir.Value]:
    """`carry = body(i, carry)` for i in [0, count), of 32-bit counts."""
    start, step = i32(0), i32(1)
    op = scf.ForOp(start, count, step, list(carry))
    with ir.InsertionPoint(op.body):
        scf.yield_(list(body(op.induction_variable, list(op.inner_iter_args))))
    results: Any = op.results
    return list(results)


def repeat(test: Callable, body: Callable, carry: Sequence[ir.Value]) -> list[ir.Value]:
    """`carry = body(carry)` while the bit `test(carry)` is set, the same in all threads."""
    kinds = [v.type for v in carry]
    op: Any = scf.WhileOp(kinds, list(carry))
    before, after = (r.blocks.append(*kinds) for r in (op.before, op.after))
    with ir.InsertionPoint(before):
        values = list(before.arguments)
        scf.condition(test(values), values)
    with ir.InsertionPoint(after):
        scf.yield_(list(body(list(after.arguments))))
    return list(op.results)


def prefetched(
    count: ir.Value, fetch: Callable, body: Callable, carry: Sequence[ir.Value]
) -> list[ir.Value]:
    """`pipelined` with one step in the loop: short, but loaded registers are copied."""
    last = arith.subi(count, i32(1))
    first = list(fetch(i32(0)))
    k = len(first)

    def step(t, values):
        ahead = fetch(arith.minsi(arith.addi(t, i32(1)), last))
        return [*ahead, *body(t, values[:k], values[k:])]

    return loop(count, step, [*first, *carry])[k:]


def pipelined(
    count: ir.Value, fetch: Callable, body: Callable, carry: Sequence[ir.Value]
) -> list[ir.Value]:
    """A loop that loads what the next step needs before it computes the present one.

    Two steps are written out, so that loaded registers need no copy from step to step:
    a copy would wait for the load.

    Args:
        count: how many steps, at least one.
        fetch: `step -> loaded values`; steps beyond the last load that again.
        body: `(step, loaded, carry) -> carry`.
        carry: what goes from step to step.
    """
    last = arith.subi(count, i32(1))

    def bounded(step):
        return list(fetch(arith.minsi(step, last)))

    first = bounded(i32(0))
    k = len(first)

    def pair(t, values):
        even = arith.muli(t, i32(2))
        odd = arith.addi(even, i32(1))
        ahead = bounded(odd)
        carried = body(even, values[:k], values[k:])
        beyond = bounded(arith.addi(even, i32(2)))
        return [*beyond, *body(odd, ahead, carried)]

    values = loop(arith.shrui(count, i32(1)), pair, [*first, *carry])
    return branch(
        bit_of(count, 0),
        [v.type for v in values[k:]],
        lambda: body(last, values[:k], values[k:]),
        lambda: values[k:],
    )


@contextlib.contextmanager
def when(condition: ir.Value) -> Iterator[None]:
    """Run a block only in threads where a bit is set."""
    with utils.when(condition):
        yield


def _by_words(value, move):
    """Move a value of any width between threads as 32-bit words."""
    width = utils.bitwidth(value.type)
    word = _bits(32)
    if width == 32:
        return utils.bitcast(move(utils.bitcast(value, word)), value.type)
    if width < 32:
        narrow = _bits(width)
        wide = arith.extui(word, utils.bitcast(value, narrow))
        return utils.bitcast(arith.trunci(narrow, move(wide)), value.type)
    whole = utils.bitcast(value, _bits(64))
    high = arith.trunci(word, arith.shrui(whole, i64(32)))
    low = move(arith.trunci(word, whole))
    both = arith.shli(i64(move(high)), i64(32))
    return utils.bitcast(arith.ori(both, i64(low)), value.type)


def shuffle(value: ir.Value, kind: str, lane: Any) -> ir.Value:
    """A value from another lane of the warp.

    Args:
        value: of any register type up to 64 bits.
        kind: "bfly" (distance), "up", "down" (distance) or "idx" (lane).
        lane: the distance or lane, an int or 32-bit value.
    """
    if known(value) is not None:
        return value  # a constant of the code is every lane's
    clamp = 0 if kind == "up" else WARP - 1
    where = lane if isinstance(lane, ir.Value) else i32(lane)
    which = getattr(nvvm.ShflKind, kind)
    return _by_words(
        value, lambda v: nvvm.shfl_sync(i32(-1), v, where, i32(clamp), which)
    )


def ballot(bit: ir.Value) -> ir.Value:
    """A word with the bit of each lane of the warp."""
    return nvvm.vote_sync(i32(-1), bit, nvvm.VoteSyncKind.ballot)


def select(condition: ir.Value, a: Any, b: Any) -> Any:
    """`a` where the bit is set, else `b`."""
    number = known(a)
    if a is b or (number is not None and number == known(b) and number != 0):
        return a
    return arith.select(condition, a, b)


def branch(
    condition: ir.Value, kinds: Sequence[ir.Type], then: Callable, other: Callable
) -> list[ir.Value]:
    """The values that one of two blocks of code gives.

    Args:
        condition: the same in all lanes of a warp, if the blocks shuffle.
        kinds: types of the values.
        then, other: write the blocks.
    """
    op: Any = scf.IfOp(condition, list(kinds), has_else=True)
    for place, code in ((op.then_block, then), (op.else_block, other)):
        with ir.InsertionPoint(place):
            scf.yield_(list(code()))
    return list(op.results)


class Shared(Buffer):
    """An array in shared memory.

    Args:
        memory: the memref.
        offset: of the array, in bytes.
        dtype: of its elements in registers.
    """

    def __init__(self, memory: ir.Value, offset: int, dtype: Any):
        byte = ir.IntegerType.get_signless(8)
        base = utils.getelementptr(utils.memref_ptr(memory), [offset], byte)
        self._begin(base, dtype)

    def copy(self, source: Buffer, at: ir.Value, offset: ir.Value, n: int) -> None:
        """Begin to copy `n` neighbouring elements to `offset`; the thread goes on."""
        space = llvm.PointerType.get(3)
        into = llvm.addrspacecast(space, self._at(offset))
        size = n * self.bytes
        # 16 bytes may pass by the first cache.
        kind = nvvm.LoadCacheModifierKind
        modifier = kind.CG if size == 16 else kind.CA
        nvvm.cp_async_shared_global(into, source._at(at), size, modifier)


class Words:
    """Shared memory as 64-bit slots that hold one register value each."""

    def __init__(self, ref: ir.Value):
        self.ref, self.base = ref, utils.memref_ptr(ref)

    def array(self, offset: int, dtype: Any) -> Shared:
        """An array of plain elements from a byte on."""
        return Shared(self.ref, offset, dtype)

    def _at(self, slot):
        return utils.getelementptr(self.base, [slot], _bits(64))

    def write(self, slot: ir.Value, value: ir.Value) -> None:
        """Store one value."""
        bits = utils.bitcast(value, _bits(utils.bitwidth(value.type)))
        wide = bits if bits.type == _bits(64) else arith.extui(_bits(64), bits)
        llvm.store(wide, self._at(slot), alignment=8)

    def read(self, slot: ir.Value, kind: ir.Type) -> ir.Value:
        """Load a value of a register type."""
        bits = llvm.load(_bits(64), self._at(slot), alignment=8)
        width = utils.bitwidth(kind)
        if width < 64:
            bits = arith.trunci(_bits(width), bits)
        return utils.bitcast(bits, kind)


def warp_barrier() -> None:
    """Wait for all lanes of the warp, and for what they wrote to shared memory."""
    nvvm.bar_warp_sync(i32(-1))


def barrier() -> None:
    """Wait for all threads of the CTA."""
    gpu.barrier()


def warpgroup_barrier() -> None:
    """Wait for all threads of the warpgroup.

    The op, unlike text of it in inline assembly, is convergent: LLVM must not move it
    into the branches of one condition before and after it, where it never ends.
    """
    # Barrier 0 is the CTA's.
    number = arith.addi(divided(thread_in_block(), WARPGROUP)[0], i32(1))
    nvvm.barrier(barrier_id=number, number_of_threads=i32(WARPGROUP))
