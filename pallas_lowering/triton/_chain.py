"""Fold policies over whole arrays: one thread a fibre, one step an element.

The chain has one order, so that only the loads run ahead of it: a block of them at a
time, in a loop over full blocks, then what is left.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.pallas_lowering.triton import _line
from jaxtile.pallas_lowering.triton._operands import element_at
from jaxtile.primitives import _fold


def start_of(spec, place, refs):
    """The state before the first element and its flag."""
    init = [place.load(r, np.int32(0)) for r in refs["init"]] or None
    shape = (place.tiling.lanes, 1)
    return _fold.start(spec, shape, init, bool(refs["mask"]))


def run_chain(spec, place, refs, carry, right=False, show: Callable | None = None):
    """Advance over the whole axis.

    Args:
        spec: the reducer.
        place: where the program stands.
        refs: "elements" and "mask".
        carry: the state and flag to start from.
        right: a right fold; the tiling runs backward.
        show: `(places, inside, [(state, flag)])` writes a piece's prefixes.

    Returns:
        The last state and its flag.
    """
    t = place.tiling
    whole = t.shape[1] // t.block

    def block(b, carry):
        return _block(spec, place, refs, b, carry, right, show, False)

    first = 0
    if whole and carry[1] is not None and not refs["mask"]:
        # After the first element there is a state: no step of the loop needs the flag.
        carry, first = block(np.int32(0), carry), 1
    if whole > first:
        carry = lax.fori_loop(np.int32(first), np.int32(whole), block, carry)
    if t.ragged:
        carry = _block(spec, place, refs, np.int32(whole), carry, right, show, True)
    return carry


def _block(spec, place, refs, b, carry, right, show, last):
    """The steps of one block; in the last one some places lie beyond the axis."""
    backward = place.tiling.backward
    pieces = [(p, place.on_axis(p) if last else None) for p, _ in place.block(b)]
    for p, inside in pieces[::-1] if backward else pieces:
        shown = []
        for element, there in _steps(spec, place, refs, p, inside):
            fresh = carry[1] is not None and not refs["mask"] and there is None
            if fresh:
                carry = spec.lift(element), None
            else:
                carry = _fold.advance(spec, carry[0], carry[1], element, there, right)
            shown.append(carry)
        if show is not None:
            show(p, inside, shown[::-1] if backward else shown)
    return carry


def _steps(spec, place, refs, p, inside):
    """The elements of one piece in the chain's order, and which exist."""
    leaves = element_at(spec, refs, place, p, inside)
    steps = list(zip(*map(_line.columns, leaves), strict=True))
    there = inside
    if refs["mask"]:
        there = place.load(refs["mask"][0], p, inside)
    if there is None:
        flags = [None] * len(steps)
    else:
        flags = _line.columns(jnp.broadcast_to(there, leaves[0].shape))
    chain = list(zip(steps, flags, strict=True))
    return chain[::-1] if place.tiling.backward else chain
