"""scan in Pallas TPU kernels: every reducer under every policy, over rows.

A tree policy permits the chain, and no grouping is cheaper over rows. The prefixes of
`fixed_tree` share the subtrees of their blocks.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtile.pallas_lowering.tpu import BACKEND, _rows
from jaxtile.pallas_lowering.tpu._refuse import refuse_bytes, refuse_operands
from jaxtile.pallas_lowering.tpu._rows import (
    Prefixes,
    Rows,
    Steps,
    Store,
    chain,
    looped,
    sweep,
)
from jaxtile.pallas_lowering.tpu._staging import Layout, as_matrix, reshape, staged
from jaxtile.pallas_lowering.tpu.reduce import fold_rows
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


class Show:
    """Where the prefixes go, and how: finished, and moved by one if exclusive.

    Args:
        steps: of the reducer.
        rows: the contributions, in the order of the scan.
        out: the store of the results, laid out as the rows.
        first: what the exclusive prefix of the first row is, or None if inclusive.
        finish: show `finish`'s results.
    """

    def __init__(self, steps: Steps, rows: Rows, out: Store, first, finish: bool):
        self.steps, self.rows, self.out = steps, rows, out
        self.first, self.finish = first, finish

    def _save(self, base, i, leaves):
        result = self.steps.finish(leaves) if self.finish else leaves
        self.out.save(self.rows.place(base, i), result)

    def begin(self) -> None:
        """Before the first row."""
        if self.first is not None:
            self._save(0, 0, self.first)

    def __call__(self, base: Any, count: int, more: bool, i: int, state) -> None:
        """The prefix of row i of a block of `count`; `more` says that others follow."""
        leaves = self.steps.settle(state)
        if self.first is None:
            self._save(base, i, leaves)
        elif more or i + 1 < count:
            self._save(base, i + 1, leaves)


def _blocks(n: int) -> tuple[int, int, int]:
    """The extent of the first block, how many follow, and that of the last.

    The last block stays out of the loop: it shows one prefix less if exclusive.
    """
    if n <= _rows.WRITTEN_OUT:
        return n, 0, 0
    whole = -(-n // _rows.BLOCK) - 2
    return _rows.BLOCK, whole, n - (whole + 1) * _rows.BLOCK


def scan_chain(steps: Steps, rows: Rows, init, show: Show):
    """The strict chain, and its last state."""
    first, whole, rest = _blocks(rows.n)

    def block(base, count, more, state):
        here = functools.partial(rows, base)
        after = functools.partial(show, base, count, more)
        return chain(steps, here, count, state, show=after)

    def in_loop(j, leaves):
        base = (j + 1) * _rows.BLOCK
        return steps.pack(block(base, _rows.BLOCK, True, steps.unpack(leaves)))

    state = block(0, first, rest > 0, steps.start(init, rows.masked))
    if not rows.masked:
        state = state[0], None
    if not rest:
        return state
    dtypes = [v.dtype for v in steps.pack(state)]
    state = steps.unpack(looped(steps.pack(state), dtypes, whole, in_loop))
    return block(rows.n - rest, rest, False, state)


def scan_tree(steps: Steps, rows: Rows, init, show: Show):
    """`fixed_tree`'s prefixes, and the last."""
    first, whole, rest = _blocks(rows.n)
    seed = None if init is None else (init, None)

    def block(base, count, more, before, end=None):
        here = functools.partial(rows, base)
        after = functools.partial(show, base, count, more)
        return sweep(steps, here, count, before, after, end)

    if not rest:
        return block(0, first, False, seed)

    def run(*refs):
        prefixes = Prefixes(steps, refs, rows.masked, seed)
        prefixes.start(whole + 2)
        block(0, first, True, seed, functools.partial(prefixes.push, 0))

        @functools.partial(lax.fori_loop, 1, whole + 1, init_val=None)
        def _(j, carry):
            end = functools.partial(prefixes.push, j)
            block(j * _rows.BLOCK, _rows.BLOCK, True, prefixes.before(), end)
            return carry

        end = functools.partial(prefixes.push, whole + 1)
        end = end if rest == _rows.BLOCK else None
        return block(rows.n - rest, rest, False, prefixes.before(), end)

    return pl.run_scoped(run, *Prefixes.memory(steps, whole + 2, rows.masked, seed))


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
    whole, rest = divmod(rows.n, _rows.SUBLANES)

    def block(j, leaves):
        state = wide.unpack(leaves)
        for k in range(_rows.SUBLANES):
            state = step(j * _rows.SUBLANES, k, state)
        return wide.pack(state)

    state = wide.unpack(looped(wide.pack(state), dtypes, whole, block))
    for k in range(rest):
        state = step(rows.n - rest, k, state)
    return wide.settle(state)


def _scan_rows(spec, rows, out, init, params):
    """Fill `out`; the raw state over all rows, where it is asked for."""
    steps, policy = Steps(spec, rows.shape), params["policy"]
    exclusive, finish = params["exclusive"], params["finish"]
    if policy.kind is (Kind.LEFT if spec.swapped else Kind.RIGHT):
        leaves = scan_nested(steps, rows, init, not exclusive)
        results = spec.finish(leaves) if finish else leaves
        rows.save_all(out, results)
        if not params["final"]:
            return []
        backward = replace(rows, backward=not rows.backward)
        return steps.settle(fold_rows(steps, backward, init, True))
    first = _fold.nothing(spec, init, rows.shape) if exclusive else None
    show = Show(steps, rows, out, first, finish)
    show.begin()
    scan = scan_tree if policy.kind is Kind.FIXED else scan_chain
    return steps.settle(scan(steps, rows, init, show))


def scan_values(*operands: Any, **params: Any) -> list:
    """The rule: the primitive's operands as values in a kernel, and its parameters."""
    spec, direction = params["spec"], params["direction"]
    elements, init, mask = unpack(spec, operands, params["seeded"], params["masked"])
    old = elements[0].shape
    shape, axes = as_matrix(old, (params["axis"],))
    layout = Layout(shape, axes)
    values = [*elements, *([] if mask is None else [mask])]
    values = [reshape(v, shape) for v in values]
    init = None if init is None else [layout.to_row(v) for v in init]
    spec = replace(spec, swapped=True) if direction == "suffix" else spec
    dtypes = spec.results if params["finish"] else spec.states

    def body(rows, out, refs):
        last = _scan_rows(spec, rows, out, init, params)
        return [layout.read(r, d) for r, d in zip(refs, dtypes, strict=True)], last

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
