r"""decode: the value of a storage format's code, exactly; times a scale, rounded once.

    decode(x) = the number that the code x stands for
    decode(x, s) = the number nearest to x s, ties to even, from the exact product

with s one scale for each block of x: its sizes divide those of x, axis by axis.

NaN gives NaN, an infinity an infinity, negative zero negative zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtile import formats
from jaxtile.errors import NoDerivativeError, TileTypeError, message
from jaxtile.primitives import _codes
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._storage import (
    TARGETS,
    batch_scaled,
    check_grid,
    check_scale,
    decode_p,
    nearest,
    require_exact,
    spread,
)
from jaxtile.primitives.cast import cast_p, convert
from jaxtile.primitives.map_linear import has_tangent


def values(x, scale, *, dtype):
    """The reference on arrays of one shape, scale or None."""
    return values_of(_codes.load(x), formats.format_of(x.dtype), scale, dtype)


def values_of(code, source, scale, dtype):
    """The values of codes as `_codes.load` gives them."""
    dtype = np.dtype(dtype)
    target = formats.format_of(dtype)
    if scale is None and not target.is_float:
        return code.astype(dtype)
    number = _codes.open_code(code, source)
    if scale is not None:
        by = _codes.normalised(_codes.open_value(scale))
        number = _codes.product(number, by)
    direct = formats.format_of(np.float32) if target.bits == 64 else target
    found = _codes.round_to(number, direct, "nearest_even")
    out = _codes.store(_codes.close(number, found, direct, "inf"), direct)
    return convert(out, dtype)


@jax.jit
def _floats(x):
    return values(x, None, dtype=np.float32)


def reference(*operands, dtype, exact, platform=""):
    x, *scale = operands
    return [values(x, spread(scale[0], x.shape) if scale else None, dtype=dtype)]


def _check_product(dtype):
    if np.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TileTypeError(
            message(
                "decode_blocks",
                expected="float32, bfloat16 or float16 for products with scales",
                got=np.dtype(dtype).name,
                way_out="Decode to float32, and cast that.",
            )
        )


def _abstract(*avals, dtype, exact):
    x, *scale = avals
    source = formats.format_of(x.dtype, "decode")
    if source.name not in TARGETS:
        raise TileTypeError(
            message(
                "decode",
                expected="codes of a storage format, or integers of 8 bits",
                got=x.dtype.name,
                way_out="It is a number already: use jaxtile.cast.",
            )
        )
    for s in scale:
        check_scale(s, "decode_blocks")
        check_grid(x, s, "decode_blocks")
        _check_product(dtype)
    if exact and not scale:
        require_exact(source, dtype, "decode")
    return [Out(x.shape, np.dtype(dtype), tuple(range(x.ndim)))]


def _jvp(primals, tangents, *, dtype, exact):
    # decode(x, s) = v(x) s is linear in each: dx s + v ds. A tangent of 8 bits is decoded
    # as the codes are.
    (y,) = decode_p.bind(*primals, dtype=dtype, exact=exact)
    x, *scale = primals
    dx, *ds = tangents
    if not jnp.issubdtype(dtype, jnp.floating):
        return [y], [zero_tangent(y)]
    terms = []
    if has_tangent(dx) and formats.format_of(x.dtype).signed:
        terms += decode_p.bind(dx, *scale, dtype=dtype, exact=exact)
    if ds and has_tangent(ds[0]) and ds[0].dtype == np.float32:
        v = _floats(x)
        terms += cast_p.bind(lax.mul(v, spread(ds[0], x.shape)), dtype=dtype)
    if not terms:
        return [y], [zero_tangent(y)]
    return [y], [terms[0] if len(terms) == 1 else lax.add(*terms)]


def _transpose(cotangents, x, *scale, dtype, exact):
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval), *(None for _ in scale)]
    fmt = formats.format_of(x.aval.dtype)
    if not (ad.is_undefined_primal(x) and fmt.is_float and fmt.signed):
        raise NoDerivativeError(
            message(
                "decode",
                expected="codes of a signed float format to transpose",
                got=fmt.name,
                way_out="Only float to float conversions are linear.",
            )
        )
    ct = cast_p.bind(ct, dtype=np.dtype(np.float32))[0]
    if scale:
        ct = ct * spread(_floats(scale[0]), ct.shape)
    return [*nearest(ct, fmt.name), *(None for _ in scale)]


define(
    decode_p,
    abstract=_abstract,
    reference=reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=lambda args, dims, **params: batch_scaled(
        decode_p, args, dims, len(args) > 1, **params
    ),
)
