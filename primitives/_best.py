"""The first k of a stable order, without ordering the rest."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.primitives import _order
from jaxtile.primitives._bits import place_dtype
from jaxtile.primitives._order import Order
from jaxtile.primitives.sort import bind_sort

_LARGEST_BLOCK_ON_CPU = (
    32  # XLA unrolls a minor reduction of up to 32, and vectorises it
)
# What a kernel sorts in one go on CUDA.
_CHUNK = 1024
# Up to as many heads of blocks are sorted at once there: a launch costs more.
_MANY = 32 * _CHUNK


def best(x, order: Order, k: int, platform: str):
    """The source indices of the first k values in stable order, 0 < k <= n."""
    return _best(x, lambda v: _order.keys_of(v, order), k, platform)


def _best(x, keys, k, platform):
    n = x.shape[-1]
    some = 3 if platform == "cpu" else 8
    if not isinstance(n, int) or some * k >= n:  # a symbolic size has no blocks
        return _first(keys(x), k, platform)
    size = _block(n, k, platform)
    if n // size + (k + 1) * size > n // 2:
        return _few(keys(x), k, platform)
    # Each of the k blocks with the best heads has an element before everything in any
    # other block: its head, or with the same head the one in the earlier block.
    count = n // size
    blocks = x[..., : count * size].reshape(*x.shape[:-1], count, size)
    heads = jnp.min(keys(blocks), -1)
    if platform == "cuda" and count <= _MANY:
        found = _first(heads, k, platform)
    else:
        found = _best(heads, lambda v: v, k, platform)
    (found,) = bind_sort(found, axis=found.ndim - 1)  # candidates in source order
    rows = jnp.take_along_axis(blocks, found[..., None], -2, mode="promise_in_bounds")
    rows = rows.reshape(*x.shape[:-1], k * size)
    rest = x[..., count * size :]
    some = _few(keys(lax.concatenate([rows, rest], x.ndim - 1)), k, platform)
    inside = jnp.minimum(some // size, k - 1)
    index = place_dtype(n)
    block, some = _order.take(found, inside).astype(index), some.astype(index)
    place = block * size + some % size
    return jnp.where(some < k * size, place, some - k * size + count * size)


def _block(n, k, platform):
    size = 1 << max(3, int(np.sqrt(n / k)).bit_length() - 1)
    return min(size, _LARGEST_BLOCK_ON_CPU) if platform == "cpu" else size


def _few(keys, k, platform):
    """The first k without looking for blocks first."""
    if platform != "cpu" or keys.dtype.itemsize == 8:
        return _first(keys, k, platform)
    # XLA's CPU has a partial sort of float32 in the total order of their bits, lower
    # indices first: the floats here are those of the keys' rank, the best one largest.
    rank = ~keys.astype(jnp.uint32)
    top = np.uint32(1 << 31)
    bits = jnp.where(rank >= top, rank ^ top, ~rank)
    return lax.top_k(lax.bitcast_convert_type(bits, jnp.float32), k)[1]


def _first(keys, k, platform):
    """The first k of everything sorted; on CUDA of what is first in each chunk."""
    n = keys.shape[-1]
    known = isinstance(n, int)  # not symbolic
    if platform != "cuda" or not known or keys.dtype.itemsize == 8 or 2 * k > _CHUNK:
        return _order.permutation(keys, platform)[..., :k]
    keys = keys.astype(jnp.uint32)
    if n <= _CHUNK:
        return _argsort(keys)[..., :k]
    # What fills the last chunk comes after everything in it.
    pads = [(0, 0)] * (keys.ndim - 1) + [(0, -n % _CHUNK)]
    keys = jnp.pad(keys, pads, constant_values=np.uint32(2**32 - 1))
    chunks = keys.reshape(*keys.shape[:-1], -1, _CHUNK)
    index = _argsort(chunks)[..., :k].astype(place_dtype(n))
    found = _order.take(chunks, index)
    begin = lax.broadcasted_iota(index.dtype, index.shape, index.ndim - 2) * _CHUNK
    shape = (*keys.shape[:-1], -1)
    # Chunks are in source order, and so are the ties of each.
    best_of = _first(found.reshape(shape), k, platform)
    return _order.take((index + begin).reshape(shape), best_of)


def _argsort(keys):
    return bind_sort(keys, axis=keys.ndim - 1, indices=True, values=False)[0]
