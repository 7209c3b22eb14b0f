"""sort and topk in Pallas TPU kernels: columns of registers, or one loop of rolls.

Short fibres become columns, transposed where they lie along lanes: see `_columns`. For
others the network is a loop, whose partners are rolls to either side along sublanes or
lanes. An extent is padded to a power of two with ranks that come last, and cut again at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
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
from jaxtile.pallas_lowering.tpu._ties import LONGEST as TIED
from jaxtile.pallas_lowering.tpu._ties import ties_of, values_of_ties
from jaxtile.primitives._order import keys_of_ranks, ranks_of, values_of
from jaxtile.primitives.sort import sort_p, wanted
from jaxtile.primitives.topk import topk_p

_WORDS = ("float32", "int32", "uint32")
_LEAST = (SUBLANES, LANES)
# Columns are written out: what the compiler takes in a few seconds.
_LONGEST_COLUMN, _MOST_FIRST, _MOST_STEPS = 256, 16, 1024
# Registers of each plane of a tile: all planes of two are alive at once, or one alone.
_REGISTERS = 16
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


def _ranks(x, place, order, length):
    rank = ranks_of(x, order)
    return jnp.where(place < length, rank, LAST)


def _first_tile(values, axis, order, length, k) -> list:
    """The first k of 128 fibres by insertion: values, source indices, and the rest."""
    columns = [v.T if axis else v for v in values]
    place = lax.broadcasted_iota(jnp.int32, columns[0].shape, 0)
    planes = [_ranks(columns[0], place, order, length), place, *columns]
    groups = [
        tuple(v[i : i + SUBLANES] for v in planes)
        for i in range(0, place.shape[0], SUBLANES)
    ]
    found = [tuple(v[:1] for v in group) for group in first_of_columns(groups, k)]
    _, index, first, *rest = (
        lax.concatenate(list(v), 0) for v in zip(*found, strict=True)
    )
    return [v.T if axis else v for v in (first, index, *rest)]


def _sorted_tile(values, axis, order, length, k, rows, alone) -> list:
    """The first k of every fibre: values, source indices and the rest, or values alone.

    The columns of 128 fibres, of `rows` rows each, stand one under the other in memory. A
    register takes rows as far apart as there are registers, so that most partners are two
    registers, and what is sorted goes back in its order.
    """
    width = values[0].shape[1 - axis]
    height = width // LANES * rows
    count, chunks = height // SUBLANES, rows * SUBLANES // height
    at = [pl.ds(r, SUBLANES, stride=count) for r in range(count)]

    def body(*memory):
        for ref, v in zip(memory, values, strict=False):
            for t in range(width // LANES):
                fibres = lax.slice_in_dim(v, t * LANES, (t + 1) * LANES, axis=1 - axis)
                column = fibres.T[:rows] if axis else _pad(fibres, 0, rows, 0)
                ref[t * rows : (t + 1) * rows, :] = column
        sublane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
        places = [(sublane & (chunks - 1)) * count + r for r in range(count)]
        leaves = [[ref[rows_of, :] for ref in memory[: len(values)]] for rows_of in at]
        rank = [
            _ranks(v[0], place, order, length)
            for v, place in zip(leaves, places, strict=True)
        ]
        found = _sorted_groups(rank, places, leaves, order, chunks, alone)
        for rows_of, group in zip(at, found, strict=True):
            for ref, v in zip(memory, group, strict=True):
                ref[rows_of, :] = v
        return [_fibres(ref, axis, rows, k) for ref in memory]

    dtypes = [v.dtype for v in values]
    if not alone:
        dtypes.append(jnp.dtype(jnp.int32))
    first, *rest = pl.run_scoped(
        body, *(pltpu.VMEM((height, LANES), d) for d in dtypes)
    )
    return [first, *rest[-1:], *rest[:-1]]


def _sorted_groups(rank, places, leaves, order, chunks, alone) -> list:
    """Registers in order: of every leaf, and last of source indices; or of values."""
    if not alone:
        groups = [(r, p, *v) for r, p, v in zip(rank, places, leaves, strict=True)]
        return [(*v, p) for _, p, *v in sort_columns(groups, chunks)]
    dtype = leaves[0][0].dtype
    found = [v for (v,) in sort_columns([(r,) for r in rank], chunks)]
    if not jnp.issubdtype(dtype, jnp.floating):
        return [(values_of(keys_of_ranks(r), order, dtype),) for r in found]
    ties = [
        (ties_of(v, r, p, order),)
        for (v,), r, p in zip(leaves, rank, places, strict=True)
    ]
    pairs = zip(found, sort_columns(ties, chunks), strict=True)
    return [(values_of_ties(r, tie, order, dtype),) for r, (tie,) in pairs]


def _fibres(ref, axis, rows, k):
    """The first k of each column in memory, as fibres again."""
    tiles = [ref[i : i + rows, :] for i in range(0, ref.shape[0], rows)]
    if axis:
        tiles = [_pad(v, 0, max(rows, LANES), 0).T[:, :k] for v in tiles]
    return lax.concatenate(
        [lax.slice_in_dim(v, 0, k, axis=axis) for v in tiles], 1 - axis
    )


def _by_columns(values, axis, tile, width, out) -> list:
    """What `tile` makes of every `width` fibres: two tiles written out, or a loop.

    Args:
        values: of one shape (rows, columns), the fibres a multiple of `width`.
        axis: the sorted one.
        tile: from `width` fibres of each of the values to those of each result.
        width: the fibres of a tile.
        out: the shapes and dtypes of the results.
    """
    starts = range(0, values[0].shape[1 - axis], width)
    if len(starts) <= 2:

        def cut(v, i):
            return lax.slice_in_dim(v, i, i + width, axis=1 - axis)

        parts = [tile([cut(v, i) for v in values]) for i in starts]
        return [lax.concatenate(list(v), 1 - axis) for v in zip(*parts, strict=True)]

    def body(*refs):
        def at(ref, t):
            fibres = pl.ds(t * width, width)
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

    memory = [pltpu.VMEM(v.shape, v.dtype) for v in (*values, *out)]
    return pl.run_scoped(body, *memory)


def _tiling(shape, axis, order, k, alone) -> tuple[Callable, int] | None:
    """How tiles of columns are ordered, and of how many fibres, where columns fit."""
    if len(shape) != 2 or (axis == 1 and shape[0] < _FEWEST_ROWS):
        return None
    n, length = _padded(shape, axis), shape[axis]
    fixed: Any = dict(axis=axis, order=order, length=length, k=k)
    if k <= _MOST_FIRST and k * n // SUBLANES <= _MOST_STEPS and k < length:
        return partial(_first_tile, **fixed), LANES
    rows = max(1 << (length - 1).bit_length(), 2 * SUBLANES)
    if rows > _LONGEST_COLUMN:
        return None
    most = _REGISTERS * (1 + alone) * SUBLANES // rows
    needed = 1 << (pl.cdiv(shape[1 - axis], LANES) - 1).bit_length()
    tiles = max(min(SUBLANES, most, needed), 1)
    return partial(_sorted_tile, rows=rows, alone=alone, **fixed), tiles * LANES


def _ordered(values, axis, order, k, alone=False) -> list:
    """Values, source indices and payload in order, or one leaf alone."""
    shape = values[0].shape
    if len(shape) == 1:
        rows = [v.reshape(1, *shape) for v in values]
        return [v.reshape(k) for v in _ordered(rows, 1, order, k)]
    n = _padded(shape, axis)
    padded = [_pad(v, axis, n, 0) for v in values]
    tiling = _tiling(shape, axis, order, k, alone)
    if tiling is None:
        rank = _pad(ranks_of(values[0], order), axis, n, LAST)
        place = lax.broadcasted_iota(jnp.int32, rank.shape, axis)
        planes = _network([rank, place, *padded], axis)
        planes = [lax.slice_in_dim(v, 0, k, axis=axis) for v in planes]
        return [planes[2], planes[1], *planes[3:]]
    tile, step = tiling
    width = shape[1 - axis]
    whole = width + -width % step
    padded = [_pad(v, 1 - axis, whole, 0) for v in padded]
    dtypes = [v.dtype for v in values]
    dtypes[1:1] = [] if alone else [jnp.dtype(jnp.int32)]
    out = [jax.ShapeDtypeStruct((whole, k) if axis else (k, whole), d) for d in dtypes]
    found = _by_columns(padded, axis, tile, step, out)
    return [lax.slice_in_dim(v, 0, width, axis=1 - axis) for v in found]


@BACKEND.traces(sort_p, _refuse)
def sort_block(*operands, axis, order, indices, values):
    """The rule of sort: plain jax to trace."""
    x, *payload = operands
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    alone = not (indices or payload or (floating and x.shape[axis] > TIED))
    found = _ordered(operands, axis, order, x.shape[axis], alone)
    return wanted(found, indices, values)


@BACKEND.traces(topk_p, _refuse_topk)
def topk_block(*operands, axis, k, order, counted):
    """The rule of topk: plain jax to trace."""
    return _ordered(operands, axis, order, k)
