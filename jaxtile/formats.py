"""One table of number formats, and what each may be used for.

*Arithmetic* formats add, reduce and scan. *Storage* formats (8 bits and below) load,
store, move and decode exactly; `quantize` makes them, not `cast`, and arithmetic on them
is an error that names the conversion to write. E4M3FN, E4M3FNUZ and E5M2 are different
formats, never interchangeable; there is no "float8_e4m3".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxtile.errors import TileTypeError, message


class Category(enum.Enum):
    """What a format may be used for."""

    ARITHMETIC = "arithmetic"
    STORAGE = "storage"


@dataclass(frozen=True)
class Format:
    """One number format.

    Args:
        name: its dtype name.
        bits: the width of one value.
        exponent_bits, fraction_bits: of a float; 0 and the value bits of an integer.
        bias: of the exponent.
        has_inf: whether it encodes infinities.
        nan_codes: how many codes are NaN.
        largest: the largest finite value.
        category: arithmetic or storage.
    """

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int
    bias: int
    has_inf: bool
    nan_codes: int
    largest: float
    category: Category

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype of the format."""
        return np.dtype(getattr(ml_dtypes, self.name, None) or self.name)

    @property
    def is_float(self) -> bool:
        """Whether its codes have an exponent."""
        return self.exponent_bits > 0

    @property
    def signed(self) -> bool:
        """Whether it has negative values."""
        return self.bits > self.exponent_bits + self.fraction_bits

    @property
    def least_exponent(self) -> int:
        """The exponent of the smallest code of full precision."""
        return 1 - self.bias if self.signed else -self.bias

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest finite value of a float."""
        field = self.largest_code >> self.fraction_bits
        return field + self.least_exponent - self.signed

    @property
    def largest_code(self) -> int:
        """The code of the largest finite value; the infinity of a float follows it."""
        if self.has_inf:
            return (((1 << self.exponent_bits) - 1) << self.fraction_bits) - 1
        unsigned = (1 << (self.bits - self.signed)) - 1
        return unsigned - self.nan_codes // (1 + self.signed)

    @property
    def nan_code(self) -> int | None:
        """The code of the quiet NaN without payload; None where there is none."""
        if self.has_inf:
            return self.largest_code + 1 + (1 << (self.fraction_bits - 1))
        if self.nan_codes == 0:
            return None
        lone = self.signed and self.nan_codes == 1  # the place of negative zero
        return 1 << (self.bits - 1) if lone else self.largest_code + 1

    @property
    def has_negative_zero(self) -> bool:
        """Whether zeros have signs."""
        return self.is_float and self.signed and self.nan_codes != 1


_A, _S = Category.ARITHMETIC, Category.STORAGE


def _float(name, bits, exponent, fraction, bias, inf, nans, largest, category):
    return Format(name, bits, exponent, fraction, bias, inf, nans, largest, category)


def _integer(name, bits, signed, category=_A):
    value_bits = bits - signed
    return Format(name, bits, 0, value_bits, 0, False, 0, 2**value_bits - 1, category)


_ALL = (
    _float("float16", 16, 5, 10, 15, True, 2046, 65504.0, _A),
    _float("bfloat16", 16, 8, 7, 127, True, 254, 3.3895313892515355e38, _A),
    _float("float32", 32, 8, 23, 127, True, 2**24 - 2, 3.4028234663852886e38, _A),
    _float("float64", 64, 11, 52, 1023, True, 2**53 - 2, 1.7976931348623157e308, _A),
    _integer("bool", 8, 0),
    *(_integer(f"int{bits}", bits, 1) for bits in (8, 16, 32, 64)),
    *(_integer(f"uint{bits}", bits, 0) for bits in (8, 16, 32, 64)),
    _float("float8_e4m3fn", 8, 4, 3, 7, False, 2, 448.0, _S),
    _float("float8_e5m2", 8, 5, 2, 15, True, 6, 57344.0, _S),
    _float("float8_e4m3fnuz", 8, 4, 3, 8, False, 1, 240.0, _S),
    _float("float8_e5m2fnuz", 8, 5, 2, 16, False, 1, 57344.0, _S),
    _float("float8_e8m0fnu", 8, 8, 0, 127, False, 1, 2.0**127, _S),
    _float("float4_e2m1fn", 4, 2, 1, 1, False, 0, 6.0, _S),
    _integer("int4", 4, 1, _S),
    _integer("uint4", 4, 0, _S),
)
FORMATS = {fmt.name: fmt for fmt in _ALL}


def format_of(dtype, op: str = "format_of") -> Format:
    """The table's row of a dtype.

    Args:
        dtype: anything that `numpy.dtype` takes.
        op: the op that asks, for the message.

    Returns:
        Its `Format`.

    Raises:
        TileTypeError: the dtype has no row.

    Example:
        >>> import jaxtile as jt
        >>> jt.formats.format_of("bfloat16").fraction_bits
        7
    """
    # NumPy reads None as float64, and an array as its dtype; jax warns of one.
    array = isinstance(dtype, jax.Array | np.ndarray | np.generic)
    try:
        value = array or dtype is None
        found = None if value else FORMATS.get(jnp.dtype(dtype).name)
    except TypeError:
        found = None
    if found is None:
        raise TileTypeError(
            message(
                op,
                expected=f"one of {', '.join(FORMATS)}",
                got="an array" if array else f"dtype {getattr(dtype, 'dtype', dtype)}",
                way_out="Convert to one of these first.",
            )
        )
    return found


def require_arithmetic(dtype, op: str) -> Format:
    """The row of an arithmetic dtype; a storage format is refused by name.

    Args:
        dtype: the dtype of an operand.
        op: the op that asks, for the message.

    Returns:
        Its `Format`.

    Raises:
        TileTypeError: the dtype is a storage format, or has no row.
    """
    fmt = format_of(dtype, op)
    if fmt.category is Category.STORAGE:
        raise TileTypeError(
            message(
                op,
                expected="an arithmetic format",
                got=f"storage format {fmt.name}",
                way_out="Storage formats load, store and move; decode it exactly first "
                "with jaxtile.decode(x, jnp.float32).",
            )
        )
    return fmt


def x64_enabled() -> bool:
    """Whether jax has 64-bit types switched on.

    Returns:
        `jax_enable_x64`.
    """
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def require_enabled(dtype, op: str) -> np.dtype:
    """The dtype, unless 64 bits were asked for while jax has them switched off.

    Args:
        dtype: the dtype that was asked for.
        op: the op that asks, for the message.

    Returns:
        The `numpy.dtype`.

    Raises:
        TileTypeError: a 64-bit dtype while `jax_enable_x64` is off.
    """
    fmt = format_of(dtype, op)
    if fmt.bits == 64 and not x64_enabled():
        raise TileTypeError(
            message(
                op,
                expected="a dtype of at most 32 bits while jax_enable_x64 is off",
                got=fmt.name,
                way_out='Set jax.config.update("jax_enable_x64", True); jax would '
                "otherwise narrow it silently.",
            )
        )
    return fmt.dtype


def accumulator(dtype) -> np.dtype:
    """The dtype that arithmetic on `dtype` accumulates in.

    Floats narrower than 32 bits accumulate in float32, integers narrower than 32 bits in
    int32 or uint32; everything else in itself.

    Args:
        dtype: an arithmetic dtype.

    Returns:
        The accumulator's dtype.

    Raises:
        TileTypeError: a storage format, or one that has no row.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.formats.accumulator("bfloat16"), jt.formats.accumulator("uint8"))
        float32 uint32
    """
    dtype = require_arithmetic(dtype, "accumulator").dtype
    if dtype.kind == "b" or dtype.itemsize >= 4:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(
        jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32
    )


def decoded(dtype) -> np.dtype:
    """The arithmetic format that holds every value of a format, by default.

    Args:
        dtype: any dtype of the table.

    Returns:
        float32 for storage floats, int8 or uint8 for storage integers, itself otherwise.

    Raises:
        TileTypeError: the dtype has no row.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.formats.decoded("float8_e5m2"), jt.formats.decoded("int4"))
        float32 int8
    """
    fmt = format_of(dtype, "decoded")
    if fmt.category is Category.ARITHMETIC:
        return fmt.dtype
    if fmt.exponent_bits:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.uint8 if fmt.name.startswith("u") else jnp.int8)


def embeds(dtype, other) -> bool:
    """True if every value of a format is one of another.

    Args:
        dtype: the narrower format.
        other: the wider one.

    Returns:
        The answer, subnormals, infinities and NaN included.

    Raises:
        TileTypeError: a dtype has no row.

    Example:
        >>> import jaxtile as jt
        >>> jt.formats.embeds("int8", "bfloat16"), jt.formats.embeds("int16", "bfloat16")
        (True, False)
    """
    small, large = format_of(dtype, "embeds"), format_of(other, "embeds")
    if small == large:
        return True
    if not large.is_float:
        fits = large.largest >= small.largest and large.signed >= small.signed
        return fits and not small.is_float and large.name != "bool"
    if not small.is_float:
        return small.fraction_bits <= large.fraction_bits + 1
    least = [f.least_exponent - f.fraction_bits for f in (small, large)]
    fits = small.largest <= large.largest and small.fraction_bits <= large.fraction_bits
    return fits and least[0] >= least[1]
