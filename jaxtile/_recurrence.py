"""The gated linear recurrence and its derivative, as kernels.

With r = sigmoid(decay), i = sigmoid(gate), a = exp(slow r) and w = 1 - a^2,

    h_t = a_t h_(t-1) + sqrt(w_t) i_t x_t.

No step divides: in Triton kernels a division is one of float64, and costs more than all of
the rest.
"""

from __future__ import annotations

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


_TUNED = {"triton": {"block": 32, "lanes": 32, "num_warps": 4}, "reference": _whole}


def _wide(ref: Any) -> Any:
    """A loaded tile in the accumulator's dtype."""
    tile = ref.load()
    return cast(tile, formats.accumulator(tile.dtype))


def _sigmoid(z):
    """1 / (1 + exp(-z)), the reciprocal as the square of a root's."""
    below = z < 0
    e = jnp.exp(jnp.where(below, z, -z))
    root = lax.rsqrt(1.0 + e)
    return jnp.where(below, e, 1.0) * (root * root)


def _rest(log_a):
    """1 - exp(2 log_a) without cancellation, as -2 t / (1 - t) of t = tanh(log_a)."""
    t = jnp.tanh(log_a)
    root = lax.rsqrt(1.0 - t)
    return -2.0 * t * (root * root)


def _step(x, decay, gate, slow):
    """h_t as a_t h_(t-1) + b_t: the pair (a_t, b_t)."""
    log_a = slow * _sigmoid(decay)
    return jnp.exp(log_a), jnp.sqrt(_rest(log_a)) * (x * _sigmoid(gate))


def _kept(decay, slow):
    """a_t."""
    return jnp.exp(slow * _sigmoid(decay))


def _back(x, decay, gate, slow, dh, before):
    """dx, ddecay, dgate, and what dslow sums; before is h_(t-1)."""
    r, i = _sigmoid(decay), _sigmoid(gate)
    log_a = slow * r
    a, w = jnp.exp(log_a), _rest(log_a)
    inverse = lax.rsqrt(jnp.maximum(w, _LEAST))
    up = dh * (w * inverse) * i
    dslow = a * dh * (before - a * inverse * (i * x)) * r
    return up, slow * dslow * (1.0 - r), up * x * (1.0 - i), dslow


def _shifted(view: Any, batch: Any, time: Any, lane: Any, by: int) -> Any:
    """A view's values `by` steps later than those of a block of time; 0 outside."""
    dim = Dim("shifted")
    tile = _wide(view.tile(batch, Window(time.start + by, dim, time.block), lane))
    return Tile(tile.array, (time.dim, lane.dim))


@kernel(out=lambda x, *rest: x, tuned=_TUNED)
def recurrence(nest: Nest, x, decay, gate, rate, y, *, block=128, lanes=128):
    batch, lane = nest.parallel(x.shape[0]), nest.parallel(x.shape[2], lanes)
    slow = _RATE * activations.softplus(_wide(rate.tile(lane)))

    @nest.pipeline(x.shape[1], block, init=nest.zeros(lane, slow.dtype))
    def _(time, h):
        part = (batch, time, lane)
        given = [_wide(v.tile(*part)) for v in (x, decay, gate)]
        step = elementwise.map(_step, *given, slow)
        out, last = scan(step, time.dim, affine, init=(1.0, h), return_final=True)
        y.tile(*part).store(cast(out, y.dtype))
        return last[1]


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
