"""A machine for lowered Mosaic GPU kernels: all threads of one CTA in step, in NumPy.

It runs the module that a kernel in Lane semantics lowers to, so that values, shuffles
and traffic through shared memory can be checked where there is no GPU. Every float op
rounds, nothing contracts, and an access to shared memory that needs a barrier which is
not there is an error.
"""

import contextlib
import re

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

_SHARED, _ARENA = 1 << 40, 1 << 22
_WARPGROUP, _WARP = 128, 32
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_FLOATS["bf16"] = ml_dtypes.bfloat16


def _dtype(kind):
    text = str(kind)
    if text in _FLOATS:
        return np.dtype(_FLOATS[text])
    if text == "i1":
        return np.dtype(bool)
    if text == "index" or text.startswith("!llvm.ptr"):
        return np.dtype(np.int64)
    return np.dtype(f"u{int(text[1:]) // 8}") if text[1:] != "1" else np.dtype(bool)


def _element(kind):
    return kind.element_type if isinstance(kind, ir.VectorType) else kind


def _signed(v):
    return v if v.dtype.kind != "u" else v.view(f"i{v.dtype.itemsize}")


class _Shared:
    """Who touched which word of shared memory since the last barrier."""

    def __init__(self, threads):
        self.epoch = 0
        shape = (_ARENA // 4,)
        self.wrote, self.read = (np.full(shape, -1) for _ in range(2))
        self.writer, self.reader = (np.full(shape, -1) for _ in range(2))
        self.owner = np.full(shape, -1)
        self.threads = np.arange(threads)

    def touch(self, address, mask, writes, changes):
        words = (address[mask] - _SHARED) // 4
        who = self.threads[mask]
        group = who // _WARPGROUP
        foreign = (self.owner[words] >= 0) & (self.owner[words] != group)
        assert not foreign.any(), "two warpgroups share a word"
        self.owner[words] = group
        fresh = self.wrote[words] == self.epoch
        raced = fresh & (self.writer[words] != who) & (changes[mask] if writes else True)
        assert not raced.any(), f"race: {'write' if writes else 'read'} after write"
        if writes:
            fresh = self.read[words] == self.epoch
            raced = fresh & (self.reader[words] != who) & changes[mask]
            assert not raced.any(), "race: write after read"
            self.wrote[words], self.writer[words] = self.epoch, who
        else:
            several = (self.read[words] == self.epoch) & (self.reader[words] != who)
            self.reader[words] = np.where(several, -2, who)
            self.read[words] = self.epoch


class Machine:
    """Runs a module's kernel over arrays.

    Args:
        text: the module.
    """

    def __init__(self, text):
        self.context = ir.Context()
        self.context.allow_unregistered_dialects = True
        with self.context:
            from jax._src.interpreters import mlir

            self.context = mlir.make_ir_context()
            self.context.allow_unregistered_dialects = True
        with self.context:
            from jax._src.lib import mosaic_gpu_dialect

            mosaic_gpu_dialect.register_dialect(self.context)
            self.module = ir.Module.parse(text, self.context)

    def run(self, arrays, outs):
        """The kernel's results, for inputs and `ShapeDtypeStruct`s of the results."""
        self.arena = np.zeros(_ARENA, np.uint8)
        self.shared = np.zeros(_ARENA, np.uint8)
        table, end, spots = 64, 4096, []
        every = [np.ascontiguousarray(a) for a in arrays]
        every += [np.zeros(o.shape, o.dtype) for o in outs]
        for k, a in enumerate(every):
            raw = np.frombuffer(a.tobytes(), np.uint8)
            self.arena[end : end + raw.size] = raw
            self.arena[table + 8 * k : table + 8 * k + 8] = np.frombuffer(
                np.int64(end).tobytes(), np.uint8
            )
            spots.append(end)
            end += -(-raw.size // 1024) * 1024
        self.threads, self.env = 1, {}
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
            if name in ("scf_yield", "gpu_terminator", "func_return", "gpu_return"):
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

    def _simple(self, name):
        if name in _ELEMENTWISE:
            fn = _ELEMENTWISE[name]

            def run(op, *args):
                out = fn(*args)
                return out.astype(_dtype(_element(op.results[0].type)))

            return run
        raise NotImplementedError(name)

    # Structure.

    def op_llvm_mlir_global(self, op):
        return []

    def op_gpu_launch(self, op, *args):
        sizes = [int(a[0]) for a in args if isinstance(a, np.ndarray)]
        dims = [s for s in sizes if s >= 0][-7:-1] if len(sizes) > 6 else sizes[:6]
        body = op.regions[0].blocks[0]
        operands = [int(self.env[v][0]) for v in op.operands if _is_index(v)]
        self.grid, self.cta = operands[:3], operands[3:6]
        assert self.grid == [1, 1, 1], "one CTA"
        self.threads = int(np.prod(self.cta))
        self.mask = np.ones(self.threads, bool)
        self.races = _Shared(self.threads)
        for argument in body.arguments:
            self.set(argument, np.zeros(self.threads, np.int64))
        self.block(body)
        self.threads, self.mask = 1, np.ones(1, bool)
        return [np.zeros(1, np.int64)] * len(op.results)

    @contextlib.contextmanager
    def _only(self, mask):
        saved, self.mask = self.mask, self.mask & mask
        yield
        self.mask = saved

    def op_scf_if(self, op, condition):
        sides = []
        for region, mask in zip(op.regions, (condition, ~condition), strict=True):
            with self._only(mask):
                some = len(region.blocks) and self.mask.any()
                sides.append(self.block(region.blocks[0]) if some else None)
        if not len(op.results):
            return []
        then, other = sides
        if then is None or other is None:
            found = then or other
        else:
            found = [_where(condition, a, b) for a, b in zip(then, other, strict=True)]
        return found[0] if len(op.results) == 1 else found

    def op_scf_for(self, op, low, high, step, *carry):
        body, carry = op.regions[0].blocks[0], list(carry)
        index = low.copy()
        while (going := self.mask & (_signed(index) < _signed(high))).any():
            with self._only(going):
                for argument, v in zip(body.arguments, [index, *carry], strict=True):
                    self.set(argument, v)
                new = self.block(body)
            carry = [_where(going, a, b) for a, b in zip(new, carry, strict=True)]
            index = index + step
        return carry[0] if len(op.results) == 1 else carry

    # Threads.

    def _of_thread(self, op, thread, other):
        return np.full(self.threads, other, np.int64) if "x" not in str(
            op.attributes["dimension"]
        ) else thread

    def op_gpu_thread_id(self, op):
        return self._of_thread(op, np.arange(self.threads), 0)

    def op_gpu_block_dim(self, op):
        return self._of_thread(op, np.full(self.threads, self.threads), 1)

    def op_gpu_block_id(self, op):
        return np.zeros(self.threads, np.int64)

    def op_gpu_grid_dim(self, op):
        return np.ones(self.threads, np.int64)

    def op_nvvm_elect_sync(self, op, *args):
        return np.arange(self.threads) % _WARP == 0

    def op_nvvm_shfl_sync(self, op, members, value, where, clamp):
        assert self.mask.reshape(-1, _WARP).all(axis=1).any()
        lane = np.arange(self.threads) % _WARP
        kind, where = str(op.attributes["kind"]), _signed(where).astype(np.int64)
        if "bfly" in kind:
            source = lane ^ where
        elif "idx" in kind:
            source = where % _WARP
        else:
            source = lane + where * (1 if "down" in kind else -1)
        source = np.where((source < 0) | (source >= _WARP), lane, source)
        base = np.arange(self.threads) - lane
        assert self.mask[(base + source)[self.mask]].all(), "a lane that is not there"
        return value[base + source]

    def op_gpu_barrier(self, op, *args):
        self._barrier()
        return []

    def _barrier(self):
        whole = self.mask.reshape(-1, _WARPGROUP)
        assert (whole.all(axis=1) | ~whole.any(axis=1)).all(), "a barrier not met by all"
        self.races.epoch += 1

    def op_llvm_inline_asm(self, op, *args):
        text = op.attributes["asm_string"].value
        if "bar.sync" in text:
            self._barrier()
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
        size = count * _dtype(_element(kind)).itemsize
        (index,) = static
        offset = _signed(dynamic[0]).astype(np.int64) if dynamic else index
        return base + offset * size

    def _memory(self, address, mask, size, writes=False, changes=None):
        shared = address >= _SHARED
        where = address[mask]
        assert shared[mask].all() or not shared[mask].any()
        if mask.any() and shared[mask].all():
            for word in range(0, size, 4):
                self.races.touch(address + word, mask, writes, changes)
            where = where - _SHARED
            arena = self.shared
        else:
            arena = self.arena
        if mask.any():
            assert (where >= 0).all() and (where + size <= _ARENA).all()
            assert (where % min(size, 16) == 0).all(), "not aligned"
        return arena, where[:, None] + np.arange(size)

    def _load(self, address, kind):
        n = int(np.prod(kind.shape)) if isinstance(kind, ir.VectorType) else 1
        element = _dtype(_element(kind))
        size = n * element.itemsize
        arena, where = self._memory(address, self.mask, size)
        raw = np.zeros((self.threads, size), np.uint8)
        raw[self.mask] = arena[where]
        found = raw.view(element)
        return found if isinstance(kind, ir.VectorType) else found[:, 0]

    def _store(self, value, address):
        flat = value.reshape(self.threads, -1)
        raw = np.ascontiguousarray(flat).view(np.uint8)
        size = raw.shape[1]
        arena = self.shared if (address[self.mask] >= _SHARED).any() else self.arena
        changes = np.ones(self.threads, bool)
        if arena is self.shared:
            spot = np.clip(address - _SHARED, 0, _ARENA - size)[:, None]
            changes = (arena[spot + np.arange(size)] != raw).any(axis=1)
        arena, where = self._memory(address, self.mask, size, True, changes)
        arena[where] = raw[self.mask]
        if arena is self.shared:
            kept = (arena[where] == raw[self.mask]).all()
            assert kept, "race: two threads write one word"

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
        return (source[0] + shift, tuple(kind.shape), _dtype(kind.element_type))

    def op_builtin_unrealized_conversion_cast(self, op, value):
        kind = op.results[0].type
        if isinstance(kind, ir.MemRefType):
            return (value[0], tuple(kind.shape), _dtype(kind.element_type))
        return value

    def op_llvm_mlir_undef(self, op):
        kind = op.results[0].type
        if isinstance(kind, ir.VectorType):
            shape = (self.threads, *kind.shape)
            return np.zeros(shape, _dtype(kind.element_type))
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

    def _element(self, memref, index):
        base, shape, element = memref
        strides = [int(np.prod(shape[k + 1 :])) for k in range(len(shape))]
        flat = sum(i * s for i, s in zip(index, strides, strict=True))
        return base + flat * element.itemsize

    def op_memref_load(self, op, memref, *index):
        return self._load(self._element(memref, index), op.results[0].type)

    op_vector_load = op_memref_load

    def op_memref_store(self, op, value, memref, *index):
        self._store(value, self._element(memref, index))
        return []

    op_vector_store = op_memref_store

    # Values.

    def op_arith_constant(self, op):
        kind, attribute = op.results[0].type, op.attributes["value"]
        if isinstance(kind, ir.VectorType):
            number = ir.DenseElementsAttr(attribute).get_splat_value().value
            shape = (self.threads, *kind.shape)
            return _numbers(number, _dtype(kind.element_type), shape)
        return _numbers(attribute.value, _dtype(kind), (self.threads,))

    def op_vector_extract(self, op, value, *dynamic):
        (position,) = [int(i) for i in op.attributes["static_position"]]
        return value[:, position]

    def op_vector_insert(self, op, value, container, *dynamic):
        (position,) = [int(i) for i in op.attributes["static_position"]]
        out = container.copy()
        out[:, position] = value
        return out

    def op_vector_broadcast(self, op, value):
        n = op.results[0].type.shape[0]
        return np.repeat(value.reshape(self.threads, 1), n, axis=1)

    def _bits(self, op, value):
        kind = _dtype(_element(op.results[0].type))
        return np.ascontiguousarray(value).view(kind)

    op_arith_bitcast = op_vector_bitcast = op_llvm_bitcast = _bits

    def op_arith_cmpi(self, op, a, b):
        name = _INTEGER[int(op.attributes["predicate"])]
        if name[0] == "s":
            a, b = (_signed(v.view(np.uint8) if v.dtype == bool else v) for v in (a, b))
        return _COMPARE[name.lstrip("su") if name != "eq" else name](a, b)

    def op_arith_cmpf(self, op, a, b):
        code = int(op.attributes["predicate"])
        unordered, name = code > 7, _FLOAT[code % 8 if code <= 7 else code]
        nan = np.isnan(a) | np.isnan(b)
        return np.where(nan, unordered, _COMPARE[name](a, b))

    def op_arith_select(self, op, condition, a, b):
        return _where(condition, a, b)


def _is_index(value):
    return str(value.type) == "index"


def _numbers(number, dtype, shape):
    if dtype.kind == "u":
        bits = dtype.itemsize * 8
        return np.full(shape, int(number) % (1 << bits), dtype)
    return np.full(shape, number, dtype)


def _where(condition, a, b):
    if a.ndim > condition.ndim:
        condition = condition.reshape(-1, *(1,) * (a.ndim - 1))
    return np.where(condition, a, b)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_INTEGER = ("eq ne slt sle sgt sge ult ule ugt uge").split()
_FLOAT = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le", 6: "ne"}
_FLOAT |= {8: "eq", 9: "gt", 10: "ge", 11: "lt", 12: "le", 13: "ne"}


def _extreme(op):
    def run(a, b):
        tie = np.where(np.signbit(a) == (op is np.minimum), a, b)
        return np.where(a == b, tie, op(a, b))

    return run


def _on_signed(op):
    return lambda *args: op(*map(_signed, args))


def _divide(a, b):
    a, b = (v.astype(np.float64) for v in (a, b))
    return np.trunc(a / b)


_ELEMENTWISE = {
    "arith_addf": np.add,
    "arith_subf": np.subtract,
    "arith_mulf": np.multiply,
    "arith_divf": np.divide,
    "arith_negf": np.negative,
    "arith_maximumf": _extreme(np.maximum),
    "arith_minimumf": _extreme(np.minimum),
    "arith_addi": np.add,
    "arith_subi": np.subtract,
    "arith_muli": np.multiply,
    "arith_divui": lambda a, b: a // b,
    "arith_remui": lambda a, b: a % b,
    "arith_divsi": _on_signed(_divide),
    "arith_andi": np.bitwise_and,
    "arith_ori": np.bitwise_or,
    "arith_xori": np.bitwise_xor,
    "arith_shli": np.left_shift,
    "arith_shrui": np.right_shift,
    "arith_shrsi": _on_signed(np.right_shift),
    "arith_minsi": _on_signed(np.minimum),
    "arith_maxsi": _on_signed(np.maximum),
    "arith_minui": np.minimum,
    "arith_maxui": np.maximum,
    "arith_extui": lambda a: a,
    "arith_extsi": _on_signed(lambda a: a),
    "arith_trunci": lambda a: a,
    "arith_index_cast": _on_signed(lambda a: a.astype(np.int64)),
    "arith_index_castui": lambda a: a,
    "arith_extf": lambda a: a,
    "arith_truncf": lambda a: a,
    "arith_sitofp": _on_signed(lambda a: a),
    "arith_uitofp": lambda a: a,
    "arith_fptosi": lambda a: np.trunc(a).astype(np.int64),
    "arith_fptoui": lambda a: np.trunc(a).astype(np.int64),
    "llvm_mul": np.multiply,
    "llvm_udiv": lambda a, b: a // b,
    "llvm_add": np.add,
    "math_absf": np.abs,
    "math_absi": _on_signed(np.abs),
    "math_exp": np.exp,
    "math_log": np.log,
    "math_log1p": np.log1p,
    "math_sqrt": np.sqrt,
    "math_copysign": np.copysign,
}


def module_of(text):
    """The module in what a kernel's `debug=True` printed."""
    return re.search(r"^module .*?^}", text, re.S | re.M).group(0)
