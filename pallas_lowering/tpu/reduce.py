"""reduce in Pallas TPU kernels: every reducer under every policy, over rows.

Under `unordered_tree` a sum is the hardware's, whose order is not known. Every other
tree is `fixed_tree`, which costs the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxtile.pallas_lowering._add import reduce_add
from jaxtile.pallas_lowering.tpu import BACKEND
from jaxtile.pallas_lowering.tpu._blocks import fold_rows, tree_rows
from jaxtile.pallas_lowering.tpu._refuse import refuse_bytes, refuse_operands
from jaxtile.pallas_lowering.tpu._rows import Steps
from jaxtile.pallas_lowering.tpu._staging import Layout, as_matrix, reshape, staged
from jaxtile.policy import Kind, Transform
from jaxtile.primitives import _fold
from jaxtile.primitives._define import lowered_on
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert
from jaxtile.primitives._spec import Spec
from jaxtile.primitives.reduce import reduce_p


def native(spec: Spec, policy) -> bool:
    """The hardware's own sum is what the policy permits."""
    free = policy.permits(Transform.REGROUP | Transform.PERMUTE)
    sums = spec.reducer.native == "add" and spec.states[0].name in ("float32", "int32")
    return free and sums


def _nests(shape, axes, policy) -> bool:
    """Lanes may be reduced before the other axes."""
    length = shape[-1]
    rest = math.prod(shape[a] for a in axes[:-1])
    aligned = length & (length - 1) == 0 or rest == 1
    return policy.kind is Kind.TREE or (policy.kind is Kind.FIXED and aligned)


def _refuse(*avals, **params):
    spec, policy = params["spec"], params["policy"]
    elements, _, mask = unpack(spec, avals, params["seeded"], params["masked"])
    reason = refuse_operands(spec, elements[0].shape, params)
    if reason is not None or native(spec, policy):
        return reason
    shape, axes = as_matrix(elements[0].shape, params["axes"])
    if not axes:
        return None
    layout = Layout(shape, axes)
    if layout.flat and _nests(shape, axes, policy):
        layout = Layout(shape, axes[-1:])
    return refuse_bytes(layout.bytes(len(elements) + (mask is not None)))


def of_states(spec: Spec) -> Spec:
    """The same merge of elements that are states already."""
    reducer = replace(
        spec.reducer, lift=None, update=None, update_right=None, indexed=False
    )
    return replace(
        spec,
        reducer=reducer,
        tree=spec.state_tree,
        raw=spec.states,
        elements=spec.states,
        index=None,
    )


def _begin(spec, layout, axes):
    """The source index of each fibre's first row, where it is not 0."""
    if spec.index is None or layout.axes == axes:
        return 0
    shape = layout.shape
    kept = [d for d in range(len(shape)) if d not in layout.axes]
    begin, stride = jnp.zeros(layout.kept, spec.index), 1
    for a in reversed(axes):
        if a in kept:
            place = lax.broadcasted_iota(spec.index, layout.kept, kept.index(a))
            begin = begin + place * stride
        stride *= shape[a]
    return layout.to_row(begin)


def _reduce_axes(spec, elements, mask, axes, inner, policy, init=None):
    """The state of the fibres along `inner`, which are parts of those along `axes`."""
    layout = Layout(elements[0].shape, inner)
    values = [*elements, *([] if mask is None else [mask])]
    chained = policy.kind in (Kind.LEFT, Kind.RIGHT)
    right = policy.kind is Kind.RIGHT
    if init is not None:
        init = [layout.to_row(v) for v in init]

    def body(rows, out):
        steps = Steps(spec, rows.shape)
        if chained:
            seed = None if init is None else (init, None)
            state = fold_rows(steps, rows, seed, right)
        else:
            state = tree_rows(steps, rows)
            if init is not None:
                state = steps.join((init, None), state)
        return state

    options: dict[str, Any] = dict(masked=mask is not None, backward=right)
    options |= dict(index=spec.index, begin=_begin(spec, layout, axes))
    leaves, valid = staged(layout, values, (), body, not chained, **options)
    leaves = [layout.to_fibres(v) for v in leaves]
    return leaves, None if valid is None else layout.to_fibres(valid)


def _state(spec, elements, init, mask, axes, policy):
    """The state of every fibre, and whether it exists."""
    shape, axes = as_matrix(elements[0].shape, axes)
    elements = [reshape(v, shape) for v in elements]
    mask = None if mask is None else reshape(mask, shape)
    nested = Layout(shape, axes).flat and _nests(shape, axes, policy)
    if not nested:
        return _reduce_axes(spec, elements, mask, axes, axes, policy, init)
    state, valid = _reduce_axes(spec, elements, mask, axes, axes[-1:], policy)
    return _state(of_states(spec), state, init, valid, axes[:-1], policy)


def reduce_values(*operands: Any, **params: Any) -> list:
    """The rule: the primitive's operands as values in a kernel, and its parameters."""
    spec, axes, policy = params["spec"], params["axes"], params["policy"]
    if native(spec, policy):
        return reduce_add(operands, params, _any_tree)
    elements, init, mask = unpack(spec, operands, params["seeded"], params["masked"])
    shape = elements[0].shape
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    # The compiler takes few ops on scalars: they stay vectors until the end.
    fibres = kept or (1,)
    if axes:
        state, valid = _state(spec, elements, init, mask, axes, policy)
        state = [reshape(v, fibres) for v in state]
        valid = None if valid is None else reshape(valid, fibres)
    else:
        if spec.index is not None:
            elements.append(jnp.zeros(shape, spec.index))
        state, valid = spec.lift(elements), mask
        if init is not None:
            state, valid = _fold.join(spec, init, None, state, valid)
    if valid is not None:
        state = _fold.pick(valid, state, spec.filler(valid.shape))
    result = spec.finish(state) if params["finish"] else state
    result = [convert(v, d) for v, d in zip(result, params["out"], strict=True)]
    return [reshape(v, kept) for v in result]


def _any_tree(x, axes):
    return jnp.sum(x, axes, dtype=x.dtype)


@BACKEND.traces(reduce_p, _refuse)
def _rule(*operands, **params):
    with lowered_on("tpu"):
        return reduce_values(*operands, **params)
