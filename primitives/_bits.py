"""Values as the bits they are stored in, so that moving them computes nothing.

A float that is padded, selected or gathered may be widened and narrowed again on the way,
which quiets a NaN; an unsigned integer of its width may not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.errors import InconclusiveDimensionOperation

from jaxtile import formats


def to_bits(x: Any) -> jax.Array:
    """A float's bits as an unsigned integer of its width; integers and bools as they are."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    width = formats.format_of(x.dtype).bits
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))


def from_bits(bits: Any, dtype: Any) -> jax.Array:
    """The inverse of `to_bits`."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def inside(index: Any, size: int) -> Any:
    """Where an index of any integer dtype lies in [0, size)."""
    wide = place_dtype(size)
    if not isinstance(size, int) and index.dtype.itemsize < wide.itemsize:
        index = index.astype(wide)  # a symbolic size may be any that this holds
    top = int(jnp.iinfo(index.dtype).max)
    low = jnp.ones(index.shape, bool)
    if not isinstance(size, int) or size <= top:
        low = index < jnp.asarray(size, index.dtype)
    if jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        return low
    return low & (index >= 0)


def below(size: Any, bound: Any) -> bool:
    """Whether a size is known to be below a bound; a symbolic one, of an export, may not."""
    try:
        return bool(size < bound)
    except InconclusiveDimensionOperation:
        return False


def place_dtype(*sizes: int) -> np.dtype:
    """The integers that count up to these sizes; for an unknown one the widest there are."""
    if all(below(n, 2**31) for n in sizes):
        return np.dtype(np.int32)
    known = any(isinstance(n, int) and n >= 2**31 for n in sizes)
    return np.dtype(np.int64 if known or formats.x64_enabled() else np.int32)
