r"""cast: a numerical event that no compiler may remove.

    cast(x) = the value of `dtype` nearest to x, ties to even, rounded once

from the exact source value (float64 and integers to bfloat16 too). Overflow goes to
infinity; NaN stays a quiet NaN; signed zeros and subnormals are kept. Float to integer
truncates toward zero, clamps at the ends of the range, and takes NaN to 0. Integer to
integer wraps. The rounding is done on the bits, so no excess-precision rewrite sees a
pair of converts to delete.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtile import formats
from jaxtile.errors import NoDerivativeError, TileTypeError, message
from jaxtile.formats import Category
from jaxtile.primitives._define import Out, define, zero_tangent


def _bits_of(dtype) -> np.dtype:
    return np.dtype(f"uint{np.dtype(dtype).itemsize * 8}")


def _is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _round_significand(sign, exponent, m, hidden, target):
    """The bits of (-1)^sign * m * 2^(exponent - hidden) in `target`, rounded once.

    `m` has its leading one at bit `hidden`, or is 0. Rounding a subnormal's significand
    into the leading bit, or the largest one into the next exponent, is the plain carry.
    """
    word = m.dtype.type
    width = m.dtype.itemsize * 8
    emin = 1 - target.bias
    short = jnp.maximum(emin - exponent, 0)
    drop = jnp.minimum(hidden - target.fraction_bits + short, width - 1)
    drop = drop.astype(m.dtype)
    kept = m >> drop
    rest = m & ((word(1) << drop) - word(1))
    half = word(1) << (drop - word(1))
    up = (rest > half) | ((rest == half) & ((kept & word(1)) == 1))
    kept = kept + up.astype(m.dtype)
    lead = jnp.maximum(exponent - emin, 0).astype(m.dtype)
    inf = word(((1 << target.exponent_bits) - 1) << target.fraction_bits)
    # An exponent past the field would wrap the word: settle it before the shift.
    over = exponent > target.bias
    bits = jnp.where(over, inf, (lead << word(target.fraction_bits)) + kept)
    bits = jnp.where(m == 0, word(0), jnp.minimum(bits, inf))
    narrow = bits.astype(_bits_of(target.dtype))
    return narrow | (sign.astype(narrow.dtype) << (target.bits - 1))


def _from_float(x, target):
    source = formats.format_of(x.dtype)
    u = lax.bitcast_convert_type(x, _bits_of(x.dtype))
    word = u.dtype.type
    sign = u >> word(source.bits - 1)
    field = (u >> word(source.fraction_bits)) & word((1 << source.exponent_bits) - 1)
    fraction = u & word((1 << source.fraction_bits) - 1)
    normal = field > 0
    m = fraction | (normal.astype(u.dtype) << word(source.fraction_bits))
    exponent = jnp.maximum(field, word(1)).astype(jnp.int32) - source.bias
    bits = _round_significand(sign, exponent, m, source.fraction_bits, target)
    top = word((1 << source.exponent_bits) - 1)
    inf = ((1 << target.exponent_bits) - 1) << target.fraction_bits
    quiet = inf | (1 << (target.fraction_bits - 1))
    payload = fraction >> word(source.fraction_bits - target.fraction_bits)
    special = jnp.where(fraction == 0, word(inf), word(quiet) | payload)
    special = special | (sign << word(target.bits - 1))
    return jnp.where(field == top, special.astype(bits.dtype), bits)


def _from_integer(x, target):
    word = _bits_of(x.dtype) if x.dtype.itemsize >= 4 else np.dtype(np.uint32)
    wide = x.astype(word)
    negative = x < 0 if jnp.issubdtype(x.dtype, jnp.signedinteger) else x != x
    m = jnp.where(negative, word.type(0) - wide, wide)
    width = word.itemsize * 8
    shift = jnp.minimum(lax.clz(m), word.type(width - 1))
    exponent = (width - 1) - shift.astype(jnp.int32)
    return _round_significand(negative, exponent, m << shift, width - 1, target)


def _float_to_integer(x, dtype):
    info = jnp.iinfo(dtype)
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    # 2^k bounds are exact in binary; iinfo.max rounds up to 2^k in narrow formats.
    low, high = float(info.min), float(info.max) + (info.bits < 53)
    inside = (wide > low - 1) if info.bits < 24 else (wide >= low)
    inside &= wide < high
    value = jnp.where(inside, wide, 0).astype(dtype)
    value = jnp.where(wide >= high, dtype.type(info.max), value)
    value = jnp.where(wide < low, dtype.type(info.min), value)
    return jnp.where(wide != wide, dtype.type(0), value)


def _nonzero(x):
    if not _is_float(x.dtype):
        return x != 0
    # Compilers compare subnormals as zeros.
    bits = lax.bitcast_convert_type(x, _bits_of(x.dtype))
    return bits << bits.dtype.type(1) != 0


def _widen(x, dtype):
    if dtype != jnp.float64 or x.dtype not in (jnp.bfloat16, jnp.float32):
        return x.astype(dtype)
    # Compilers read float32 subnormals as zeros: take those from their integer.
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    tiny = size.astype(dtype) * np.float64(2.0**-149)
    tiny = jnp.where(bits >> np.uint32(31) == 1, -tiny, tiny)
    return jnp.where(size < np.uint32(0x800000), tiny, x.astype(dtype))


def convert(x, dtype):
    """The reference conversion of an array to an arithmetic dtype."""
    source, target = formats.format_of(x.dtype), formats.format_of(dtype)
    dtype = target.dtype
    if source == target:
        return x
    if dtype.kind == "b":
        return _nonzero(x)
    if not _is_float(dtype):
        return _float_to_integer(x, dtype) if _is_float(x.dtype) else x.astype(dtype)
    if x.dtype == bool or source.fraction_bits <= target.fraction_bits:
        if not (x.dtype == jnp.bfloat16 and dtype == jnp.float16):
            return _widen(x, dtype)
    if x.dtype.itemsize == 2 and _is_float(x.dtype):
        x = x.astype(jnp.float32)
    if _is_float(x.dtype):
        bits = _from_float(x, target)
    elif x.dtype.itemsize == 1 and dtype == jnp.float16:
        return x.astype(dtype)
    else:
        bits = _from_integer(x, target)
    return lax.bitcast_convert_type(bits, dtype)


def _reference(x, *, dtype, platform=""):
    return [convert(x, dtype)]


def _abstract(x, *, dtype):
    if formats.format_of(dtype, "cast").category is Category.STORAGE:
        raise TileTypeError(
            message(
                "cast",
                expected="an arithmetic dtype",
                got=f"storage format {jnp.dtype(dtype).name}",
                way_out="Write jaxtile.quantize(x, "
                f"{jnp.dtype(dtype).name!r}), which states rounding and overflow.",
            )
        )
    formats.require_arithmetic(x.dtype, "cast")
    return [Out(x.shape, np.dtype(dtype), tuple(range(x.ndim)))]


def _jvp(primals, tangents, *, dtype):
    # Rounding has derivative 0 almost everywhere; as everywhere in jax, the tangent of
    # a cast is the cast of the tangent.
    (x,), (dx,) = primals, tangents
    (y,) = cast_p.bind(x, dtype=dtype)
    if type(dx) is ad.Zero or not (_is_float(dtype) and _is_float(x.dtype)):
        return [y], [zero_tangent(y)]
    return [y], cast_p.bind(dx, dtype=dtype)


def _transpose(cotangents, x, *, dtype):
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval)]
    if not _is_float(x.aval.dtype):
        raise NoDerivativeError(
            message(
                "cast",
                expected="a float operand to transpose",
                got=str(x.aval.dtype),
                way_out="Only float to float casts are linear.",
            )
        )
    return cast_p.bind(ct, dtype=np.dtype(x.aval.dtype))


def _batch(args, dims, *, dtype):
    return cast_p.bind(*args, dtype=dtype), list(dims)


cast_p = define(
    "tile_cast",
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
