"""Attention and its derivative, as kernels.

Row i has weights p_ij = exp(scale q_i k_j) / sum_j exp(scale q_i k_j), which are computed as
2^(l_ij - norm_i) of logits in base 2. With dp_ij = dy_i v_j and delta_i = dy_i y_i,

    dv_j = sum_i p_ij dy_i,  ds_ij = p_ij (dp_ij - delta_i),
    dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i.

Each kernel computes the weights again: none is ever held.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtile import catalogue, elementwise, formats
from jaxtile.casting import cast
from jaxtile.contraction import mma
from jaxtile.dims import Dim
from jaxtile.kernels import Nest, kernel
from jaxtile.reducers import Laws, Reducer
from jaxtile.reduction import reduce


def _merge_online(a: tuple, b: tuple) -> tuple:
    """Two runs of keys: row maxima in base 2, sums of weights, and of weighted values."""
    (m, total, acc), (n, more, other) = a, b
    top = catalogue.maximum(m, n)
    left, right = elementwise.exp2(m - top), elementwise.exp2(n - top)
    return top, total * left + more * right, acc * left + other * right


_LOWEST = float(
    jnp.finfo(jnp.float32).min
)  # finite, so that rows without keys subtract no infinities

online_softmax = Reducer(
    merge=_merge_online,
    identity=(_LOWEST, 0.0, 0.0),
    laws=Laws(associative=True, commutative=True),
    name="online_softmax",
)


def _tuned(block: int, keys: int, num_warps: int, num_stages: int) -> dict[str, Any]:
    """Sizes for Triton, measured on an H200 with bfloat16 of depth 128.

    Tiles that are deeper or wider share the same memory.
    """

    def sizes(q: Any, *rest: Any) -> dict[str, int]:
        parts = max(1, (q.dtype.itemsize << (q.shape[-1] - 1).bit_length()) // 256)
        if q.dtype.itemsize > 2:  # beyond the tensor cores
            side = max(16, 64 // max(2, parts))
            return {"block": side, "keys": side, "num_warps": 4}
        warps = num_warps if parts == 1 else 4
        launch = {"num_warps": warps, "num_stages": num_stages}
        return {
            "block": max(16, block // parts),
            "keys": max(16, keys // parts),
            **launch,
        }

    return {"triton": sizes}


class _Pairs:
    """Which keys a row sees, and its weights.

    Args:
        nest: the kernel's.
        q: the view of the queries.
        length: how many keys there are.
        causal, scale: of the call.
    """

    def __init__(self, nest: Nest, q: Any, length: Any, causal: bool, scale: float):
        self.nest, self.causal, self.scale = nest, causal, scale * math.log2(math.e)
        self.length, self.ahead = length, length - q.shape[3]

    def stop(self, rows: Any, block: int) -> Any:
        """The end of the keys that some row of a block sees."""
        last = self.length
        if self.causal:
            last = jnp.minimum(last, rows.start + block + self.ahead)
        return last

    def first(self, keys: Any) -> Any:
        """The first row that sees some key of a block."""
        behind = keys.start - self.ahead if self.causal else 0
        return jnp.where(keys.start < self.length, behind, jnp.int32(2**30))

    def logits(self, a: Any, b: Any, rows: Any, keys: Any, spec: tuple) -> Any:
        """Those of two tiles, in base 2; -inf where a row does not see a key."""
        place = self.nest.coordinates(keys) + self.nest.zeros(spec, jnp.int32)
        end = self.length
        if self.causal:  # the last row sees the last key
            end = self.nest.coordinates(rows) + (self.ahead + 1)
        found = mma(a, b, spec=[h.dim for h in spec]) * self.scale
        return elementwise.ite(place < end, found, -jnp.inf)


def _attend(
    nest: Nest, q, k, v, lengths, y, norms, *, causal, scale, block=128, keys=None
):
    batch, heads = nest.parallel(q.shape[0]), nest.parallel(q.shape[1])
    group, rows = nest.parallel(q.shape[2]), nest.parallel(q.shape[3], block)
    depth, width = Dim("depth"), Dim("width")
    here = (batch, heads, group, rows)
    t = q.tile(*here, depth).load()
    pairs = _Pairs(nest, q, lengths.at(batch), causal, scale)
    wide = formats.accumulator(q.dtype)
    ref, zero = y.tile(*here, width), nest.zeros(rows, wide)
    start = (zero + _LOWEST, zero, nest.zeros((rows, width), wide))
    loop = {"init": start, "contract": online_softmax, "stop": pairs.stop(rows, block)}

    @nest.reduce(k.shape[2], keys or block, **loop)
    def state(keys, s):
        top, total, acc = s
        there = k.tile(batch, heads, keys, depth).load()
        logits = pairs.logits(t, there, rows, keys, (rows, keys))
        high = catalogue.maximum(top, reduce(logits, keys.dim, catalogue.maximum))
        p, keep = elementwise.exp2(logits - high), elementwise.exp2(top - high)
        values = v.tile(batch, heads, keys, width).load()
        acc = mma(cast(p, values.dtype), values, acc * keep)
        return high, total * keep + reduce(p, keys.dim, catalogue.add), acc

    top, total, acc = state
    total = elementwise.ite(total > 0, total, 1.0)
    ref.store(cast(acc * (1.0 / total), y.dtype))
    if norms is not None:
        norms.tile(*here).store(top + elementwise.log2(total))


@kernel(out=lambda q, k, v, lengths: q, tuned=_tuned(128, 128, 8, 3))
def attention(nest: Nest, q, k, v, lengths, y, **config):
    _attend(nest, q, k, v, lengths, y, None, **config)


def _with_norms(q: Any, *rest: Any) -> tuple:
    return q, jax.ShapeDtypeStruct(q.shape[:-1], formats.accumulator(q.dtype))


@kernel(out=_with_norms, tuned=_tuned(128, 128, 8, 3))
def attention_with_norms(nest: Nest, q, k, v, lengths, y, norms, **config):
    _attend(nest, q, k, v, lengths, y, norms, **config)


@kernel(out=lambda q, *rest: q, tuned=_tuned(64, 64, 4, 2))
def attention_dq(nest: Nest, *views, causal, scale, block=128, keys=None):
    q, k, v, lengths, dy, norms, deltas, dq = views
    batch, heads = nest.parallel(q.shape[0]), nest.parallel(q.shape[1])
    group, rows = nest.parallel(q.shape[2]), nest.parallel(q.shape[3], block)
    depth, width = Dim("depth"), Dim("width")
    here = (batch, heads, group, rows)
    t, up = q.tile(*here, depth).load(), dy.tile(*here, width).load()
    norm, delta = norms.tile(*here).load(), deltas.tile(*here).load()
    pairs = _Pairs(nest, q, lengths.at(batch), causal, scale)
    zero = nest.zeros((rows, depth), norms.dtype)

    @nest.pipeline(k.shape[2], keys or block, init=zero, stop=pairs.stop(rows, block))
    def acc(keys, acc):
        there, values = (
            x.tile(batch, heads, keys, d).load() for x, d in ((k, depth), (v, width))
        )
        p = elementwise.exp2(pairs.logits(t, there, rows, keys, (rows, keys)) - norm)
        ds = p * (mma(up, values, spec=[rows.dim, keys.dim]) - delta)
        return mma(cast(ds, there.dtype), there, acc)

    dq.tile(*here, depth).store(cast(acc * scale, dq.dtype))


@kernel(out=lambda q, k, v, *rest: (k, v), tuned=_tuned(64, 64, 4, 2))
def attention_dkv(nest: Nest, *views, causal, scale, block=128, keys=None):
    q, k, v, lengths, dy, norms, deltas, dk, dv = views
    batch, heads = nest.parallel(k.shape[0]), nest.parallel(k.shape[1])
    keys = nest.parallel(k.shape[2], keys or block)
    depth, width = Dim("depth"), Dim("width")
    part = (batch, heads, keys)
    there, values = k.tile(*part, depth).load(), v.tile(*part, width).load()
    pairs = _Pairs(nest, q, lengths.at(batch), causal, scale)
    zero = [nest.zeros((keys, d), norms.dtype) for d in (depth, width)]

    @nest.serial(q.shape[2], init=zero)
    def found(group, s):
        @nest.pipeline(q.shape[3], block, init=s, start=pairs.first(keys))
        def sums(rows, s):
            here = (batch, heads, group, rows)
            t, up = q.tile(*here, depth).load(), dy.tile(*here, width).load()
            norm, delta = norms.tile(*here).load(), deltas.tile(*here).load()
            # Keys first, so that the sums over rows turn no tile around.
            p = elementwise.exp2(
                pairs.logits(there, t, rows, keys, (keys, rows)) - norm
            )
            ds = p * (mma(values, up, spec=[keys.dim, rows.dim]) - delta)
            return [mma(cast(ds, t.dtype), t, s[0]), mma(cast(p, up.dtype), up, s[1])]

        return sums

    dk.tile(*part, depth).store(cast(found[0] * scale, dk.dtype))
    dv.tile(*part, width).store(cast(found[1], dv.dtype))


def _forward(q, k, v, lengths, **config):
    y, norms = attention_with_norms(q, k, v, lengths, **config)
    return y, (q, k, v, lengths, y, norms)


def _backward(residuals, dy, **config):
    q, k, v, lengths, y, norms = residuals
    deltas = jnp.sum(dy.astype(norms.dtype) * y.astype(norms.dtype), -1)
    given = (q, k, v, lengths, dy, norms, deltas)
    return attention_dq(*given, **config), *attention_dkv(*given, **config), None


attention.defvjp(_forward, _backward, forward_mode=True)
