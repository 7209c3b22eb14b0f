"""Products of numbers in a storage format with a scale for each block."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import _kernels, formats
from jaxtile._checks import as_array, integer
from jaxtile.blocks import decode_blocks, quantize_blocks
from jaxtile.contraction import matmul
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives._storage import check_grid, check_scale, spread
from jaxtile.quantization import decode, target_format

_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_STEP = 128  # of K at most, where it divides


def scaled_matmul(
    a: Any, b: Any, a_scales: Any, b_scales: Any, *, out_dtype: Any = jnp.float32
) -> jax.Array:
    """The product of 8-bit codes, each block of which counts in units of its scale.

        y = sum over blocks g of K of s[m, g] t[g, n] (sum over k in g of a[m, k] b[k, n])

    with s and t the scales of the blocks in which elements lie. Sums are float32 in any
    order, the inner one of exact products.

    It is the product of `decode_blocks(a, a_scales)` and `decode_blocks(b, b_scales)`, and
    has its derivatives; jax gives codes 8-bit tangents, which round and saturate. Train
    through `quantized_matmul` instead.

    Args:
        a: codes `[..., depth]` of float8_e4m3fn or float8_e5m2.
        b: codes `[depth, columns]`, likewise.
        a_scales, b_scales: float32 or float8_e8m0fnu, of the codes' rank, as many along
            each axis as there are blocks: what `quantize_blocks` gives.
        out_dtype: what the sum is rounded to, once.

    Returns:
        An array `[..., columns]` of out_dtype.

    Raises:
        TileShapeError: shapes that do not fit; scales that are not one for each block.
        TileTypeError: codes or scales of other formats; an out_dtype that holds no floats.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> a, s = jt.quantize_blocks(jnp.array([[1.0, 2.0, 40.0, 8.0]]), "e4m3fn", (1, 2))
        >>> b, t = jt.quantize_blocks(jnp.ones((4, 1)), "e4m3fn", (2, 1))
        >>> print(jt.nn.scaled_matmul(a, b, s, t))
        [[51.]]
    """
    op = "scaled_matmul"
    a, b = _codes(op, "a", a), _codes(op, "b", b)
    _require_pair(op, a.shape, b.shape)
    s, t = _scales(op, a, a_scales), _scales(op, b, b_scales)
    return _product(a, b, s, t, _out(op, out_dtype))


def quantized_matmul(
    a: Any,
    b: Any,
    *,
    format: Any = "float8_e4m3fn",
    block: int = 128,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """The `scaled_matmul` of floats that are quantized by blocks first.

    Blocks of a are block elements of a row, those of b block by block, with float32 scales
    under which nothing saturates. The derivative is straight-through, as `quantize_blocks`
    has it with out_dtype=float32: that of the product of the rounded operands, in float32.

    Args:
        a: floats `[..., depth]`.
        b: floats `[depth, columns]`.
        format: "float8_e4m3fn" or "float8_e5m2".
        block: how many elements share a scale, along each axis; it divides depth and
            columns or covers them.
        out_dtype: what the sum is rounded to, once.

    Returns:
        An array `[..., columns]` of out_dtype.

    Raises:
        TileShapeError: shapes that do not fit; a block that leaves a short one.
        TileTypeError: operands that are no floats; no such format; an out_dtype that holds
            no floats.

    Example:
        >>> import jax, jax.numpy as jnp, jaxtile as jt
        >>> a, b = jnp.array([[448.0, 99.0]]), jnp.full((2, 1), 448.0)
        >>> print(jt.nn.quantized_matmul(a, b))  # 99 rounds to 96
        [[243712.]]
        >>> print(jax.grad(lambda b: jt.nn.quantized_matmul(a, b)[0, 0])(b))
        [[448.]
         [ 96.]]
    """
    op = "quantized_matmul"
    a, b = as_array(op, a), as_array(op, b)
    _require_pair(op, a.shape, b.shape)
    block = integer(op, "block an integer", block, "The default is 128.")
    name = target_format(op, format).name
    if name not in _FORMATS:
        _refuse_format(op, "the format", name)
    return _through(a, b, name, block, _out(op, out_dtype))


def _refuse_format(op: str, what: str, got: str) -> None:
    raise TileTypeError(
        message(
            op,
            expected=f"{what} {' or '.join(_FORMATS)}",
            got=got,
            way_out="Quantize to one of these, or multiply with jaxtile.matmul.",
        )
    )


def _codes(op: str, name: str, value: Any) -> jax.Array:
    value = as_array(op, value)
    if value.dtype.name not in _FORMATS:
        _refuse_format(op, f"{name} of", value.dtype.name)
    return value


def _require_pair(op: str, a: tuple, b: tuple) -> None:
    if len(a) < 1 or len(b) != 2 or a[-1:] != b[:1] or 0 in (*a, *b):
        raise TileShapeError(
            message(
                op,
                expected="a of shape [..., depth] and b of [depth, columns], none empty",
                got=f"{a} and {b}",
                way_out="Reshape or transpose them.",
            )
        )


def _scales(op: str, codes: jax.Array, scales: Any) -> jax.Array:
    scales = as_array(op, scales)
    check_scale(scales, op)
    check_grid(codes, scales, op)
    return scales if scales.dtype == np.float32 else decode(scales)


def _out(op: str, dtype: Any) -> np.dtype:
    dtype = formats.require_enabled(dtype, op)
    formats.require_arithmetic(dtype, op)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TileTypeError(
            message(
                op,
                expected="an out_dtype of floats",
                got=dtype.name,
                way_out="Leave it out for float32, and cast that.",
            )
        )
    return dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _product(a, b, s, t, dtype) -> jax.Array:
    depth, columns = b.shape
    # Blocks of K of either operand are unions of steps.
    even = depth // _STEP if depth % _STEP == 0 else 1
    steps = math.lcm(s.shape[-1], t.shape[0], even)
    rows = math.prod(a.shape[:-1])
    left = spread(s, (*a.shape[:-1], steps)).reshape(rows, steps).T
    right = spread(t, (steps, columns))
    y = _kernels.scaled_matmul(dtype)(a.reshape(rows, depth), b, left, right)
    return y.reshape(*a.shape[:-1], columns)


@_product.defjvp
def _product_jvp(dtype, primals, tangents):
    def plain(a, b, s, t):
        left, right = decode_blocks(a, s), decode_blocks(b, t)
        return matmul(left, right, out_dtype=dtype)

    return _product(*primals, dtype), jax.jvp(plain, primals, tangents)[1]


def _quantized(a, b, name: str, block: int, dtype: Any = None) -> tuple:
    """Rows by runs of a block, matrices by squares; values where a dtype is given."""
    run = (1,) * (a.ndim - 1) + (block,)
    options = dict(scale_format="float32", out_dtype=dtype)
    left = quantize_blocks(a, name, run, **options)
    return left, quantize_blocks(b, name, (block, block), **options)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _through(a, b, name, block, dtype) -> jax.Array:
    (a, s), (b, t) = _quantized(a, b, name, block)
    return _product(a, b, s, t, dtype)


@_through.defjvp
def _through_jvp(name, block, dtype, primals, tangents):
    def plain(a, b):
        return matmul(*_quantized(a, b, name, block, np.float32), out_dtype=dtype)

    return _through(*primals, name, block, dtype), jax.jvp(plain, primals, tangents)[1]
