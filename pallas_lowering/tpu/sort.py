"""sort and topk in Pallas TPU kernels: the bitonic network as one loop of rolls.

The partner of an element is a roll to either side away, along sublanes or lanes. An
extent is padded to a power of two with ranks that come last, and cut again at the end.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from jaxtile.pallas_lowering._sort import exchanged, refuse_length
from jaxtile.pallas_lowering.tpu import BACKEND
from jaxtile.pallas_lowering.tpu._refuse import MOST_BYTES
from jaxtile.primitives._order import ranks_of
from jaxtile.primitives.sort import sort_p, wanted
from jaxtile.primitives.topk import topk_p

_WORDS = ("float32", "int32", "uint32")
_LEAST = (8, 128)  # sublanes and lanes of a register


def _padded(shape, axis) -> int:
    """The extent of the network along one of the last two axes of a shape."""
    least = _LEAST[axis - (len(shape) - 2)]
    return max(1 << (shape[axis] - 1).bit_length(), least)


def _refuse(x, *payload, axis, **params):
    for v in (x, *payload):
        if v.dtype.name not in _WORDS:
            return (
                f"{v.dtype.name} is not rolled there; its sorts are of float32 and 32-bit "
                "integers: cast it, or sort outside the kernel"
            )
    if 0 in x.shape:
        return "a kernel has no empty values; sort empty arrays outside"
    if x.ndim == 0 or axis < x.ndim - 2:
        return "it sorts along the last two axes only; transpose outside the kernel"
    shape = x.shape if x.ndim > 1 else (1, *x.shape)
    place = axis + len(shape) - x.ndim
    size = math.prod(shape) // shape[place] * _padded(shape, place)
    # Two sets of planes are alive in a step.
    needed = 2 * (3 + len(payload)) * 4 * size
    if needed > MOST_BYTES:
        return (
            f"it needs {needed / 2**20:.1f} MiB of vector memory, above "
            f"{MOST_BYTES >> 20}; sort smaller blocks"
        )
    return refuse_length(x.shape[axis])


def _refuse_topk(*operands, k, counted, **params):
    if counted:
        return "valid_count has no rule there; leave it out, and mask the result"
    if k == 0:
        return "a kernel has no empty values; ask for at least one"
    return _refuse(*operands, **params)


def _network(planes: list, axis: int) -> list:
    """The planes in order, by one loop over the steps, which compiles once."""
    n = planes[0].shape[axis]
    place = lax.broadcasted_iota(jnp.int32, planes[0].shape, axis)

    def step(_, carry):
        p, q, planes = carry
        distance = jnp.int32(1) << q
        low = ((place >> q) & 1) == 0
        others = [
            jnp.where(
                low, pltpu.roll(v, n - distance, axis), pltpu.roll(v, distance, axis)
            )
            for v in planes
        ]
        planes = exchanged(planes, others, place, p, q)
        last = q == 0
        return jnp.where(last, p + 1, p), jnp.where(last, p, q - 1), planes

    bits = n.bit_length() - 1
    start = jnp.int32(1), jnp.int32(0), planes
    return lax.fori_loop(0, bits * (bits + 1) // 2, step, start)[2]


def _pad(v: Any, axis: int, n: int, fill: Any) -> Any:
    missing = n - v.shape[axis]
    if not missing:
        return v
    shape = (*v.shape[:axis], missing, *v.shape[axis + 1 :])
    return lax.concatenate([v, jnp.full(shape, fill, v.dtype)], axis)


def _ordered(values, axis, order, k) -> list:
    shape = values[0].shape
    if len(shape) == 1:
        rows = [v.reshape(1, *shape) for v in values]
        return [v.reshape(k) for v in _ordered(rows, 1, order, k)]
    n = _padded(shape, axis)
    last = np.iinfo(np.int32).max
    rank = _pad(ranks_of(values[0], order), axis, n, last)
    planes = [rank, lax.broadcasted_iota(jnp.int32, rank.shape, axis)]
    planes += [_pad(v, axis, n, 0) for v in values]
    planes = [lax.slice_in_dim(v, 0, k, axis=axis) for v in _network(planes, axis)]
    return [planes[2], planes[1], *planes[3:]]


@BACKEND.traces(sort_p, _refuse)
def sort_block(*operands, axis, order, indices, values):
    """The rule of sort: plain jax to trace."""
    found = _ordered(operands, axis, order, operands[0].shape[axis])
    return wanted(found, indices, values)


@BACKEND.traces(topk_p, _refuse_topk)
def topk_block(*operands, axis, k, order, counted):
    """The rule of topk: plain jax to trace."""
    return _ordered(operands, axis, order, k)
