"""What the rank of a float leaves open: the sign of a zero, and the bits of a NaN.

Where values are sorted and nothing else, a second integer says it, the tie, and carries
nothing: ranks and ties are sorted apart, and their results belong together, because the
ties of negative values, zeros, positive values and NaNs follow each other as their ranks
do, and within zeros and NaNs by source index.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.primitives._order import Order, keys_of_ranks, values_of

# A tie has a bit for NaNs or all others, 7 of the place, and a sign and mantissa.
LONGEST = 128
_LOW = 24
_FIRST, _LAST = (np.int32(v) for v in (np.iinfo(np.int32).min, np.iinfo(np.int32).max))
_MASK = np.int32((1 << _LOW) - 1)


def _nan_last(order: Order) -> bool:
    return order.nan not in ("first", "largest" if order.descending else "smallest")


def _classes(rank, order: Order) -> tuple:
    """Where the ranks of NaNs and of zeros are, and the latter."""
    zero = np.int32(-1 if order.descending else 0)
    return rank == (_LAST if _nan_last(order) else _FIRST), rank == zero, zero


def ties_of(x, rank, place, order: Order):
    """The ties of 32-bit floats at places below `LONGEST`."""
    nan, zeros, zero = _classes(rank, order)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    turned = (bits << 1) | lax.shift_right_logical(bits, np.int32(31))
    open_ = (place << _LOW) | (turned & _MASK)
    tie = jnp.where(nan | zeros, open_, jnp.where(rank < zero, np.int32(0), _LAST))
    return jnp.where(nan == _nan_last(order), tie, tie | _FIRST)


def values_of_ties(rank, tie, order: Order, dtype):
    """The values of ranks and ties in order."""
    nan, zeros, _ = _classes(rank, order)
    turned = (tie & _MASK) | jnp.where(nan, ~_MASK, np.int32(0))
    bits = lax.shift_right_logical(turned, np.int32(1)) | (turned << 31)
    found = lax.bitcast_convert_type(bits, dtype)
    return jnp.where(nan | zeros, found, values_of(keys_of_ranks(rank), order, dtype))
