"""sort and topk in Pallas Triton kernels: the bitonic network, within one tile.

The partner of an element is the sum of the pair without itself, in integers, which wrap:
Triton reduces and broadcasts along any axis, but indexes none.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxtile.pallas_lowering._elementwise import _inlined
from jaxtile.pallas_lowering._sort import refuse_length, sorted_planes
from jaxtile.pallas_lowering.triton import BACKEND, TRAITS
from jaxtile.primitives._order import image, ranks_of, value_of
from jaxtile.primitives.sort import sort_p, wanted
from jaxtile.primitives.topk import topk_p


def _refuse(x, *rest, axis, order, **params):
    reasons = (TRAITS.operand(v) for v in (x, *rest))
    return next(filter(None, reasons), None) or refuse_length(x.shape[axis])


def _refuse_topk(x, *rest, axis, k, **params):
    reason = _refuse(x, *rest, axis=axis, **params)
    if reason is None and (k & (k - 1) or k == 0):
        reason = (
            f"k={k} is no power of two, and Triton has no other tensors; ask for the "
            "next one and read the first of them"
        )
    return reason


def _partner(axis):
    def partner(v, q):
        # Narrow integers and bools sum as words.
        bits = image(v)
        word = jnp.int64 if bits.dtype.itemsize == 8 else jnp.int32
        wide = bits.astype(word)
        shape = v.shape
        split = (*shape[:axis], -1, 2, 1 << q, *shape[axis + 1 :])
        pairs = wide.reshape(split)
        total = lax.reduce_sum(pairs, (axis + 1,))
        both = jnp.broadcast_to(lax.expand_dims(total, (axis + 1,)), pairs.shape)
        return value_of((both - pairs).reshape(shape).astype(bits.dtype), v.dtype)

    return partner


def _ordered(values, axis, order):
    rank = ranks_of(values[0], order)
    place = lax.broadcasted_iota(jnp.int32, rank.shape, axis)
    planes = sorted_planes([rank, place, *values], axis, _partner(axis))
    return [planes[2], planes[1], *planes[3:]]


@BACKEND.traces(sort_p, _refuse)
def sort_tile(*operands, axis, order, indices, values):
    """The rule of sort: plain jax to trace."""

    def run(*planes):
        return wanted(_ordered(planes, axis, order), indices, values)

    return _inlined(run, TRAITS.rewrites)(*operands)


def _head(v, axis, k):
    """The first k along an axis: one row of a reshape, picked by a sum."""
    if v.shape[axis] == k:
        return v
    bits = image(v)
    word = jnp.int64 if bits.dtype.itemsize == 8 else jnp.int32
    shape = v.shape
    rows = bits.astype(word).reshape(*shape[:axis], -1, k, *shape[axis + 1 :])
    first = lax.broadcasted_iota(jnp.int32, rows.shape, axis) == 0
    one = lax.reduce_sum(jnp.where(first, rows, jnp.zeros_like(rows)), (axis,))
    return value_of(one.astype(bits.dtype), v.dtype)


@BACKEND.traces(topk_p, _refuse_topk)
def topk_tile(*operands, axis, k, order, counted):
    """The rule of topk: plain jax to trace."""

    def run(*values):
        count = values[-1] if counted else None
        found = _ordered(values[: len(values) - counted], axis, order)
        found = [_head(v, axis, k) for v in found]
        if count is None:
            return found
        place = lax.broadcasted_iota(jnp.int32, found[0].shape, axis)
        wanted = place < lax.expand_dims(count, (axis,))
        outs = [jnp.where(wanted, v, jnp.zeros_like(v)) for v in found]
        outs[1] = jnp.where(wanted, found[1], jnp.full_like(found[1], -1))
        return outs

    return _inlined(run, TRAITS.rewrites)(*operands)
