"""scan in Pallas TPU kernels: every reducer under every policy, over rows.

A tree policy permits the chain, and no grouping is cheaper over rows. The prefixes of
`fixed_tree` share the subtrees of their blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxtile.pallas_lowering.tpu import BACKEND
from jaxtile.pallas_lowering.tpu._blocks import fold_rows, looped, scan_rows
from jaxtile.pallas_lowering.tpu._refuse import refuse_bytes, refuse_operands
from jaxtile.pallas_lowering.tpu._rows import SUBLANES, Rows, Show, Steps
from jaxtile.pallas_lowering.tpu._staging import Layout, as_matrix, reshape, staged
from jaxtile.policy import Kind
from jaxtile.primitives import _fold
from jaxtile.primitives._define import lowered_on
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert
from jaxtile.primitives.scan import scan_p


def _refuse(*avals, **params):
    spec = params["spec"]
    elements, _, mask = unpack(spec, avals, params["seeded"], params["masked"])
    reason = refuse_operands(spec, elements[0].shape, params)
    if reason is not None:
        return reason
    shape, axes = as_matrix(elements[0].shape, (params["axis"],))
    leaves = len(elements) + (mask is not None) + len(params["out"])
    return refuse_bytes(Layout(shape, axes).bytes(leaves))


def _nests(params) -> bool:
    """The fold runs against the direction: a chain of its own for each prefix."""
    against = Kind.LEFT if params["direction"] == "suffix" else Kind.RIGHT
    return params["policy"].kind is against


def scan_nested(steps: Steps, rows: Rows, init, inclusive: bool):
    """A chain of its own for each prefix, all of them at once, in memory's order."""
    shape = (rows.n, *rows.shape)
    axis = 0
    if rows.whole is None:
        axis = len(rows.shape) - 2
        shape = (*rows.shape[:-2], rows.n, rows.shape[-1])
    wide = Steps(steps.spec, shape)
    place = lax.broadcasted_iota(jnp.int32, shape, axis)
    place = rows.n - 1 - place if rows.backward else place
    last = replace(rows, backward=not rows.backward)

    def step(base, k, state):
        leaves, mask = last(base, k)
        i = rows.n - 1 - base - k
        inside = place >= i if inclusive else place > i
        if mask is not None:
            inside &= jnp.broadcast_to(mask, shape)
        leaves = [jnp.broadcast_to(v, shape) for v in leaves]
        return wide.advance(state, (leaves, inside), True)

    if init is not None:
        init = [jnp.broadcast_to(v, shape) for v in init]
    state = wide.start(init, True)
    dtypes = [v.dtype for v in wide.pack(state)]
    whole, rest = divmod(rows.n, SUBLANES)

    def block(j, leaves):
        state = wide.unpack(leaves)
        for k in range(SUBLANES):
            state = step(j * SUBLANES, k, state)
        return wide.pack(state)

    state = wide.unpack(looped(0, wide.pack(state), dtypes, whole, block))
    for k in range(rest):
        state = step(rows.n - rest, k, state)
    return wide.settle(state)


def _scan_rows(spec, rows, out, init, params):
    """Fill `out`; the raw state over all rows, where it is asked for."""
    steps, policy = Steps(spec, rows.shape), params["policy"]
    exclusive, finish = params["exclusive"], params["finish"]
    seed = None if init is None else (init, None)
    if _nests(params):
        leaves = scan_nested(steps, rows, init, not exclusive)
        results = spec.finish(leaves) if finish else leaves
        rows.save_all(out, results)
        if not params["final"]:
            return []
        backward = replace(rows, backward=not rows.backward)
        return steps.settle(fold_rows(steps, backward, seed, True))
    nothing = _fold.nothing(spec, init, rows.shape) if exclusive else None
    show = Show(steps, rows, out, nothing, finish)
    if policy.kind is Kind.FIXED:
        return steps.settle(scan_rows(steps, rows, seed, show))
    return steps.settle(fold_rows(steps, rows, seed, show=show))


def scan_values(*operands: Any, **params: Any) -> list:
    """The rule: the primitive's operands as values in a kernel, and its parameters."""
    spec, direction = params["spec"], params["direction"]
    elements, init, mask = unpack(spec, operands, params["seeded"], params["masked"])
    old = elements[0].shape
    shape, axes = as_matrix(old, (params["axis"],))
    layout = Layout(shape, axes, _nests(params))
    values = [*elements, *([] if mask is None else [mask])]
    values = [reshape(v, shape) for v in values]
    init = None if init is None else [layout.to_row(v) for v in init]
    spec = replace(spec, swapped=True) if direction == "suffix" else spec
    dtypes = spec.results if params["finish"] else spec.states

    def body(rows, out):
        last = _scan_rows(spec, rows, out, init, params)
        return [layout.read(r, d) for r, d in zip(out.refs, dtypes, strict=True)], last

    options = dict(backward=direction != "prefix", index=spec.index)
    outs, last = staged(
        layout, values, dtypes, body, masked=mask is not None, **options
    )
    outs = [
        convert(reshape(v, old), d) for v, d in zip(outs, params["out"], strict=True)
    ]
    if not params["final"]:
        return outs
    fibre = tuple(s for d, s in enumerate(old) if d != params["axis"])
    return outs + [reshape(v, fibre) for v in last]


@BACKEND.traces(scan_p, _refuse)
def _rule(*operands, **params):
    with lowered_on("tpu"):
        return scan_values(*operands, **params)
