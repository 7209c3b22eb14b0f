"""Lines: values along one axis in a Triton kernel, and the orders in which they combine.

A line is a list of pieces, each a list of leaves and a flag leaf (or None: all exist).
A leaf's last axis is the ordered one, of a power of two. Element i of the line lies in
piece i // extent at place i % extent, so that a line is one tile in registers, or many
loads of one element for each fibre, or both. Taking neighbours apart and weaving them
together (`tt.split`, `tt.join`) moves bits and computes nothing.

Everything here is plain jax on arrays too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import _jax_private
from jaxtile.pallas_lowering._elementwise import _inlined
from jaxtile.pallas_lowering.triton import TRAITS
from jaxtile.primitives import _fold
from jaxtile.primitives._scalar import Keyed, evaluate
from jaxtile.primitives._spec import Spec

# Up to so many elements a chain is written out; beyond, a loop picks them out.
_WRITTEN_OUT = 8


@functools.lru_cache(maxsize=4096)
def _jitted(keyed: Keyed, tree: Any) -> Callable:
    def flat(*values):
        return jax.tree.leaves(evaluate(keyed.fn, *jax.tree.unflatten(tree, values)))

    return jax.jit(_inlined(flat, TRAITS.rewrites))


def _run(fn: Callable, *args: Any) -> list:
    """`evaluate`, in ops that keep their meaning in Triton; the result's leaves.

    One jitted function for all of a reducer's merges: a kernel of many pieces calls it
    often, and traces it once.
    """
    leaves, tree = jax.tree.flatten(args)
    return _jitted(Keyed(fn), tree)(*leaves)


@dataclass(frozen=True)
class KernelSpec(Spec):
    """A `Spec` whose functions run inside a Triton kernel."""

    def lift(self, leaves, run=_run):
        return super().lift(leaves, run)

    def merge(self, a, b, run=_run):
        return super().merge(a, b, run)

    def update(self, state, leaves, run=_run):
        return super().update(state, leaves, run)

    def update_right(self, leaves, state, run=_run):
        return super().update_right(leaves, state, run)

    def finish(self, state, run=_run):
        return super().finish(state, run)

    def _constant(self, value, shape):
        # The scalars become literals: a kernel has no constants.
        with jax.ensure_compile_time_eval():
            scalars = [np.asarray(v) for v in super()._constant(value, ())]
        return [_full(tuple(shape), v) for v in scalars]


def _full(shape, scalar):
    if scalar.dtype == np.uint64:  # Triton's constants are signed
        return jnp.full(shape, scalar.view(np.int64)).astype(np.uint64)
    return jnp.full(shape, scalar, scalar.dtype)


def in_kernel(spec: Spec) -> KernelSpec:
    """The spec as a kernel's functions call it."""
    return KernelSpec(**{f.name: getattr(spec, f.name) for f in fields(Spec)})


def guard(v):
    """A float that no later add can pull into a fused multiply-add."""
    if not jnp.issubdtype(v.dtype, jnp.floating):
        return v
    return jnp.where(v == v, v, jnp.full_like(v, jnp.nan))


def halves(v, backward=False):
    """The even and the odd places of the last axis, the later ones first if backward."""
    n = v.shape[-1]
    pairs = v.reshape(*v.shape[:-1], n // 2, 2)
    sides = lax.split(pairs, (1, 1), axis=pairs.ndim - 1)
    a, b = (s.reshape(*v.shape[:-1], n // 2) for s in sides)
    return (b, a) if backward else (a, b)


def weave(a, b, backward=False):
    """The inverse of `halves`."""
    a, b = (b, a) if backward else (a, b)
    pairs = lax.concatenate([a[..., None], b[..., None]], a.ndim)
    return pairs.reshape(*a.shape[:-1], 2 * a.shape[-1])


def columns(v) -> list:
    """Each place of the last axis as an array of its own, which keeps an axis of 1."""
    if v.shape[-1] == 1:
        return [v]
    sides = [columns(side) for side in halves(v)]
    return [v for pair in zip(*sides, strict=True) for v in pair]


def from_columns(values: Sequence):
    """The inverse of `columns`."""
    if len(values) == 1:
        return values[0]
    return weave(from_columns(values[0::2]), from_columns(values[1::2]))


def take(v, here):
    """The one element of the last axis where `here` is true, in its own bits."""
    bits = v
    if jnp.issubdtype(v.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(v, np.dtype(f"int{8 * v.dtype.itemsize}"))
    word = np.dtype("int64" if v.dtype.itemsize == 8 else "int32")
    wide = jnp.where(here, bits.astype(word), jnp.zeros(here.shape, word))
    one = lax.reduce_sum(wide, (wide.ndim - 1,))[..., None].astype(bits.dtype)
    return one if bits is v else lax.bitcast_convert_type(one, v.dtype)


def _apply(fn, *values):
    """A function of leaves on pieces: None, the flag of all, stays None."""
    if values[0] is None:
        return None
    return fn(*values)


def _pairs(line, backward):
    if line[0][0][0].shape[-1] == 1:
        a, b = line[0::2], line[1::2]
        return (b, a) if backward else (a, b)
    split = functools.partial(_apply, functools.partial(halves, backward=backward))
    sides = []
    for states, valid in line:
        flags = split(valid) or (None, None)
        sides.append(([split(v) for v in states], flags))
    return tuple(
        [([v[k] for v in states], flags[k]) for states, flags in sides] for k in (0, 1)
    )


def _woven(a, b, pieces, backward):
    if len(a) < pieces:
        a, b = (b, a) if backward else (a, b)
        return [piece for pair in zip(a, b, strict=True) for piece in pair]
    both = functools.partial(_apply, functools.partial(weave, backward=backward))
    return [
        ([both(x, y) for x, y in zip(u, v, strict=True)], _flags(both, u, known, v, seen))
        for (u, known), (v, seen) in zip(a, b, strict=True)
    ]


def _flags(both, u, known, v, seen):
    if known is None and seen is None:
        return None
    ones = jnp.ones(u[0].shape, bool)
    return both(ones if known is None else known, ones if seen is None else seen)


def _merged(spec, a, b):
    return [_fold.join(spec, *x, *y) for x, y in zip(a, b, strict=True)]


def _extent(line) -> int:
    return len(line) * line[0][0][0].shape[-1]


def tree(spec: Spec, line, backward=False):
    """The one piece of one element that `fixed_tree` makes of a line."""
    while _extent(line) > 1:
        line = _merged(spec, *_pairs(line, backward))
    return line[0]


def fixed_scan(spec: Spec, line, before, backward=False, whole=None):
    """What comes before each element of a line, and up to it, under `fixed_tree`.

    Args:
        spec: the reducer.
        line: the contributions.
        before: the piece, of one element, before all of them.
        backward: the line runs from its end.
        whole: the piece up to their end, where that is part of a larger subtree.

    Returns:
        Two lines. Before the right of a pair is what is before the pair and its left;
        up to the right is what is up to the pair.
    """
    if _extent(line) == 1:
        return [before], [whole] if whole else _merged(spec, [before], line)
    left, right = _pairs(line, backward)
    pairs = _merged(spec, left, right)
    around = fixed_scan(spec, pairs, before, backward, whole)
    middle = _merged(spec, around[0], left)
    n = len(line)
    return (
        _woven(around[0], middle, n, backward),
        _woven(middle, around[1], n, backward),
    )


def _plain_scan(*leaves, combine, axis, reverse):
    return lax.associative_scan(combine, list(leaves), reverse, axis)


def _plain_reduce(*leaves, combine, axis, reverse):
    scanned = _plain_scan(*leaves, combine=combine, axis=axis, reverse=reverse)
    return [lax.index_in_dim(v, v.shape[axis] - 1, axis, False) for v in scanned]


scan_region = _jax_private.triton_associative("scan", True, _plain_scan)
reduce_region = _jax_private.triton_associative("reduce", False, _plain_reduce)


def _combined(primitive, spec: Spec, states, valid, reverse=False):
    """Triton's own reduction or scan of the last axis; a bool travels as an int32."""
    k, bools = len(states), [v.dtype == bool for v in states]
    flags = [] if valid is None else [valid]
    leaves = [v.astype(np.int32) if v.dtype == bool else v for v in [*states, *flags]]

    def states_of(leaves):
        found = [v != 0 if b else v for v, b in zip(leaves, bools, strict=False)]
        return found, leaves[k] != 0 if flags else None

    def combine(a, b):
        done, seen = _fold.join(spec, *states_of(a), *states_of(b))
        done = [*done, *([] if seen is None else [seen])]
        return [v.astype(np.int32) if v.dtype == bool else v for v in done]

    axis = states[0].ndim - 1
    outs = primitive.bind(*leaves, combine=combine, axis=axis, reverse=reverse)
    if primitive is reduce_region:
        outs = [v[..., None] for v in outs]
    return states_of(outs)


any_tree = functools.partial(_combined, reduce_region)
any_scan = functools.partial(_combined, scan_region)


def fold(spec: Spec, elements: Sequence, mask, carry, right=False, backward=False):
    """The strict chain along the last axis from a piece of one element.

    Args:
        spec: the reducer.
        elements: leaves of the contributions.
        mask: which of them exist, or None.
        carry: the state to start from, and its flag.
        right: a right fold: from the last element, each step on the left.
        backward: the elements run from the axis's end.

    Returns:
        The last state and its flag.
    """
    n = elements[0].shape[-1]
    down = right != backward
    if n <= _WRITTEN_OUT:
        return _written_out(spec, elements, mask, carry, right, down)
    place = places(elements[0].shape)

    def body(i, carry):
        here = place == (n - 1 - i if down else i)
        element = [take(v, here) for v in elements]
        there = None if mask is None else take(mask, here)
        return _fold.advance(spec, *carry, element, there, right)

    return lax.fori_loop(np.int32(0), np.int32(n), body, carry)


def _written_out(spec, elements, mask, carry, right, down):
    steps = list(zip(*map(columns, elements), strict=True))
    flags = [None] * len(steps) if mask is None else columns(mask)
    chain = list(zip(steps, flags, strict=True))
    for element, there in reversed(chain) if down else chain:
        carry = _fold.advance(spec, *carry, element, there, right)
    return carry


def fold_scan(spec: Spec, elements, mask, carry, first, backward=False):
    """The states of the strict chain along the last axis, and its last one.

    Args:
        spec: the reducer.
        elements, mask: the contributions.
        carry: the state to start from, and its flag.
        first: leaves that exclusive prefixes start with; None for inclusive ones.
        backward: the axis runs from its end.

    Returns:
        Two pieces: the prefixes, and the state after all.
    """
    shape = elements[0].shape
    n = shape[-1]
    place = places(shape)
    outs = [jnp.broadcast_to(v, shape) for v in first or spec.filler(shape)]
    seen = None if carry[1] is None else jnp.zeros(shape, bool)

    def body(i, carry):
        before, outs, seen = carry
        at = n - 1 - i if backward else i
        here = place == at
        element = [take(v, here) for v in elements]
        there = None if mask is None else take(mask, here)
        state, valid = _fold.advance(spec, *before, element, there)
        if first is not None:
            here = place == (at - 1 if backward else at + 1)
        wide = [jnp.broadcast_to(v, shape) for v in state]
        if seen is not None:
            seen = jnp.where(here, jnp.broadcast_to(valid, shape), seen)
        return (state, valid), _fold.pick(here, wide, outs), seen

    carry = (carry, outs, seen)
    last, outs, seen = lax.fori_loop(np.int32(0), np.int32(n), body, carry)
    return (outs, seen), last


def nested_scan(spec: Spec, elements, mask, carry, first, backward=False):
    """Each prefix as a right fold of its own: quadratic, by definition.

    Args and returns as `fold_scan`; `carry` is one for every place.
    """
    shape = elements[0].shape
    n = shape[-1]
    place = places(shape)

    def body(k, carry):
        i = k if backward else n - 1 - k
        here = place == i
        element = [jnp.broadcast_to(take(v, here), shape) for v in elements]
        inside = place <= i if backward else place >= i
        if first is not None:
            inside &= ~here
        if mask is not None:
            inside &= jnp.broadcast_to(take(mask, here), shape)
        return _fold.advance(spec, *carry, element, inside, right=True)

    outs, seen = lax.fori_loop(np.int32(0), np.int32(n), body, carry)
    if first is not None:
        here = place == (n - 1 if backward else 0)
        outs = _fold.pick(here, [jnp.broadcast_to(v, shape) for v in first], outs)
        seen = None if seen is None else seen | here
    return outs, seen


def places(shape):
    """The place of each element along the last axis."""
    return lax.broadcasted_iota(np.int32, tuple(shape), len(shape) - 1)
