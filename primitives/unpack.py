r"""unpack: the two 4-bit codes of every byte, by the address map of `pack`.

    unpack(pack(x)) = x,    pack(unpack(b)) = b

bit for bit. It has no derivative.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import formats
from jaxtile.errors import TileTypeError, message
from jaxtile.primitives._define import Out, define
from jaxtile.primitives.pack import batch_axis, half_axis, no_derivative


def _reference(x, *, format, axis, order, pairing, platform=""):
    low, high = x & np.uint8(15), x >> np.uint8(4)
    first, second = (low, high) if order == "low_first" else (high, low)
    both = jnp.stack([first, second], axis=half_axis(axis, pairing))
    shape = (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :])
    codes = both.reshape(shape).astype(jnp.uint4)
    return [lax.bitcast_convert_type(codes, formats.format_of(format).dtype)]


def _abstract(x, *, format, axis, order, pairing):
    fmt = formats.format_of(format, "unpack")
    if x.dtype != np.uint8 or fmt.bits != 4:
        raise TileTypeError(
            message(
                "unpack",
                expected="bytes of uint8 that hold int4, uint4 or float4_e2m1fn",
                got=f"{x.dtype.name} for {fmt.name}",
                way_out="Pass what jaxtile.pack gave, and the format that it was given.",
            )
        )
    shape = (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :])
    kept = tuple(-1 if d == axis else d for d in range(x.ndim))
    return [Out(shape, fmt.dtype, kept)]


unpack_p = define(
    "tile_unpack",
    abstract=_abstract,
    reference=_reference,
    jvp=lambda primals, tangents, **params: no_derivative(unpack_p, primals, params),
    batch=lambda args, dims, **params: batch_axis(unpack_p, args, dims, **params),
)
