"""What quantize and decode share: their bindings, and what each format takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import formats
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.formats import Category, Format
from jaxtile.primitives._define import new_primitive

quantize_p = new_primitive("tile_quantize")
decode_p = new_primitive("tile_decode")

_STORAGE = [f.name for f in formats.FORMATS.values() if f.category is Category.STORAGE]
TARGETS = (*_STORAGE, "int8", "uint8")
SCALES = ("float32", "float8_e8m0fnu")


def overflows(target: Format) -> tuple[str, ...]:
    """The overflow modes that a format has."""
    nan = target.nan_code is not None
    return ("saturate", *(("nan",) * nan), *(("inf",) * target.has_inf))


def check_scale(scale, op: str) -> None:
    """Refuse a scale of a format that no scale has.

    Raises:
        TileTypeError: it is neither float32 nor float8_e8m0fnu.
    """
    if scale.dtype.name not in SCALES:
        raise TileTypeError(
            message(
                op,
                expected=f"scales of {' or '.join(SCALES)}",
                got=scale.dtype.name,
                way_out="Cast the scales to float32.",
            )
        )


def check_grid(x, scale, op: str) -> None:
    """Refuse scales that are not one for each block of an array.

    Raises:
        TileShapeError: their sizes do not divide the array's.
    """
    pairs = list(zip(x.shape, scale.shape, strict=False))
    fits = all(n % g == 0 if g else n == 0 for n, g in pairs)
    if x.ndim != scale.ndim or not fits:
        raise TileShapeError(
            message(
                op,
                expected=f"scales of sizes that divide {x.shape}",
                got=str(scale.shape),
                way_out="Give one for each block, along every axis.",
            )
        )


def spread(scale, shape):
    """The scale of every element of a shape; linear in the scales."""
    for axis, (n, g) in enumerate(zip(shape, scale.shape, strict=True)):
        if n != g:
            times = n // g
            inner = (*scale.shape[: axis + 1], times, *scale.shape[axis + 1 :])
            places = [d for d in range(scale.ndim + 1) if d != axis + 1]
            wide = lax.broadcast_in_dim(scale, inner, places)
            scale = wide.reshape(*scale.shape[:axis], n, *scale.shape[axis + 1 :])
    return scale


def batch_scaled(primitive, args, dims, has_scale: bool, /, **params):
    """The batching rule of an elementwise primitive whose second operand may be scales."""
    size = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    moved = []
    for i, (v, d) in enumerate(zip(args, dims, strict=True)):
        if d is not None:
            moved.append(jnp.moveaxis(v, d, 0))
        elif has_scale and i == 1 and size:
            moved.append(lax.expand_dims(v, (0,)))  # one block of the whole batch
        else:
            moved.append(jnp.broadcast_to(v, (size, *v.shape)))
    return primitive.bind(*moved, **params), [0]


def holds(target: Format, source: Format) -> bool:
    """Whether every value of a storage format is one of another format's."""
    if target.name == "bool":
        return False
    if not target.is_float:
        fits = target.largest >= source.largest and target.signed >= source.signed
        return not source.is_float and fits
    if not source.is_float:
        return target.fraction_bits + 1 >= source.fraction_bits
    least = source.least_exponent - source.fraction_bits
    return (
        target.fraction_bits >= source.fraction_bits
        and target.largest >= source.largest
        and target.least_exponent - target.fraction_bits <= least
    )


def require_exact(source: Format, dtype, op: str) -> None:
    """Refuse a dtype that does not hold every value of a storage format.

    Raises:
        TileTypeError: it does not, or is a storage format itself.
    """
    target = formats.require_arithmetic(dtype, op)
    if not holds(target, source):
        raise TileTypeError(
            message(
                op,
                expected=f"a dtype that holds every value of {source.name}",
                got=target.name,
                way_out="Decode to float32, and cast that.",
            )
        )


def nearest(x, format):
    """Bind `quantize_p` as tangents of 8 bits need it; gives a list."""
    return quantize_p.bind(
        x,
        format=format,
        rounding="nearest_even",
        overflow="saturate",
        scaled=False,
        random=False,
        dtype=None,
    )


def bind_decode(x, scale, *, dtype, exact=True):
    """Bind `decode_p` from its parts.

    Args:
        x: codes.
        scale: None, or one scale for each block.
        dtype: of the values.
        exact: refuse a dtype that does not hold every code's value.

    Returns:
        The one output, in a list.
    """
    operands = [x] if scale is None else [x, scale]
    return decode_p.bind(*operands, dtype=np.dtype(dtype), exact=exact)
