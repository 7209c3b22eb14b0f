"""The gated linear recurrence and its derivative, as kernels.

With r = sigmoid(decay), i = sigmoid(gate), a = exp(slow r) and w = 1 - a^2,

    h_t = a_t h_(t-1) + sqrt(w_t) i_t x_t.

No step divides: in Triton kernels a division is one of float64, and costs more than all of
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def _whole(x: Any, *rest: Any) -> dict[str, int]:
    return {"block": x.shape[1], "lanes": x.shape[2]}


# Measured on an H200. Loads a block ahead keep the memory busy; in Triton a warp's own
# scan needs no barrier.
_SMALL = {"block": 32, "lanes": 16, "num_warps": 1}


def _tuned(block: int, triton: dict[str, Any]) -> dict[str, Any]:
    mosaic = {"block": block, "lanes": 32, "num_warps": 4, "ahead": True}
    return {"mosaic_gpu": mosaic, "triton": triton, "reference": _whole}


def _wide(ref: Any) -> Any:
    """A loaded tile in the accumulator's dtype."""
    tile = ref.load()
    return cast(tile, formats.accumulator(tile.dtype))


def _exp(z):
    """exp(z) as a power of 2: off by 2 |z| + 2 ulps at most, at half the cost."""
    return jnp.exp2(z * math.log2(math.e))


def _sides(z):
    """s = 1 / (1 + exp(-z)), the reciprocal as the square of a root's, and 1 - s."""
    # Below, exp(-z) is infinite, and the derivative of its root no number.
    least = -700.0 if z.dtype == jnp.float64 else -87.0
    other = _exp(-jnp.maximum(z, least))
    root = lax.rsqrt(1.0 + other)
    s = root * root
    return s, other * s


def _sigmoid(z):
    return _sides(z)[0]


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


def _inverse(w):
    """1 / sqrt(w), finite still where a is 1."""
    return lax.rsqrt(jnp.maximum(w, float(jnp.finfo(w.dtype).tiny)))


def _step(x, decay, gate, slow):
    """h_t as a_t h_(t-1) + b_t: the pair (a_t, b_t)."""
    log_a = slow * _sigmoid(decay)
    a = _exp(log_a)
    w = _rest(log_a, a)
    # A root that is rounded correctly costs a call.
    root = w * _inverse(w)
    return a, root * (x * _sigmoid(gate))


def _pulled(decay, slow, dy):
    """g_t = a_t dh_t as a_t g_(t+1) + a_t dy_t: the pair (a_t, a_t dy_t)."""
    a = _exp(slow * _sigmoid(decay))
    return a, a * dy


def _back(x, decay, gate, slow, dy, later, before):
    """dx, ddecay, dgate, and what dslow sums; later is g_(t+1), before h_(t-1)."""
    dh = dy + later
    (r, r_rest), (i, i_rest) = _sides(decay), _sides(gate)
    log_a = slow * r
    a = _exp(log_a)
    w = _rest(log_a, a)
    inverse = _inverse(w)
    up = dh * (w * inverse) * i
    dslow = a * dh * (before - a * inverse * (i * x)) * r
    return up, slow * dslow * r_rest, up * x * i_rest, dslow


class _Steps:
    """The operands' values at a block of time, or at the next one while this is computed.

    Args:
        views: `(view, by)`: which, and how many steps later.
        batch, lane: the handles.
        block: of time.
        ahead: they are loaded a block before they are used.
    """

    def __init__(self, views: Sequence, batch: Any, lane: Any, block: int, ahead: bool):
        self.views, self.batch, self.lane = views, batch, lane
        self.block, self.ahead = block, ahead

    def following(self, start: Any) -> tuple:
        """What the block that begins there is given."""
        if not self.ahead:
            return ()
        return tuple(self._window(v, start + by) for v, by in self.views)

    def now(self, time: Any, given: tuple) -> list[Tile]:
        """The tiles at a block; 0 outside."""
        part = (self.batch, time, self.lane)
        arrays = given or [
            self._window(v, time.start + by) if by else _wide(v.tile(*part)).array
            for v, by in self.views
        ]
        return [Tile(x, (time.dim, self.lane.dim)) for x in arrays]

    def _window(self, view: Any, start: Any) -> Any:
        time = Window(start, Dim("following"), self.block)
        return _wide(view.tile(self.batch, time, self.lane)).array


@kernel(out=lambda x, *rest: x, tuned=_tuned(32, {**_SMALL, "ahead": True}))
def recurrence(
    nest: Nest, x, decay, gate, rate, y, *, block=128, lanes=128, ahead=False
):
    batch, lane = nest.parallel(x.shape[0]), nest.parallel(x.shape[2], lanes)
    slow = _RATE * activations.softplus(_wide(rate.tile(lane)))

    steps = _Steps([(v, 0) for v in (x, decay, gate)], batch, lane, block, ahead)
    start = nest.zeros(lane, slow.dtype), steps.following(0)

    @nest.pipeline(x.shape[1], block, init=start)
    def _(time, s):
        part, now = (batch, time, lane), steps.now(time, s[1])
        later = steps.following(time.start + block)
        element = elementwise.map(_step, *now, slow)
        out, last = scan(element, time.dim, affine, init=(1.0, s[0]), return_final=True)
        y.tile(*part).store(cast(out, y.dtype))
        return last[1], later


def _like(x: Any, decay: Any, gate: Any, rate: Any, *rest: Any) -> tuple:
    wide = formats.accumulator(rate.dtype)
    return x, decay, gate, jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), wide)


@kernel(out=_like, tuned=_tuned(16, _SMALL))
def recurrence_back(nest: Nest, *views, block=128, lanes=128, ahead=False, lag=1):
    x, decay, gate, rate, y, dy, dx, ddecay, dgate, dslow = views
    batch, lane = nest.parallel(x.shape[0]), nest.parallel(x.shape[2], lanes)
    slow = _RATE * activations.softplus(_wide(rate.tile(lane)))
    zero = nest.zeros(lane, slow.dtype)
    # h_(t-1) as it was stored: rounded, where x is
    given = [(x, 0), (decay, 0), (gate, 0), (dy, 0), (y, -lag)]
    steps = _Steps(given, batch, lane, block, ahead)
    last = (x.shape[1] - 1) // block * block

    @nest.pipeline(
        x.shape[1], block, init=(zero, zero, steps.following(last)), reverse=True
    )
    def state(time, s):
        *now, dy_t, before = steps.now(time, s[2])
        then = steps.following(time.start - block)
        element = elementwise.map(_pulled, now[1], slow, dy_t)
        options = {"direction": "reverse", "exclusive": True, "return_final": True}
        later, first = scan(element, time.dim, affine, init=(1.0, s[0]), **options)
        found = elementwise.map(_back, *now, slow, dy_t, later, before)
        for view, value in zip((dx, ddecay, dgate), found, strict=False):
            view.tile(batch, time, lane).store(cast(value, view.dtype))
        return first[1], s[1] + reduce(found[3], time.dim, catalogue.add), then

    dslow.tile(batch, lane).store(state[1])


def _forward(*operands, **config):
    y = recurrence(*operands, **config)
    return y, (*operands, y)


def _backward(residuals, dy, *, implementation=None, **config):
    *given, y = residuals
    if implementation == "tpu":  # no window, which would begin a step before a block
        y, config = jnp.pad(y[:, :-1], ((0, 0), (1, 0), (0, 0))), {**config, "lag": 0}
    config["implementation"] = implementation
    *moved, dslow = recurrence_back(*given, y, dy, **config)
    rate = residuals[3]
    drate = _RATE * jax.nn.sigmoid(rate.astype(dslow.dtype)) * jnp.sum(dslow, 0)
    return *moved, drate.astype(rate.dtype)


recurrence.defvjp(_forward, _backward, forward_mode=True)
