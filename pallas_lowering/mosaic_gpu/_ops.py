"""Single operations of thread code, with the meaning that jax gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import math as math_dialect

_FLOAT, _INT = arith.CmpFPredicate, arith.CmpIPredicate


def is_float(dtype: Any) -> bool:
    """Whether the arithmetic of a dtype is floating point."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_signed(dtype: Any) -> bool:
    """Whether the integers of a dtype have a sign."""
    return jnp.issubdtype(dtype, jnp.signedinteger)


def type_of(dtype: Any) -> ir.Type:
    """The register type of a dtype; bool is one bit."""
    return utils.dtype_to_ir_type(np.dtype(dtype))


def constant(value: Any, dtype: Any) -> ir.Value:
    """A constant of a dtype."""
    kind = type_of(dtype)
    if isinstance(kind, ir.IntegerType):
        return arith.constant(kind, ir.IntegerAttr.get(kind, int(value)))
    return arith.constant(kind, ir.FloatAttr.get(kind, float(value)))


def _compare(name, dtype, a, b):
    if is_float(dtype):
        which = {"ne": "UNE"}.get(name, f"O{name.upper()}")
        return arith.cmpf(getattr(_FLOAT, which), a, b)
    prefix = "" if name in ("eq", "ne") else "s" if is_signed(dtype) else "u"
    return arith.cmpi(getattr(_INT, prefix + name), a, b)


def extreme(name, dtype, a, b):
    """max or min: NaN wins, and -0.0 is below +0.0."""
    if not is_float(dtype):
        sign = "s" if is_signed(dtype) else "u"
        return getattr(arith, f"{name}{sign}i")(a, b)
    if np.dtype(dtype) != np.float64:
        return getattr(arith, f"{name}imumf")(a, b)
    # The hardware's float64 maximum skips NaN and orders no zeros.
    word = np.dtype(np.int64)
    ahead = _compare("gt" if name == "max" else "lt", dtype, a, b)
    bits = utils.bitcast(a, type_of(word))
    negative = _compare("lt", word, bits, constant(0, word))
    sign = negative if name == "min" else arith.xori(negative, constant(1, bool))
    tie = arith.andi(_compare("eq", dtype, a, b), sign)
    keep = arith.ori(arith.ori(ahead, tie), _compare("ne", dtype, a, a))
    return arith.select(keep, a, b)


def _arithmetic(float_op, int_op):
    return lambda dtype, a, b: (float_op if is_float(dtype) else int_op)(a, b)


def _ptx(op, *args):
    """A float32 instruction that LLVM would replace by an approximate one."""
    places = ", ".join(f"${k}" for k in range(len(args) + 1))
    constraints = ",".join(["=f"] + ["f"] * len(args))
    return llvm.inline_asm(
        args[0].type, list(args), f"{op} {places};", constraints, has_side_effects=False
    )


def _divide(dtype, a, b):
    if np.dtype(dtype) == np.float32:
        return _ptx("div.rn.f32", a, b)
    if is_float(dtype):
        return arith.divf(a, b)
    zero, safe = _safe_divisor(dtype, a, b)
    quotient = (arith.divsi if is_signed(dtype) else arith.divui)(a, safe)
    return arith.select(zero, constant(-1, dtype), quotient)


def _safe_divisor(dtype, a, b):
    """Whether b is 0, and a divisor for which the instruction is defined.

    Of 0 jax makes a quotient of -1 and a remainder of a; the least integer by -1 is
    what it is by 1.
    """
    zero = _compare("eq", dtype, b, constant(0, dtype))
    undefined = zero
    if is_signed(dtype):
        least = _compare("eq", dtype, a, constant(jnp.iinfo(dtype).min, dtype))
        wraps = arith.andi(least, _compare("eq", dtype, b, constant(-1, dtype)))
        undefined = arith.ori(zero, wraps)
    return zero, arith.select(undefined, constant(1, dtype), b)


def _remainder(dtype, a, b):
    zero, safe = _safe_divisor(dtype, a, b)
    rest = (arith.remsi if is_signed(dtype) else arith.remui)(a, safe)
    return arith.select(zero, a, rest)


def _shift(op, dtype, a, b):
    bits = np.dtype(dtype).itemsize * 8
    inside = arith.cmpi(_INT.ult, b, constant(bits, dtype))
    fill = constant(0, dtype)
    if op is arith.shrsi:
        fill = arith.shrsi(a, constant(bits - 1, dtype))
    return arith.select(inside, op(a, b), fill)


def power(dtype, a, y):
    """a to a constant integer power, by squaring."""
    if y < 0:
        return _divide(dtype, constant(1, dtype), power(dtype, a, -y))
    multiply, result = BINARY["mul"], None
    while y > 0:
        if y & 1:
            result = a if result is None else multiply(dtype, result, a)
        y >>= 1
        a = multiply(dtype, a, a) if y else a
    return constant(1, dtype) if result is None else result


def _sign(dtype, a):
    zero, one = constant(0, dtype), constant(1, dtype)
    if not is_float(dtype):
        low = constant(-1, dtype) if is_signed(dtype) else zero
        result = arith.select(_compare("gt", dtype, a, zero), one, low)
        return arith.select(_compare("eq", dtype, a, zero), zero, result)
    result = math_dialect.copysign(one, a)
    same = _compare("eq", dtype, a, zero)
    odd = arith.ori(same, _compare("ne", dtype, a, a))
    return arith.select(odd, a, result)


def _math(name):
    return lambda dtype, a: getattr(math_dialect, name)(a)


def nearest(a: ir.Value, method: Any) -> ir.Value:
    """The nearest integral value, by one of jax's rules for ties."""
    even = method == lax.RoundingMethod.TO_NEAREST_EVEN
    return (math_dialect.roundeven if even else math_dialect.round)(a)


def _logistic(dtype, a):
    one = constant(1, dtype)
    return _divide(dtype, one, arith.addf(one, math_dialect.exp(arith.negf(a))))


def _root(dtype, a):
    single = np.dtype(dtype) == np.float32
    return _ptx("sqrt.rn.f32", a) if single else math_dialect.sqrt(a)


def _negate(dtype, a):
    return arith.negf(a) if is_float(dtype) else arith.subi(constant(0, dtype), a)


def _absolute(dtype, a):
    if is_float(dtype):
        return math_dialect.absf(a)
    return math_dialect.absi(a) if is_signed(dtype) else a


def _finite(dtype, a):
    return _compare("lt", dtype, math_dialect.absf(a), constant(np.inf, dtype))


def _complement(dtype, a):
    return arith.xori(a, constant(1 if np.dtype(dtype).kind == "b" else -1, dtype))


BINARY: dict[str, Callable] = {
    "add": _arithmetic(arith.addf, arith.addi),
    "add_any": _arithmetic(arith.addf, arith.addi),
    "sub": _arithmetic(arith.subf, arith.subi),
    "mul": _arithmetic(arith.mulf, arith.muli),
    "div": _divide,
    "rem": _remainder,
    "max": functools.partial(extreme, "max"),
    "min": functools.partial(extreme, "min"),
    "and": lambda dtype, a, b: arith.andi(a, b),
    "or": lambda dtype, a, b: arith.ori(a, b),
    "xor": lambda dtype, a, b: arith.xori(a, b),
    "pow": lambda dtype, a, b: math_dialect.powf(a, b),
    "atan2": lambda dtype, a, b: math_dialect.atan2(a, b),
    "shift_left": functools.partial(_shift, arith.shli),
    "shift_right_logical": functools.partial(_shift, arith.shrui),
    "shift_right_arithmetic": functools.partial(_shift, arith.shrsi),
    **{k: functools.partial(_compare, k) for k in ("eq", "ne", "lt", "le", "gt", "ge")},
}
_MATH = "exp exp2 log log2 log1p expm1 tanh sin cos tan rsqrt cbrt floor ceil erf"
UNARY: dict[str, Callable] = {
    "neg": _negate,
    "abs": _absolute,
    "sign": _sign,
    "not": _complement,
    "sqrt": _root,
    "logistic": _logistic,
    "is_finite": _finite,
    "square": lambda dtype, a: BINARY["mul"](dtype, a, a),
    **{name: _math(name) for name in _MATH.split()},
}
