"""sort and topk in Pallas TPU kernels: columns of registers, or one loop of rolls.

Short fibres become columns, transposed where they lie along lanes: see `_columns`. For
others the network is a loop, whose partners are rolls to either side along sublanes or
lanes. An extent is padded to a power of two with ranks that come last, and cut again at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxtile.pallas_lowering._sort import exchanged, refuse_length
from jaxtile.pallas_lowering.tpu import BACKEND
from jaxtile.pallas_lowering.tpu._columns import (
    LANES,
    LAST,
    SUBLANES,
    first_of_columns,
    sort_columns,
)
from jaxtile.pallas_lowering.tpu._refuse import MOST_BYTES
from jaxtile.primitives._order import ranks_of
from jaxtile.primitives.sort import sort_p, wanted
from jaxtile.primitives.topk import topk_p

_WORDS = ("float32", "int32", "uint32")
_LEAST = (SUBLANES, LANES)
# Columns are written out: what the compiler takes in a few seconds.
_LONGEST_COLUMN, _MOST_FIRST, _MOST_STEPS = 256, 16, 1024
# Fewer rows leave most of a transposed register empty.
_FEWEST_ROWS = 64


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


def _run_of_columns(shape, axis, n, k) -> Callable | None:
    """How columns of n rows give their first k in order, where they fit."""
    if len(shape) != 2 or (axis == 1 and shape[0] < _FEWEST_ROWS):
        return None
    if k <= _MOST_FIRST and k * n // SUBLANES <= _MOST_STEPS and k < shape[axis]:
        return lambda groups: [
            tuple(v[:1] for v in group) for group in first_of_columns(groups, k)
        ]
    return sort_columns if n <= _LONGEST_COLUMN else None


def _column_tile(values, axis, order, length, run, k) -> list:
    """The first k of a tile's fibres: values, source indices, and the rest."""
    columns = [v.T if axis else v for v in values]
    place = lax.broadcasted_iota(jnp.int32, columns[0].shape, 0)
    rank = ranks_of(columns[0], order)
    if length < place.shape[0]:
        rank = jnp.where(place < length, rank, LAST)
    planes = [rank, place, *columns]
    groups = [
        tuple(v[i : i + SUBLANES] for v in planes)
        for i in range(0, place.shape[0], SUBLANES)
    ]
    found = zip(*run(groups), strict=True)
    _, index, first, *rest = (lax.concatenate(list(v), 0)[:k] for v in found)
    return [v.T if axis else v for v in (first, index, *rest)]


def _by_columns(values: Sequence, axis: int, tile: Callable, k: int) -> list:
    """What `tile` makes of every 128 fibres: two tiles written out, or more in a loop.

    Args:
        values: of one shape (rows, columns), the fibres a multiple of 128.
        axis: the sorted one.
        tile: from 128 fibres of each of the values to the first k of each result.
        k: the extent of the results.
    """
    width = values[0].shape[1 - axis]
    starts = range(0, width, LANES)
    if len(starts) <= 2:

        def cut(v, i):
            return lax.slice_in_dim(v, i, i + LANES, axis=1 - axis)

        parts = [tile([cut(v, i) for v in values]) for i in starts]
        return [lax.concatenate(list(v), 1 - axis) for v in zip(*parts, strict=True)]

    def body(*refs):
        def at(ref, t):
            fibres = pl.ds(t * LANES, LANES)
            return ref.at[fibres, :] if axis else ref.at[:, fibres]

        def step(t, carry):
            found = tile([at(ref, t)[...] for ref in refs[: len(values)]])
            for ref, v in zip(refs[len(values) :], found, strict=True):
                at(ref, t)[...] = v
            return carry

        for ref, value in zip(refs, values, strict=False):
            ref[...] = value
        lax.fori_loop(0, len(starts), step, 0)
        return [ref[...] for ref in refs[len(values) :]]

    shape = (width, k) if axis else (k, width)
    first, *rest = (v.dtype for v in values)
    memory = [pltpu.VMEM(v.shape, v.dtype) for v in values]
    memory += [pltpu.VMEM(shape, d) for d in (first, jnp.int32, *rest)]
    return pl.run_scoped(body, *memory)


def _ordered(values, axis, order, k) -> list:
    shape = values[0].shape
    if len(shape) == 1:
        rows = [v.reshape(1, *shape) for v in values]
        return [v.reshape(k) for v in _ordered(rows, 1, order, k)]
    n = _padded(shape, axis)
    padded = [_pad(v, axis, n, 0) for v in values]
    run = _run_of_columns(shape, axis, n, k)
    if run is None:
        rank = _pad(ranks_of(values[0], order), axis, n, LAST)
        place = lax.broadcasted_iota(jnp.int32, rank.shape, axis)
        planes = _network([rank, place, *padded], axis)
        planes = [lax.slice_in_dim(v, 0, k, axis=axis) for v in planes]
        return [planes[2], planes[1], *planes[3:]]
    width = shape[1 - axis]
    padded = [_pad(v, 1 - axis, width + -width % LANES, 0) for v in padded]

    def tile(columns):
        return _column_tile(columns, axis, order, shape[axis], run, k)

    found = _by_columns(padded, axis, tile, k)
    return [lax.slice_in_dim(v, 0, width, axis=1 - axis) for v in found]


@BACKEND.traces(sort_p, _refuse)
def sort_block(*operands, axis, order, indices, values):
    """The rule of sort: plain jax to trace."""
    found = _ordered(operands, axis, order, operands[0].shape[axis])
    return wanted(found, indices, values)


@BACKEND.traces(topk_p, _refuse_topk)
def topk_block(*operands, axis, k, order, counted):
    """The rule of topk: plain jax to trace."""
    return _ordered(operands, axis, order, k)
