"""mma in Pallas TPU kernels: the matrix unit where it takes the operands, else products.

float32 goes through it at its full precision; parts that are rounded to bfloat16 already
lose nothing in one pass.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.pallas_lowering._mma import Unit, mma_values, refuse_mma
from jaxtile.pallas_lowering.tpu import BACKEND, TRAITS
from jaxtile.pallas_lowering.tpu._refuse import MOST_BYTES
from jaxtile.primitives import _contract
from jaxtile.primitives._define import lowered_on
from jaxtile.primitives.mma import mma_p

_UNITS = {"float32": ("bfloat16", "float32"), "int32": ("int8",)}


def _takes(a, b, dims, acc) -> bool:
    """Two matrices, or as many pairs of them as one leading batch axis has."""
    batch, matrix = dims.batch, 2 + len(dims.batch)
    if len(dims.contracted) != 1 or any(len(side) != matrix for side in dims):
        return False
    if batch and (len(batch) > 1 or any(side[0] != batch[0] for side in dims)):
        return False
    form = _contract.carrier(a.dtype, b.dtype, acc).name
    return form in _UNITS.get(np.dtype(acc).name, ())


def _loose(dtype, rounded) -> bool:
    return dtype != jnp.float32


def _promotes(run, a, b, dims, every):
    (k,) = dims.contracted
    axes = dims.a.index(k), dims.b.index(k)
    count, total = a.shape[axes[0]], None
    for start in range(0, count, every):
        end = min(start + every, count)
        pieces = [
            lax.slice_in_dim(v, start, end, axis=d)
            for v, d in zip((a, b), axes, strict=True)
        ]
        z = run(*pieces, dims)
        total = z if total is None else total + z
    return total


UNIT = Unit(
    loose=_loose,
    takes=_takes,
    inputs=frozenset(("int8", "float8_e4m3fn", "float8_e5m2")),
    most=MOST_BYTES // 4,
    promotes=_promotes,
)


def _refuse(*avals, **params):
    return refuse_mma(BACKEND, TRAITS, UNIT, avals, params)


@BACKEND.traces(mma_p, _refuse)
def _mma(*operands, **params):
    with lowered_on("tpu"):
        return mma_values(UNIT, operands, params)
