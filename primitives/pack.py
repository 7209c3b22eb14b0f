r"""pack: two 4-bit codes a byte, by a stated address map.

    byte j = x[first(j)] | x[second(j)] << 4      order "low_first"
    byte j = x[second(j)] | x[first(j)] << 4      order "high_first"

along one axis of n codes, with

    first(j), second(j) = 2j, 2j + 1              pairing "adjacent"
    first(j), second(j) = j, j + n/2              pairing "halves"

Bits move, and nothing is computed. It has no derivative.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import formats
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives._define import Out, define, zero_tangent

ORDERS = ("low_first", "high_first")
PAIRINGS = ("adjacent", "halves")


def batch_axis(primitive, args, dims, *, axis, **params):
    """The batching rule of an op along one axis."""
    (x,), (d,) = args, dims
    moved = axis + (axis >= d)
    return primitive.bind(x, axis=moved, **params), [d]


def no_derivative(primitive, primals, params):
    """The JVP rule of an op that moves bits into integers, or out of them."""
    (y,) = primitive.bind(*primals, **params)
    return [y], [zero_tangent(y)]


def half_axis(axis: int, pairing: str) -> int:
    """Where the axis of the two halves of a byte is, beside the axis of bytes."""
    return axis + (pairing == "adjacent")


def _reference(x, *, axis, order, pairing, platform=""):
    half = half_axis(axis, pairing)
    pairs = [x.shape[axis] // 2]
    pairs.insert(half - axis, 2)
    nibbles = lax.bitcast_convert_type(x, jnp.uint4).astype(np.uint8)
    split = nibbles.reshape(*x.shape[:axis], *pairs, *x.shape[axis + 1 :])
    first, second = (split.take(i, axis=half) for i in (0, 1))
    low, high = (first, second) if order == "low_first" else (second, first)
    return [low | (high << np.uint8(4))]


def _abstract(x, *, axis, order, pairing):
    fmt = formats.format_of(x.dtype, "pack")
    if fmt.bits != 4:
        raise TileTypeError(
            message(
                "pack",
                expected="codes of 4 bits: int4, uint4 or float4_e2m1fn",
                got=fmt.name,
                way_out="Make them with jaxtile.quantize.",
            )
        )
    if x.shape[axis] % 2:
        raise TileShapeError(
            message(
                "pack",
                expected=f"an even number of codes along axis {axis}",
                got=f"shape {x.shape}",
                way_out="Pad the axis with jnp.pad, or pack along another one.",
            )
        )
    shape = (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :])
    kept = tuple(-1 if d == axis else d for d in range(x.ndim))
    return [Out(shape, np.dtype(np.uint8), kept)]


pack_p = define(
    "tile_pack",
    abstract=_abstract,
    reference=_reference,
    jvp=lambda primals, tangents, **params: no_derivative(pack_p, primals, params),
    batch=lambda args, dims, **params: batch_axis(pack_p, args, dims, **params),
)
