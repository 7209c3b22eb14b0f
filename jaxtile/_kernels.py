"""The kernels of `jaxtile.nn` that work on rows and products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxtile import activations, catalogue, composite, elementwise, formats
from jaxtile.casting import cast
from jaxtile.contraction import mma
from jaxtile.dims import Dim
from jaxtile.kernels import Nest, kernel
from jaxtile.reduction import reduce

# Rows of an instance of the kernels that work on rows.
_ROWS = 8


def _same(x: Any, *rest: Any) -> Any:
    return x


def _wide(ref: Any) -> Any:
    """A loaded tile in the accumulator's dtype."""
    tile = ref.load()
    return cast(tile, formats.accumulator(tile.dtype))


# The longest row that stays in a GPU's registers, and the pieces of longer ones.
_LONGEST, _PIECE = 16384, 4096


def _rows_in_registers(x: Any, *rest: Any) -> dict[str, int]:
    cols = x.shape[1]
    if cols > _LONGEST:
        return {"block": 1, "width": _PIECE}
    return {"block": max(1, 2048 >> (cols - 1).bit_length())}


_BY_ROWS = {"triton": _rows_in_registers}


@kernel(out=_same, tuned=_BY_ROWS)
def softmax(nest: Nest, x, y, *, block=_ROWS, width=None):
    if width is not None:
        return _long_softmax(nest, x, y, block, width)
    rows, cols = nest.parallel(x.shape[0], block), Dim("cols")
    t = _wide(x.tile(rows, cols))
    e = elementwise.exp(t - reduce(t, cols, catalogue.maximum))
    y.tile(rows, cols).store(cast(e / reduce(e, cols, catalogue.add), y.dtype))


def _long_softmax(nest: Nest, x, y, block, width):
    rows = nest.parallel(x.shape[0], block)
    zero = nest.zeros(rows, formats.accumulator(x.dtype))
    # A finite start: after a piece that is all -inf the sum is 0, not NaN.
    lowest = float(jnp.finfo(zero.dtype).min)

    @nest.pipeline(x.shape[1], width, init=(zero + lowest, zero))
    def state(cols, s):
        t = _wide(x.tile(rows, cols))
        high = catalogue.maximum(s[0], reduce(t, cols.dim, catalogue.maximum))
        more = reduce(elementwise.exp(t - high), cols.dim, catalogue.add)
        return high, s[1] * elementwise.exp(s[0] - high) + more

    @nest.pipeline(x.shape[1], width)
    def _(cols):
        e = elementwise.exp(_wide(x.tile(rows, cols)) - state[0])
        y.tile(rows, cols).store(cast(e / state[1], y.dtype))


def _of_rows(nest: Nest, x, block, width, init, step):
    """The last state of a row's pieces, or of the row as one; and what walks them."""
    rows = nest.parallel(x.shape[0], block)
    if width is None:
        cols = Dim("cols")
        t = _wide(x.tile(rows, cols))
        return rows, step(t, cols, None), lambda body: body(cols, t)

    def each(body):
        nest.pipeline(x.shape[1], width)(lambda c: body(c, _wide(x.tile(rows, c))))

    start = init(nest.zeros(rows, formats.accumulator(x.dtype)))
    state = nest.pipeline(x.shape[1], width, init=start)(
        lambda c, s: step(_wide(x.tile(rows, c)), c.dim, s)
    )
    return rows, state, each


@kernel(out=_same, tuned=_BY_ROWS)
def layer_norm(nest: Nest, x, weight, bias, y, *, eps, block=_ROWS, width=None):
    def moments(t, dim, seen):
        return reduce(t, dim, composite.welford, init=seen)

    def start(zero):
        return composite.Moments(zero, zero, zero)

    rows, m, each = _of_rows(nest, x, block, width, start, moments)
    scale = elementwise.rsqrt(m.m2 / m.count + eps)

    @each
    def _(cols, t):
        out = (t - m.mean) * scale * _wide(weight.tile(cols)) + _wide(bias.tile(cols))
        y.tile(rows, cols).store(cast(out, y.dtype))


@kernel(out=_same, tuned=_BY_ROWS)
def rms_norm(nest: Nest, x, weight, y, *, eps, block=_ROWS, width=None):
    def squares(t, dim, seen):
        return reduce(t * t, dim, catalogue.add, init=seen)

    rows, total, each = _of_rows(nest, x, block, width, lambda zero: zero, squares)
    scale = elementwise.rsqrt(total / x.shape[1] + eps)

    @each
    def _(cols, t):
        y.tile(rows, cols).store(cast(t * scale * _wide(weight.tile(cols)), y.dtype))


@kernel(out=lambda x, w, labels: jax.ShapeDtypeStruct(labels.shape, jnp.float32))
def cross_entropy(nest: Nest, x, w, labels, loss, *, block=512):
    rows, depth = nest.parallel(x.shape[0], 128), Dim("depth")
    t, label = x.tile(rows, depth).load(), labels.tile(rows).load()
    low = nest.full(rows, -jnp.inf, jnp.float32)

    @nest.pipeline(w.shape[1], block, init=(low, nest.zeros(rows, jnp.float32)))
    def state(words, s):
        total, picked = s
        nothing = nest.zeros((rows, words), jnp.float32)
        logits = mma(t, w.tile(depth, words).load(), nothing)
        at = elementwise.ite(
            nest.coordinates(words) == label + 0 * nothing, logits, 0.0
        )
        total = catalogue.logaddexp(
            total, reduce(logits, words.dim, catalogue.logaddexp)
        )
        return total, picked + reduce(at, words.dim, catalogue.add)

    loss.tile(rows).store(state[0] - state[1])


@kernel(
    out=lambda a, b, bias: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
    tuned={"triton": {"block": 128, "num_warps": 8}},
)
def linear_gelu(nest: Nest, a, b, bias, y, *, block=128):
    m, n = nest.parallel(a.shape[0], block), nest.parallel(b.shape[1], block)

    @nest.pipeline(a.shape[1], block, init=nest.zeros((m, n), jnp.float32))
    def acc(k, acc):
        return mma(a.tile(m, k).load(), b.tile(k, n).load(), acc)

    y.tile(m, n).store(cast(activations.gelu(acc + _wide(bias.tile(n))), y.dtype))
