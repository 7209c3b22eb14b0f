"""Reference realisations of the order policies, shared by reduce and scan.

Contributions are lists of equally shaped arrays; `axis` is the one they lie along. A
`valid` array (or None for all) marks which states exist: a masked contribution is
skipped whatever it holds, never replaced by a value that arithmetic could see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtile.primitives._spec import Spec

# Steps written out in one loop body: they share the loads of one cache line. More only
# lengthens the compile.
_UNROLL = 8


def pick(condition: Any, a: Sequence, b: Sequence) -> list:
    """Leafwise `where`."""
    return [jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)]


def at(leaves: Sequence, i: Any, axis: int) -> list:
    """The slice at position `i`, without the axis."""
    return [lax.dynamic_index_in_dim(v, i, axis, keepdims=False) for v in leaves]


def join(spec: Spec, a: Sequence, a_valid, b: Sequence, b_valid) -> tuple[list, Any]:
    """Merge two states of which either may not exist."""
    both = spec.merge(a, b)
    if a_valid is None and b_valid is None:
        return both, None
    if b_valid is not None:
        both = pick(b_valid, both, a)
    if a_valid is not None:
        both = pick(a_valid, both, b)
    if a_valid is None or b_valid is None:
        return both, None
    return both, a_valid | b_valid


def unrolled(spec, most: int) -> int:
    """How many steps to write out: many components make one step long to compile."""
    return most if len(spec.states) < 4 else 1


def steps(n: int, body, carry, unroll: int = 1):
    """`fori_loop(0, n, ...)` with `unroll` steps written out in the body."""
    if not isinstance(n, int):  # symbolic, in an export
        return lax.fori_loop(0, jnp.asarray(n, jnp.int32), body, carry)
    if n <= unroll:
        for i in range(n):
            carry = body(i, carry)
        return carry
    whole = n // unroll

    def block(k, carry):
        for i in range(unroll):
            carry = body(k * unroll + i, carry)
        return carry

    carry = lax.fori_loop(0, whole, block, carry)
    for i in range(whole * unroll, n):
        carry = body(i, carry)
    return carry


def advance(spec: Spec, state, valid, element, mask, right=False):
    """One step of a fold: update, start, or skip."""
    element = spec.hidden(element)
    new = spec.update_right(element, state) if right else spec.update(state, element)
    if valid is not None:
        new = pick(valid, new, spec.lift(element))
        valid = jnp.ones_like(valid) if mask is None else valid | mask
    if mask is not None:
        new = pick(mask, new, state)
    return new, valid


def start(spec: Spec, shape: Sequence[int], init: Sequence | None, masked: bool):
    """The state before the first step, and its validity (None: it exists).

    A mask may leave nothing, whose value is not the identity where the two differ in
    bits: the empty float sum is +0.0, its identity -0.0.
    """
    if init is not None:
        return list(init), None
    if spec.has_update or (spec.starts_from_identity and not masked):
        return spec.origin(shape), None
    return spec.filler(shape), jnp.zeros(tuple(shape), bool)


def fold(spec, elements, axis, init, mask, right=False):
    """The strict chain along `axis`: its last state and validity."""
    n = elements[0].shape[axis]
    shape = tuple(s for d, s in enumerate(elements[0].shape) if d != axis)

    def body(i, carry):
        state, valid = carry
        i = n - 1 - i if right else i
        m = None if mask is None else at([mask], i, axis)[0]
        return advance(spec, state, valid, at(elements, i, axis), m, right)

    return steps(
        n, body, start(spec, shape, init, mask is not None), unrolled(spec, _UNROLL)
    )


def tree(spec: Spec, states: Sequence, valid, axis: int) -> tuple[list, Any]:
    """`fixed_tree`: neighbours level by level, an odd last one moves up unchanged."""
    states, hide = list(states), spec.hidden_state
    while (n := states[0].shape[axis]) > 1:
        half = n // 2

        def side(v, first, half=half):
            return lax.slice_in_dim(v, first, 2 * half, 2, axis)

        sides = [
            (
                hide([side(v, k) for v in states]),
                None if valid is None else side(valid, k),
            )
            for k in (0, 1)
        ]
        merged, merged_valid = join(spec, *sides[0], *sides[1])
        if n % 2:
            last = hide([lax.slice_in_dim(v, n - 1, n, 1, axis) for v in states])
            merged = [
                lax.concatenate(pair, axis) for pair in zip(merged, last, strict=True)
            ]
            if valid is not None:
                tail = lax.slice_in_dim(valid, n - 1, n, 1, axis)
                merged_valid = lax.concatenate([merged_valid, tail], axis)
        states, valid, hide = merged, merged_valid, list
    squeezed = [jnp.squeeze(v, axis) for v in hide(states)]
    return squeezed, None if valid is None else jnp.squeeze(valid, axis)


def split(leaves: Sequence, axis: int, chunks: int, fill: Any = 0) -> list:
    """View `axis` as (chunks, length), padding its end with `fill`."""
    n = leaves[0].shape[axis]
    length = -(-n // chunks)
    out = []
    for v in leaves:
        width = [(0, 0, 0)] * v.ndim
        width[axis] = (0, length * chunks - n, 0)
        v = lax.pad(v, jnp.asarray(fill, v.dtype), width)
        shape = (*v.shape[:axis], chunks, length, *v.shape[axis + 1 :])
        out.append(v.reshape(shape))
    return out


def chunk_count(shape: Sequence[int], axis: int, lanes: int = 4096) -> int:
    """How many pieces of `axis` run side by side to fill the vector units."""
    if not isinstance(shape[axis], int):
        return 1
    batch = _size([n for n in shape if isinstance(n, int)]) // max(1, shape[axis])
    batch = max(1, batch)
    return max(1, min(lanes // batch, shape[axis] // 16))


def _size(shape: Sequence[int]) -> int:
    size = 1
    for s in shape:
        size *= s
    return size


def index_leaf(spec: Spec, shape: Sequence[int], axis: int) -> list:
    """The source index of each contribution, for reducers that take it."""
    if spec.index is None:
        return []
    return [lax.broadcasted_iota(spec.index, tuple(shape), axis)]


def collapse(leaf: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The named axes as one last axis, in lexicographic source order."""
    kept = [d for d in range(leaf.ndim) if d not in axes]
    moved = lax.transpose(leaf, (*kept, *axes))
    count = _size([leaf.shape[d] for d in axes])
    return moved.reshape(*(leaf.shape[d] for d in kept), count)


def shift_in(first: Any, rest: Any, axis: int) -> Any:
    """`rest` moved one place along `axis`, with `first` in front."""
    n = rest.shape[axis]
    head = lax.expand_dims(first, (axis,))
    return lax.concatenate([head, lax.slice_in_dim(rest, 0, n - 1, axis=axis)], axis)


def nothing(spec: Spec, init: Sequence | None, fibre: Sequence[int]) -> list:
    """The state of no contributions at all: the seed, else the empty value."""
    return list(init) if init is not None else spec.filler(fibre)
