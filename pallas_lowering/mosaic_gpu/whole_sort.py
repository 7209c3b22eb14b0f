"""sort on whole arrays: short rows, a warp each; longer ones are XLA's."""

from __future__ import annotations

import jax.numpy as jnp

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND
from jaxtile.pallas_lowering.mosaic_gpu._refusals import refuse_formats
from jaxtile.pallas_lowering.mosaic_gpu.sort_rows import sort_rows
from jaxtile.primitives import _order
from jaxtile.primitives.sort import sort_p

# A lane has this many keys in registers, or half as many with their places.
_LONGEST, _LONGEST_INDEXED = 2048, 1024


def _refuse(x, *payload, axis, order, indices, values):
    del order, values
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


@BACKEND.runs(sort_p, _refuse)
def run(x, *payload, axis, order, indices, values):
    """`sort_p` on whole arrays."""
    x, *payload = (jnp.moveaxis(v, axis, -1) for v in (x, *payload))
    flat = x.reshape(-1, x.shape[-1])
    pairs = bool(indices or payload)
    found = [v.reshape(x.shape) for v in sort_rows(flat, order, pairs, values)]
    index = found[-1]
    outs = [*found[:values], *[index] * indices]
    outs += [_order.take(v, index) for v in payload]
    return [jnp.moveaxis(v, -1, axis) for v in outs]
