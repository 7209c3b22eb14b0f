"""What the backends' rules for reduce with `add` share: all but the sum itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert


def reduce_add(operands: Sequence, params: dict, total: Callable[..., Any]) -> list:
    """Reduce with `add`: lift, mask, sum, seed, narrow.

    Args:
        operands, params: of the primitive.
        total: `(x, axes) -> sum`, a tree that starts from no zero at all.

    Returns:
        The one result.
    """
    spec, axes = params["spec"], params["axes"]
    elements, init, mask = unpack(spec, operands, params["seeded"], params["masked"])
    (state,) = spec.states
    x = convert(convert(elements[0], spec.elements[0]), state)
    if mask is not None:
        # -0.0 is what changes no sum, not even that of zeros.
        x = jnp.where(mask, x, _full(x, _neutral(state)))
    y = total(x, axes) if axes else x
    if init is not None:
        y = init[0] + y
    elif mask is not None:
        ones = jnp.where(mask, _full(x, 1, np.int32), _full(x, 0, np.int32))
        seen = total(ones, axes) if axes else ones
        y = jnp.where(seen > 0, y, jnp.zeros_like(y))
    return [convert(y, params["out"][0])]


def _neutral(dtype):
    return -0.0 if jnp.issubdtype(dtype, jnp.floating) else 0


def _full(x, value, dtype=None):
    return jnp.full(x.shape, value, dtype or x.dtype)
