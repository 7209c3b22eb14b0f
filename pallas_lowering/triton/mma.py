"""mma in Pallas Triton kernels: `tt.dot` where it takes the operands, else their products.

tt.dot adds in the tensor cores' own precision, and the compiler may hand it the seed as its
accumulator; under `promote_every` a select stands between the two.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.pallas_lowering._mma import Unit, by_unit, mma_values, refuse_mma
from jaxtile.pallas_lowering.triton import BACKEND, TRAITS, _line, _turn
from jaxtile.primitives import _contract
from jaxtile.primitives.mma import mma_p

# Below, tt.dot has no instruction for every format; of int8 it takes twice as many of K.
_LEAST = 16
_UNITS = {
    "float32": ("bfloat16", "float16", "float32"),
    "int32": ("int8",),
    "float64": ("float64",),
}


def _takes(a, b, dims, acc) -> bool:
    if dims.batch or any(len(side) != 2 for side in dims) or len(dims.contracted) != 1:
        return False
    form = _contract.carrier(a.dtype, b.dtype, acc).name
    if form not in _UNITS.get(np.dtype(acc).name, ()):
        return False
    k = a.shape[dims.contracted[0]]
    return min(*a.shape, *b.shape) >= _LEAST and k >= _LEAST * (1 + (form == "int8"))


def _loose(dtype, rounded) -> bool:
    """TF32 is said for float32 inputs alone."""
    return rounded and dtype == jnp.float32


def _chain(a, b, c, dims, policy, acc):
    """A loop over K that picks a column of a and a row of b at a time."""
    shape, sides = dims.shape(a.shape, b.shape), []
    for x, labels in ((a, dims.a), (b, dims.b)):
        x = _contract.chain_input(x, policy, acc)
        order = [d for d in dims.out if d in labels]
        turn = [labels.index(d) for d in (*order, *dims.contracted)]
        x = _turn.turned(x, turn)
        x = x.reshape(*x.shape[: len(order)], -1)
        sides.append((x, _line.places(x.shape), [dims.out.index(d) for d in order]))

    def body(k, z):
        x, y = (
            lax.broadcast_in_dim(_line.take(v, at == k)[..., 0], shape, places)
            for v, at, places in sides
        )
        return _contract.step(z, x, y)

    start = jnp.full(shape, -0.0, acc) if c is None else _line.guard(c)
    return lax.fori_loop(np.int32(0), np.int32(sides[0][0].shape[-1]), body, start)


UNIT = Unit(
    loose=_loose,
    takes=_takes,
    inputs=frozenset(("float8_e4m3fn", "float8_e5m2")),
    most=1 << 15,
    chain=_chain,
    turn=_turn.turned,
)


def _widened(x, other):
    """float8_e5m2 by way of float16: the compiler's way to bfloat16 loses inf and NaN."""
    if x.dtype != jnp.float8_e5m2:
        return x
    x = x.astype(jnp.float16)
    return x.astype(jnp.bfloat16) if other.dtype == jnp.bfloat16 else x


def _refuse(*avals, **params):
    return refuse_mma(BACKEND, TRAITS, UNIT, avals, params)


@BACKEND.traces(mma_p, _refuse)
def _mma(a, b, *rest, roles, **params):
    if by_unit(UNIT, a, b, roles, params["policy"], params["acc"]):
        a, b, roles = _facing(a, b, roles)
    params["roles"] = roles
    return mma_values(UNIT, [_widened(a, b), _widened(b, a), *rest], params)


def _facing(a, b, dims):
    """K last in a and first in b: else jax's own rule turns each of their parts."""
    (k,), left, right = dims.contracted, dims.a, dims.b
    if left[-1] != k:
        a, left = _turn.turned(a, (1, 0)), left[::-1]
    if right[0] != k:
        b, right = _turn.turned(b, (1, 0)), right[::-1]
    return a, b, _contract.numbered(left, right, dims.out, dims.across)
