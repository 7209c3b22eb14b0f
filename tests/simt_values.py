"""The ops of `simt.Machine` that compute values: arith, math, vector, in NumPy."""

import math

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_FLOATS["bf16"] = ml_dtypes.bfloat16
_FLOATS |= {"f8E4M3FN": ml_dtypes.float8_e4m3fn, "f8E5M2": ml_dtypes.float8_e5m2}


def dtype_of(kind):
    text = str(kind)
    if text in _FLOATS:
        return np.dtype(_FLOATS[text])
    if text == "i1":
        return np.dtype(bool)
    if text == "index" or text.startswith("!llvm.ptr"):
        return np.dtype(np.int64)
    return np.dtype(f"u{int(text[1:]) // 8}") if text[1:] != "1" else np.dtype(bool)


def element(kind):
    return kind.element_type if isinstance(kind, ir.VectorType) else kind


def signed(v):
    return v if v.dtype.kind != "u" else v.view(f"i{v.dtype.itemsize}")


def _numbers(number, dtype, shape):
    if dtype.kind == "u":
        bits = dtype.itemsize * 8
        return np.full(shape, int(number) % (1 << bits), dtype)
    return np.full(shape, number, dtype)


def choose(condition, a, b):
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
    return lambda *args: op(*map(signed, args))


def _quotient(a, b):
    return (a - np.fmod(a, b)) // b


def _defined(op):
    """A division whose operands the hardware must not see is an error."""

    def run(a, b):
        assert (b != 0).all(), "a divisor of 0"
        assert not ((a == np.iinfo(a.dtype).min) & (b == -1)).any(), "an overflow"
        return op(a, b)

    return run


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
    "arith_divsi": _on_signed(_defined(_quotient)),
    "arith_remsi": _on_signed(_defined(np.fmod)),
    "arith_andi": np.bitwise_and,
    "arith_ori": np.bitwise_or,
    "arith_xori": np.bitwise_xor,
    "arith_shli": np.left_shift,
    "arith_shrui": np.right_shift,
    "arith_shrsi": _on_signed(np.right_shift),
    "arith_minui": np.minimum,
    "arith_maxui": np.maximum,
    "math_ctpop": lambda a: np.bitwise_count(a).astype(a.dtype),
    "arith_minsi": _on_signed(np.minimum),
    "arith_maxsi": _on_signed(np.maximum),
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
    "math_ctlz": lambda a: a.itemsize * 8 - np.frexp(a.astype(np.float64))[1],
    "math_absi": _on_signed(np.abs),
    "math_exp": np.exp,
    "math_log": np.log,
    "math_log2": np.log2,
    "math_log1p": np.log1p,
    "math_sqrt": np.sqrt,
    "math_rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype),
    "math_tanh": np.tanh,
    "math_floor": np.floor,
    "math_ceil": np.ceil,
    "math_roundeven": np.rint,
    "math_round": lambda a: np.copysign(np.floor(np.abs(a) + 0.5), a),
    "math_exp2": np.exp2,
    "math_expm1": np.expm1,
    "math_sin": np.sin,
    "math_cos": np.cos,
    "math_tan": np.tan,
    "math_cbrt": np.cbrt,
    "math_atan2": np.arctan2,
    "math_powf": np.power,
    "math_erf": lambda a: np.vectorize(math.erf, otypes=[a.dtype])(a),
    "math_copysign": np.copysign,
}


class Values:
    """Handlers of ops, which `Machine` finds by their names."""

    threads: int

    def _simple(self, name):
        if name in _ELEMENTWISE:
            fn = _ELEMENTWISE[name]

            def run(op, *args):
                out = fn(*args)
                return out.astype(dtype_of(element(op.results[0].type)))

            return run
        raise NotImplementedError(name)

    def op_arith_constant(self, op):
        kind, attribute = op.results[0].type, op.attributes["value"]
        if isinstance(kind, ir.VectorType):
            number = ir.DenseElementsAttr(attribute).get_splat_value().value
            shape = (self.threads, *kind.shape)
            return _numbers(number, dtype_of(kind.element_type), shape)
        return _numbers(attribute.value, dtype_of(kind), (self.threads,))

    op_llvm_mlir_constant = op_arith_constant

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
        kind = dtype_of(element(op.results[0].type))
        return np.ascontiguousarray(value).view(kind)

    op_arith_bitcast = op_vector_bitcast = op_llvm_bitcast = _bits

    def op_arith_cmpi(self, op, a, b):
        name = _INTEGER[int(op.attributes["predicate"])]
        if name[0] == "s":
            a, b = (signed(v.view(np.uint8) if v.dtype == bool else v) for v in (a, b))
        return _COMPARE[name.lstrip("su") if name != "eq" else name](a, b)

    def op_arith_cmpf(self, op, a, b):
        code = int(op.attributes["predicate"])
        unordered, name = code > 7, _FLOAT[code % 8 if code <= 7 else code]
        nan = np.isnan(a) | np.isnan(b)
        return np.where(nan, unordered, _COMPARE[name](a, b))

    def op_arith_select(self, op, condition, a, b):
        return choose(condition, a, b)
