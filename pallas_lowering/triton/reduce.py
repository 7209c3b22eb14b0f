"""reduce in Pallas Triton kernels: every reducer under every policy.

A policy that permits permutation is one `tt.reduce`, whose order is Triton's and whose
lanes need not agree on which side is left. Any other tree is `fixed_tree` itself:
neighbours taken apart and merged, extents being powers of two. A fold is the chain.
"""

from __future__ import annotations

from jaxtile.pallas_lowering.triton import BACKEND, _line
from jaxtile.pallas_lowering.triton._operands import (
    refuse_operands,
    settled,
    unpacked,
)
from jaxtile.policy import Kind, Transform
from jaxtile.primitives import _fold
from jaxtile.primitives._scalar import convert
from jaxtile.primitives.reduce import reduce_p


def _refuse(*avals, axes, **params):
    return refuse_operands(avals, params)


@BACKEND.traces(reduce_p, _refuse)
def _reduce(*operands, spec, axes, policy, seeded, masked, finish, out):
    spec = _line.in_kernel(spec)
    elements, init, mask = unpacked(spec, operands, axes, seeded, masked)
    state, valid = combined(spec, elements, mask, init, policy)
    state = settled(spec, state, valid)
    result = spec.finish(state) if finish else state
    return [
        _line.guard(convert(v, d)).reshape(v.shape[:-1])
        for v, d in zip(result, out, strict=True)
    ]


def combined(spec, elements, mask, init, policy):
    """The piece of one element that a policy makes of a tile and its seed."""
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        shape = (*elements[0].shape[:-1], 1)
        start = _fold.start(spec, shape, init, mask is not None)
        return _line.fold(spec, elements, mask, start, policy.kind is Kind.RIGHT)
    states = spec.lift(elements)
    if policy.permits(Transform.REGROUP | Transform.PERMUTE):
        piece = _line.any_tree(spec, states, mask)
    else:
        piece = _line.tree(spec, [(states, mask)])
    return piece if init is None else _fold.join(spec, init, None, *piece)
