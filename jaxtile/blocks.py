"""Storage formats with explicit scales: one a tensor, a channel or a block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtile import formats
from jaxtile._arguments import axis_of, by_dims
from jaxtile._checks import as_array, choice, integer
from jaxtile._jax_private import sharding_spec
from jaxtile._operators import is_tile
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError, message
from jaxtile.primitives._storage import SCALES, bind_decode, check_scale, quantize_p
from jaxtile.quantization import modes, name_of, random_bits, target_format
from jaxtile.tile import Tile

SCALE_ROUNDINGS = ("up", "nearest_even", "ocp")
_BLOCK = (
    "Give block= one extent for each axis, None for a whole one: (1, 32), or 32 for the "
    "last axis alone."
)


class Blocks(NamedTuple):
    """Codes and the scales that they count in.

    Args:
        codes: an array or tile of a storage format or 8-bit integers.
        scales: float32 or float8_e8m0fnu, one for each block, of the codes' rank.
    """

    codes: Any
    scales: Any


def quantize_blocks(
    x: Any,
    format: Any,
    block: Any = None,
    *,
    scales: Any = None,
    scale_format: Any = "float8_e8m0fnu",
    scale_rounding: str = "up",
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    bits: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Numbers in units of a scale that their block shares, in a storage format.

        codes = quantize(x / s), rounded once from the exact quotient

    Where scales are not given, with m the largest finite magnitude of a block (NaN and
    infinities do not count) and t the largest value of the format, they are

        "up":            m / t rounded up to scale_format, so that nothing saturates
        "nearest_even":  m / t rounded to the nearest
        "ocp":           2^(floor(log2 m) - floor(log2 t)), the rule of OCP's MX formats,
                         under which magnitudes above t s saturate

    and 1 for a block of zeros; no scale is below the format's least. MX is a block of 32
    with scales of float8_e8m0fnu.

    The derivative is that of `quantize`, straight-through: codes count as x / s inside
    the range, and as constants outside. Scales that are computed count as constants;
    given ones of float32 have a derivative. With out_dtype it has that precision, else
    jax rounds the tangent of 8-bit codes to 8 bits.

    Args:
        x: an array or tile of floats.
        format: as `quantize` takes it.
        block: how many elements share a scale along each axis, None for the whole axis:
            (None, None) is one a tensor, (1, None) one a row, (1, 32) blocks of a row.
            An integer is blocks of the last axis, None one scale for all; for a tile, a
            mapping from dims to extents too. Extents divide their axes, or cover them.
        scales: given ones, which broadcast to one for each block.
        scale_format: "float32" or "float8_e8m0fnu", of computed scales.
        scale_rounding: "up", "nearest_even" or, for float8_e8m0fnu, "ocp".
        rounding: as `quantize` takes it.
        overflow: as `quantize` takes it.
        bits: as `quantize` takes them.
        out_dtype: give what `decode_blocks` makes of codes and scales in this dtype.

    Returns:
        `Blocks(codes, scales)`. A tile's codes are a tile, its scales an array in the
        order of its dims. With out_dtype the decoded array or tile alone.

    Raises:
        TileTypeError: x is not floats; no such format; scales of another format.
        TileValueError: no such rounding or overflow mode; an extent below 1.
        TileShapeError: block or scales do not fit x; an extent that leaves a short block.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([[0.5, 1.5, 40.0, 24.0]])
        >>> q = jt.quantize_blocks(x, "float4_e2m1fn", (1, 2))
        >>> print(q.codes, q.scales)
        [[2 6 4 3]] [[0.25 8]]
        >>> print(jt.decode_blocks(q.codes, q.scales))
        [[ 0.5  1.5 32.  24. ]]
    """
    op = "quantize_blocks"
    target = target_format(op, format)
    params = modes(op, target, rounding, overflow)
    array, dims = (x.array, x.dims) if is_tile(x) else (as_array(op, x), None)
    _require_floats(array.dtype)
    shape = array.shape
    extents = _extents(op, block, shape, dims)
    grid = _grid(shape, extents)
    if scales is None:
        scales = _scales(array, extents, target, scale_format, scale_rounding)
    else:
        scales = _given(op, scales, grid)
    operands = [array, scales]
    if bits is not None:
        bits = by_dims(op, "bits", bits, dims) if is_tile(bits) else bits
        operands.append(random_bits(op, bits, shape))
    dtype = None if out_dtype is None else formats.require_enabled(out_dtype, op)
    params |= dict(scaled=True, random=bits is not None, dtype=dtype)
    (out,) = quantize_p.bind(*operands, **params)
    out = out if dims is None else Tile(out, dims)
    return Blocks(out, scales) if dtype is None else out


def decode_blocks(codes: Any, scales: Any, *, dtype: Any = jnp.float32) -> Any:
    """The values of codes times their blocks' scales, rounded once.

        y = the number of dtype nearest to value(code) * s, ties to even

    from the exact product; overflow goes to infinity, subnormals are kept. It is linear
    in the codes' values and in float32 scales.

    Args:
        codes: an array or tile, as `quantize_blocks` gives it.
        scales: float32 or float8_e8m0fnu, of the codes' rank, as many along each axis as
            there are blocks of equal extent.
        dtype: float32, bfloat16 or float16.

    Returns:
        An array, or a `Tile` of the codes' dims.

    Raises:
        TileTypeError: codes, scales or dtype have another format.
        TileShapeError: the sizes of the scales do not divide those of the codes.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> codes = jt.quantize(jnp.array([[1.0, 2.0, 3.0, 4.0]]), "float4_e2m1fn")
        >>> scales = jt.quantize(jnp.array([[0.5, 8.0]]), "float8_e8m0fnu")
        >>> print(jt.decode_blocks(codes, scales))
        [[ 0.5  1.  24.  32. ]]
    """
    op = "decode_blocks"
    dtype = formats.require_enabled(dtype, op)
    array, dims = (
        (codes.array, codes.dims) if is_tile(codes) else (as_array(op, codes), None)
    )
    scales = as_array(op, scales.array if is_tile(scales) else scales)
    (out,) = bind_decode(array, scales, dtype=dtype)
    return out if dims is None else Tile(out, dims)


def _require_floats(dtype) -> None:
    formats.require_arithmetic(dtype, "quantize_blocks")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TileTypeError(
            message(
                "quantize_blocks",
                expected="floats",
                got=dtype.name,
                way_out="Cast x to float32 first.",
            )
        )


def _extents(op: str, block: Any, shape: tuple, dims: Any) -> tuple[int, ...]:
    """The extent of a block along each axis, at least 1."""
    ndim = len(shape)
    if isinstance(block, Mapping):
        named: list = [1] * ndim
        for axis, extent in block.items():
            named[axis_of(op, axis, ndim, dims)] = extent
        block = named
    elif block is None:
        block = (None,) * ndim
    elif not isinstance(block, tuple | list):
        block = (1,) * (ndim - 1) + (block,) * bool(ndim)
    if len(block) != ndim:
        expected = f"a block of {ndim} extents for shape {shape}"
        raise TileShapeError(
            message(op, expected=expected, got=str(tuple(block)), way_out=_BLOCK)
        )
    found = []
    for extent, size in zip(block, shape, strict=True):
        # A symbolic size, of an export, may be anything from 1.
        known = isinstance(size, int)
        whole = max(size, 1) if known else size
        n = whole if extent is None else integer(op, "integer extents", extent, _BLOCK)
        if n < 1:
            raise TileValueError(
                message(op, expected="extents of 1 or more", got=str(n), way_out=_BLOCK)
            )
        found.append(min(n, whole) if known else n)
        if size % found[-1]:
            expected = f"extents that divide shape {shape}"
            way_out = "Pad x with zeros by jnp.pad: they change no scale."
            raise TileShapeError(
                message(op, expected=expected, got=str(n), way_out=way_out)
            )
    return tuple(found)


def _grid(shape: tuple, extents: tuple) -> tuple[int, ...]:
    """How many blocks there are along each axis."""
    return tuple(n // e for n, e in zip(shape, extents, strict=True))


def _given(op: str, scales: Any, grid: tuple) -> jax.Array:
    scales = as_array(op, scales.array if is_tile(scales) else scales)
    check_scale(scales, op)
    try:
        return jnp.broadcast_to(scales, grid)
    except ValueError:
        raise TileShapeError(
            message(
                op,
                expected=f"scales that broadcast to {grid}, one for each block",
                got=str(scales.shape),
                way_out=_BLOCK,
            )
        ) from None


def _scales(x, extents, target, scale_format, scale_rounding) -> jax.Array:
    op = "quantize_blocks"
    way_out = "float8_e8m0fnu holds powers of two."
    name = choice(op, "scale_format", name_of(scale_format), SCALES, way_out)
    known = SCALE_ROUNDINGS if name != "float32" else SCALE_ROUNDINGS[:2]
    choice(op, "scale_rounding", scale_rounding, known, '"ocp" gives powers of two.')
    _require_near(x, extents)
    top = _largest(lax.stop_gradient(x), extents)
    by, rounding = float(target.largest), scale_rounding
    if scale_rounding == "ocp":
        by, rounding = 2.0 ** math.floor(math.log2(by)), "toward_zero"
    (found,) = quantize_p.bind(
        top,
        jnp.full(top.shape, by, np.float32),
        format=name,
        rounding=rounding,
        overflow="saturate",
        scaled=True,
        random=False,
        dtype=None,
    )
    # Compilers compare subnormals as zeros, so the bits say which they are.
    none = _bits(top) == 0
    if name == "float32":
        some = jnp.maximum(_bits(found), np.uint32(1))
        found = lax.bitcast_convert_type(some, np.float32)
    return jnp.where(none, jnp.ones_like(found), found)


def _require_near(x, extents: tuple) -> None:
    """Refuse blocks that span some devices of an explicit mesh, but not all."""
    mesh = jax.typeof(x).sharding.mesh
    for axis, (names, grid) in enumerate(
        zip(sharding_spec(jax.typeof(x)), _grid(x.shape, extents), strict=True)
    ):
        names = names if isinstance(names, tuple) else (names,) * (names is not None)
        devices = math.prod(mesh.shape[name] for name in names)
        if grid != 1 and grid % devices:
            raise TileShapeError(
                message(
                    "quantize_blocks",
                    expected=f"blocks that lie within the {devices} parts of axis {axis}",
                    got=f"{grid} blocks, sharded over mesh axes {names}",
                    way_out="Reshard that axis first (jax.sharding.reshard), or pass "
                    "scales=.",
                )
            )


def _split_sharding(x, extents: tuple) -> Any:
    """Of x with two axes for each of its own: (which block, where in it)."""
    sharding, spec = jax.typeof(x).sharding, sharding_spec(jax.typeof(x))
    if not any(spec):
        return None
    halves = zip(spec, _grid(x.shape, extents), strict=True)
    pairs = [(name, None) if grid != 1 else (None, name) for name, grid in halves]
    spec = PartitionSpec(*(name for pair in pairs for name in pair))
    return NamedSharding(sharding.mesh, spec)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def _largest(x: jax.Array, extents: tuple) -> jax.Array:
    """The largest finite magnitude of every block, by its bits."""
    fmt = formats.format_of(x.dtype)
    code = _bits(x)
    word = code.dtype.type
    size = code & word((1 << (fmt.bits - 1)) - 1)
    size = jnp.where(size > word(fmt.largest_code), word(0), size)
    pairs = zip(_grid(x.shape, extents), extents, strict=True)
    split = lax.reshape(
        size,
        [k for pair in pairs for k in pair],
        out_sharding=_split_sharding(x, extents),
    )
    top = split.max(tuple(range(1, 2 * x.ndim, 2)), initial=0)
    return lax.bitcast_convert_type(top, x.dtype)
