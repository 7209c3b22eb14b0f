"""reduce with `add` in Pallas Triton kernels.

Under `unordered_tree` each axis is one `tt.reduce`, whose order is Triton's. Otherwise
the axes become one, which halves level by level: a reduction of two neighbours has only
one grouping, and extents are powers of two, so this is `fixed_tree` itself.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxtile.pallas_lowering._add import reduce_add, refuse_add
from jaxtile.pallas_lowering.triton import BACKEND, TRAITS
from jaxtile.policy import Transform
from jaxtile.primitives._fold import collapse
from jaxtile.primitives.reduce import reduce_p

_ACCUMULATORS = ("float32", "float64", "int32", "uint32", "int64", "uint64")


def _refuse(*avals, **params):
    return refuse_add(TRAITS, _ACCUMULATORS, avals, params)


def _any_tree(x, axes):
    # One axis at a time: for several, jax's own rule negates twice in between, by
    # 0 - (0 - x), which loses the sign of zero.
    for axis in reversed(axes):
        x = lax.reduce_sum(x, (axis,))
    return x


def _fixed_tree(x, axes):
    x = collapse(x, axes)
    if jnp.issubdtype(x.dtype, jnp.floating):
        # A product in the kernel must not fuse with the first level's add.
        x = jnp.where(x == x, x, jnp.full(x.shape, jnp.nan, x.dtype))
    while (n := x.shape[-1]) > 1:
        pairs = x.reshape(*x.shape[:-1], n // 2, 2)
        x = lax.reduce_sum(pairs, (pairs.ndim - 1,))
    return x.reshape(x.shape[:-1])


@BACKEND.traces(reduce_p, _refuse)
def _reduce(*operands, **params):
    free = params["policy"].permits(Transform.REGROUP | Transform.PERMUTE)
    total = _any_tree if free else _fixed_tree
    return reduce_add(operands, params, total)
