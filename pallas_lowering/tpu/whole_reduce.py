"""reduce of whole arrays on TPU: every reducer under every policy, one pass."""

from __future__ import annotations

import functools
from typing import Any

from jaxtile.pallas_lowering.tpu import BACKEND, _blocks
from jaxtile.pallas_lowering.tpu._blocks import (
    Counter,
    count_rows,
    fold_rows,
    tree_rows,
)
from jaxtile.pallas_lowering.tpu._grid import Call, Plan
from jaxtile.pallas_lowering.tpu._refuse import refuse_whole
from jaxtile.pallas_lowering.tpu._rows import Store, encode, scratch
from jaxtile.policy import Kind
from jaxtile.primitives._define import lowered_on
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert
from jaxtile.primitives.reduce import reduce_p


def _refuse(*avals, **params):
    spec = params["spec"]
    elements, _, _ = unpack(spec, avals, params["seeded"], params["masked"])
    return refuse_whole(spec, elements[0].shape, params["axes"], params)


def _emit(call, params, refs, state) -> None:
    """Write the results of a block of fibres."""
    leaves = call.steps.settle(state)
    result = call.steps.finish(leaves) if params["finish"] else leaves
    for ref, value, dtype in zip(refs.fibres, result, params["out"], strict=True):
        value = convert(value, dtype)
        ref[...] = encode(value) if value.dtype == bool else value


def seed_of(refs) -> Any:
    """The state that seeds give, or None."""
    return ([ref[...] for ref in refs.seeds], None) if refs.seeds else None


def _chain_step(call, params, right, dtypes, refs, carry, t, count, first, last):
    rows = call.rows(refs.rows, count, t)
    store = Store(carry, dtypes)
    place = (slice(None), slice(None))
    state = seed_of(refs) if first else call.steps.unpack(store.load(place))
    state = fold_rows(call.steps, rows, state, right)
    if last:
        _emit(call, params, refs, state)
    else:
        store.save(place, call.steps.pack(state))


def _tree_step(call, params, refs, carry, t, count, first, last):
    rows, steps, plan = call.rows(refs.rows, count, t), call.steps, call.plan
    if plan.n <= _blocks.WRITTEN_OUT:
        state = tree_rows(steps, rows)
    else:
        counter = Counter.of(steps, carry, rows.masked)
        begin = t * (plan.block[0] // _blocks.BLOCK)
        state = count_rows(steps, rows, counter, begin)
        if last:
            state = counter.total(plan.n // _blocks.BLOCK, state)
    if last:
        seed = seed_of(refs)
        _emit(call, params, refs, state if seed is None else steps.join(seed, state))


def flagged(call, seeded: bool) -> bool:
    """Whether the state of a chain may still not exist after a row."""
    start = None if seeded else call.steps.start(None, call.masked)[1]
    return call.masked and start is not None


def reduce_array(*arrays: Any, **params: Any) -> list:
    """The primitive's operands as whole arrays, and its parameters."""
    spec, policy = params["spec"], params["policy"]
    elements, init, mask = unpack(spec, arrays, params["seeded"], params["masked"])
    masked = mask is not None
    leaves = [*elements, *([mask] if masked else [])]
    plan = Plan(elements[0].shape, params["axes"], len(leaves))
    right = policy.kind is Kind.RIGHT
    call = Call(plan, spec, [v.dtype for v in elements], masked, right)
    carry = []
    if right or policy.kind is Kind.LEFT:
        dtypes = [*spec.states, *[bool] * flagged(call, init is not None)]
        carry = scratch(call.shape, dtypes)
        step = functools.partial(_chain_step, call, params, right, dtypes)
    else:
        if plan.n > _blocks.WRITTEN_OUT:
            carry = Counter.memory(call.steps, plan.n // _blocks.BLOCK, masked)
        step = functools.partial(_tree_step, call, params)
    return call.run(step, leaves, init, (), params["out"], carry)


@BACKEND.runs(reduce_p, _refuse)
def _run(*arrays, **params):
    with lowered_on("tpu"):
        return reduce_array(*arrays, **params)
