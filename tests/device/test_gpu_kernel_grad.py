"""Attention, the recurrence and their derivatives as Triton kernels, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from on_device import on_cpu, on_gpu

pytestmark = pytest.mark.gpu

# batch, heads, groups, rows, keys, depth
_SHAPES = {
    "whole blocks": (2, 4, 4, 512, 512, 128),
    "grouped": (1, 8, 2, 256, 384, 64),
    "ragged": (2, 3, 1, 200, 333, 64),
    "few rows": (1, 2, 2, 17, 640, 128),
    "deep": (1, 2, 1, 128, 128, 256),
}
# bfloat16 rounds each result once, and the weights that the tensor cores take
_TOLERANCES = {"bfloat16": 2e-2, "float32": 2e-5}


def _drawn(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)


def _gradients(call, count):
    """The results and the cotangents of the first operands, for a cotangent given."""

    def run(dy, *args):
        moved, rest = args[:count], args[count:]
        y, pull = jax.vjp(lambda *v: call(*v, *rest), *moved)
        return y, *pull(dy)

    return run


def _plain(q, k, v, lengths, causal):
    """Attention of whole matrices in float32."""
    share = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, share, 1) for x in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    place, n = jnp.arange(k.shape[2]), lengths[:, None, None, None]
    seen = place < n
    if causal:
        seen &= place <= jnp.arange(q.shape[2])[:, None] + n - q.shape[2]
    p = jax.nn.softmax(jnp.where(seen, s, -1e30)) * seen
    return jnp.einsum("bhqk,bhkd->bhqd", p, v)


def _close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * np.abs(b).max()
        )


@pytest.mark.parametrize("dtype", _TOLERANCES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", _SHAPES)
def test_attention(shape, causal, dtype):
    b, heads, groups, n, m, d = _SHAPES[shape]
    rng = np.random.default_rng(41)
    q, dy = (_drawn(rng, (b, heads, n, d), dtype) for _ in range(2))
    k, v = (_drawn(rng, (b, groups, m, d), dtype) for _ in range(2))
    lengths = jnp.asarray(rng.integers(m // 2, m, b), jnp.int32)

    def call(q, k, v, lengths):
        return jt.nn.attention(q, k, v, causal=causal, lengths=lengths)

    got = on_gpu(_gradients(call, 3), dy, q, k, v, lengths)
    exact = functools.partial(_plain, causal=causal)
    wide = [x.astype(jnp.float32) for x in (dy, q, k, v)]
    _close(got, on_cpu(_gradients(exact, 3), *wide, lengths), _TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", _TOLERANCES)
@pytest.mark.parametrize("shape", [(2, 256, 64), (3, 333, 100), (1, 7, 5)])
def test_recurrence(shape, dtype):
    rng = np.random.default_rng(43)
    x, gate, dy = (_drawn(rng, shape, dtype) for _ in range(3))
    decay = _drawn(rng, shape, dtype) - jnp.asarray(2, dtype)
    rate = _drawn(rng, shape[-1:], "float32") - 1.0

    def plain(x, decay, gate, rate):
        log_a = -8 * jax.nn.softplus(rate) * jax.nn.sigmoid(decay)
        b = jnp.sqrt(-jnp.expm1(2 * log_a)) * x * jax.nn.sigmoid(gate)
        merge = lambda m, n: (m[0] * n[0], n[0] * m[1] + n[1])  # noqa: E731
        return jax.lax.associative_scan(merge, (jnp.exp(log_a), b), axis=1)[1]

    got = on_gpu(_gradients(jt.nn.gated_recurrence, 4), dy, x, decay, gate, rate)
    wide = [v.astype(jnp.float32) for v in (dy, x, decay, gate, rate)]
    # drate sums what cancels: its error is that of the summands
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    _close(got, on_cpu(_gradients(plain, 4), *wide), tolerance)


def _kernels(target, call, *args):
    """How many kernels of a backend a function has on the GPU."""
    with jax.default_device(jax.devices("gpu")[0]):
        text = jax.jit(call).lower(*args).as_text()
    return text.count(f"custom_call @{target}")


def test_they_are_kernels():
    q = jnp.zeros((1, 2, 128, 64), jnp.bfloat16)
    run = _gradients(functools.partial(jt.nn.attention, causal=True), 3)
    assert _kernels("__gpu$xla.gpu.triton", run, q, q, q, q) == 3
    x = jnp.zeros((1, 64, 32))
    run = _gradients(jt.nn.gated_recurrence, 4)
    assert _kernels("mosaic_gpu", run, x, x, x, x, x[0, 0]) == 2


def test_under_vmap_and_in_second_derivatives():
    rng = np.random.default_rng(47)
    q, k, v = (_drawn(rng, (2, 1, 2, 32, 16), "float32") for _ in range(3))
    call = functools.partial(jt.nn.attention, causal=True)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(call(q, k, v)))

    def found(q, k, v):
        grads = jax.vmap(jax.grad(loss, (0, 1, 2)))(q, k, v)
        one = q[0], k[0], v[0]
        return grads, jax.jvp(jax.grad(loss), one, one)[1]

    got, want = on_gpu(found, q, k, v), on_cpu(found, q, k, v)
    _close(jax.tree.leaves(got), jax.tree.leaves(want), 1e-4)
