"""sort on whole arrays: short rows, a warp each; longer ones are XLA's."""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND
from jaxtile.pallas_lowering.mosaic_gpu._refusals import refuse_formats
from jaxtile.pallas_lowering.mosaic_gpu.sort_rows import sort_rows
from jaxtile.primitives import _order
from jaxtile.primitives.sort import sort_p

# A lane has this many keys in registers, or half as many with their places.
_LONGEST, _LONGEST_INDEXED = 2048, 1024
# Fewer rows leave multiprocessors without work.
_FEW = 512


def _refuse(x, *payload, axis, order, indices):
    del order
    if x.dtype.itemsize > 4:
        return (
            f"its keys are words of 32 bits, not {x.dtype}; leave it to the reference"
        )
    if x.size == 0:
        return (
            "there is nothing to launch for an empty array; leave it to the reference"
        )
    longest = _LONGEST_INDEXED if indices or payload else _LONGEST
    if x.shape[axis] > longest:
        return f"rows of {x.shape[axis]} are longer than a warp's {longest} keys"
    return refuse_formats([x.dtype])


def _slower(x, *payload, axis, order, indices):
    del payload, order, indices
    rows = math.prod(x.shape) // x.shape[axis]
    if rows < _FEW:
        return f"{rows} rows, a warp each, leave most of the device without work"
    return None


@BACKEND.runs(sort_p, _refuse, _slower)
def run(x, *payload, axis, order, indices):
    """`sort_p` on whole arrays."""
    x, *payload = (jnp.moveaxis(v, axis, -1) for v in (x, *payload))
    flat = x.reshape(-1, x.shape[-1])
    found = sort_rows(flat, order, bool(indices or payload))
    found = [v.reshape(x.shape) for v in found]
    index = found[1] if len(found) > 1 else None
    outs = [found[0], *([index] if indices else [])]
    outs += [_order.take(v, index) for v in payload]
    return [jnp.moveaxis(v, -1, axis) for v in outs]
