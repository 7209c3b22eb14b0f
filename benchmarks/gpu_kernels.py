"""Time the layers written in the kernel language on a GPU beside their jnp forms.

    python benchmarks/gpu_kernels.py            # measure, write results/gpu_kernels.*
    python benchmarks/gpu_kernels.py softmax    # the cases whose name contains it

As benchmarks/gpu_reduce_scan.py; the first peer is the jnp form under XLA, for which the
targets are. Attention stands beside cuDNN's and PyTorch's too.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from gpu_order import run
from gpu_reduce_scan import Case
from jax import lax

import jaxtile as jt

SHORT, LONG = (65536, 4096), (8192, 65536)
HEADS = (4, 16, 4096, 128)
TIME = (8, 4096, 2048)


def _narrow(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def _softmax(x):
    return jax.nn.softmax(x, -1)


def _layer_norm(x, weight, bias):
    t = x.astype(jnp.float32)
    t = t - t.mean(-1, keepdims=True)
    out = t * lax.rsqrt((t * t).mean(-1, keepdims=True) + 1e-5) * weight + bias
    return out.astype(x.dtype)


def _rms_norm(x, weight):
    t = x.astype(jnp.float32)
    scale = lax.rsqrt((t * t).mean(-1, keepdims=True) + 1e-6)
    return (t * scale * weight).astype(x.dtype)


def _attention(q, k, v):
    logits = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    logits = jnp.where(seen, logits / math.sqrt(q.shape[-1]), -jnp.inf)
    p = jax.nn.softmax(logits, -1).astype(v.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v)


def _cudnn(q, k, v):
    turn = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    call = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    )
    return turn(call(turn(q), turn(k), turn(v)))


def _torch_attention(q, k, v):
    import torch  # pyright: ignore[reportMissingImports]

    call = torch.nn.functional.scaled_dot_product_attention
    return call(q, k, v, is_causal=True)


def _recurrence(x, decay, gate, rate):
    log_a = -8 * jax.nn.softplus(rate) * jax.nn.sigmoid(decay)
    b = jnp.sqrt(-jnp.expm1(2 * log_a)) * jax.nn.sigmoid(gate) * x

    def merge(p, q):
        return p[0] * q[0], p[1] * q[0] + q[1]

    return lax.associative_scan(merge, (jnp.exp(log_a), b), axis=1)[1]


def _gradient(fn):
    """The cotangents of the operands, for that of the result."""
    return lambda *args: jax.vjp(fn, *args[:-1])[1](args[-1])


def _rows() -> list[Case]:
    found = []
    for shape, narrow, target in (
        (SHORT, False, 1.03),
        (SHORT, True, 1.03),
        (LONG, False, 1.2),
        (LONG, True, 1.2),
    ):
        vector = (shape[1],)
        draw = _narrow if narrow else jax.random.normal
        known: dict[str, Any] = {
            "draw": draw,
            "bound": 2e-2 if narrow else 1e-4,
            "calls": 10,
        }
        name = ", bf16" if narrow else ""
        found += [
            Case("softmax" + name, (shape,), jt.nn.softmax, {"jnp": _softmax}, target, 2,
                 **known),
            Case("layer_norm" + name, (shape, vector, vector), jt.nn.layer_norm,
                 {"jnp": _layer_norm}, target, 2, **known),
            Case("rms_norm" + name, (shape, vector), jt.nn.rms_norm, {"jnp": _rms_norm},
                 target, 2, **known),
        ]  # fmt: skip
    return found


def cases() -> list[Case]:
    """All comparisons."""
    ours = functools.partial(jt.nn.attention, causal=True)
    heads: dict[str, Any] = dict(draw=_narrow, bound=3e-2, calls=5)
    recurrence: dict[str, Any] = dict(bound=2e-3, calls=5)
    gates = (TIME, TIME, TIME, TIME[2:])
    return [
        *_rows(),
        Case("attention, causal, bf16", (HEADS,) * 3, ours,
             {"jnp": _attention, "cudnn": _cudnn}, 1.5, 4, _torch_attention, **heads),
        Case("its gradient, bf16", (HEADS,) * 4, _gradient(ours),
             {"jnp": _gradient(_attention), "cudnn": _gradient(_cudnn)}, 1.0, 7,
             **heads),
        Case("gated recurrence", gates, jt.nn.gated_recurrence,
             {"associative_scan": _recurrence}, 3.0, 4, **recurrence),
        Case("its gradient", (*gates, TIME), _gradient(jt.nn.gated_recurrence),
             {"associative_scan": _gradient(_recurrence)}, 3.0, 7, **recurrence),
    ]  # fmt: skip


if __name__ == "__main__":
    run("gpu_kernels", cases())
