"""Lines: values along one axis in a Triton kernel, and the orders in which they combine.

A line is a list of pieces, each a list of leaves and a flag leaf (or None: all exist).
One axis of the leaves, the last unless said, is the ordered one, of a power of two.
Element i of the line lies in piece i // extent at place i % extent, so that a line is one
tile in registers, or many loads of one element for each fibre, or both. Taking neighbours
apart and weaving them together (`tt.split`, `tt.join`) moves bits and computes nothing.

A tile is combined along the axis where it is, for what a transpose costs see _turn.py.

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


def resized(shape, axis, *sizes) -> tuple:
    """A shape with other sizes in the place of an axis."""
    axis %= len(shape)
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def halves(v, backward=False, axis=-1):
    """The even and the odd places of an axis, the later ones first if backward."""
    axis, n = axis % v.ndim, v.shape[axis]
    half = resized(v.shape, axis, n // 2)
    if n == 2 and axis < v.ndim - 1:
        # An axis that is whole is no obstacle to a transpose on its way up.
        a, b = (take(v, places(v.shape, axis) == k, axis) for k in (0, 1))
    else:
        pairs = v.reshape(resized(v.shape, axis, n // 2, 2))
        pairs = jnp.moveaxis(pairs, axis + 1, -1)
        sides = lax.split(pairs, (1, 1), axis=pairs.ndim - 1)
        a, b = (s.reshape(half) for s in sides)
    return (b, a) if backward else (a, b)


def weave(a, b, backward=False, axis=-1):
    """The inverse of `halves`."""
    a, b = (b, a) if backward else (a, b)
    axis %= a.ndim
    wide = resized(a.shape, axis, 2 * a.shape[axis])
    if a.size == 1:
        # XLA's Triton compiler (jax 0.11.2) dies at a `tt.join` of single elements.
        return jnp.where(
            places(wide, axis) == 0, *(jnp.broadcast_to(v, wide) for v in (a, b))
        )
    pairs = lax.concatenate([a[..., None], b[..., None]], a.ndim)
    return jnp.moveaxis(pairs, -1, axis + 1).reshape(wide)


def columns(v, axis=-1) -> list:
    """Each place of an axis as an array of its own, which keeps an axis of 1."""
    if v.shape[axis] == 1:
        return [v]
    sides = [columns(side, axis) for side in halves(v, axis=axis)]
    return [v for pair in zip(*sides, strict=True) for v in pair]


def from_columns(values: Sequence):
    """The inverse of `columns`."""
    if len(values) == 1:
        return values[0]
    return weave(from_columns(values[0::2]), from_columns(values[1::2]))


def take(v, here, axis=-1):
    """The one element of an axis where `here` is true, in its own bits."""
    bits = v
    if jnp.issubdtype(v.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(v, np.dtype(f"int{8 * v.dtype.itemsize}"))
    word = np.dtype("int64" if v.dtype.itemsize == 8 else "int32")
    wide = jnp.where(here, bits.astype(word), jnp.zeros(here.shape, word))
    one = _along(lax.reduce_sum, wide, axis).astype(bits.dtype)
    return one if bits is v else lax.bitcast_convert_type(one, v.dtype)


def _along(reduction, v, axis):
    """A reduction along an axis, which stays."""
    axis %= v.ndim
    return lax.expand_dims(reduction(v, (axis,)), (axis,))


def _apply(fn, *values) -> Any:
    """A function of leaves on pieces: None, the flag of all, stays None."""
    if values[0] is None:
        return None
    return fn(*values)


def _pairs(line, backward, axis):
    if line[0][0][0].shape[axis] == 1:
        a, b = line[0::2], line[1::2]
        return (b, a) if backward else (a, b)
    split = functools.partial(
        _apply, functools.partial(halves, backward=backward, axis=axis)
    )
    sides = []
    for states, valid in line:
        flags = split(valid) or (None, None)
        sides.append(([split(v) for v in states], flags))
    return tuple(
        [([v[k] for v in states], flags[k]) for states, flags in sides] for k in (0, 1)
    )


def _woven(a, b, pieces, backward, axis):
    if len(a) < pieces:
        a, b = (b, a) if backward else (a, b)
        return [piece for pair in zip(a, b, strict=True) for piece in pair]
    whole = functools.partial(weave, backward=backward, axis=axis)
    both = functools.partial(_apply, whole)
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


def _extent(line, axis) -> int:
    return len(line) * line[0][0][0].shape[axis]


def tree(spec: Spec, line: Sequence[Piece], backward=False, axis=-1) -> Piece:
    """The one piece of one element that `fixed_tree` makes of a line."""
    while _extent(line, axis) > 1:
        left, right = _pairs(line, backward, axis)
        line = _merged(spec, left, right)
    return line[0]


def fixed_scan(spec: Spec, line, before, backward=False, whole=None, axis=-1):
    """What comes before each element of a line, and up to it, under `fixed_tree`.

    Args:
        spec: the reducer.
        line: the contributions.
        before: the piece, of one element, before all of them.
        backward: the line runs from its end.
        whole: the piece up to their end, where that is part of a larger subtree.
        axis: the ordered one.

    Returns:
        Two lines. Before the right of a pair is what is before the pair and its left;
        up to the right is what is up to the pair.
    """
    if _extent(line, axis) == 1:
        return [before], [whole] if whole else _merged(spec, [before], line)
    left, right = _pairs(line, backward, axis)
    pairs = _merged(spec, left, right)
    around = fixed_scan(spec, pairs, before, backward, whole, axis)
    middle = _merged(spec, around[0], left)
    n = len(line)
    return (
        _woven(around[0], middle, n, backward, axis),
        _woven(middle, around[1], n, backward, axis),
    )


def _plain_scan(*leaves, combine, axis, reverse):
    return lax.associative_scan(combine, list(leaves), reverse, axis)


def _plain_reduce(*leaves, combine, axis, reverse):
    scanned = _plain_scan(*leaves, combine=combine, axis=axis, reverse=reverse)
    return [lax.index_in_dim(v, v.shape[axis] - 1, axis, False) for v in scanned]


scan_region = _jax_private.triton_associative("scan", True, _plain_scan)
reduce_region = _jax_private.triton_associative("reduce", False, _plain_reduce)


def _combined(primitive, spec: Spec, states, valid, axis, reverse=False) -> Piece:
    """Triton's own reduction or scan of an axis; a bool travels as an int32."""
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

    axis %= states[0].ndim
    lone = primitive is reduce_region and states[0].ndim == 1
    if lone:
        # Triton lets a reshape to one axis scramble what only a `tt.reduce` reads, each
        # operand in its own way: a value would lose its index.
        leaves = [lax.expand_dims(v, (0,)) for v in leaves]
    along = {"axis": axis + lone, "reverse": reverse}
    outs = primitive.bind(*leaves, combine=combine, **along)
    if primitive is reduce_region and not lone:
        outs = [lax.expand_dims(v, (axis,)) for v in outs]
    return states_of(outs)


def any_tree(spec: Spec, states: Sequence, valid, axis=-1) -> Piece:
    """One `tt.reduce` of an axis of a tile, in Triton's order."""
    return _combined(reduce_region, spec, states, valid, axis)


def any_scan(spec: Spec, states: Sequence, valid, reverse=False, axis=-1) -> Piece:
    """One `tt.scan` of an axis of a tile, grouped as Triton likes."""
    return _combined(scan_region, spec, states, valid, axis, reverse)


def total(
    spec: Spec, line, anyhow=False, backward=False, flagged=True, axis=-1
) -> Piece:
    """The one piece of one element that a tree policy makes of a line.

    What does not exist is an identity where that keeps every bit, so that no merge asks
    for flags; else each merge skips it.

    Args:
        spec: the reducer.
        line: the contributions.
        anyhow: any order will do.
        backward: the line runs from its end.
        flagged: it must be known whether anything existed.
        axis: the ordered one.

    Returns:
        The piece.
    """
    flags = [v for _, v in line if v is not None]
    exact = spec.reducer.exact_identity and spec.reducer.identity is not None
    if flags and exact:
        identity = spec.identity(line[0][0][0].shape)
        line = [(_fold.pick(v, states, identity), None) for states, v in line]
    if anyhow and len(line) == 1:
        state, valid = any_tree(spec, line[0][0], line[0][1], axis)
    else:
        state, valid = tree(spec, line, backward, axis)
    if flags and exact and flagged:
        some = functools.reduce(lax.bitwise_or, flags).astype(np.int32)
        valid = _along(lax.reduce_max, some, axis) > 0
    return state, valid


def places(shape, axis=-1):
    """The place of each element along an axis."""
    return lax.broadcasted_iota(np.int32, tuple(shape), axis % len(shape))
