"""reduce of whole arrays on TPU: every reducer under every policy, one pass."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxtile.pallas_lowering.tpu import BACKEND, _blocks
from jaxtile.pallas_lowering.tpu._blocks import (
    Counter,
    count_rows,
    fold_rows,
    tree_rows,
)
from jaxtile.pallas_lowering.tpu._grid import LANES, Call, Plan
from jaxtile.pallas_lowering.tpu._refuse import refuse_whole
from jaxtile.pallas_lowering.tpu._rows import Store, encode, scratch
from jaxtile.pallas_lowering.tpu.reduce import of_states
from jaxtile.policy import Kind
from jaxtile.primitives import _fold, _native
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


def _few(shape, axes, policy) -> bool:
    """So few fibres leave most lanes idle, and the policy permits parts of a fibre."""
    n = math.prod(shape[a] for a in axes)
    chained = policy.kind in (Kind.LEFT, Kind.RIGHT)
    return math.prod(shape) // n < LANES and n >= 2 * LANES and not chained


def _in_parts(elements, init, mask, params) -> list:
    """Aligned parts of each fibre as fibres of their own, then the parts' states."""
    spec, axes = params["spec"], params["axes"]
    shape = elements[0].shape
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    leaves = [*elements, *([] if mask is None else [mask])]
    leaves = [_fold.collapse(v, axes) for v in leaves]
    leaves = [v.reshape(-1, v.shape[-1]) for v in leaves]
    if spec.index is not None:
        place = lax.broadcasted_iota(spec.index, leaves[0].shape, 1)
        leaves.insert(len(elements), place)
    fibres, n = leaves[0].shape
    whole = n // LANES * LANES
    heads = [v[:, :whole].reshape(fibres, -1, LANES) for v in leaves]
    parts = [heads] + [[v[:, whole:, None].mT for v in leaves]] * (whole < n)
    inner = dict(params, axes=(2,), seeded=False, finish=False, out=spec.states)
    found = [reduce_array(*part, **inner) for part in parts]
    states = [jnp.concatenate(v, 1) for v in zip(*found, strict=True)]
    if mask is not None:
        some = [jnp.any(part[-1], 2) for part in parts]
        states.append(jnp.concatenate(some, 1))
    seeds = [v.reshape(fibres) for v in init or ()]
    k = len(spec.states)
    outer = dict(params, spec=of_states(spec), axes=(1,))
    outs = reduce_array(*states[:k], *seeds, *states[k:], **outer)
    return [v.reshape(kept) for v in outs]


def _unpack(spec, arrays, params):
    """The operands; parts of a fibre bring their source index as one more element."""
    spare = len(arrays) - params["masked"] - len(spec.raw)
    spare -= len(spec.states) if params["seeded"] else 0
    index = list(arrays[len(spec.raw) : len(spec.raw) + spare])
    rest = [*arrays[: len(spec.raw)], *arrays[len(spec.raw) + spare :]]
    elements, init, mask = unpack(spec, rest, params["seeded"], params["masked"])
    return elements + index, init, mask


def reduce_array(*arrays: Any, **params: Any) -> list:
    """The primitive's operands as whole arrays, and its parameters."""
    spec, policy = params["spec"], params["policy"]
    elements, init, mask = _unpack(spec, arrays, params)
    masked = mask is not None
    if _few(elements[0].shape, params["axes"], policy):
        return _in_parts(elements[: len(spec.raw)], init, mask, params)
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


# What XLA's own schedule was seen to reduce in no more cycles.
_XLA_REDUCES = frozenset(("add", "max"))


def _slower(*avals, **params):
    spec, policy = params["spec"], params["policy"]
    name = spec.reducer.native
    counted = name in _XLA_REDUCES and _native.keeps_rounding(spec)
    if counted and _native.permitted(spec, policy):
        return (
            f"XLA's own {name} costs no more under {policy}, and fuses with what "
            "computes its operand"
        )
    return None


@BACKEND.runs(reduce_p, _refuse, _slower)
def _run(*arrays, **params):
    with lowered_on("tpu"):
        return reduce_array(*arrays, **params)
