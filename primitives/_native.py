"""Reductions that XLA realises well, where the policy and the reducer permit them.

Each entry gives the tree of one catalogue reducer over elements already in the
accumulator's dtype. Nothing here is used under a policy that forbids regrouping.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.policy import Kind, Transform
from jaxtile.primitives import _best, _order
from jaxtile.primitives._bits import below, place_dtype
from jaxtile.primitives._define import PLATFORM
from jaxtile.primitives._fold import collapse


def _sum(x, axes):
    # A named function, not lax.add: jax would swap in reduce_sum, whose +0.0 start
    # loses the sign of a sum of -0.0.
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    zero = np.asarray(-0.0 if floating else 0, x.dtype)
    return lax.reduce(x, zero, lambda a, b: lax.add(a, b), axes)


def add(x, axes, source=None):
    """The sum; `source` holds x in a narrower format, which has the signs as well."""
    total = _sum(x, axes)
    if _split_on_cpu(x):
        source = x if source is None else source
        fix = functools.partial(_signed_zero, axes=axes)
        return lax.cond(jnp.any(total == 0), fix, lambda x, t: t, source, total)
    return total


def _split_on_cpu(x) -> bool:
    """Whether XLA may reduce these floats in parts, by kernels of its own."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    long = not isinstance(x.size, int) or x.size >= 1024  # a symbolic size may be
    return floating and long and PLATFORM.get() == "cpu"


def _signed_zero(x, total, axes):
    """XLA splits a long sum on the CPU and starts the parts from +0.0."""
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{x.dtype.itemsize * 8}"))
    negative = lax.reduce(bits < 0, np.asarray(True), lax.bitwise_and, axes)
    return jnp.where((total == 0) & negative, -jnp.zeros_like(total), total)


def _mul(x, axes):
    return lax.reduce(x, np.asarray(1, x.dtype), lax.mul, axes)


def keys(x, sign):
    """Integers in the order of the floats: -0.0 below +0.0, any NaN the extreme."""
    word = np.dtype(f"int{x.dtype.itemsize * 8}")
    info = np.iinfo(word)
    top = jnp.asarray(info.max if sign > 0 else info.min, word)
    return jnp.where(x != x, top, _turned(lax.bitcast_convert_type(x, word)))


def values(words, dtype):
    """The floats of `keys`; a NaN is one whatever it was."""
    return lax.bitcast_convert_type(_turned(words), dtype)


def _turned(words):
    """Negative numbers' magnitudes, which grow against their order; its own inverse."""
    most = jnp.asarray(np.iinfo(words.dtype).max, words.dtype)
    return jnp.where(words < 0, words ^ most, words)


def _extreme(op, sign):
    def run(x, axes):
        if jnp.issubdtype(x.dtype, jnp.floating):
            worst = -sign * np.inf
        elif x.dtype == bool:
            worst = sign < 0
        else:
            info = jnp.iinfo(x.dtype)
            worst = info.min if sign > 0 else info.max
        worst = np.asarray(worst, x.dtype)
        if not _split_on_cpu(x):
            return lax.reduce(x, worst, op, axes)
        if x.dtype.itemsize >= 4:
            return _propagated(op, x, worst, axes)
        found = lax.reduce(x, worst, op, axes)
        doubtful = jnp.any(_has_nan(x, axes) | (found == 0))
        exact = functools.partial(_exactly, run, sign, axes)
        return lax.cond(doubtful, exact, lambda _, found: found, x, found)

    return run


def _propagated(op, x, worst, axes):
    """The extreme, by an op that XLA does not know as one.

    Its own kernel for an extreme on the CPU loses NaNs and orders no zeros.
    """

    def either(a, b):
        return lax.select(a != a, a, op(a, b))

    for axis in sorted(axes, reverse=True):  # two axes at once are six times slower
        x = lax.reduce(x, worst, either, (axis,))
    return x


def _has_nan(x, axes):
    """True for each fibre of 16-bit floats with a NaN, and perhaps for some others."""
    if x.dtype == jnp.bfloat16:  # a kernel of XLA's own: three times as fast
        return jnp.isnan(_sum(lax.convert_element_type(x, jnp.float32), axes))
    return lax.reduce(x != x, np.asarray(False), lax.bitwise_or, axes)


def _exactly(reduce, sign, axes, x, _):
    return values(reduce(keys(x, sign), axes), x.dtype)


def _logaddexp(x, axes):
    """max + log(sum(exp(x - max))): one exp an element, no pairwise logarithms."""
    # A maximum that loses a NaN will do: the sum keeps it.
    top = lax.reduce(x, np.asarray(-np.inf, x.dtype), lax.max, axes)
    # An infinite maximum is the answer; inf - inf would be NaN.
    finite = jnp.where(jnp.abs(top) == jnp.inf, jnp.zeros_like(top), top)
    kept = [d for d in range(x.ndim) if d not in axes]
    shift = lax.broadcast_in_dim(finite, x.shape, kept)
    total = jnp.log(_sum(jnp.exp(x - shift), axes))
    # log(1) is 0, and 0 + -0.0 would lose the sign of a lone finite element.
    alone = ((jnp.abs(top) == jnp.inf) & ~jnp.isnan(total)) | (total == 0)
    return jnp.where(alone, top, total + finite)


VALUES = {
    "add": add,
    "mul": _mul,
    "max": _extreme(lax.max, 1),
    "min": _extreme(lax.min, -1),
    "logaddexp": _logaddexp,
}


def permitted(spec, policy) -> bool:
    """Whether XLA's reduction, which permutes, keeps what the policy states.

    Selections and integers show no order, and the best few are the same in any.
    """
    if spec.reducer.native == "topk":
        return True
    selects = spec.reducer.native in ("max", "min", "argmax", "argmin")
    exact = selects or not any(jnp.issubdtype(d, jnp.floating) for d in spec.states)
    return policy.kind is Kind.TREE and (exact or policy.permits(Transform.PERMUTE))


def keeps_rounding(spec) -> bool:
    """XLA sums narrow floats in float32; a stated narrow accumulator rounds each step."""
    narrow = spec.states[0].itemsize < 4 and jnp.issubdtype(
        spec.states[0], jnp.floating
    )
    return not narrow or spec.reducer.native in ("max", "min")


def argument(name, x, axes, index_dtype):
    """The first extreme element and its source index; NaN wins, lowest index on ties."""
    x = collapse(x, axes)
    axis = x.ndim - 1
    pick = lax.argmax if name == "argmax" else lax.argmin
    index = pick(x, axis, index_dtype)
    value = jnp.take_along_axis(x, index[..., None], axis, mode="clip")[..., 0]
    return [value, index]


def ranked(spec, elements, mask, axes, platform):
    """The best few with their source indices; places beyond the elements are empty."""
    x, *own = (collapse(v, axes) for v in elements)
    k = len(spec.states) // 2
    few = min(k, x.shape[-1]) if isinstance(x.shape[-1], int) else k
    mask = None if mask is None else collapse(mask, axes)
    if not below(few, x.shape[-1] + 1):  # a symbolic size may be less
        mask = jnp.ones(x.shape, bool) if mask is None else mask
        x, mask, *own = (_longer(v, few) for v in (x, mask, *own))
    if mask is None and not own:
        index = _best.best(x, spec.reducer.order, few, platform)
        found = [_order.take(x, index), index.astype(spec.index)]
    else:
        found = _by_own_index(spec, x, own, mask, few)
    empty = spec.identity(found[0].shape[:-1])
    return [
        lax.index_in_dim(found[leaf // k], leaf % k, -1, keepdims=False)
        if leaf % k < few
        else empty[leaf]
        for leaf in range(2 * k)
    ]


def _longer(x, some):
    """Zeros behind the last axis."""
    pads = [(0, 0, 0)] * (x.ndim - 1) + [(0, some, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), pads)


def _by_own_index(spec, x, own, mask, few):
    """The best of (value, index) pairs; the largest index marks an empty one."""
    last = x.ndim - 1
    index = own[0] if own else lax.broadcasted_iota(spec.index, x.shape, last)
    nowhere = np.asarray(np.iinfo(index.dtype).max, index.dtype)
    if mask is not None:
        x, index = jnp.where(mask, x, 0), jnp.where(mask, index, nowhere)
    rank = _order.ranks_of(x, spec.reducer.order)
    worst = np.asarray(np.iinfo(rank.dtype).max, rank.dtype)
    rank = jnp.where(index == nowhere, worst, rank)
    place = lax.broadcasted_iota(place_dtype(x.shape[-1]), x.shape, last)
    place = lax.sort((rank, index, place), dimension=last, num_keys=2)[2][..., :few]
    return [_order.take(v, place) for v in (x, index)]


def prefixes(spec, x, axis):
    """Inclusive prefixes as one full-width window, which XLA turns into a tree.

    The window starts from the identity, which keeps every bit; jax's own cumsum starts
    from +0.0 and loses the sign of a leading -0.0.
    """
    n = x.shape[axis]
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis], padding[axis] = n, (n - 1, 0)
    (identity,) = spec.identity(())

    def merge(a, b):
        return spec.merge([a], [b])[0]

    return lax.reduce_window(x, identity, merge, window, (1,) * x.ndim, padding)


def variadic(spec, states, axis):
    """Any reducer with an exact identity and no order, as one XLA reduction."""

    def merge(a, b):
        return tuple(spec.merge(list(a), list(b)))

    return list(lax.reduce(tuple(states), tuple(spec.identity(())), merge, (axis,)))
