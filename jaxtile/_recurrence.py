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


def _sigmoid(z: Any) -> Any:
    """1 / (1 + exp(-z)), the reciprocal as the square of a root's."""
    below = z < 0
    e = elementwise.exp(elementwise.ite(below, z, -z))
    root = elementwise.rsqrt(1.0 + e)
    return elementwise.ite(below, e, 1.0) * (root * root)


def _rest(log_a: Any) -> Any:
    """1 - exp(2 log_a) without cancellation, as -2 t / (1 - t) of t = tanh(log_a)."""
    t = elementwise.tanh(log_a)
    root = elementwise.rsqrt(1.0 - t)
    return -2.0 * t * (root * root)


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
        log_a = slow * _sigmoid(_wide(decay.tile(*part)))
        drive = _wide(x.tile(*part)) * _sigmoid(_wide(gate.tile(*part)))
        element = elementwise.exp(log_a), elementwise.sqrt(_rest(log_a)) * drive
        out, last = scan(element, time.dim, affine, init=(1.0, h), return_final=True)
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
        r, i = (_sigmoid(_wide(v.tile(*part))) for v in (decay, gate))
        value, log_a = _wide(x.tile(*part)), slow * r
        a, w = elementwise.exp(log_a), _rest(log_a)
        inverse = elementwise.rsqrt(catalogue.maximum(w, _LEAST))
        # dh_t = dy_t + a_(t+1) dh_(t+1)
        later = elementwise.exp(slow * _sigmoid(_shifted(decay, batch, time, lane, 1)))
        element = later, _wide(dy.tile(*part))
        options = {"direction": "reverse", "return_final": True, "init": (1.0, s[0])}
        dh, first = scan(element, time.dim, affine, **options)
        up = dh * (w * inverse) * i
        dx.tile(*part).store(cast(up, dx.dtype))
        dgate.tile(*part).store(cast(up * value * (1.0 - i), dgate.dtype))
        # h_(t-1) as it was stored: rounded, where x is
        before = _shifted(y, batch, time, lane, -1)
        dlog = a * dh * (before - a * inverse * (i * value)) * r
        ddecay.tile(*part).store(cast(slow * dlog * (1.0 - r), ddecay.dtype))
        return first[1], s[1] + reduce(dlog, time.dim, catalogue.add)

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
