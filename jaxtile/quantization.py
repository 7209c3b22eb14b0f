"""Storage formats: into them, out of them, and two 4-bit codes a byte."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import formats
from jaxtile._arguments import axis_of, by_dims
from jaxtile._checks import as_array, choice
from jaxtile._operators import is_tile
from jaxtile.casting import bind_exact, exact_operand
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives._codes import ROUNDINGS
from jaxtile.primitives._storage import TARGETS, bind_decode, overflows, quantize_p
from jaxtile.primitives.pack import ORDERS, PAIRINGS, pack_p
from jaxtile.primitives.unpack import unpack_p
from jaxtile.tile import Tile

_ROUND = 'The default is "nearest_even".'


def quantize(
    x: Any,
    format: Any,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    bits: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Numbers rounded to a storage format, once, from their exact value.

    The same bits everywhere. x overflows where rounding, as if the exponent had no upper
    end, leaves the format: 464 rounds to 448 in float8_e4m3fn, 465 would to 480. Infinity
    stays itself in a format that has it, in every mode; elsewhere it overflows. NaN stays
    NaN with its sign; it becomes 0 in an integer format, and in float4_e2m1fn a zero of
    the other sign, since those have none. Zeros keep their sign where the format has one
    for them. float8_e8m0fnu holds powers of two alone: what lies between 0 and 2^-127 goes to
    2^-127, ties go up; zero and negative numbers count as overflow, to 2^-127 or NaN.

    "stochastic" rounds the magnitude up where floor(f 2^23) + floor(bits / 2^9) >= 2^23,
    f being the distance to the magnitude below in units of the gap.

    The derivative is straight-through: 1 where x did not overflow, 0 where it did. jax
    gives an 8-bit value an 8-bit tangent, which rounds (to nearest, saturating); with
    out_dtype the derivative has that precision. Integer codes and float8_e8m0fnu have
    derivatives with out_dtype alone.

    Args:
        x: an array, a tile, or a Python or NumPy number, of an arithmetic format. 64 bits
            count exactly, whatever jax_enable_x64 says.
        format: "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
            "float8_e8m0fnu", "float4_e2m1fn", "int8", "int4", "uint8" or "uint4", or the
            dtype; "e4m3fn" and the like for short.
        rounding: "nearest_even", "toward_zero", "up", "down" or "stochastic".
        overflow: "saturate", to the end of the range; "nan" or "inf" where the format
            has it.
        bits: uint32 random bits of x's shape, for "stochastic": the same bits, the same
            result.
        out_dtype: give the codes' values in this dtype, `decode(quantize(x), out_dtype)`,
            instead of the codes.

    Returns:
        The codes, an array or a `Tile` of the same dims.

    Raises:
        TileTypeError: x is none of these; no such format; bits that are not uint32;
            out_dtype does not hold every value of the format.
        TileValueError: no such rounding; an overflow mode that the format lacks; bits
            without stochastic rounding, or that rounding without bits.
        TileShapeError: bits of another shape.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([3.3, 464.0, 1000.0])
        >>> print(jt.decode(jt.quantize(x, "float8_e4m3fn")))
        [  3.25 448.   448.  ]
        >>> print(jt.quantize(x, "e4m3fn", overflow="nan", out_dtype=jnp.float32))
        [  3.25 448.      nan]
    """
    op = "quantize"
    target = target_format(op, format)
    dtype = None if out_dtype is None else formats.require_enabled(out_dtype, op)
    if is_tile(x):
        bits = bits if bits is None else by_dims(op, "bits", bits, x.dims)
        found = quantize(
            x.array,
            target.name,
            rounding=rounding,
            overflow=overflow,
            bits=bits,
            out_dtype=dtype,
        )
        return Tile(found, x.dims)
    x = exact_operand(op, x)
    formats.require_arithmetic(x.dtype, op)
    rest = () if bits is None else (random_bits(op, bits, np.shape(x)),)
    params = modes(op, target, rounding, overflow)
    bind = functools.partial(
        quantize_p.bind, **params, scaled=False, random=bool(rest), dtype=dtype
    )
    return bind_exact(bind, x, *rest)


def target_format(op: str, format: Any) -> formats.Format:
    """The format that a name, short or not, or a dtype stands for, if codes can have it.

    Raises:
        TileTypeError: it is none of them.
    """
    name = name_of(format)
    name = next((n for n in TARGETS if n.partition("_")[2] == name), name)
    if name not in TARGETS:
        raise TileTypeError(
            message(
                op,
                expected=f"one of {', '.join(TARGETS)}",
                got=str(getattr(format, "__name__", format)),
                way_out="Other formats come from jaxtile.cast.",
            )
        )
    return formats.FORMATS[name]


def name_of(dtype: Any) -> Any:
    """The name of a dtype, or what was given for one; None for what is no dtype."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):  # jax's key types raise the second
        return None


def modes(op: str, target: formats.Format, rounding: Any, overflow: Any) -> dict:
    """The parameters that say how to round, checked.

    Raises:
        TileValueError: no such rounding or overflow, or none that the format has.
    """
    choice(op, "rounding", rounding, ROUNDINGS, _ROUND)
    known = overflows(target)
    lacks = f"{target.name} has no code for others; "
    choice(op, "overflow", overflow, known, f"{lacks}the default is 'saturate'.")
    return dict(format=target.name, rounding=rounding, overflow=overflow)


def random_bits(op: str, bits: Any, shape: tuple) -> jax.Array:
    """Random bits of a shape.

    Raises:
        TileTypeError: they are not uint32.
        TileShapeError: they have another shape.
    """
    way_out = "Draw them with jax.random.bits(key, x.shape)."
    if getattr(bits, "dtype", None) != np.uint32:
        got = str(getattr(bits, "dtype", type(bits).__name__))
        raise TileTypeError(
            message(op, expected="random bits of uint32", got=got, way_out=way_out)
        )
    bits = as_array(op, bits)
    if bits.shape != tuple(shape):
        expected = f"random bits of shape {tuple(shape)}"
        raise TileShapeError(
            message(op, expected=expected, got=str(bits.shape), way_out=way_out)
        )
    return bits


def decode(x: Any, dtype: Any = jnp.float32) -> Any:
    """The values of codes, exactly.

    NaN gives NaN, an infinity an infinity, negative zero negative zero. The tangent of
    float codes is decoded as they are; integers have none.

    Args:
        x: an array or tile of a storage format, of int8 or of uint8.
        dtype: an arithmetic dtype that holds every value of the format.

    Returns:
        An array, or a `Tile` of the same dims.

    Raises:
        TileTypeError: x has an arithmetic format; dtype does not hold every value of x's
            format, or has 64 bits while jax_enable_x64 is off.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> codes = jt.quantize(jnp.array([0.3, -1000.0]), "float8_e4m3fn")
        >>> print(jt.decode(codes))
        [ 3.125e-01 -4.480e+02]
    """
    dtype = formats.require_enabled(dtype, "decode")
    if is_tile(x):
        return Tile(decode(x.array, dtype), x.dims)
    return bind_decode(as_array("decode", x), None, dtype=dtype)[0]


def pack(
    x: Any, axis: Any = -1, *, order: str = "low_first", pairing: str = "adjacent"
) -> Any:
    """Two 4-bit codes a byte along an axis, by an address map.

    Byte j holds codes first and second: 2j and 2j + 1 where pairing is "adjacent", j and
    j + n/2 where it is "halves". order "low_first" puts the first one in the low 4 bits.

    Args:
        x: an array or tile of int4, uint4 or float4_e2m1fn.
        axis: the axis to pack along, of an even size; a `Dim` for a tile.
        order: "low_first" or "high_first".
        pairing: "adjacent" or "halves".

    Returns:
        uint8, half as long along the axis. A tile gives its array, since a byte is no
        element of the dim.

    Raises:
        TileTypeError: x has another format.
        TileShapeError: no such axis, or one of odd size.
        TileValueError: no such order or pairing.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jt.quantize(jnp.array([1, -2, 3, 7]), "int4")
        >>> packed = jt.pack(x)
        >>> print(packed, jt.unpack(packed, "int4"))
        [225 115] [1 -2 3 7]
    """
    array, axis = _along("pack", x, axis)
    params = _map("pack", order, pairing)
    return pack_p.bind(array, axis=axis, **params)[0]


def unpack(
    x: Any,
    format: Any,
    axis: Any = -1,
    *,
    order: str = "low_first",
    pairing: str = "adjacent",
) -> Any:
    """The 4-bit codes of every byte: what `pack` packed with the same address map.

    Args:
        x: an array of uint8.
        format: "int4", "uint4" or "float4_e2m1fn".
        axis: the axis to unpack along.
        order: "low_first" or "high_first".
        pairing: "adjacent" or "halves".

    Returns:
        The codes, twice as long along the axis.

    Raises:
        TileTypeError: x is not uint8, or no such format.
        TileShapeError: no such axis.
        TileValueError: no such order or pairing.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> packed = jnp.array([0x21, 0x43], jnp.uint8)
        >>> print(jt.unpack(packed, "uint4", pairing="halves", order="high_first"))
        [2 4 1 3]
    """
    target = target_format("unpack", format)
    array, axis = _along("unpack", x, axis)
    params = _map("unpack", order, pairing)
    return unpack_p.bind(array, format=target.name, axis=axis, **params)[0]


def _along(op: str, x: Any, axis: Any) -> tuple[jax.Array, int]:
    dims = x.dims if is_tile(x) else None
    array = x.array if is_tile(x) else as_array(op, x)
    return array, axis_of(op, axis, array.ndim, dims)


def _map(op: str, order: Any, pairing: Any) -> dict:
    way_out = "The address map has no other kinds: transpose the codes."
    choice(op, "order", order, ORDERS, way_out)
    choice(op, "pairing", pairing, PAIRINGS, way_out)
    return dict(order=order, pairing=pairing)
