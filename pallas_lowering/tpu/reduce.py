"""reduce with `add` in Pallas TPU kernels.

Under `unordered_tree` the sum is the hardware's, whose order is not known. Otherwise
rows, or whole blocks of the leading axes, are added pair by pair, neighbours first.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from jaxtile.pallas_lowering._add import reduce_add, refuse_add
from jaxtile.pallas_lowering.tpu import BACKEND, TRAITS
from jaxtile.policy import Transform
from jaxtile.primitives._operands import unpack
from jaxtile.primitives.reduce import reduce_p

# Each row is written out: beyond this the compiler takes many seconds.
_MOST_ROWS = 256


def _free(params):
    return params["policy"].permits(Transform.REGROUP | Transform.PERMUTE)


def _refuse(*avals, **params):
    reason = refuse_add(TRAITS, ("float32", "int32"), avals, params)
    if reason is not None or _free(params):
        return reason
    elements, _, _ = unpack(params["spec"], avals, params["seeded"], params["masked"])
    shape, axes = elements[0].shape, params["axes"]
    if len(shape) - 1 in axes:
        return (
            f"{params['policy']} along the last axis, which lies in the lanes, has no "
            'rule; transpose first, or use policy="unordered_tree"'
        )
    if math.prod(shape[a] for a in axes) > _MOST_ROWS:
        return (
            f"{params['policy']} over more than {_MOST_ROWS} rows has no rule; reduce "
            "blocks of a power of two rows, then their results"
        )
    return None


def _any_tree(x, axes):
    return jnp.sum(x, axes, dtype=x.dtype)


def _rows(x, axes):
    if not axes:
        return [x]
    axis, rest = axes[0], [a - 1 for a in axes[1:]]
    n = x.shape[axis]
    parts = (lax.index_in_dim(x, i, axis, keepdims=False) for i in range(n))
    return [row for part in parts for row in _rows(part, rest)]


def _tree(rows):
    """Depth first, so that few rows live at once; the same pairs as level by level."""
    if len(rows) == 1:
        return rows[0]
    half = 1 << (len(rows) - 1).bit_length() - 1
    return _tree(rows[:half]) + _tree(rows[half:])


def _fixed_tree(x, axes):
    return _tree(_rows(x, list(axes)))


@BACKEND.traces(reduce_p, _refuse)
def _reduce(*operands, **params):
    return reduce_add(operands, params, _any_tree if _free(params) else _fixed_tree)
