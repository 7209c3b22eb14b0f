"""bitcast: float32 and uint32 reinterpreted as each other, bit for bit.

    bits(bitcast(x)) = bits(x)

Zero signs, subnormals and NaN payloads survive. It has no derivative.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from jaxtile.errors import TileTypeError, message
from jaxtile.primitives._define import Out, define, zero_tangent

_PARTNER = {"float32": "uint32", "uint32": "float32"}


def _abstract(x, *, dtype):
    if _PARTNER.get(x.dtype.name) != np.dtype(dtype).name:
        raise TileTypeError(
            message(
                "bitcast",
                expected="float32 to uint32, or uint32 to float32",
                got=f"{x.dtype.name} to {np.dtype(dtype).name}",
                way_out="Use cast for a numerical conversion, or "
                "jax.lax.bitcast_convert_type for other widths.",
            )
        )
    return [Out(x.shape, np.dtype(dtype), tuple(range(x.ndim)))]


def _reference(x, *, dtype, platform=""):
    return [lax.bitcast_convert_type(x, dtype)]


def _jvp(primals, tangents, *, dtype):
    (y,) = bitcast_p.bind(*primals, dtype=dtype)
    return [y], [zero_tangent(y)]


def _batch(args, dims, *, dtype):
    return bitcast_p.bind(*args, dtype=dtype), list(dims)


bitcast_p = define(
    "tile_bitcast", abstract=_abstract, reference=_reference, jvp=_jvp, batch=_batch
)
