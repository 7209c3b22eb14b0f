"""What sort and topk share: the checks of their operands, and their derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxtile import formats
from jaxtile._jax_private import sharding_spec
from jaxtile.errors import TileShapeError, TileValueError, message
from jaxtile.primitives._define import zero_tangent
from jaxtile.primitives._order import NAN_RULES, Order
from jaxtile.primitives._tangent import is_float, is_zero


def check_ranked(op: str, x: Any, payload: Sequence, axis: int, order: Order) -> None:
    """Everything that sort and topk demand of their keys and payload.

    Raises:
        TileTypeError: keys of a storage format.
        TileShapeError: shapes differ, or the axis is sharded on an explicit mesh.
        TileValueError: no such rule for NaN.
    """
    formats.require_arithmetic(x.dtype, op)
    if order.nan not in NAN_RULES:
        raise TileValueError(
            message(
                op,
                expected=f"nan in {NAN_RULES}",
                got=repr(order.nan),
                way_out='"last" and "first" hold in both directions.',
            )
        )
    for leaf in payload:
        if leaf.shape != x.shape:
            raise TileShapeError(
                message(
                    op,
                    expected=f"payload leaves of x's shape, {x.shape}",
                    got=f"{leaf.shape}",
                    way_out="Broadcast them first, or gather by the indices.",
                )
            )
    for leaf in (x, *payload):
        found = sharding_spec(leaf)
        if found[axis] is not None:
            raise TileShapeError(
                message(
                    op,
                    expected=f"axis {axis} not sharded",
                    got=f"sharding {tuple(found)}",
                    way_out="Reshard that axis first (jax.sharding.reshard).",
                )
            )


# The order is locally constant, so dy[j] = dx[p(j)]: a gather, linear in dx, whose
# transpose adds each cotangent where its value came from.


def moved(tangents: Sequence, outs: Sequence, index: Any, axis: int) -> list:
    """The tangent of each output whose source has one; index -1 is no source.

    Args:
        tangents: for every output the tangent of its source, or None.
        outs: the outputs.
        index: the source index of each place.
        axis: where it lies.

    Returns:
        Tangents, symbolic zeros where there is nothing to move.
    """
    return [
        zero_tangent(out)
        if t is None or is_zero(t) or not is_float(out.dtype)
        else _along(t, index, axis)
        for t, out in zip(tangents, outs, strict=True)
    ]


def _along(t, index, axis):
    source = jnp.maximum(index, 0)
    found = jnp.take_along_axis(t, source, axis, mode="promise_in_bounds")
    return jnp.where(index < 0, jnp.zeros_like(found), found)
