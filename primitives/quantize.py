r"""quantize: a number, or its quotient by a scale, rounded once to a storage format.

    quantize(x) = the code nearest to x, in the direction of `rounding`
    quantize(x, s) = the code nearest to x / s, exact before the one rounding

with s one scale for each block of x: its sizes divide those of x, axis by axis.

With `dtype` the result is decoded again and multiplied by s, rounded once more:

    decode(quantize(x, s)) * s

A number overflows where rounding, as if the exponent had no upper end, leaves the format.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtile import formats
from jaxtile.errors import NoDerivativeError, TileTypeError, TileValueError, message
from jaxtile.primitives import _codes, decode
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._storage import (
    batch_scaled,
    bind_decode,
    check_grid,
    check_scale,
    nearest,
    overflows,
    quantize_p,
    require_exact,
    spread,
)
from jaxtile.primitives.cast import cast_p, convert
from jaxtile.primitives.map_linear import has_tangent, one_shape


def _parts(operands, scaled, random):
    """x, the scale or None, the random bits or None."""
    x, *rest = operands
    scale = rest.pop(0) if scaled else None
    return x, scale, rest[0] if random else None


def _rounded(x, scale, bits, target, rounding):
    """The number that is rounded, in parts, and its rounding."""
    number = _codes.open_value(x)
    # A subnormal's word is short, which matters where the target goes lower.
    if scale is not None or target.least_exponent < -126:
        number = _codes.normalised(number)
    if scale is not None:
        divisor = _codes.normalised(_codes.open_value(scale))
        width = _codes.width_of(number.word)
        if width == 64:
            word = divisor.word.astype(np.uint64) << np.uint64(32)
            divisor = divisor._replace(word=word)
        enough = 3 + (target.fraction_bits if target.is_float else target.bits)
        if rounding == "stochastic":
            enough = 31
        powers = not formats.format_of(scale.dtype).fraction_bits
        number = _codes.quotient(number, divisor, enough, powers)
    return number, _codes.round_to(number, target, rounding, bits)


def codes(x, scale, bits, *, format, rounding, overflow):
    """The codes, as `_codes.load` gives them, of arrays of one shape."""
    target = formats.format_of(format)
    if x.dtype == bool:
        x = x.astype(np.int32)
    number, found = _rounded(x, scale, bits, target, rounding)
    return _codes.close(number, found, target, overflow)


def reference(
    *operands, format, rounding, overflow, scaled, random, dtype, platform=""
):
    x, scale, bits = _parts(operands, scaled, random)
    scale = None if scale is None else spread(scale, x.shape)
    y = codes(x, scale, bits, format=format, rounding=rounding, overflow=overflow)
    target = formats.format_of(format)
    if dtype is None:
        return [_codes.store(y, target)]
    return [decode.values_of(y, target, scale, dtype)]


def _abstract(*avals, format, rounding, overflow, scaled, random, dtype):
    target = formats.format_of(format)
    x, scale, bits = _parts(avals, scaled, random)
    formats.require_arithmetic(x.dtype, "quantize")
    _check_modes(target, rounding, overflow, random)
    if scale is not None:
        _check_scale(x, scale)
    if bits is not None and bits.dtype != np.uint32:
        raise TileTypeError(
            message(
                "quantize",
                expected="random bits of uint32",
                got=bits.dtype.name,
                way_out="Draw them with jax.random.bits(key, x.shape).",
            )
        )
    one_shape([x] if bits is None else [x, bits], "quantize")
    if dtype is not None:
        require_exact(target, dtype, "quantize")
    out = target.dtype if dtype is None else np.dtype(dtype)
    return [Out(x.shape, out, tuple(range(x.ndim)))]


def _check_modes(target, rounding, overflow, random):
    if overflow not in overflows(target):
        raise TileValueError(
            message(
                "quantize",
                expected=f"overflow in {overflows(target)} for {target.name}",
                got=repr(overflow),
                way_out="The format has no code for it: saturate, or take a format that "
                "has one.",
            )
        )
    if random != (rounding == "stochastic"):
        raise TileValueError(
            message(
                "quantize",
                expected="random bits with stochastic rounding, and with no other",
                got=f"rounding={rounding!r} {'with' if random else 'without'} bits=",
                way_out='Pass rounding="stochastic", bits=jax.random.bits(key, x.shape).',
            )
        )


def _check_scale(x, scale):
    check_scale(scale, "quantize")
    check_grid(x, scale, "quantize")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TileTypeError(
            message(
                "quantize",
                expected="floats to divide by scales",
                got=x.dtype.name,
                way_out="Cast x to float32 first.",
            )
        )


def _is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _jvp(primals, tangents, **params):
    (y,) = quantize_p.bind(*primals, **params)
    x, scale, _ = _parts(primals, params["scaled"], params["random"])
    dx, ds, _ = _parts(tangents, params["scaled"], params["random"])
    dx = dx if has_tangent(dx) else None
    ds = ds if ds is not None and has_tangent(ds) and _is_wide(ds.dtype) else None
    target, dtype = formats.format_of(params["format"]), params["dtype"]
    # A float8_e8m0fnu holds no zero and no negative tangent.
    held = target.is_float and target.signed if dtype is None else _is_float(dtype)
    if not held or (dx is None and ds is None):
        return [y], [zero_tangent(y)]
    dy = _tangent(primals, dx, ds, params)
    if dtype is not None:
        return [y], cast_p.bind(dy, dtype=np.dtype(dtype))
    # jax gives a value of 8 bits a tangent of 8 bits.
    return [y], nearest(dy, params["format"])


def _is_wide(dtype) -> bool:
    return dtype in (np.float32, np.float64)


@jax.jit
def _scale(scale):
    return decode.values(scale, None, dtype=np.float32)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _inside(x, scale, bits, target, rounding):
    return ~_rounded(x, scale, bits, target, rounding)[1].over


@functools.partial(jax.jit, static_argnames=("dtype", "format", "rounding", "overflow"))
def _value(x, scale, bits, dtype, **params):
    found = codes(x, scale, bits, **params)
    return decode.values_of(found, formats.format_of(params["format"]), None, dtype)


def _tangent(primals, dx, ds, params):
    # Rounding has derivative 0 almost everywhere, which trains nothing. Straight through,
    # the code's value v counts as the quotient q = x / s where x did not overflow, and as
    # a constant elsewhere:
    #     dv = (dx - q ds) / s inside, 0 outside;
    #     d(v s) = dx + (v - q) ds inside, v ds outside.
    x, scale, bits = _parts(primals, params["scaled"], params["random"])
    scale = None if scale is None else spread(scale, x.shape)
    target = formats.format_of(params["format"])
    inside = _inside(x, scale, bits, target, params["rounding"])
    wide = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    terms = []
    if dx is not None:
        dx = cast_p.bind(dx, dtype=wide)[0]
        terms.append(lax.select(inside, dx, jnp.zeros_like(dx)))
    if scale is None:
        return terms[0]
    s = convert(_scale(scale), wide)
    decoded = params["dtype"] is not None
    if ds is not None:
        kept = {k: params[k] for k in ("format", "rounding", "overflow")}
        v = _value(x, scale, bits, dtype=wide, **kept)
        q = lax.div(convert(x, wide), s)
        inner = v - q if decoded else -q
        factor = jnp.where(inside, inner, v if decoded else jnp.zeros_like(v))
        terms.append(factor * spread(cast_p.bind(ds, dtype=wide)[0], x.shape))
    total = terms[0] if len(terms) == 1 else lax.add(*terms)
    return total if decoded else lax.div(total, s)


def _transpose(cotangents, x, *rest, format, dtype, **params):
    # Only the tangents of a quantize are linear, and those have neither scale nor dtype:
    # the conversion to the codes' format, and back.
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval)]
    if rest or dtype is not None or not _is_float(x.aval.dtype):
        raise NoDerivativeError(
            message(
                "quantize",
                expected="its derivative to transpose",
                got="quantize itself, which is not linear",
                way_out="Take jax.vjp or jax.grad of it.",
            )
        )
    return bind_decode(ct, None, dtype=np.dtype(x.aval.dtype), exact=False)


define(
    quantize_p,
    abstract=_abstract,
    reference=reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=lambda args, dims, **params: batch_scaled(
        quantize_p, args, dims, params["scaled"], **params
    ),
)
