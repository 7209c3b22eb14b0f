"""Layers written in the kernel language: short kernels, each differentiable."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtile import _attention, _kernels, _recurrence
from jaxtile._checks import as_array, flag, floats, integer, number
from jaxtile._scaled import quantized_matmul as quantized_matmul
from jaxtile._scaled import scaled_matmul as scaled_matmul
from jaxtile.errors import TileShapeError, TileTypeError, message


def _rows(op: str, x: Any) -> tuple[jax.Array, tuple[int, ...]]:
    """An array as rows along its last axis, and its shape."""
    x = floats(op, "x", x)
    if x.ndim < 1 or 0 in x.shape:
        _refuse(op, "an array with a last axis and no empty one", x.shape)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), x.shape


def _refuse(op: str, expected: str, shape: Any, way_out: str = "Reshape it.") -> None:
    raise TileShapeError(
        message(op, expected=expected, got=f"shape {tuple(shape)}", way_out=way_out)
    )


def _vector(op: str, name: str, value: Any, size: int) -> jax.Array:
    value = floats(op, name, value)
    if value.shape != (size,):
        _refuse(op, f"{name} of shape {(size,)}", value.shape, "One for each column.")
    return value


_EPS = "It is known while tracing: pass a Python float."


def _integers(op: str, name: str, value: Any, shape: tuple, size: int) -> jax.Array:
    """Integers of a shape as int32; what lies outside [0, size] stays outside."""
    value = as_array(op, value)
    if value.shape != shape:
        _refuse(op, f"{name} of shape {shape}", value.shape)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TileTypeError(
            message(
                op,
                expected=f"{name} of integers",
                got=value.dtype.name,
                way_out="Cast them to int32.",
            )
        )
    if value.dtype.itemsize < 4:
        value = value.astype(jnp.int32)
    low = -1 if jnp.issubdtype(value.dtype, jnp.signedinteger) else 0
    return jnp.clip(value, low, size).astype(jnp.int32)


def _require_alike(op: str, **operands: Any) -> None:
    """Refuse float64 beside narrower operands: an accumulator has one dtype."""
    if len({v.dtype == jnp.float64 for v in operands.values()}) > 1:
        raise TileTypeError(
            message(
                op,
                expected=f"{', '.join(operands)} all of float64, or none",
                got=", ".join(v.dtype.name for v in operands.values()),
                way_out="Cast them to one dtype.",
            )
        )


def softmax(x: Any) -> jax.Array:
    """exp(x - m) / sum exp(x - m) along the last axis, m its maximum.

    Args:
        x: an array of any rank; below 32 bits it is computed in float32.

    Returns:
        An array like x.

    Raises:
        TileShapeError: no axis, or an empty one.
        TileTypeError: x holds no floats, or is no array.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.nn.softmax(jnp.zeros(4)))
        [0.25 0.25 0.25 0.25]
    """
    rows, shape = _rows("softmax", x)
    return _kernels.softmax(rows).reshape(shape)


def layer_norm(x: Any, weight: Any, bias: Any, *, eps: float = 1e-5) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias along the last axis.

    The mean is corrected by the mean of what it leaves; rows too long for a GPU's registers
    take Welford's, by pieces. What overflows in the sums and squares of the accumulator,
    in float32 squares of 1.8e19 and above, is not scaled: such rows are 0 or NaN.

    Args:
        x: an array of any rank; below 32 bits it is computed in float32.
        weight, bias: vectors of the last axis.
        eps: added to the variance.

    Returns:
        An array like x.

    Raises:
        TileShapeError: no axis or an empty one, or vectors of another size.
        TileTypeError: operands of other dtypes, or that are no arrays.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([1.0, 3.0])
        >>> print(jt.nn.layer_norm(x, jnp.ones(2), jnp.zeros(2), eps=0.0))
        [-1.  1.]
    """
    rows, shape = _rows("layer_norm", x)
    weight = _vector("layer_norm", "weight", weight, shape[-1])
    bias = _vector("layer_norm", "bias", bias, shape[-1])
    eps = number("layer_norm", "eps a number", eps, _EPS)
    return _kernels.layer_norm(rows, weight, bias, eps=eps).reshape(shape)


def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(mean of squares + eps) * weight along the last axis.

    Squares that overflow in the accumulator, in float32 those of 1.8e19 and above, are not
    scaled: such rows are 0.

    Args:
        x: an array of any rank; below 32 bits it is computed in float32.
        weight: a vector of the last axis.
        eps: added to the mean.

    Returns:
        An array like x.

    Raises:
        TileShapeError: no axis or an empty one, or a vector of another size.
        TileTypeError: operands of other dtypes, or that are no arrays.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.nn.rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2), eps=12.5))
        [0.6 0.8]
    """
    rows, shape = _rows("rms_norm", x)
    weight = _vector("rms_norm", "weight", weight, shape[-1])
    eps = number("rms_norm", "eps a number", eps, _EPS)
    return _kernels.rms_norm(rows, weight, eps=eps).reshape(shape)


def cross_entropy(x: Any, w: Any, labels: Any) -> jax.Array:
    """logsumexp(x @ w) - (x @ w)[label] of each row, the logits never held at once.

    Derivatives compute each block of logits again.

    Args:
        x: features `[..., depth]`.
        w: the head `[depth, words]`.
        labels: integers `[...]` in [0, words); others give the logsumexp alone.

    Returns:
        A loss of the labels' shape, of float32; of float64 where x or w is.

    Raises:
        TileShapeError: shapes that do not fit.
        TileTypeError: operands of other dtypes, or that are no arrays.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x, w = jnp.zeros((1, 2)), jnp.zeros((2, 8))
        >>> print(jt.nn.cross_entropy(x, w, jnp.array([3])), jnp.log(8.0))
        [2.0794415] 2.0794415
    """
    rows, shape = _rows("cross_entropy", x)
    w = as_array("cross_entropy", w)
    if w.ndim != 2 or w.shape[0] != shape[-1] or 0 in w.shape:
        _refuse("cross_entropy", f"w of shape ({shape[-1]}, words)", w.shape)
    labels = _integers("cross_entropy", "labels", labels, shape[:-1], w.shape[1])
    return _kernels.cross_entropy(rows, w, labels.reshape(-1)).reshape(shape[:-1])


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    lengths: Any = None,
    scale: float | None = None,
    block: int | None = None,
) -> jax.Array:
    """softmax(scale * q k^T) v of each head, as a fold of an online softmax over keys.

    Keys beyond a length may hold anything. Values that causal hides from a row weigh 0
    there: they have to be finite.

    Args:
        q: queries `[batch, heads, rows, depth]`.
        k, v: `[batch, groups, keys, depth]`; heads is a multiple of groups.
        causal: row i sees key j where j <= i + length - rows.
        lengths: how many keys each batch element has; None for all of them.
        scale: of the logits; by default 1 / sqrt(depth).
        block: rows, and keys, of one step; None for what suits the platform.

    Returns:
        An array like q; rows that see no key are zero.

    Raises:
        TileShapeError: shapes that do not fit.
        TileTypeError: operands of other dtypes, or that are no arrays.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> q, v = jnp.zeros((1, 1, 1, 2)), jnp.arange(4.0).reshape(1, 1, 2, 2)
        >>> print(jt.nn.attention(q, v, v))
        [[[[1. 2.]]]]
    """
    q, v = floats("attention", "q", q), floats("attention", "v", v)
    k = as_array("attention", k)
    _require_alike("attention", q=q, k=k, v=v)
    way_out = "q is [batch, heads, rows, depth], k and v [batch, groups, keys, depth]."
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape and 0 not in q.shape
    if not fits or 0 in k.shape:
        _refuse("attention", "q, k and v of rank 4, k and v alike", k.shape, way_out)
    b, heads, n, depth = q.shape
    groups = k.shape[1]
    if (k.shape[0], k.shape[3]) != (b, depth) or heads % groups:
        _refuse("attention", f"k that fits q of {q.shape}", k.shape, way_out)
    padded = lengths is not None
    if not padded:
        lengths = jnp.full(b, k.shape[2], jnp.int32)
    lengths = _integers("attention", "lengths", lengths, (b,), k.shape[2])
    if padded:  # a weight of zero does not undo what may lie there
        there = (jnp.arange(k.shape[2]) < lengths[:, None])[:, None, :, None]
        k, v = (jnp.where(there, x, jnp.zeros_like(x)) for x in (k, v))
    split = q.reshape(b, groups, heads // groups, n, depth)
    options: dict = {"causal": flag("attention", "causal", causal)}
    if block is not None:
        way_out = "Leave it out for what suits the platform."
        block = integer("attention", "block an integer", block, way_out)
        # More than what there is would be padding.
        block = min(block, 1 << (max(n, k.shape[2]) - 1).bit_length())
        options.update(block=block, keys=block)
    if scale is None:
        scale = 1 / math.sqrt(depth)
    way_out = "Multiply q by a scale that is an array."
    options["scale"] = number("attention", "scale a number", scale, way_out)
    return _attention.attention(split, k, v, lengths, **options).reshape(q.shape)


def gated_recurrence(x: Any, decay: Any, gate: Any, rate: Any) -> jax.Array:
    """The gated linear recurrence of RG-LRU along time.

        h_t = a_t h_(t-1) + sqrt(1 - a_t^2) sigmoid(gate_t) x_t
        a_t = exp(-8 softplus(rate) sigmoid(decay_t))

    Args:
        x: inputs `[batch, time, lanes]`.
        decay, gate: logits of the gates, of x's shape.
        rate: `[lanes]`.

    Returns:
        h, like x; below 32 bits it is computed in float32.

    Raises:
        TileShapeError: shapes that do not fit.
        TileTypeError: operands of other dtypes, or that are no arrays.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.ones((1, 3, 1))
        >>> h = jt.nn.gated_recurrence(x, 0 * x, 0 * x, jnp.zeros(1))
        >>> print(*(f"{v:.3f}" for v in h.ravel()))
        0.499 0.530 0.532
    """
    op = "gated_recurrence"
    x, decay = floats(op, "x", x), floats(op, "decay", decay)
    gate = floats(op, "gate", gate)
    if x.ndim != 3 or 0 in x.shape:
        _refuse(op, "x of shape [batch, time, lanes], none of them empty", x.shape)
    for name, v in (("decay", decay), ("gate", gate)):
        if v.shape != x.shape:
            _refuse(op, f"{name} of shape {x.shape}", v.shape)
    rate = _vector(op, "rate", rate, x.shape[2])
    _require_alike(op, x=x, decay=decay, gate=gate, rate=rate)
    return _recurrence.recurrence(x, decay, gate, rate)


def linear_gelu(a: Any, b: Any, bias: Any) -> jax.Array:
    """gelu(a @ b + bias), summed and activated in one kernel.

    Args:
        a: `[..., depth]`.
        b: `[depth, columns]`.
        bias: `[columns]`.

    Returns:
        An array `[..., columns]` in a's dtype.

    Raises:
        TileShapeError: shapes that do not fit.
        TileTypeError: operands of other dtypes, or that are no arrays.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.nn.linear_gelu(jnp.ones((1, 2)), jnp.ones((2, 1)), jnp.zeros(1)))
        [[1.9545977]]
    """
    rows, shape = _rows("linear_gelu", a)
    b = as_array("linear_gelu", b)
    if b.ndim != 2 or b.shape[0] != shape[-1] or 0 in b.shape:
        _refuse("linear_gelu", f"b of shape ({shape[-1]}, columns)", b.shape)
    bias = _vector("linear_gelu", "bias", bias, b.shape[1])
    return _kernels.linear_gelu(rows, b, bias).reshape(*shape[:-1], b.shape[1])
