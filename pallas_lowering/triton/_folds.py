"""Fold policies over one tile: a loop that picks out an element at a time.

An element is picked by an integer sum over its bits and zeros, which is exact. Nothing
cheaper addresses one place of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.pallas_lowering.triton import _line
from jaxtile.primitives import _fold
from jaxtile.primitives._spec import Spec

# Up to so many elements a chain is written out.
_WRITTEN_OUT = 8


def fold(
    spec: Spec, elements: Sequence, mask, carry, right=False, backward=False, axis=-1
):
    """The strict chain along an axis from a piece of one element.

    Args:
        spec: the reducer.
        elements: leaves of the contributions.
        mask: which of them exist, or None.
        carry: the state to start from, and its flag.
        right: a right fold: from the last element, each step on the left.
        backward: the elements run from the axis's end.
        axis: the ordered one.

    Returns:
        The last state and its flag.
    """
    n = elements[0].shape[axis]
    down = right != backward
    if n <= _WRITTEN_OUT:
        return _written_out(spec, elements, mask, carry, right, down, axis)
    place = _line.places(elements[0].shape, axis)

    def body(i, carry):
        here = place == (n - 1 - i if down else i)
        element = [_line.take(v, here, axis) for v in elements]
        there = None if mask is None else _line.take(mask, here, axis)
        return _fold.advance(spec, carry[0], carry[1], element, there, right)

    return lax.fori_loop(np.int32(0), np.int32(n), body, carry)


def _written_out(spec, elements, mask, carry, right, down, axis):
    steps = list(zip(*(_line.columns(v, axis) for v in elements), strict=True))
    flags = [None] * len(steps) if mask is None else _line.columns(mask, axis)
    chain = list(zip(steps, flags, strict=True))
    for element, there in reversed(chain) if down else chain:
        carry = _fold.advance(spec, carry[0], carry[1], element, there, right)
    return carry


def fold_scan(spec: Spec, elements, mask, carry, first, backward=False, axis=-1):
    """The states of the strict chain along an axis, and its last one.

    Args:
        spec: the reducer.
        elements, mask: the contributions.
        carry: the state to start from, and its flag.
        first: leaves that exclusive prefixes start with; None for inclusive ones.
        backward: the axis runs from its end.
        axis: the ordered one.

    Returns:
        Two pieces: the prefixes, and the state after all.
    """
    shape = elements[0].shape
    n = shape[axis]
    place = _line.places(shape, axis)
    outs = [jnp.broadcast_to(v, shape) for v in first or spec.filler(shape)]
    seen = None if carry[1] is None else jnp.zeros(shape, bool)

    def body(i, carry):
        before, outs, seen = carry
        at = n - 1 - i if backward else i
        here = place == at
        element = [_line.take(v, here, axis) for v in elements]
        there = None if mask is None else _line.take(mask, here, axis)
        state, valid = _fold.advance(spec, before[0], before[1], element, there)
        if first is not None:
            here = place == (at - 1 if backward else at + 1)
        wide = [jnp.broadcast_to(v, shape) for v in state]
        if seen is not None and valid is not None:
            seen = jnp.where(here, jnp.broadcast_to(valid, shape), seen)
        return (state, valid), _fold.pick(here, wide, outs), seen

    carry = (carry, outs, seen)
    last, outs, seen = lax.fori_loop(np.int32(0), np.int32(n), body, carry)
    return (outs, seen), last


def nested_scan(spec: Spec, elements, mask, carry, first, backward=False, axis=-1):
    """Each prefix as a right fold of its own: quadratic, by definition.

    Args and returns as `fold_scan`; `carry` is one for every place.
    """
    shape = elements[0].shape
    n = shape[axis]
    place = _line.places(shape, axis)

    def body(k, carry):
        i = k if backward else n - 1 - k
        here = place == i
        element = [jnp.broadcast_to(_line.take(v, here, axis), shape) for v in elements]
        inside = place <= i if backward else place >= i
        if first is not None:
            inside &= ~here
        if mask is not None:
            inside &= jnp.broadcast_to(_line.take(mask, here, axis), shape)
        return _fold.advance(spec, carry[0], carry[1], element, inside, right=True)

    outs, seen = lax.fori_loop(np.int32(0), np.int32(n), body, carry)
    if first is not None:
        here = place == (n - 1 if backward else 0)
        outs = _fold.pick(here, [jnp.broadcast_to(v, shape) for v in first], outs)
        seen = None if seen is None else seen | here
    return outs, seen
