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

# The states of a line's elements that one tile holds, and which exist (None: all).
Piece = tuple[list, Any]


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
    if a.size == 1:
        # XLA's Triton compiler (jax 0.11.2) dies at a `tt.join` of single elements.
        wide = (*a.shape[:-1], 2)
        return jnp.where(
            places(wide) == 0, *(jnp.broadcast_to(v, wide) for v in (a, b))
        )
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


def _apply(fn, *values) -> Any:
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
        (
            [both(x, y) for x, y in zip(u, v, strict=True)],
            _flags(both, u, known, v, seen),
        )
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


def tree(spec: Spec, line: Sequence[Piece], backward=False) -> Piece:
    """The one piece of one element that `fixed_tree` makes of a line."""
    while _extent(line) > 1:
        left, right = _pairs(line, backward)
        line = _merged(spec, left, right)
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


def _combined(primitive, spec: Spec, states, valid, reverse=False) -> Piece:
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


def any_tree(spec: Spec, states: Sequence, valid) -> Piece:
    """One `tt.reduce` of a tile's last axis, in Triton's order."""
    return _combined(reduce_region, spec, states, valid)


def any_scan(spec: Spec, states: Sequence, valid, reverse=False) -> Piece:
    """One `tt.scan` of a tile's last axis, grouped as Triton likes."""
    return _combined(scan_region, spec, states, valid, reverse)


def total(spec: Spec, line, anyhow=False, backward=False, flagged=True) -> Piece:
    """The one piece of one element that a tree policy makes of a line.

    What does not exist is an identity where that keeps every bit, so that no merge asks
    for flags; else each merge skips it.

    Args:
        spec: the reducer.
        line: the contributions.
        anyhow: any order will do.
        backward: the line runs from its end.
        flagged: it must be known whether anything existed.

    Returns:
        The piece.
    """
    flags = [v for _, v in line if v is not None]
    exact = spec.reducer.exact_identity and spec.reducer.identity is not None
    if flags and exact:
        identity = spec.identity(line[0][0][0].shape)
        line = [(_fold.pick(v, states, identity), None) for states, v in line]
    if anyhow and len(line) == 1:
        state, valid = any_tree(spec, line[0][0], line[0][1])
    else:
        state, valid = tree(spec, line, backward)
    if flags and exact and flagged:
        some = functools.reduce(lax.bitwise_or, flags).astype(np.int32)
        valid = lax.reduce_max(some, (some.ndim - 1,))[..., None] > 0
    return state, valid


def places(shape):
    """The place of each element along the last axis."""
    return lax.broadcasted_iota(np.int32, tuple(shape), len(shape) - 1)
