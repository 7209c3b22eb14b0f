"""scan of whole arrays on TPU: every reducer in every order, one pass."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from jax import lax

from jaxtile.pallas_lowering.tpu import BACKEND, _blocks
from jaxtile.pallas_lowering.tpu._blocks import (
    Prefixes,
    fold_rows,
    scan_rows,
    sweep_rows,
)
from jaxtile.pallas_lowering.tpu._grid import LANES, Call, Plan
from jaxtile.pallas_lowering.tpu._refuse import refuse_whole
from jaxtile.pallas_lowering.tpu._rows import Show, Store, encode, scratch
from jaxtile.pallas_lowering.tpu.whole_reduce import flagged, seed_of
from jaxtile.policy import Kind
from jaxtile.primitives import _fold
from jaxtile.primitives._define import lowered_on
from jaxtile.primitives._operands import unpack
from jaxtile.primitives.scan import scan_p


def _refuse(*avals, **params):
    spec, policy = params["spec"], params["policy"]
    elements, _, _ = unpack(spec, avals, params["seeded"], params["masked"])
    against = Kind.LEFT if params["direction"] == "suffix" else Kind.RIGHT
    if policy.kind is against:
        return (
            f"{policy} of {params['direction']} scans is a chain of its own for each "
            "prefix, which has no kernel of whole arrays; fold in the scan's direction"
        )
    return refuse_whole(spec, elements[0].shape, (params["axis"],), params)


def _step(call, params, carry_dtypes, refs, carry, t, count, first, last):
    steps, plan, fixed = call.steps, call.plan, params["policy"].kind is Kind.FIXED
    rows, seed = call.rows(refs.rows, count, t), seed_of(refs)
    shown = call.spec.results if params["finish"] else call.spec.states
    nothing = None
    if params["exclusive"]:
        init = None if seed is None else seed[0]
        nothing = _fold.nothing(call.spec, init, call.shape)
    show = Show(steps, rows, Store(refs.out, shown), nothing, params["finish"])
    place = (slice(None), slice(None))
    if not fixed:
        store = Store(carry, carry_dtypes)
        state = seed if first else steps.unpack(store.load(place))
        state = fold_rows(steps, rows, state, show=show)
        if not last:
            store.save(place, steps.pack(state))
    elif plan.n <= _blocks.WRITTEN_OUT:
        state = scan_rows(steps, rows, seed, show)
    else:
        blocks = -(-plan.n // _blocks.BLOCK)
        prefixes = Prefixes(steps, carry, blocks, call.masked, seed)
        begin = t * (plan.block[0] // _blocks.BLOCK)
        state = sweep_rows(steps, rows, show, prefixes, first, begin)
    if last and params["final"]:
        for ref, value in zip(refs.fibres, steps.settle(state), strict=True):
            ref[...] = encode(value) if value.dtype == bool else value


def scan_array(*arrays: Any, **params: Any) -> list:
    """The primitive's operands as whole arrays, and its parameters."""
    spec, direction = params["spec"], params["direction"]
    elements, init, mask = unpack(spec, arrays, params["seeded"], params["masked"])
    fixed, masked = params["policy"].kind is Kind.FIXED, mask is not None
    count = len(elements) + masked + len(params["out"])
    plan = Plan(elements[0].shape, (params["axis"],), count)
    spec = replace(spec, swapped=True) if direction == "suffix" else spec
    backward = direction != "prefix"
    # The blocks of fixed_tree align with where the scan begins.
    flips = backward and fixed and plan.tail != plan.block[0] and plan.steps > 1
    if flips and spec.index is not None:
        elements.append(
            lax.broadcasted_iota(spec.index, elements[0].shape, params["axis"])
        )
    leaves = [*elements, *([mask] if masked else [])]
    leaves = [plan.flip(v) for v in leaves] if flips else leaves
    dtypes = [v.dtype for v in elements]
    call = Call(plan, spec, dtypes, masked, backward and not flips)
    carry_dtypes = [*spec.states, *[bool] * flagged(call, init is not None)]
    carry = [] if fixed else scratch(call.shape, carry_dtypes)
    if fixed and plan.n > _blocks.WRITTEN_OUT:
        blocks = -(-plan.n // _blocks.BLOCK)
        seed = None if init is None else (init, None)
        carry = Prefixes.memory(call.steps, blocks, masked, seed)
    step = functools.partial(_step, call, params, carry_dtypes)
    shown = spec.results if params["finish"] else spec.states
    results = list(zip(shown, params["out"], strict=True))
    fibres = spec.states if params["final"] else ()
    outs = call.run(step, leaves, init, results, fibres, carry)
    if flips:
        outs = [*map(plan.flip, outs[: len(shown)]), *outs[len(shown) :]]
    return outs


def _slower(*avals, **params):
    spec, policy, axis = params["spec"], params["policy"], params["axis"]
    elements, _, _ = unpack(spec, avals, params["seeded"], params["masked"])
    shape = elements[0].shape
    fibres = math.prod(shape) // shape[axis]
    if policy.kind in (Kind.TREE, Kind.FIXED) and fibres < LANES:
        return (
            f"{fibres} fibres leave most lanes of each step idle, and XLA's tree along "
            "the axis fills them (an estimate: not counted)"
        )
    return None


@BACKEND.runs(scan_p, _refuse, _slower)
def _run(*arrays, **params):
    with lowered_on("tpu"):
        return scan_array(*arrays, **params)
