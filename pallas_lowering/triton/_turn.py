"""Transposes in Triton kernels.

XLA's Triton compiler (jax 0.11.2) moves a transpose up through every elementwise op that
made its operand, once for each use: what is shared becomes a tree, and the time to compile
exponential. It does not move one past `tt.join`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jax import lax
from jax.interpreters import mlir

from jaxtile.pallas_lowering.triton import BACKEND, _line
from jaxtile.primitives._define import new_primitive

# A transpose of fewer ops is better moved up, to the load that may read it in that order.
_MOST = 64
_ENDS = ("tt.load", "tt.dot", "tt.join", "tt.trans", "tt.make_range", "tt.splat")

hold_p = new_primitive("triton_hold")
hold_p.def_abstract_eval(lambda x: [x])
hold_p.def_impl(lambda x: [x])
mlir.register_lowering(hold_p, lambda ctx, x: [x])


@BACKEND.hooks.trace
def _woven(x):
    axis = int(np.argmax(x.shape))
    return [_line.weave(*_line.halves(x, axis=axis), axis=axis)]


def _moves(op) -> bool:
    """Whether a transpose may be moved up through what made a value."""
    if not hasattr(op, "operands"):  # a block, whose argument the value is
        return False
    return len(op.results) == 1 and not len(op.regions) and op.name not in _ENDS


def _long(value) -> bool:
    """Whether a transpose of the value may become many ops."""
    found, count = [value], 0
    while found and count <= _MOST:
        op = found.pop().owner
        if _moves(op):
            count += 1
            found += op.operands
    return count > _MOST


@functools.partial(BACKEND.hooks.register, hold_p)
def _hold(ctx, x):
    (aval,) = ctx.avals_in
    return _woven(ctx, x) if aval.size > 1 and _long(x) else [x]


def hold(x):
    """The same values, past which no transpose moves up if many ops made them."""
    return hold_p.bind(x)[0]


def turned(x, permutation: Sequence[int]):
    """A transpose of what it may be costly to make twice."""
    if list(permutation) == sorted(permutation):
        return x
    return lax.transpose(hold(x), permutation)
