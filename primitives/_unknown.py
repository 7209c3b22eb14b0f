"""Values of which XLA's algebra knows nothing.

XLA rewrites what it knows: a constant, a sum's or a quotient's operands. On the CPU what
hides a value from it is gone before the code is made; `guard` stays in the code.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile._jax_private import placed_like
from jaxtile.primitives._define import PLATFORM


def guard(product):
    """A product that no compiler fuses with a sum."""
    # A select that no compiler can fold stands between the product and an add, so that
    # the two cannot become one fused multiply-add. optimization_barrier and
    # reduce_precision do not hold on every jax line.
    return jnp.where(product == product, product, jnp.full_like(product, jnp.nan))


def truth_of(like):
    """An array of True, shaped as `like`, that XLA does not know to be one.

    No place along an axis is below 0, but a barrier keeps that number until XLA has done its
    algebra. A barrier on the whole array would keep what is around it from being fused,
    and for scalars that are broadcast XLA has rules: a scalar's truth is of the scalar,
    which vmap may batch.
    """
    like = jnp.asarray(like)
    axes = [d for d, n in enumerate(like.shape) if isinstance(n, int) and 1 < n < 2**31]
    if not axes:
        return placed_like(
            lax.optimization_barrier((like == like) | (like != like)), like
        )
    place = lax.broadcasted_iota(np.int32, like.shape, axes[-1])
    return placed_like(place >= lax.optimization_barrier(jnp.int32(0)), like)


def hidden(x):
    """A float of which XLA's algebra knows nothing but that scalars may be broadcast."""
    true = lax.optimization_barrier(jnp.asarray(True))
    x = jnp.asarray(x)
    return lax.select(true, x, jnp.full_like(x, jnp.nan))


def unknown(values: Sequence) -> list:
    """Arrays of which XLA's algebra knows nothing on the CPU: x + 0.0 would be x."""
    if PLATFORM.get() != "cpu":
        return list(values)
    return [_unknown_array(v) if is_float(v) else v for v in values]


def _unknown_array(x):
    # A flag of one element is known as soon as the barrier is gone.
    return lax.optimization_barrier(x) if x.size == 1 else hidden(x)


def unknown_operands(values: Sequence) -> list:
    """`unknown` of a map's equally shaped operands, even where all of them are constants.

    XLA would fold such a map at compile time, by other routines than it runs.
    """
    floats = [v for v in values if is_float(v)]
    if PLATFORM.get() != "cpu" or not floats:
        return list(values)
    truth = truth_of(floats[0])
    return [kept(v, truth) if is_float(v) else v for v in values]


def unknown_seed(init: Sequence) -> list:
    """A seed's leaves, which are small, of which XLA's algebra knows nothing."""
    return list(map(lax.optimization_barrier, init))


def is_float(x) -> bool:
    """Whether a value is of floats."""
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def kept(x, truth):
    """x, of which XLA's algebra knows nothing, by what `truth_of` made."""
    return jnp.where(truth, x, jnp.asarray(np.nan, jnp.result_type(x)))
