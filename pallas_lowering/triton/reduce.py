"""reduce in Pallas Triton kernels: every reducer under every policy.

A policy that permits permutation is one `tt.reduce`, whose order is Triton's and whose
lanes need not agree on which side is left. Any other tree is `fixed_tree` itself:
neighbours taken apart and merged, extents being powers of two. A fold is the chain.
"""

from __future__ import annotations

import functools

import numpy as np
from jax import lax

from jaxtile.pallas_lowering.triton import BACKEND, _folds, _line
from jaxtile.pallas_lowering.triton._chain import run_chain, start_of
from jaxtile.pallas_lowering.triton._launch import chain_for, launch, tile_for
from jaxtile.pallas_lowering.triton._operands import (
    contributions,
    refuse_launch,
    refuse_operands,
    settled,
    unpacked,
    viewed_inputs,
    write,
)
from jaxtile.policy import Kind, Transform
from jaxtile.primitives import _fold
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert
from jaxtile.primitives.reduce import reduce_p


def _refuse(*avals, axes, **params):
    return refuse_operands(avals, params)


@BACKEND.traces(reduce_p, _refuse)
def _reduce(*operands, spec, axes, policy, seeded, masked, finish, out):
    spec = _line.in_kernel(spec)
    elements, init, mask, axis = unpacked(spec, operands, axes, seeded, masked)
    state, valid = combined(spec, elements, mask, init, policy, axis)
    state = settled(spec, state, valid)
    result = spec.finish(state) if finish else state
    return [
        lax.squeeze(_line.guard(convert(v, d)), (axis,))
        for v, d in zip(result, out, strict=True)
    ]


def combined(spec, elements, mask, init, policy, axis):
    """The piece of one element that a policy makes of a tile and its seed."""
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        shape = _line.resized(elements[0].shape, axis, 1)
        start = _fold.start(spec, shape, init, mask is not None)
        right = policy.kind is Kind.RIGHT
        return _folds.fold(spec, elements, mask, start, right, axis=axis)
    line = [(spec.lift(elements), mask)]
    piece = _line.total(spec, line, _any_order(policy), axis=axis)
    return piece if init is None else _fold.join(spec, init, None, piece[0], piece[1])


def refuse_arrays(*avals, axes, **params):
    """Why a reduce of whole arrays is refused, or None."""
    return refuse_launch(avals, axes, params)


def _slower(*avals, policy, **params):
    """benchmarks/results/gpu_triton.md: a fold is four times the reference, a tree none."""
    del avals, params
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        return None
    return "XLA's own reductions are as fast or faster; ask for it by name"


@BACKEND.runs(reduce_p, refuse_arrays, _slower)
def reduce_arrays(*operands, spec, axes, policy, seeded, masked, finish, out):
    """reduce of whole arrays: `reduce_p`'s operands and parameters, its results.

    Under a tree policy each launch replaces blocks by their totals, until one is left:
    aligned blocks of a power of two are whole subtrees of `fixed_tree`.
    """
    spec = _line.in_kernel(spec)
    elements, init, mask = unpack(spec, operands, seeded, masked)
    given = viewed_inputs(elements, init, mask, axes)
    end = functools.partial(_end, spec, finish, out)
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        right = policy.kind is Kind.RIGHT
        tiling = chain_for(given["elements"][0].shape, right)
        made = launch(
            tiling,
            functools.partial(_chain_body, spec, end, right),
            given,
            {"out": _fibres(tiling, out)},
            "jaxtile_fold",
        )
    else:
        made = _tree_levels(spec, given, policy, end, out)
    shape = [s for d, s in enumerate(elements[0].shape) if d not in axes]
    return [v.reshape(shape) for v in made["out"]]


def _tree_levels(spec, given, policy, end, out):
    tiling = tile_for(given["elements"][0].shape)
    while tiling.blocks > 1:
        given = {**given, **totals(spec, given, policy, tiling)}
        tiling = tile_for(given["states"][0].shape)

    def body(place, refs):
        state, valid = total_of(spec, refs, place, policy)
        end(place, refs, state, valid)

    return launch(tiling, body, given, {"out": _fibres(tiling, out)}, "jaxtile_reduce")


def totals(spec, given, policy, tiling):
    """One launch: the raw total of every block, as contributions to the next one."""
    outer, _, inner = tiling.shape
    shape = outer, tiling.blocks, inner
    outs = {
        "totals": [(shape, d) for d in spec.states],
        "seen": [(shape, np.dtype(bool))] * len(given["mask"]),
    }

    def body(place, refs):
        state, valid = total_of(spec, refs, place, policy)
        for ref, v in zip(refs["totals"], state, strict=True):
            place.store(ref, place.b, v)
        for ref in refs["seen"]:
            place.store(ref, place.b, valid)

    inputs = {**given, "init": []}
    made = launch(tiling, body, inputs, outs, "jaxtile_totals")
    return {"elements": [], "states": made["totals"], "mask": made["seen"]}


def total_of(spec, refs, place, policy):
    """The piece of one element that a program's block combines to."""
    line = contributions(spec, refs, place)
    # The pieces are in the order already; a tile is turned around inside.
    turned = place.tiling.backward and place.tiling.extent > 1
    return _line.total(spec, line, _any_order(policy), turned, bool(refs["mask"]))


def _any_order(policy):
    return policy.permits(Transform.REGROUP | Transform.PERMUTE)


def _end(spec, finish, out, place, refs, state, valid):
    """Seed, settle, finish, narrow, and write."""
    if refs["init"]:
        init = [place.load(r, np.int32(0)) for r in refs["init"]]
        state, valid = _fold.join(spec, init, None, state, valid)
    write(spec, finish, out, place, refs["out"], np.int32(0), state, valid)


def _chain_body(spec, end, right, place, refs):
    carry = start_of(spec, place, refs)
    state, valid = run_chain(spec, place, refs, carry, right=right)
    end(place, {**refs, "init": []}, state, valid)


def _fibres(tiling, dtypes):
    outer, _, inner = tiling.shape
    return [((outer, 1, inner), d) for d in dtypes]
