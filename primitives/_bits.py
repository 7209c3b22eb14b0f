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
    below = jnp.ones(index.shape, bool)
    if size <= jnp.iinfo(index.dtype).max:
        below = index < jnp.asarray(size, index.dtype)
    if jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        return below
    return below & (index >= 0)


def place_dtype(*sizes: int) -> np.dtype:
    """The integers that count up to these sizes."""
    return np.dtype(np.int32 if max(sizes, default=0) < 2**31 else np.int64)
