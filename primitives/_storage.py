"""What quantize and decode share: their bindings, and what each format takes."""

from __future__ import annotations

import numpy as np

from jaxtile import formats
from jaxtile.errors import TileTypeError, message
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


def require_exact(source: Format, dtype, op: str) -> None:
    """Refuse a dtype that does not hold every value of a storage format.

    Raises:
        TileTypeError: it does not, or is a storage format itself.
    """
    target = formats.require_arithmetic(dtype, op)
    if not formats.embeds(source.name, target.name):
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
        scale: None, or one scale for each code.
        dtype: of the values.
        exact: refuse a dtype that does not hold every code's value.

    Returns:
        The one output, in a list.
    """
    operands = [x] if scale is None else [x, scale]
    return decode_p.bind(*operands, dtype=np.dtype(dtype), exact=exact)
