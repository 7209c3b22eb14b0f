"""The kernels of `jaxtile.nn` that work on rows and products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtile import activations, catalogue, elementwise, formats
from jaxtile.casting import cast
from jaxtile.contraction import mma
from jaxtile.dims import Dim
from jaxtile.kernels import Kernel, Nest, kernel
from jaxtile.reduction import reduce

# Rows of an instance of the kernels that work on rows.
_ROWS = 8


def _same(x: Any, *rest: Any) -> Any:
    return x


def _wide(ref: Any) -> Any:
    """A loaded tile in the accumulator's dtype."""
    tile = ref.load()
    return cast(tile, formats.accumulator(tile.dtype))


def _widest(*operands: Any) -> Any:
    """The dtype in which a product of floats, and of codes, adds up."""
    return jnp.float64 if any(v.dtype == jnp.float64 for v in operands) else jnp.float32


# The longest row that stays in a GPU's registers, and instances that keep it busy.
_LONGEST, _ENOUGH = 16384, 256


def _padded(cols: int) -> int:
    return 1 << (cols - 1).bit_length()


def _of_elements(count: int, longer: dict[int, tuple[int, int, int]]) -> Callable:
    """Sizes for Mosaic GPU, measured on an H200.

    Args:
        count: elements of an instance, where rows are short.
        longer: by the bytes of an element the piece of a longer row, the warps, and how
            many pieces registers hold from the first time that they are read.
    """

    def sizes(x: Any, *rest: Any) -> dict[str, int]:
        if x.shape[1] <= _LONGEST:
            most = _padded(x.shape[0] // _ENOUGH + 1) // 2
            return {"block": max(1, min(count // _padded(x.shape[1]), most))}
        width, warps, held = longer[x.dtype.itemsize]
        return {"block": 1, "width": width, "num_warps": warps, "num_held": held}

    return sizes


def _of_bytes(size: int, longer: dict[str, int]) -> Callable:
    """Sizes for Triton, measured on an H200.

    Args:
        size: bytes of rows that an instance has at least, where they are short.
        longer: for rows that are read in pieces.
    """

    def sizes(x: Any, *rest: Any) -> dict[str, int]:
        if x.shape[1] > _LONGEST:
            return longer
        return {"block": max(1, size // (x.dtype.itemsize * _padded(x.shape[1])))}

    return sizes


_ALONE = _of_bytes(8192, {"block": 1, "width": 1024, "num_warps": 1})
# Rows side by side share the weight and the bias, which are as long as they.
_SHARING = _of_bytes(16384, {"block": 4, "width": 1024, "num_warps": 4})


def _tuned(count: int, held: int, triton: Callable) -> dict[str, Any]:
    longer = {2: (32768, 16, 1), 4: (16384, 16, held), 8: (8192, 16, held)}
    mosaic = _of_elements(count, longer)
    return {"mosaic_gpu": mosaic, "triton": triton}


@kernel(out=_same, tuned=_tuned(4096, 3, _ALONE))
def softmax(nest: Nest, x, y, *, block=_ROWS, width=None):
    if width is not None:
        return _long_softmax(nest, x, y, block, width)
    rows, cols = nest.parallel(x.shape[0], block), Dim("cols")
    t = _wide(x.tile(rows, cols))
    e = elementwise.exp(t - reduce(t, cols, catalogue.maximum))
    scale = 1.0 / reduce(e, cols, catalogue.add)
    y.tile(rows, cols).store(cast(e * scale, y.dtype))


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

    scale = 1.0 / state[1]

    @nest.pipeline(x.shape[1], width, reverse=True)
    def _(cols):
        e = elementwise.exp(_wide(x.tile(rows, cols)) - state[0])
        y.tile(rows, cols).store(cast(e * scale, y.dtype))


def _pieces(nest: Nest, x, block, width, init, step):
    """The rows of an instance, the last state of their pieces, and what walks them."""
    rows = nest.parallel(x.shape[0], block)
    start = init(nest.zeros(rows, formats.accumulator(x.dtype)))
    state = nest.pipeline(x.shape[1], width, init=start)(
        lambda c, s: step(_wide(x.tile(rows, c)), c, s)
    )

    def each(body):
        # Back through what a cache has seen last.
        again = nest.pipeline(x.shape[1], width, reverse=True)
        again(lambda c: body(c, _wide(x.tile(rows, c))))

    return rows, state, each


@kernel(out=_same, tuned=_tuned(4096, 2, _SHARING))
def layer_norm(nest: Nest, x, weight, bias, y, *, eps, block=_ROWS, width=None):
    if width is not None:
        return _long_layer_norm(nest, x, weight, bias, y, eps, block, width)
    rows, cols = nest.parallel(x.shape[0], block), Dim("cols")
    t, size = _wide(x.tile(rows, cols)), x.shape[1]
    # A row at hand is read twice for nothing. The first mean is off by what a sum of large
    # values loses; the mean of what it leaves, which is small, says by how much.
    t = t - reduce(t, cols, catalogue.add) / size
    more = reduce(t, cols, catalogue.add) / size
    variance = reduce(t * t, cols, catalogue.add) / size - more * more
    scale = elementwise.rsqrt(variance + eps)
    out = (t - more) * scale * _wide(weight.tile(cols)) + _wide(bias.tile(cols))
    y.tile(rows, cols).store(cast(out, y.dtype))


def _long_layer_norm(nest: Nest, x, weight, bias, y, eps, block, width):
    size = x.shape[1]

    def moments(t, cols, seen):
        mean, m2 = seen
        count = jnp.minimum(size - cols.start, width).astype(t.dtype)
        own = reduce(t, cols.dim, catalogue.add) / count
        own_m2 = reduce((t - own) * (t - own), cols.dim, catalogue.add)
        # Welford's merge: a piece weighs as much as its share of what has been seen.
        share, gap = count / (cols.start + count), own - mean
        return mean + gap * share, m2 + own_m2 + gap * share * (gap * cols.start)

    def start(zero):
        return zero, zero

    rows, (mean, m2), each = _pieces(nest, x, block, width, start, moments)
    scale = elementwise.rsqrt(m2 / size + eps)

    @each
    def _(cols, t):
        out = (t - mean) * scale * _wide(weight.tile(cols)) + _wide(bias.tile(cols))
        y.tile(rows, cols).store(cast(out, y.dtype))


@kernel(out=_same, tuned=_tuned(8192, 3, _ALONE))
def rms_norm(nest: Nest, x, weight, y, *, eps, block=_ROWS, width=None):
    if width is not None:
        return _long_rms_norm(nest, x, weight, y, eps, block, width)
    rows, cols = nest.parallel(x.shape[0], block), Dim("cols")
    t = _wide(x.tile(rows, cols))
    mean = reduce(t * t, cols, catalogue.add) / x.shape[1]
    out = t * elementwise.rsqrt(mean + eps) * _wide(weight.tile(cols))
    y.tile(rows, cols).store(cast(out, y.dtype))


def _long_rms_norm(nest: Nest, x, weight, y, eps, block, width):
    def squares(t, cols, seen):
        return seen + reduce(t * t, cols.dim, catalogue.add)

    rows, total, each = _pieces(nest, x, block, width, lambda zero: zero, squares)
    scale = elementwise.rsqrt(total / x.shape[1] + eps)

    @each
    def _(cols, t):
        y.tile(rows, cols).store(cast(t * scale * _wide(weight.tile(cols)), y.dtype))


@kernel(
    out=lambda x, w, labels: jax.ShapeDtypeStruct(labels.shape, _widest(x, w)),
    tuned={"reference": {"block": 4096}},
)
def cross_entropy(nest: Nest, x, w, labels, loss, *, block=512):
    rows, depth = nest.parallel(x.shape[0], 128), Dim("depth")
    t, label = x.tile(rows, depth).load(), labels.tile(rows).load()
    wide = _widest(x, w)
    low = nest.full(rows, -jnp.inf, wide)

    @nest.pipeline(w.shape[1], block, init=(low, nest.zeros(rows, wide)))
    def state(words, s):
        total, picked = s
        nothing = nest.zeros((rows, words), wide)
        logits = mma(t, w.tile(depth, words).load(), nothing)
        wanted = label + nest.zeros((rows, words), jnp.int32)
        at = elementwise.ite(nest.coordinates(words) == wanted, logits, 0.0)
        total = catalogue.logaddexp(
            total, reduce(logits, words.dim, catalogue.logaddexp)
        )
        return total, picked + reduce(at, words.dim, catalogue.add)

    loss.tile(rows).store(state[0] - state[1])


@kernel(
    out=lambda a, b, bias: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
    tuned={"reference": lambda a, b, bias: {"block": max(*a.shape, *b.shape)}},
)
def linear_gelu(nest: Nest, a, b, bias, y, *, block=128):
    m, n = nest.parallel(a.shape[0], block), nest.parallel(b.shape[1], block)

    @nest.pipeline(a.shape[1], block, init=nest.zeros((m, n), _widest(a, b)))
    def acc(k, acc):
        return mma(a.tile(m, k).load(), b.tile(k, n).load(), acc)

    y.tile(m, n).store(cast(activations.gelu(acc + _wide(bias.tile(n))), y.dtype))


@functools.cache
def scaled_matmul(dtype: Any) -> Kernel:
    """The product of codes whose scales are [blocks of K, rows or columns]."""

    @kernel(out=lambda a, b, *_: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), dtype))
    def scaled_matmul(nest: Nest, a, b, left, right, y, *, block=128):
        m, n = nest.parallel(a.shape[0], block), nest.parallel(b.shape[1], block)
        zero, depth = nest.zeros((m, n), jnp.float32), a.shape[1] // left.shape[0]

        @nest.pipeline(a.shape[1], depth, init=zero)
        def acc(k, acc):
            part = mma(a.tile(m, k).load(), b.tile(k, n).load(), zero)
            s, t = left.tile(k.blocks, m).load(), right.tile(k.blocks, n).load()
            # The small one first: where the other would overflow alone.
            s, t = s + zero, t + zero
            return acc + part * catalogue.minimum(s, t) * catalogue.maximum(s, t)

        y.tile(m, n).store(cast(acc, y.dtype))

    return scaled_matmul
