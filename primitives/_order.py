"""Order-preserving keys, and the permutations that sort and topk make of them.

A key is an unsigned integer that ascends in the order asked for; equal keys are ties,
which the source index settles. So zeros are one class whatever their sign, NaNs one
whatever their payload, and no comparison of floats sees a subnormal that a CPU flushes.
Values move by index, as unsigned images of their bits.

Everything here works along the last axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.primitives._bits import place_dtype

NAN_RULES = ("last", "first", "largest", "smallest")


class Order(NamedTuple):
    """A total preorder of one format.

    Args:
        descending: large values first.
        nan: where NaNs go: to one end whatever the direction, or as a value.
    """

    descending: bool
    nan: str


def unsigned_of(dtype) -> np.dtype:
    """The unsigned integers as wide as a format."""
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def _top(word):
    """The highest bit of unsigned integers: the sign of what they are images of."""
    word = np.dtype(word)
    return word.type(1 << (8 * word.itemsize - 1))


def image(x):
    """The bits of a value as an unsigned integer; 4-bit formats stay what they are."""
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    if jax.dtypes.itemsize_bits(x.dtype) < 8:
        return x
    return lax.bitcast_convert_type(x, unsigned_of(x.dtype))


def value_of(bits, dtype):
    """The inverse of `image`."""
    if np.dtype(dtype).kind == "b":
        return bits.astype(bool)
    return lax.bitcast_convert_type(bits, dtype) if bits.dtype != dtype else bits


def keys_of(x, order: Order):
    """The keys of arithmetic values.

    Args:
        x: values.
        order: the order asked for.

    Returns:
        Unsigned integers of x's width.
    """
    bits = image(x)
    word = bits.dtype
    zero, ones = word.type(0), ~word.type(0)
    if x.dtype == bool:
        return bits ^ word.type(order.descending)
    flip = ones if order.descending else zero
    top = _top(word)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return bits ^ (flip ^ (top if x.dtype.kind == "i" else zero))
    magnitude = bits & ~top
    negative = (bits > top) ^ order.descending
    # -0 counts as +0. NaNs alone have the bits that would give the first or last key.
    keys = jnp.where(negative, ~magnitude & ~top, magnitude | top)
    infinity = np.array(np.inf, x.dtype).view(word)[()]
    value = "largest" if order.descending else "smallest"
    nan = zero if order.nan in ("first", value) else ones
    return jnp.where(magnitude > infinity, nan, keys)


def values_of(keys, order: Order, dtype):
    """The inverse of `keys_of`, where a key is of one value: no zero, and no NaN."""
    word = keys.dtype
    zero, ones, top = word.type(0), ~word.type(0), _top(word)
    flip = ones if order.descending else zero
    if not jnp.issubdtype(dtype, jnp.floating):
        return value_of(keys ^ (flip ^ (top if dtype.kind == "i" else zero)), dtype)
    flip = zero if order.descending else top
    return value_of(jnp.where(keys >= top, keys ^ flip, ~keys ^ flip ^ top), dtype)


def ranks_of(x, order: Order):
    """The keys as signed integers of 32 or 64 bits, which everything compares."""
    if x.dtype.itemsize < 4:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        x = x.astype(jnp.float32 if floating else jnp.int32)
    keys = keys_of(x, order)
    word = np.dtype(f"int{8 * keys.dtype.itemsize}")
    return lax.bitcast_convert_type(keys ^ _top(keys.dtype), word)


def keys_of_ranks(rank):
    """The keys again."""
    keys = lax.bitcast_convert_type(rank, unsigned_of(rank.dtype))
    return keys ^ _top(keys.dtype)


def permutation(keys, platform: str):
    """The source indices in stable order of the keys."""
    n = keys.shape[-1]
    index = place_dtype(n)
    last = keys.ndim - 1
    place = lax.broadcasted_iota(index, keys.shape, last)
    # A symbolic size, of an export, may need every bit that an index has.
    shift = max(n - 1, 1).bit_length() if isinstance(n, int) else 8 * index.itemsize
    width = 8 * keys.dtype.itemsize + shift
    if platform != "cpu" or width > 64:
        return lax.sort((keys, place), dimension=last, num_keys=1, is_stable=True)[1]
    # XLA's CPU sorts one integer operand several times as fast as a key and a payload.
    with jax.enable_x64(True):
        word = np.dtype(np.uint32 if width <= 32 else np.uint64)
        packed = keys.astype(word) << word.type(shift) | place.astype(word)
        packed = lax.sort(packed, dimension=last, is_stable=True)
        return (packed & word.type((1 << shift) - 1)).astype(index)


def ranked(x, order: Order, platform: str):
    """The values in stable order, where nobody asks where they came from."""
    last = x.ndim - 1
    if not jnp.issubdtype(x.dtype, jnp.floating):  # equal integers have equal bits
        found = lax.sort(x, dimension=last)
        return lax.rev(found, (last,)) if order.descending else found
    keys = keys_of(x, order)

    def exact(keys):
        return take(x, permutation(keys, platform))

    if platform not in ("cpu", "cuda") or x.dtype.itemsize < 4:
        return exact(keys)
    # A key says everything of a number that is no zero; what is undone is +0 and one NaN.
    none, top = keys.dtype.type(0), _top(keys.dtype)
    nan = (keys == none) | (keys == ~none)
    doubtful = jnp.any((image(x) == top) | nan)

    def undone(keys):
        found = lax.sort(keys, dimension=last, is_stable=False)
        return values_of(found, order, x.dtype)

    return lax.cond(doubtful, exact, undone, keys)


def take(x, index, wanted=None):
    """The values at source indices, bit for bit; zeros where they are not wanted."""
    bits = image(x)
    found = jnp.take_along_axis(bits, index, -1, mode="promise_in_bounds")
    if wanted is not None:
        found = jnp.where(wanted, found, jnp.zeros_like(found))
    return value_of(found, x.dtype)
