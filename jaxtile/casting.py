"""Conversions of arrays and tiles: by value, and by bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxtile import formats
from jaxtile._checks import operand
from jaxtile._operators import is_tile
from jaxtile.primitives._define import compile_time
from jaxtile.primitives.bitcast import bitcast_p
from jaxtile.primitives.cast import cast_p
from jaxtile.tile import Tile


def cast(x: Any, dtype: Any) -> Any:
    """The nearest value of another format: a rounding that no compiler removes.

        cast(x) = the value of dtype nearest to x, ties to even, rounded once

    from the exact source value. Overflow goes to infinity; NaN stays a quiet NaN;
    signed zeros and subnormals are kept. Float to integer truncates toward zero, clamps
    to the range, and takes NaN to 0; integer to integer wraps; anything to bool is
    x != 0. The tangent of a float to float cast is the cast of the tangent.

    Args:
        x: an array, a tile, or a Python or NumPy scalar, of an arithmetic format.
            64-bit arrays and Python scalars count exactly, whatever
            jax_enable_x64 says.
        dtype: an arithmetic dtype.

    Returns:
        An array, or a `Tile` of the same dims.

    Raises:
        TileTypeError: x is none of these; either format is a storage format or not in
            the table; dtype has 64 bits while jax_enable_x64 is off.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.cast(jt.cast(jnp.float32(3.1415927), jnp.bfloat16), jnp.float32))
        3.140625
    """
    dtype = formats.require_enabled(dtype, "cast")
    if is_tile(x):
        return Tile(cast(x.array, dtype), x.dims)
    x = exact_operand("cast", x)
    formats.require_arithmetic(x.dtype, "cast")
    return bind_exact(functools.partial(cast_p.bind, dtype=dtype), x)


def bitcast(x: Any, dtype: Any) -> Any:
    """The same 32 bits read as float32 or as uint32.

        bits(bitcast(x)) = bits(x)

    Zero signs, subnormals and NaN payloads survive. It has no derivative.

    Args:
        x: an array, a tile or a NumPy scalar of float32 or uint32.
        dtype: the other of the two.

    Returns:
        An array of the same shape, or a `Tile` of the same dims.

    Raises:
        TileTypeError: x is none of these, or the pair of formats is another one.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(hex(jt.bitcast(jnp.float32(1.0), jnp.uint32)))
        0x3f800000
    """
    dtype = formats.format_of(dtype, "bitcast").dtype
    if is_tile(x):
        return Tile(bitcast(x.array, dtype), x.dims)
    x = exact_operand("bitcast", x)
    formats.format_of(x.dtype, "bitcast")
    # Without x64, jax would narrow 64 bits to the 32 that the op takes, and not refuse.
    with jax.enable_x64(formats.x64_enabled() or x.dtype.itemsize == 8):
        return bitcast_p.bind(jnp.asarray(x), dtype=dtype)[0]


def exact_operand(op: str, x: Any) -> Any:
    """A jax array as it is, everything else as a NumPy array of its exact value."""
    x = operand(op, x, wide=True)
    return x if isinstance(x, jax.Array) else np.asarray(x)


def bind_exact(bind: Callable[..., list], x: Any, *rest: Any) -> Any:
    """The one result of a binding of x, of 64 bits too while jax has those off."""
    if isinstance(x, Tracer) or x.dtype.itemsize < 8 or formats.x64_enabled():
        return bind(jnp.asarray(x), *rest)[0]
    # A constant: computed now, so that no 64-bit type enters a 32-bit computation.
    with compile_time(), jax.enable_x64(True):
        return bind(jnp.asarray(x), *rest)[0]
