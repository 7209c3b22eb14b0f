"""A machine for lowered Mosaic GPU kernels: the threads of a CTA in step, in NumPy.

It runs the module that a kernel in Lane semantics lowers to, so that values, shuffles
and traffic through shared memory can be checked where there is no GPU. Every float op
rounds, nothing contracts, and an access to shared memory that needs a barrier which is
not there is an error.
"""

import re

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir

from simt_flow import Flow
from simt_memory import WARP, WARPGROUP, Ledger
from simt_values import Values, dtype_of, element, signed

_SHARED, _ARENA = 1 << 40, 1 << 22
_ENDS = "scf_yield scf_condition gpu_terminator func_return gpu_return".split()


class Machine(Values, Flow):
    """Runs a module's kernel over arrays.

    Args:
        text: the module.
        whole: all of it is our code, no Pallas body.
    """

    def __init__(self, text, whole=False):
        self.whole = whole
        self.context = mlir.make_ir_context()
        self.context.allow_unregistered_dialects = True
        with self.context:
            mgpu.dialect.register_dialect(self.context)
            self.module = ir.Module.parse(text, self.context)

    def run(self, arrays, outs):
        """The kernel's results, for inputs and `ShapeDtypeStruct`s of the results."""
        self.arena = np.zeros(_ARENA, np.uint8)
        self.inside, self.shared = np.zeros(_ARENA, bool), None
        table, end, spots = 64, 4096, []
        every = [np.ascontiguousarray(a) for a in arrays]
        every += [np.zeros(o.shape, o.dtype) for o in outs]
        for k, a in enumerate(every):
            raw = np.frombuffer(a.tobytes(), np.uint8)
            self.arena[end : end + raw.size] = raw
            self.inside[end : end + raw.size] = True
            self.arena[table + 8 * k : table + 8 * k + 8] = np.frombuffer(
                np.int64(end).tobytes(), np.uint8
            )
            self.inside[table + 8 * k : table + 8 * k + 8] = True
            spots.append(end)
            end += -(-raw.size // 1024) * 1024
        self.threads, self.env, self.copies = 1, {}, [[]]
        func = [
            op
            for op in self.module.body.operations
            if op.operation.name == "func.func" and len(op.regions[0].blocks)
        ][0]
        block = func.regions[0].blocks[0]
        self.mask = np.ones(1, bool)
        self.set(block.arguments[0], np.zeros(1, np.int64))
        self.set(block.arguments[1], np.full(1, table, np.int64))
        with np.errstate(all="ignore"):
            self.block(block)
        found = []
        for spot, o in zip(spots[len(arrays) :], outs, strict=True):
            size = int(np.prod(o.shape)) * np.dtype(o.dtype).itemsize
            raw = self.arena[spot : spot + size].tobytes()
            found.append(np.frombuffer(raw, o.dtype).reshape(o.shape))
        return found

    def set(self, value, data):
        self.env[value] = data

    def get(self, value):
        data = self.env[value]
        if isinstance(data, np.ndarray) and data.shape[0] != self.threads:
            return np.repeat(data, self.threads, axis=0)
        return data

    def block(self, block):
        for op in block.operations:
            op = op.operation
            name = op.name.replace(".", "_")
            args = [self.get(v) for v in op.operands]
            if name in _ENDS:
                return args
            handler = getattr(self, f"op_{name}", None)
            if handler is None:
                handler = self._simple(name)
            found = handler(op, *args)
            if len(op.results) == 1:
                found = [found]
            for result, data in zip(op.results, found or [], strict=True):
                self.set(result, data)
        return []

    # Structure.

    def op_llvm_mlir_global(self, op):
        return []

    def op_gpu_launch(self, op, *args):
        body = op.regions[0].blocks[0]
        operands = [int(self.env[v][0]) for v in op.operands if str(v.type) == "index"]
        self.grid, threads = operands[:3], int(np.prod(operands[3:6]))
        assert self.grid[1:] == [1, 1]
        outside = dict(self.env)
        for cta in range(self.grid[0]):
            self.cta = cta
            self.env = dict(outside)
            self.threads = threads
            self.mask = np.ones(threads, bool)
            self.races = Ledger(threads)
            # What nobody wrote is no zero.
            self.shared = np.full(_ARENA, 0xFF, np.uint8)
            for argument in body.arguments:
                self.set(argument, np.zeros(threads, np.int64))
            self.block(body)
        self.threads, self.mask, self.env = 1, np.ones(1, bool), outside
        return [np.zeros(1, np.int64)] * len(op.results)

    # Threads.

    def _of_thread(self, op, thread, other):
        return (
            np.full(self.threads, other, np.int64)
            if "x" not in str(op.attributes["dimension"])
            else thread
        )

    def op_gpu_thread_id(self, op):
        return self._of_thread(op, np.arange(self.threads), 0)

    def op_gpu_block_dim(self, op):
        return self._of_thread(op, np.full(self.threads, self.threads), 1)

    def op_gpu_block_id(self, op):
        return self._of_thread(op, np.full(self.threads, self.cta), 0)

    def op_gpu_grid_dim(self, op):
        return self._of_thread(op, np.full(self.threads, self.grid[0]), 1)

    def op_nvvm_elect_sync(self, op, *args):
        return np.arange(self.threads) % WARP == 0

    def op_nvvm_shfl_sync(self, op, members, value, where, clamp):
        assert self.mask.reshape(-1, WARP).all(axis=1).any()
        lane = np.arange(self.threads) % WARP
        kind, where = str(op.attributes["kind"]), signed(where).astype(np.int64)
        if "bfly" in kind:
            source = lane ^ where
        elif "idx" in kind:
            source = where % WARP
        else:
            source = lane + where * (1 if "down" in kind else -1)
        source = np.where((source < 0) | (source >= WARP), lane, source)
        base = np.arange(self.threads) - lane
        assert self.mask[(base + source)[self.mask]].all(), "a lane that is not there"
        return value[base + source]

    def op_nvvm_vote_sync(self, op, members, bit):
        assert "ballot" in str(op.attributes["kind"])
        lanes = (bit & self.mask).reshape(-1, WARP).astype(np.uint64)
        words = (lanes << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
        return np.repeat(words.astype(np.uint32), WARP)

    def op_gpu_barrier(self, op, *args):
        self._barrier(None)
        return []

    def op_nvvm_barrier(self, op, number, threads):
        assert (threads == WARPGROUP).all()
        own = np.arange(self.threads) // WARPGROUP + 1
        assert (number == own)[self.mask].all(), "the barrier of another warpgroup"
        self._barrier(WARPGROUP)
        return []

    def op_nvvm_bar_warp_sync(self, op, members):
        self._barrier(WARP)
        return []

    def _barrier(self, size):
        """Groups of a size meet, or the whole CTA."""
        groups = self.mask.reshape(-1, size or self.threads)
        assert (groups.all(axis=1) | ~groups.any(axis=1)).all(), (
            "a barrier not met by all"
        )
        self.races.barrier(self.mask, size)

    def op_llvm_inline_asm(self, op, *args):
        text = op.attributes["asm_string"].value
        if "bar.sync" in text:
            # LLVM may move it into the branches of a condition, where it never ends.
            assert not self.whole, "a barrier that is not convergent"
            self._barrier(WARPGROUP)
        name = text.split()[0]
        if name == "div.rn.f32":
            return args[0] / args[1]
        if name == "sqrt.rn.f32":
            return np.sqrt(args[0])
        if len(op.results):
            return self._special(text, op, args)
        return []

    def _special(self, text, op, args):
        if "void" in str(op.results[0].type):
            return np.zeros(self.threads, bool)
        raise NotImplementedError(text)

    def op_nvvm_fence_proxy(self, op, *args):
        return []

    # Addresses: of the arena, or of shared memory.

    def op_llvm_getelementptr(self, op, base, *dynamic):
        static = [int(i) for i in op.attributes["rawConstantIndices"]]
        kind = op.attributes["elem_type"].value
        count = int(np.prod(kind.shape)) if isinstance(kind, ir.VectorType) else 1
        size = count * dtype_of(element(kind)).itemsize
        (index,) = static
        offset = signed(dynamic[0]).astype(np.int64) if dynamic else index
        return base + offset * size

    def _bytes(self, address, size):
        """The memory, and the bytes in it, that the present threads mean."""
        found = address[self.mask]
        shared = found >= _SHARED
        assert shared.all() or not shared.any()
        if len(found) and shared.all():
            arena, found = self.shared, found - _SHARED
        else:
            arena = self.arena
        if len(found):
            assert found.min() >= 0
            assert found.max() + size <= _ARENA
            assert (found % min(size, 16) == 0).all(), "not aligned"
        spots = found[:, None] + np.arange(size)
        if arena is self.arena:
            assert self.inside[spots].all(), "outside every array"
        return arena, spots

    def _load(self, address, kind):
        n = int(np.prod(kind.shape)) if isinstance(kind, ir.VectorType) else 1
        item = dtype_of(element(kind))
        arena, spots = self._bytes(address, n * item.itemsize)
        if arena is self.shared:
            self.races.touch(spots, np.flatnonzero(self.mask), None)
        raw = np.zeros((self.threads, n * item.itemsize), np.uint8)
        raw[self.mask] = arena[spots]
        found = raw.view(item)
        return found if isinstance(kind, ir.VectorType) else found[:, 0]

    def _store(self, value, address):
        flat = np.ascontiguousarray(value.reshape(self.threads, -1))
        self._raw(address, flat.view(np.uint8)[self.mask])

    def _raw(self, address, raw):
        arena, spots = self._bytes(address, raw.shape[1])
        if arena is self.shared:
            changes = (arena[spots] != raw).any(axis=1)
            self.races.touch(spots, np.flatnonzero(self.mask), changes)
        arena[spots] = raw
        assert (arena[spots] == raw).all(), "race: two threads write one place"

    def op_nvvm_cp_async_shared_global(self, op, into, source):
        size = int(op.attributes["size"])
        arena, spots = self._bytes(source, size)
        assert arena is self.arena
        # Until it is waited for, nothing sensible is there.
        self._raw(into, np.full(spots.shape, 0xFF, np.uint8))
        self.copies[-1].append((into, arena[spots], self.mask))
        return []

    def op_nvvm_cp_async_commit_group(self, op):
        self.copies.append([])
        return []

    def op_nvvm_cp_async_wait_group(self, op):
        *done, now = self.copies
        cut = max(0, len(done) - int(op.attributes["n"]))
        self.copies = [*done[cut:], now]
        for into, raw, mask in (copy for group in done[:cut] for copy in group):
            saved, self.mask = self.mask, mask
            self._raw(into, raw)
            self.mask = saved
        return []

    def op_llvm_load(self, op, address):
        return self._load(address, op.results[0].type)

    def op_llvm_store(self, op, value, address):
        self._store(value, address)
        return []

    def op_llvm_ptrtoint(self, op, v):
        return v.astype(np.uint64)

    def op_llvm_inttoptr(self, op, v):
        return v.astype(np.int64)

    def op_llvm_addrspacecast(self, op, v):
        return v

    def op_gpu_dynamic_shared_memory(self, op):
        return (np.full(self.threads, _SHARED, np.int64), None, np.uint8)

    def op_memref_view(self, op, source, shift, *sizes):
        kind = ir.MemRefType(op.results[0].type)
        return (source[0] + shift, tuple(kind.shape), dtype_of(kind.element_type))

    def op_builtin_unrealized_conversion_cast(self, op, value):
        kind = op.results[0].type
        if isinstance(kind, ir.MemRefType):
            return (value[0], tuple(kind.shape), dtype_of(kind.element_type))
        return value

    def op_llvm_mlir_undef(self, op):
        kind = op.results[0].type
        if isinstance(kind, ir.VectorType):
            shape = (self.threads, *kind.shape)
            return np.zeros(shape, dtype_of(kind.element_type))
        return [None]

    def op_llvm_insertvalue(self, op, container, value):
        # Of a memref's descriptor only the pointer matters here.
        position = [int(i) for i in op.attributes["position"]]
        return [value] if position == [1] else container

    def op_llvm_extractvalue(self, op, container):
        position = [int(i) for i in op.attributes["position"]]
        if position == [1]:
            return container[0]
        return np.zeros(self.threads, np.uint64)

    def _reshaped(self, op, source, *sizes):
        kind = ir.MemRefType(op.results[0].type)
        return (source[0], tuple(kind.shape), source[2])

    op_memref_collapse_shape = op_memref_expand_shape = _reshaped
    op_memref_reinterpret_cast = op_memref_cast = _reshaped

    def op_memref_subview(self, op, source, *dynamic):
        kind, dynamic = ir.MemRefType(op.results[0].type), list(dynamic)
        offsets = [int(i) for i in op.attributes["static_offsets"]]
        offsets = [dynamic.pop(0) if i < 0 else i for i in offsets]
        return (self._spot(source, offsets), tuple(kind.shape), source[2])

    def _spot(self, memref, index):
        base, shape, element = memref
        strides = [int(np.prod(shape[k + 1 :])) for k in range(len(shape))]
        flat = sum(i * s for i, s in zip(index, strides, strict=True))
        return base + flat * element.itemsize

    def op_memref_load(self, op, memref, *index):
        return self._load(self._spot(memref, index), op.results[0].type)

    op_vector_load = op_memref_load

    def op_memref_store(self, op, value, memref, *index):
        self._store(value, self._spot(memref, index))
        return []

    op_vector_store = op_memref_store


def module_of(text):
    """The module in what a kernel's `debug=True` printed."""
    return re.search(r"^module .*?^}", text, re.S | re.M).group(0)
