"""What the backends' rules for reduce with `add` share: all but the sum itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtile.pallas_lowering._elementwise import Traits, refuse_cast
from jaxtile.policy import Kind
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert


def refuse_add(
    traits: Traits, states: Sequence[str], avals: Sequence, params: dict
) -> str | None:
    """Why a reduce is refused on any grounds but the realisation of its tree.

    Args:
        traits: of the backend.
        states: the accumulator formats that its sum rounds to at every step.
        avals, params: of the primitive.

    Returns:
        A sentence, or None.
    """
    spec, policy = params["spec"], params["policy"]
    if spec.reducer.native != "add":
        return (
            f"only jt.add is reduced inside kernels, not {spec.reducer!r}; reduce "
            "outside the kernel, or combine blocks with jnp ops in the body"
        )
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        return (
            f"{policy} is a sequential chain, and the sum is a tree there; use "
            'policy="fixed_tree" for stated bits, or reduce outside the kernel'
        )
    (state,) = spec.states
    if state.name not in states:
        return (
            f"an accumulator of {state.name} is not rounded at every step there; use "
            f"acc_dtype={' or '.join(states)}"
        )
    elements, _, _ = unpack(spec, avals, params["seeded"], params["masked"])
    if 0 in elements[0].shape:
        return "a kernel has no empty values; reduce an empty array outside"
    steps = [(spec.raw[0], spec.elements[0]), (spec.elements[0], state)]
    steps.append((state, params["out"][0]))
    reasons = (refuse_cast(traits, a, b) for a, b in steps if a != b)
    found = [traits.operand(elements[0]), traits.format(state), *reasons]
    return next(filter(None, found), None)


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
