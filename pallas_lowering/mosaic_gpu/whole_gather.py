"""gather on whole arrays along the last axis, where every row has an index of its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND
from jaxtile.pallas_lowering.mosaic_gpu.gather_rows import gather_rows
from jaxtile.primitives._bits import from_bits, inside, to_bits
from jaxtile.primitives._moves import gather_p

_MOST = 2**31 - 1


def _refuse(x, index, fill, *, axis, batch):
    if axis != x.ndim - 1 or len(batch) != axis or index.ndim != x.ndim:
        return (
            "only the last axis, with an index for every row (batch='all'), is picked "
            "in a launch; leave it to the reference"
        )
    if fill.ndim:
        return "a fill for each place has no kernel; leave it to the reference"
    if x.dtype.itemsize not in (1, 2, 4, 8) or jnp.dtype(x.dtype).name.endswith("int4"):
        return f"{x.dtype} is no whole number of bytes"
    if x.size == 0 or index.size == 0:
        return (
            "there is nothing to launch for an empty array; leave it to the reference"
        )
    if max(x.shape[-1], index.shape[-1], x.size // x.shape[-1]) > _MOST:
        return f"{x.shape} is beyond 32-bit places or a grid; split the array"
    return None


@BACKEND.runs(gather_p, _refuse)
def run(x, index, fill, *, axis, batch):
    """`gather_p` on whole arrays."""
    del axis, batch
    n, shape = x.shape[-1], index.shape
    if index.dtype != np.int32:
        # What is outside must stay so when it narrows.
        index = jnp.where(inside(index, n), index.astype(np.int32), np.int32(-1))
    bits, other = (
        v.astype(np.uint8) if v.dtype == bool else to_bits(v) for v in (x, fill)
    )
    found = gather_rows(
        bits.reshape(-1, n), index.reshape(-1, shape[-1]), other.reshape(1)
    ).reshape(shape)
    return [found.astype(bool) if x.dtype == bool else from_bits(found, x.dtype)]
