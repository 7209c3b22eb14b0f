r"""scan: every prefix of each fibre combined by a reducer, in a stated order.

    prefix:   y_i = seed . x_0 . x_1 ... x_i        (earlier on the left)
    suffix:   y_i = x_i . x_(i+1) ... x_(n-1) . seed
    reverse:  y_i = seed . x_(n-1) . x_(n-2) ... x_i   (the scan of the flipped sequence)

where the policy says how the dots associate (see `jaxtile.policy`). The first inclusive
prefix is the element itself, bits kept. Exclusive prefixes leave x_i out and never
subtract. Masked elements are skipped: their place shows the prefix so far. Under
`fixed_tree` a suffix is the mirror image: its blocks align with the end. A fold policy
that runs against the direction (`fold_right` of prefixes, `fold_left` of suffixes) is a
separate chain for each prefix, quadratic by definition.

Operands: element leaves, then seed leaves (if `seeded`), then a mask (if `masked`).
Results: the prefixes, then the final raw state (if `final`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxtile.errors import TileShapeError, message
from jaxtile.policy import Kind
from jaxtile.primitives import _fold, _prefix
from jaxtile.primitives._bind import flip, scan_p
from jaxtile.primitives._define import Out, define
from jaxtile.primitives._fold import nothing, shift_in
from jaxtile.primitives._operands import (
    batch_fibres,
    check_operands,
    check_symbolic,
    unpack,
)
from jaxtile.primitives._scalar import convert, evaluate
from jaxtile.primitives._scan_rules import jvp, transpose
from jaxtile.primitives._spec import Spec
from jaxtile.primitives._unknown import unknown_seed


def _abstract(*avals, spec: Spec, axis, policy, seeded, masked, out, final, **params):
    elements, init, mask = unpack(spec, avals, seeded, masked)
    shape = elements[0].shape
    kept = tuple(d for d in range(len(shape)) if d != axis)
    check_operands("scan", spec, policy, elements, init, mask, kept, (axis,))
    check_symbolic("scan", (shape[axis],), policy)
    nothing = final and shape[axis] == 0
    if not seeded and (params["exclusive"] or nothing):
        if not spec.has_empty and spec.reducer.identity is None:
            raise TileShapeError(
                message(
                    "scan",
                    expected=f"init= for the prefix of nothing: {spec.reducer!r} has "
                    "no identity",
                    got=f"exclusive={params['exclusive']}, axis of {shape[axis]}",
                    way_out="Pass init=.",
                )
            )
    dims = tuple(range(len(shape)))
    outs = [Out(shape, d, dims) for d in out]
    fibre = tuple(shape[d] for d in kept)
    return outs + [Out(fibre, d, kept) for d in spec.states] * final


def _inclusive(spec, elements, init, mask, axis, policy, platform):
    against = policy.kind is (Kind.LEFT if spec.swapped else Kind.RIGHT)
    if against:
        return _prefix.right_nested(spec, elements, axis, init, mask)
    if policy.kind is Kind.FIXED:
        return _prefix.fixed(spec, elements, axis, init, mask)
    if policy.kind is not Kind.TREE:
        return _prefix.chain(spec, elements, axis, init, mask, platform)
    if platform != "cpu":
        return _prefix.windowed(spec, elements, axis, init, mask)
    return _prefix.chunked(spec, elements, axis, init, mask, platform)


def _reference(
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
    platform="",
):
    elements, init, mask = unpack(spec, operands, seeded, masked)
    init = init and unknown_seed(init)
    shape = elements[0].shape
    n, fibre = shape[axis], tuple(s for d, s in enumerate(shape) if d != axis)
    elements = elements + _fold.index_leaf(spec, shape, axis)
    backward = direction != "prefix"
    if backward:
        elements = flip(elements, axis)
        mask = None if mask is None else lax.rev(mask, (axis,))
    if direction == "suffix":
        spec = _prefix.swapped(spec)
    if n == 0:
        states = [jnp.zeros(shape, d) for d in spec.states]
        last = nothing(spec, init, fibre)
    else:
        states = _inclusive(spec, elements, init, mask, axis, policy, platform)
        last = [lax.index_in_dim(v, n - 1, axis, keepdims=False) for v in states]
        if exclusive:
            first = nothing(spec, init, fibre)
            states = [shift_in(f, v, axis) for f, v in zip(first, states, strict=True)]
    if backward:
        states = flip(states, axis)
    results = spec.finish(states, evaluate) if finish else states
    outs = [convert(v, d) for v, d in zip(results, out, strict=True)]
    return outs + (last if final else [])


define(
    scan_p,
    abstract=_abstract,
    reference=_reference,
    jvp=jvp,
    transpose=transpose,
    batch=batch_fibres(scan_p),
    along=lambda *, axis, **_: (axis,),
)
