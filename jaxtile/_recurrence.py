"""The gated linear recurrence and its derivative, as kernels.

With r = sigmoid(decay), i = sigmoid(gate), a = exp(slow r) and w = 1 - a^2,

    h_t = a_t h_(t-1) + sqrt(w_t) i_t x_t.

No step divides: in Triton kernels a division is one of float64, and costs more than all of
the rest.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtile import activations, catalogue, elementwise, formats
from jaxtile.casting import cast
from jaxtile.dims import Dim
from jaxtile.kernels import Nest, Window, kernel
from jaxtile.recurrences import affine
from jaxtile.reduction import reduce, scan
from jaxtile.tile import Tile

_RATE = -8.0
# The least w whose root is divided by: where a is 1 the derivative is finite still.
_LEAST = 1e-30


def _whole(x: Any, *rest: Any) -> dict[str, int]:
    return {"block": x.shape[1], "lanes": x.shape[2]}


# A warp's own scan needs no barrier; measured on an H200.
_SMALL = {"block": 32, "lanes": 16, "num_warps": 1}
_TUNED = {"triton": _SMALL, "reference": _whole}


def _wide(ref: Any) -> Any:
    """A loaded tile in the accumulator's dtype."""
    tile = ref.load()
    return cast(tile, formats.accumulator(tile.dtype))


def _sigmoid(z):
    """1 / (1 + exp(-z)), the reciprocal as the square of a root's."""
    # Below, exp(-z) is infinite, and the derivative of its root no number.
    z = jnp.where(z < -80.0, -80.0, z)
    root = lax.rsqrt(1.0 + jnp.exp(-z))
    return root * root


_SERIES = 0.125


def _rest(log_a, a):
    """1 - a^2 without cancellation: of a near 1 the series of 1 - exp(2 log_a)."""
    u = 2.0 * log_a
    if u.dtype == jnp.float64:
        return -jnp.expm1(u)
    near = 1.0 / math.factorial(6)
    for k in range(5, 0, -1):  # what is left out is u^6 / 7! below 5e-8
        near = 1.0 / math.factorial(k) + u * near
    return jnp.where(log_a > -_SERIES, -u * near, (1.0 - a) * (1.0 + a))


def _step(x, decay, gate, slow):
    """h_t as a_t h_(t-1) + b_t: the pair (a_t, b_t)."""
    log_a = slow * _sigmoid(decay)
    a = jnp.exp(log_a)
    return a, jnp.sqrt(_rest(log_a, a)) * (x * _sigmoid(gate))


def _kept(decay, slow):
    """a_t."""
    return jnp.exp(slow * _sigmoid(decay))


def _back(x, decay, gate, slow, dh, before):
    """dx, ddecay, dgate, and what dslow sums; before is h_(t-1)."""
    r, i = _sigmoid(decay), _sigmoid(gate)
    log_a = slow * r
    a = jnp.exp(log_a)
    w = _rest(log_a, a)
    inverse = lax.rsqrt(jnp.maximum(w, _LEAST))
    up = dh * (w * inverse) * i
    dslow = a * dh * (before - a * inverse * (i * x)) * r
    return up, slow * dslow * (1.0 - r), up * x * (1.0 - i), dslow


def _shifted(view: Any, batch: Any, time: Any, lane: Any, by: int) -> Any:
    """A view's values `by` steps later than those of a block of time; 0 outside."""
    dim = Dim("shifted")
    tile = _wide(view.tile(batch, Window(time.start + by, dim, time.block), lane))
    return Tile(tile.array, (time.dim, lane.dim))


@kernel(out=lambda x, *rest: x, tuned={**_TUNED, "triton": {**_SMALL, "ahead": True}})
def recurrence(
    nest: Nest, x, decay, gate, rate, y, *, block=128, lanes=128, ahead=False
):
    batch, lane = nest.parallel(x.shape[0]), nest.parallel(x.shape[2], lanes)
    slow = _RATE * activations.softplus(_wide(rate.tile(lane)))

    def following(start):
        """The operands' next block, loaded while this one is computed."""
        part = (batch, Window(start, Dim("following"), block), lane)
        return tuple(_wide(v.tile(*part)).array for v in (x, decay, gate))

    start = nest.zeros(lane, slow.dtype), following(0) if ahead else ()

    @nest.pipeline(x.shape[1], block, init=start)
    def _(time, s):
        part = (batch, time, lane)
        if ahead:
            now = [Tile(v, (time.dim, lane.dim)) for v in s[1]]
        else:
            now = [_wide(v.tile(*part)) for v in (x, decay, gate)]
        later = following(time.start + block) if ahead else ()
        element = elementwise.map(_step, *now, slow)
        out, last = scan(element, time.dim, affine, init=(1.0, s[0]), return_final=True)
        y.tile(*part).store(cast(out, y.dtype))
        return last[1], later


def _like(x: Any, decay: Any, gate: Any, rate: Any, *rest: Any) -> tuple:
    wide = formats.accumulator(rate.dtype)
    return x, decay, gate, jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), wide)


@kernel(out=_like, tuned=_TUNED)
def recurrence_back(nest: Nest, *views, block=128, lanes=128):
    x, decay, gate, rate, y, dy, dx, ddecay, dgate, dslow = views
    batch, lane = nest.parallel(x.shape[0]), nest.parallel(x.shape[2], lanes)
    slow = _RATE * activations.softplus(_wide(rate.tile(lane)))
    zero = nest.zeros(lane, slow.dtype)

    @nest.pipeline(x.shape[1], block, init=(zero, zero), reverse=True)
    def state(time, s):
        part = (batch, time, lane)
        # dh_t = dy_t + a_(t+1) dh_(t+1)
        later = elementwise.map(_kept, _shifted(decay, *part, 1), slow)
        options = {"direction": "reverse", "return_final": True, "init": (1.0, s[0])}
        dh, first = scan((later, _wide(dy.tile(*part))), time.dim, affine, **options)
        # h_(t-1) as it was stored: rounded, where x is
        given = [_wide(v.tile(*part)) for v in (x, decay, gate)]
        found = elementwise.map(_back, *given, slow, dh, _shifted(y, *part, -1))
        for view, value in zip((dx, ddecay, dgate), found, strict=False):
            view.tile(*part).store(cast(value, view.dtype))
        return first[1], s[1] + reduce(found[3], time.dim, catalogue.add)

    dslow.tile(batch, lane).store(state[1])


def _forward(*operands, **config):
    y = recurrence(*operands, **config)
    return y, (*operands, y)


def _backward(residuals, dy, **config):
    *moved, dslow = recurrence_back(*residuals, dy, **config)
    rate = residuals[3]
    drate = _RATE * jax.nn.sigmoid(rate.astype(dslow.dtype)) * jnp.sum(dslow, 0)
    return *moved, drate.astype(rate.dtype)


recurrence.defvjp(_forward, _backward, forward_mode=True)
