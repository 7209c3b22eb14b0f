"""scan in Pallas Triton kernels: every reducer, direction and policy.

A tree policy that permits regrouping is one `tt.scan`, which keeps the order. It has no
exclusive form and no shift, so that exclusive prefixes and `fixed_tree` are a sweep up
and down the tree. A fold is the chain, written where it stands.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxtile.pallas_lowering.triton import BACKEND, _line
from jaxtile.pallas_lowering.triton._operands import (
    refuse_operands,
    settled,
    unpacked,
)
from jaxtile.policy import Kind
from jaxtile.primitives import _fold
from jaxtile.primitives._scalar import convert
from jaxtile.primitives.scan import scan_p


def _refuse(*avals, **params):
    return refuse_operands(avals, params)


@BACKEND.traces(scan_p, _refuse)
def _scan(
    *operands,
    spec,
    axis,
    policy,
    direction,
    exclusive,
    final,
    seeded,
    masked,
    finish,
    out,
):
    spec = _line.in_kernel(spec)
    elements, init, mask = unpacked(spec, operands, (axis,), seeded, masked)
    backward = direction != "prefix"
    if direction == "suffix":
        spec = replace(spec, swapped=True)
    tree = policy.kind in (Kind.TREE, Kind.FIXED)
    prefixes = trees if tree else chains
    shown, last = prefixes(spec, elements, mask, init, backward, exclusive, policy)
    states = settled(spec, *shown)
    results = spec.finish(states) if finish else states
    place = elements[0].ndim - 1
    outs = [
        jnp.moveaxis(_line.guard(convert(v, d)), place, axis)
        for v, d in zip(results, out, strict=True)
    ]
    if not final:
        return outs
    last = [_line.guard(v) for v in settled(spec, *last)]
    return outs + [v.reshape(v.shape[:-1]) for v in last]


def trees(spec, elements, mask, init, backward, exclusive, policy):
    """Prefixes of one tile, and what is up to its end, under a tree policy."""
    states = spec.lift(elements)
    shape = states[0].shape
    if init is None:
        fibre = (*shape[:-1], 1)
        before = spec.filler(fibre), jnp.zeros(fibre, bool)
    else:
        before = init, None
    if exclusive or policy.kind is Kind.FIXED:
        out, upto = _line.fixed_scan(spec, [(states, mask)], before, backward)
        return (out if exclusive else upto)[0], _last(*upto[0], backward)
    upto = _line.any_scan(spec, states, mask, reverse=backward)
    if init is not None:
        wide = [jnp.broadcast_to(v, shape) for v in init]
        upto = _fold.join(spec, wide, None, *upto)
    return upto, _last(*upto, backward)


def _last(states, valid, backward):
    shape = states[0].shape
    here = _line.places(shape) == (0 if backward else shape[-1] - 1)
    flag = None if valid is None else _line.take(valid, here)
    return [_line.take(v, here) for v in states], flag


def chains(spec, elements, mask, init, backward, exclusive, policy):
    """Prefixes of one tile, and what is up to its end, under a fold policy."""
    shape = elements[0].shape
    fibre = (*shape[:-1], 1)
    first = _fold.nothing(spec, init, fibre) if exclusive else None
    if policy.kind is not (Kind.LEFT if spec.swapped else Kind.RIGHT):
        start = _fold.start(spec, fibre, init, mask is not None)
        return _line.fold_scan(spec, elements, mask, start, first, backward)
    start = _fold.start(spec, fibre, init, True)
    last = _line.fold(spec, elements, mask, start, True, backward)
    wide = [jnp.broadcast_to(v, shape) for v in start[0]]
    flag = None if start[1] is None else jnp.broadcast_to(start[1], shape)
    carry = (wide, flag)
    return _line.nested_scan(spec, elements, mask, carry, first, backward), last
