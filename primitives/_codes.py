"""Numbers taken apart, rounded and put together again, on unsigned integers alone.

A number is (-1)^negative * word * 2^(exponent - width + 1), its word's leading bit on top
wherever `opened` or `normalised` says so. No float is computed with: no subnormal is
flushed, no product contracted, and no conversion of a compiler decides a bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.formats import Format, format_of


class Number(NamedTuple):
    """An array of numbers in parts.

    Args:
        negative: the sign, bool.
        exponent: int32, of the word's top bit.
        word: uint32 or uint64; 0 for zero.
        rest: bool, the exact number is a little larger than the word says.
        nan, inf: bool; they outrank the word.
    """

    negative: Any
    exponent: Any
    word: Any
    rest: Any
    nan: Any
    inf: Any


def width_of(word: Any) -> int:
    """How many bits a word has."""
    return word.dtype.itemsize * 8


def false_like(word: Any) -> Any:
    """No, for every element of an integer array."""
    return jnp.full_like(word, False, dtype=bool)


def open_float(x: Any) -> Number:
    """A float in parts; subnormals keep the least exponent and have a short word."""
    source = format_of(x.dtype)
    code = lax.bitcast_convert_type(x, np.dtype(f"uint{source.bits}"))
    # Not from the wider code: a GPU's conversion drops the sign of a NaN.
    negative = code >> code.dtype.type(source.bits - 1) == code.dtype.type(1)
    if source.bits == 16:
        source, code = _widened(x, code)
    kind = code.dtype.type
    top = kind((1 << source.exponent_bits) - 1)
    field = (code >> kind(source.fraction_bits)) & top
    fraction = code & kind((1 << source.fraction_bits) - 1)
    m = fraction | (jnp.minimum(field, kind(1)) << kind(source.fraction_bits))
    special = field == top
    return Number(
        negative=negative,
        exponent=jnp.maximum(field, kind(1)).astype(np.int32) - np.int32(source.bias),
        word=m << kind(width_of(m) - 1 - source.fraction_bits),
        rest=false_like(code),
        nan=special & (fraction != kind(0)),
        inf=special & (fraction == kind(0)),
    )


def _widened(x, code):
    """A 16-bit float's bits as float32's, exactly."""
    wide = format_of(np.float32)
    if x.dtype == jnp.bfloat16:
        return wide, code.astype(np.uint32) << np.uint32(16)
    return wide, lax.bitcast_convert_type(x.astype(np.float32), np.uint32)


def open_integer(x: Any) -> Number:
    """An integer in parts, normalised."""
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    if x.dtype.itemsize < 8:
        x = x.astype(np.int32 if signed else np.uint32)
    word = x.astype(np.dtype(f"uint{x.dtype.itemsize * 8}"))
    no = false_like(word)
    # By its bit: what was unsigned before compares unsigned in Mosaic GPU's lanes.
    negative = word >> word.dtype.type(width_of(word) - 1) != 0 if signed else no
    m = jnp.where(negative, word.dtype.type(0) - word, word)
    top = jnp.full_like(word, width_of(word) - 1, dtype=np.int32)
    return normalised(Number(negative, top, m, no, no, no))


def load(x: Any) -> Any:
    """The codes of an array of a storage format: uint32, or int32 of an integer."""
    fmt = format_of(x.dtype)
    if not fmt.is_float:
        return x.astype(np.int32)
    code = lax.bitcast_convert_type(x, jnp.dtype(f"uint{fmt.bits}"))
    return code.astype(np.uint32)


def store(code: Any, fmt: Format) -> Any:
    """Codes in their format: what `load` undoes."""
    if not fmt.is_float:
        return code.astype(fmt.dtype)
    narrow = code.astype(jnp.dtype(f"uint{fmt.bits}"))
    return lax.bitcast_convert_type(narrow, fmt.dtype)


def open_code(code: Any, fmt: Format) -> Number:
    """A storage format's codes, as `load` gives them, in parts, normalised."""
    if not fmt.is_float:
        return open_integer(code)
    one, no = np.uint32(1), false_like(code)
    size = code & np.uint32((1 << (fmt.bits - fmt.signed)) - 1)
    field = size >> np.uint32(fmt.fraction_bits)
    m, exponent = jnp.full_like(code, 1), field
    if fmt.signed:
        fraction = size & np.uint32((1 << fmt.fraction_bits) - 1)
        m = fraction | (jnp.minimum(field, one) << np.uint32(fmt.fraction_bits))
        exponent = jnp.maximum(field, one)
    nan = size > np.uint32(fmt.largest_code + fmt.has_inf)
    if fmt.nan_codes == 1:
        nan = code == np.uint32(fmt.nan_code or 0)
    number = Number(
        negative=code >> np.uint32(fmt.bits - 1) == one if fmt.signed else no,
        exponent=exponent.astype(np.int32) - np.int32(fmt.bias),
        word=m << np.uint32(31 - fmt.fraction_bits),
        rest=no,
        nan=nan,
        inf=size == np.uint32(fmt.largest_code + 1) if fmt.has_inf else no,
    )
    return normalised(number)


def open_value(x: Any) -> Number:
    """Any array of a format in parts."""
    fmt = format_of(x.dtype)
    if fmt.bits <= 8:
        return open_code(load(x), fmt)
    return open_float(x) if fmt.is_float else open_integer(x)


def normalised(x: Number) -> Number:
    """The leading bit of every word on top."""
    shift = jnp.minimum(lax.clz(x.word), x.word.dtype.type(width_of(x.word) - 1))
    return x._replace(
        word=x.word << shift, exponent=x.exponent - shift.astype(np.int32)
    )


def product(a: Number, b: Number) -> Number:
    """The exact product of significands of 8 bits and of 24, both normalised."""
    word = (a.word >> np.uint32(24)) * (b.word >> np.uint32(8))
    inf = a.inf | b.inf
    number = Number(
        negative=a.negative ^ b.negative,
        exponent=a.exponent + b.exponent + np.int32(1),
        word=word,
        rest=a.rest | b.rest,
        nan=a.nan | b.nan | (inf & (word == np.uint32(0))),
        inf=inf,
    )
    return normalised(number)


def quotient(a: Number, b: Number, bits: int, powers: bool) -> Number:
    """a / b, exact in its leading bits and in `rest`, both normalised.

    Args:
        a: significands of two bits less than a word has, or fewer.
        b: likewise, in words as wide.
        bits: how many leading bits the caller looks at, fewer than a word has.
        powers: every b is a power of two.

    Returns:
        The quotient, normalised.
    """
    kind, width = a.word.dtype.type, width_of(a.word)
    word, rest, bare = a.word, a.rest, kind(0)
    if not powers:
        # Two bits of room: no remainder reaches the sign of a signed comparison.
        left, divisor = a.word >> kind(2), b.word >> kind(2)
        word = jnp.zeros_like(left)
        for step in range(bits + 1):
            left = left << kind(step > 0)
            fits = left >= divisor
            left = jnp.where(fits, left - divisor, left)
            word = (word << kind(1)) | fits.astype(word.dtype)
        word, rest = word << kind(width - 1 - bits), rest | (left != bare)
    none = (a.word == bare, b.word == bare)
    number = Number(
        negative=a.negative ^ b.negative,
        exponent=a.exponent - b.exponent,
        word=jnp.where(b.inf, bare, word),
        rest=rest,
        nan=a.nan | b.nan | (none[0] & none[1]) | (a.inf & b.inf),
        inf=a.inf | none[1],
    )
    return normalised(number)


class Rounded(NamedTuple):
    """A rounded number.

    Args:
        code: the magnitude's code, as if the exponent had no upper end.
        over: bool, outside what the format holds.
        below: bool, too low for a format without zero or sign.
    """

    code: Any
    over: Any
    below: Any


ROUNDINGS = ("nearest_even", "toward_zero", "up", "down", "stochastic")
RANDOM_BITS = 23  # what a float32 drops at most


def round_to(x: Number, target: Format, rounding: str, random: Any = None) -> Rounded:
    """A number rounded once to the precision of a format.

    Args:
        x: normalised, unless its least exponent is not above the target's.
        target: a float format, or an integer of at most 8 bits.
        rounding: one of `ROUNDINGS`.
        random: uint32, for "stochastic".

    Returns:
        The `Rounded`.
    """
    kind, width = x.word.dtype.type, width_of(x.word)
    zero = x.word == kind(0)
    if target.is_float:
        least = np.int32(target.least_exponent)
        # An exponent past the field would wrap the code.
        most = np.int32(target.largest_exponent)
        past = x.exponent > most
        lead = jnp.clip(x.exponent - least, np.int32(0), most - least)
        short = jnp.maximum(least - x.exponent, np.int32(0))
        drop = short + np.int32(width - 1 - target.fraction_bits)
    else:
        high = jnp.minimum(x.exponent, np.int32(target.bits + 1))
        drop, lead = np.int32(width - 1) - high, jnp.zeros_like(high)
        past = false_like(zero)
    kept, more = _cut(x, drop, rounding, random)
    code = (kept + more).astype(np.uint32)
    code = code + (lead.astype(np.uint32) << np.uint32(target.fraction_bits))
    below = false_like(zero)
    if target.is_float and not target.signed:
        # One code a power of two: the hidden bit is all of the significand.
        code = jnp.maximum(code, np.uint32(1)) - np.uint32(1)
        below = zero | x.negative
    code = jnp.where(zero, np.uint32(0), code)
    limit = np.uint32(target.largest_code)
    if not target.is_float:
        limit = jnp.where(x.negative, np.uint32(lowest(target)), limit)
    over = (code > limit) | (past & (x.word != kind(0))) | below
    return Rounded(code, over | (x.inf if not target.has_inf else below), below)


def lowest(fmt: Format) -> int:
    """The magnitude of an integer format's lowest value."""
    return 1 << (fmt.bits - 1) if fmt.signed else 0


def _cut(x: Number, drop, rounding, random):
    """The bits of a word above its lowest `drop`, and 1 where they round up."""
    kind, width = x.word.dtype.type, width_of(x.word)
    most = np.int32(width - 1)
    inside = drop <= most
    by = jnp.clip(drop, np.int32(0), most).astype(x.word.dtype)
    kept = jnp.where(inside, x.word >> by, kind(0))
    # The fraction with its first bit on top.
    past = jnp.clip(drop - np.int32(width), np.int32(0), most).astype(x.word.dtype)
    near = (x.word << kind(1)) << (kind(width - 1) - by)
    fraction = jnp.where(inside, near, x.word >> past)
    if rounding == "toward_zero":
        more = false_like(kept)
    elif rounding == "nearest_even":
        odd = (kept & kind(1)) == kind(1)
        sticky = (fraction << kind(1) != kind(0)) | x.rest
        more = (fraction >> kind(width - 1) == kind(1)) & (sticky | odd)
    elif rounding == "stochastic":
        size = (fraction >> kind(width - RANDOM_BITS)).astype(np.uint32)
        chance = random >> np.uint32(32 - RANDOM_BITS)
        more = (size + chance) >> np.uint32(RANDOM_BITS) == np.uint32(1)
    else:
        more = (kept << by != x.word) | x.rest
        # Bools are never negated: Mosaic GPU has no layout for their constants.
        away = jnp.where(more, kind(1), kind(0))
        low, high = (away, kind(0)) if rounding == "down" else (kind(0), away)
        return kept, jnp.where(x.negative, low, high)
    return kept, more.astype(kept.dtype)


def close(x: Number, y: Rounded, target: Format, overflow: str) -> Any:
    """The codes of a rounded number, as `load` gives them.

    Args:
        x: what was rounded.
        y: its rounding.
        target: the format.
        overflow: "saturate"; "nan" or "inf" where the format has it.

    Returns:
        The codes: `store` makes the array.
    """
    largest = np.uint32(target.largest_code)
    if not target.is_float:
        size = jnp.where(x.negative, np.uint32(lowest(target)), largest)
        size = jnp.where(y.over, size, y.code).astype(np.int32)
        value = jnp.where(x.negative, np.int32(0) - size, size)
        return jnp.where(x.nan, np.int32(0), value)
    sign_bit = 1 << (target.bits - 1)
    # Without a NaN it is a zero of the other sign, which is what ml_dtypes makes of it.
    nan = np.uint32(sign_bit if target.nan_code is None else target.nan_code)
    limit = {"saturate": largest, "nan": nan, "inf": largest + np.uint32(1)}
    low = np.uint32(0) if overflow == "saturate" else nan
    code = jnp.where(y.over, limit[overflow], y.code)
    if not target.signed:
        code = jnp.where(y.below, low, code)
    if target.has_inf:
        code = jnp.where(x.inf, largest + np.uint32(1), code)
    code = jnp.where(x.nan, nan, code)
    if target.signed:
        negative = x.negative
        if not target.has_negative_zero:
            negative = negative & (code & np.uint32(sign_bit - 1) != np.uint32(0))
        code = code ^ jnp.where(negative, np.uint32(sign_bit), np.uint32(0))
    return code
