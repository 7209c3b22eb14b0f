"""Scalar functions emitted as thread code: one value of each operand in each thread.

A reducer's functions are traced on scalars and replayed in the arith and math dialects.
That supplies the ops that plgpu lacks, takes states of mixed dtypes, and keeps the
contract: no op carries a fast-math flag, so nothing contracts a * b + c, and every op
with a float16 or bfloat16 result is computed in float32 and rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.extend.core import Literal
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as math_dialect

from jaxtile.pallas_lowering._elementwise import rounds_twice
from jaxtile.pallas_lowering.mosaic_gpu._ops import (
    BINARY,
    UNARY,
    constant,
    extreme,
    is_float,
    is_signed,
    nearest,
    power,
    type_of,
)
from jaxtile.primitives import _scalar
from jaxtile.primitives import cast as _cast

_NARROW = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
# A kernel's values lie on one device, so that nothing is resharded.
_SAME = frozenset("broadcast_in_dim reshape squeeze stop_gradient copy reshard".split())
_SPECIAL = frozenset(
    "select_n clamp integer_pow convert_element_type bitcast_convert_type tile_cast "
    "tile_bitcast reduce_precision clz round".split()
)
# Ops that round nothing, or round as they say.
_MOVES = (_SPECIAL - {"integer_pow", "round"}) | {"neg", "abs"}
# Ops whose float form is missing: what to say.
_INTEGERS_ONLY = frozenset(("rem",))


def _dtype(var):
    return getattr(var.aval, "dtype", None)


def lacks(jaxpr: Any) -> str | None:
    """Why a scalar jaxpr cannot be emitted, or None."""
    for eqn in _scalar.as_closed(jaxpr)[0].eqns:
        inner, name = _scalar.inner_jaxpr(eqn), eqn.primitive.name
        if inner is not None:
            reason = lacks(inner)
            if reason is not None:
                return reason
            continue
        known = name in BINARY or name in UNARY or name in _SAME | _SPECIAL
        floats = eqn.invars and is_float(_dtype(eqn.invars[0]))
        if name == "pow" and not is_float(_dtype(eqn.invars[1])):
            return (
                "its function uses pow with an integer exponent, which has no thread "
                "code; cast the exponent to the base's format"
            )
        if not known or (floats and name in _INTEGERS_ONLY):
            return f"its function uses {name}, which has no thread code; map it outside"
    return None


def convert(value: ir.Value, source: Any, target: Any) -> ir.Value:
    """The conversion that `jaxtile.cast` states; narrow floats come from float32."""
    source, target = np.dtype(source), np.dtype(target)
    if source == target:
        return value
    direct = _convert_directly(value, source, target)
    if direct is not None:
        return direct
    # Selects around the instruction, or bits rounded once: replay the definition.
    region = Region(lambda x: [_cast.convert(x, target)], (source,), plain=True)
    return region(value)[0]


def _convert_directly(value, source, target):
    kind, wide = type_of(target), np.dtype(np.float32)
    if rounds_twice(source, target):
        return None
    if target in _NARROW and source != wide:
        return arith.truncf(kind, convert(value, source, wide))
    if is_float(source) and is_float(target):
        wider = target.itemsize > source.itemsize
        return (arith.extf if wider else arith.truncf)(kind, value)
    if is_float(target):
        unsigned = not is_signed(source)
        return (arith.uitofp if unsigned else arith.sitofp)(kind, value)
    if is_float(source) or target.kind == "b":
        return None
    width = 1 if source.kind == "b" else source.itemsize * 8
    if width == target.itemsize * 8:
        return value
    if width > target.itemsize * 8:
        return arith.trunci(kind, value)
    return (arith.extsi if is_signed(source) else arith.extui)(kind, value)


def _float_to_integer(value, source, target):
    """The bare instruction, for the inside of the cast's own selects."""
    op = arith.fptosi if is_signed(target) else arith.fptoui
    return op(type_of(target), value)


_FOLDS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "gt": np.greater,
}


def known(value: ir.Value) -> Any:
    """The number that a value is known to be, or None."""
    op = value.owner
    if not isinstance(op, ir.Operation | ir.OpView) or op.name != "arith.constant":
        return None
    number: Any = op.attributes["value"]
    return number.value


def _folded(name, args, dtypes, result):
    """A constant of constants: the counts of a tree's first levels, and their quotients.

    A compiler cannot fold an instruction that is stated as such.
    """
    if name not in _FOLDS or not all(is_float(d) for d in dtypes):
        return None
    numbers = [known(a) for a in args]
    if any(n is None for n in numbers):
        return None
    typed = [np.dtype(d).type(n) for n, d in zip(numbers, dtypes, strict=True)]
    with np.errstate(all="ignore"):
        return constant(_FOLDS[name](*typed), result)


class Region:
    """A function of scalars, ready to be emitted any number of times.

    Args:
        fn: `(*scalars) -> sequence of scalars`, in plain jax.
        dtypes: of its operands.
        plain: `convert_element_type` is the bare instruction, not `jaxtile.cast`.
    """

    def __init__(self, fn: Callable, dtypes: Sequence, plain: bool = False):
        shapes = [jax.ShapeDtypeStruct((), np.dtype(d)) for d in dtypes]
        self.closed = jax.make_jaxpr(fn)(*shapes)
        self.plain = plain

    def __call__(self, *values: ir.Value) -> list[ir.Value]:
        """The results for one value of each operand in this thread."""
        jaxpr, consts = _scalar.as_closed(self.closed)
        return self._replay(jaxpr, consts, values)

    def _replay(self, jaxpr, consts, values) -> list:
        def value(c, var):
            return c if isinstance(c, ir.Value) else constant(c, var.aval.dtype)

        pairs = zip(jaxpr.constvars, consts, strict=True)
        env: dict = {var: value(c, var) for var, c in pairs}
        env.update(zip(jaxpr.invars, values, strict=True))

        def read(atom):
            if isinstance(atom, Literal):
                return constant(atom.val, atom.aval.dtype)  # pyright: ignore
            return env[atom]

        for eqn in jaxpr.eqns:
            args, inner = [read(v) for v in eqn.invars], _scalar.inner_jaxpr(eqn)
            if inner is not None:
                outs = self._replay(*_scalar.as_closed(inner), args)
            else:
                outs = [self._rounded(eqn, args)]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _rounded(self, eqn, args):
        """One op, its narrow result rounded from float32."""
        dtypes = [v.aval.dtype for v in eqn.invars]
        result = eqn.outvars[0].aval.dtype
        name = eqn.primitive.name
        moves = name in _SAME or name in _MOVES
        narrow = any(d in _NARROW for d in dtypes)
        if moves or not narrow:
            return self._emit(eqn, args, dtypes)
        wide = np.dtype(np.float32)
        args = [
            convert(a, d, wide) if d in _NARROW else a
            for a, d in zip(args, dtypes, strict=True)
        ]
        dtypes = [wide if d in _NARROW else d for d in dtypes]
        out: Any = self._emit(eqn, args, dtypes)
        return convert(out, wide, result) if result in _NARROW else out

    def _emit(self, eqn, args, dtypes):
        name, dtype = eqn.primitive.name, dtypes[0] if dtypes else None
        folded = _folded(name, args, dtypes, eqn.outvars[0].aval.dtype)
        if folded is not None:
            return folded
        if name in BINARY:
            return BINARY[name](dtype, *args)
        if name in UNARY:
            return UNARY[name](dtype, *args)
        if name in _SAME:
            return args[0]
        return self._special(name, eqn, args, dtypes)

    def _special(self, name, eqn, args, dtypes):
        if name == "select_n":
            return arith.select(args[0], args[2], args[1])
        if name == "clamp":
            low = extreme("max", dtypes[1], args[1], args[0])
            return extreme("min", dtypes[1], low, args[2])
        if name == "integer_pow":
            return power(dtypes[0], args[0], eqn.params["y"])
        if name == "clz":
            return math_dialect.ctlz(args[0])
        if name == "round":
            return nearest(args[0], eqn.params["rounding_method"])
        if name == "reduce_precision":
            return self._reduce_precision(eqn, args[0], dtypes[0])
        target = np.dtype(eqn.outvars[0].aval.dtype)
        if name in ("bitcast_convert_type", "tile_bitcast"):
            return utils.bitcast(args[0], type_of(target))
        if name not in ("convert_element_type", "tile_cast"):
            raise NotImplementedError(name)  # `lacks` says so before
        if self.plain and is_float(dtypes[0]) and not is_float(target):
            return _float_to_integer(args[0], dtypes[0], target)
        return convert(args[0], dtypes[0], target)

    def _reduce_precision(self, eqn, value, dtype):
        for narrow in _NARROW:
            info = jnp.finfo(narrow)
            want = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
            if (info.nexp, info.nmant) == want:
                return convert(convert(value, dtype, narrow), narrow, dtype)
        raise NotImplementedError(f"reduce_precision to {eqn.params}")
