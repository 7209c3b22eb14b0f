"""Derivatives of attention and of the recurrence as kernels, against float64 NumPy's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets
from folds import same_derivatives
from jaxtile import _attention, _recurrence

RNG = np.random.default_rng(31)
NAMES = (None, "interpret")


def _f32(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def _attention_oracle(q, k, v, lengths, dy, causal, scale):
    """dq, dk and dv in float64, from the softmax's own derivative."""
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    b, heads, share, n, _ = q.shape
    for at in np.ndindex(b, heads, share):
        end = int(lengths[at[0]])
        keys, values = k[at[:2]][:end], v[at[:2]][:end]
        for i in range(n):
            last = min(end, i + end - n + 1) if causal else end
            if last <= 0:
                continue
            e = scale * keys[:last] @ q[at][i]
            p = np.exp(e - e.max())
            p /= p.sum()
            dp = values[:last] @ dy[at][i]
            ds = p * (dp - p @ dp)
            dq[at][i] = scale * ds @ keys[:last]
            dk[at[:2]][:last] += scale * np.outer(ds, q[at][i])
            dv[at[:2]][:last] += np.outer(p, dy[at][i])
    return dq, dk, dv


# batch, groups, heads of a group, rows, keys, depth; lengths
_SHAPES = {
    "square": ((2, 2, 1, 32, 32, 16), (32, 32)),
    "ragged": ((2, 1, 3, 21, 37, 8), (37, 11)),
    "few keys": ((2, 1, 2, 20, 9, 4), (9, 0)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "causal"),
    [("square", False), ("ragged", False), ("ragged", True), ("few keys", True)],
)
def test_attention(shape, causal, name):
    (b, groups, share, n, m, d), lengths = _SHAPES[shape]
    q, k, v = _f32(b, groups, share, n, d), _f32(b, groups, m, d), _f32(b, groups, m, d)
    lengths, dy = jnp.asarray(lengths, jnp.int32), _f32(*q.shape)
    call = functools.partial(
        _attention.attention, causal=causal, scale=0.4, block=16, implementation=name
    )
    _, pull = jax.vjp(lambda *x: call(*x, lengths), q, k, v)
    want = _attention_oracle(q, k, v, lengths, dy, causal, 0.4)
    for got, exact in zip(jax.jit(pull)(dy), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-5)


def test_attention_of_bfloat16():
    make = lambda *s: _f32(*s).astype(jnp.bfloat16)  # noqa: E731
    q, k, v = make(1, 1, 2, 24, 16), make(1, 1, 40, 16), make(1, 1, 40, 16)
    dy, lengths = make(*q.shape), jnp.array([33], jnp.int32)
    call = functools.partial(
        _attention.attention,
        causal=True,
        scale=0.25,
        block=16,
        implementation="interpret",
    )
    _, pull = jax.vjp(lambda *x: call(*x, lengths), q, k, v)
    want = _attention_oracle(q, k, v, lengths, dy, True, 0.25)
    for got, exact in zip(pull(dy), want, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got, exact, rtol=3e-2, atol=3e-2)


def _recurrence_oracle(x, decay, gate, rate, dy):
    """dx, ddecay, dgate and drate in float64, by the chain of every step."""
    x, decay, gate, rate, dy = (
        np.asarray(v, np.float64) for v in (x, decay, gate, rate, dy)
    )
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    slow, r, i = -8 * np.log1p(np.exp(rate)), sigmoid(decay), sigmoid(gate)
    a = np.exp(slow * r)
    root = np.sqrt(-np.expm1(2 * slow * r))
    h = np.zeros((x.shape[0], x.shape[1] + 1, x.shape[2]))
    for t in range(x.shape[1]):
        h[:, t + 1] = a[:, t] * h[:, t] + root[:, t] * i[:, t] * x[:, t]
    dh, found = np.zeros(h[:, 0].shape), [np.zeros(x.shape) for _ in range(3)]
    for t in reversed(range(x.shape[1])):
        dh = dy[:, t] + (a[:, t + 1] * dh if t + 1 < x.shape[1] else 0.0)
        up = dh * root[:, t]
        found[0][:, t] = up * i[:, t]
        found[2][:, t] = up * x[:, t] * i[:, t] * (1 - i[:, t])
        drive = i[:, t] * x[:, t]
        found[1][:, t] = dh * (a * h[:, :-1])[:, t] - dh * drive * (a * a / root)[:, t]
    dlog = found[1].copy()
    found[1] = dlog * slow * r * (1 - r)
    drate = (dlog * r).sum((0, 1)) * -8 * sigmoid(rate)
    return [*found, drate]


@pytest.mark.parametrize(
    ("name", "ahead"), [(None, False), ("interpret", False), ("interpret", True)]
)
@pytest.mark.parametrize(("steps", "block"), [(45, 16), (17, 12)])
def test_recurrence(steps, block, name, ahead):
    shape = (2, steps, 6)
    x, gate, dy = (_f32(*shape) for _ in range(3))
    decay, rate = _f32(*shape) - 1.0, _f32(6) - 2.0
    call = functools.partial(
        _recurrence.recurrence,
        block=block,
        lanes=4,
        ahead=ahead,
        implementation=name,
    )
    _, pull = jax.vjp(call, x, decay, gate, rate)
    want = _recurrence_oracle(x, decay, gate, rate, dy)
    for got, exact in zip(jax.jit(pull)(dy), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-5)


def test_recurrence_of_saturated_gates_is_finite():
    x = jnp.ones((1, 6, 5))
    far = jnp.array([-200.0, -90.0, 0.0, 90.0, 200.0])
    for call in (
        jt.nn.gated_recurrence,
        functools.partial(_recurrence.recurrence, implementation="interpret"),
    ):
        loss = lambda *v, call=call: jnp.sum(call(*v))  # noqa: E731
        grads = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(
            x, x * far, x * far[::-1], far - 1.0
        )
        assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads)


def _attend(q, k, v):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(s.shape[2:], bool), k.shape[2] - q.shape[2])
    return jax.nn.softmax(jnp.where(mask, s, -jnp.inf)) @ v


def _recur(x, decay, gate, rate):
    log_a = -8 * jax.nn.softplus(rate) * jax.nn.sigmoid(decay)
    b = jnp.sqrt(-jnp.expm1(2 * log_a)) * x * jax.nn.sigmoid(gate)
    merge = lambda m, n: (m[0] * n[0], n[0] * m[1] + n[1])  # noqa: E731
    return jax.lax.associative_scan(merge, (jnp.exp(log_a), b), axis=1)[1]


_PAIRS = {
    "attention": (
        functools.partial(jt.nn.attention, causal=True, block=4),
        _attend,
        [(1, 2, 4, 3), (1, 2, 6, 3), (1, 2, 6, 3)],
    ),
    "recurrence": (jt.nn.gated_recurrence, _recur, [(2, 7, 3)] * 3 + [(3,)]),
}


@pytest.mark.parametrize("name", _PAIRS)
def test_second_derivatives_are_plain_jaxs(name):
    call, plain, shapes = _PAIRS[name]
    args = [_f32(*s) for s in shapes]
    same_derivatives(call, plain, *args, order=2, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", _PAIRS)
def test_transforms(name):
    call, plain, shapes = _PAIRS[name]
    args = [_f32(3, *s) for s in shapes]
    one = [v[0] for v in args]

    def grads(fn):
        return jax.grad(lambda *v: jnp.sum(jnp.sin(fn(*v))), tuple(range(len(one))))

    def close(got, want):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)

    shared = (0, *(None,) * (len(one) - 1))
    mixed = (args[0], *one[1:])
    batched = lambda fn: jax.vmap(fn, shared)  # noqa: E731
    close(jax.jit(grads(batched(call)))(*mixed), grads(batched(plain))(*mixed))
    close(jax.jit(jax.jacrev(call))(*one), jax.jit(jax.jacrev(plain))(*one))
    close(jax.jit(grads(jax.checkpoint(call)))(*one), grads(plain)(*one))
    over = lambda fn: lambda *v: jax.jvp(fn, v, v)[1]  # noqa: E731
    close(jax.jit(grads(over(call)))(*one), grads(over(plain))(*one))


def _shapes(*args):
    return [jax.ShapeDtypeStruct(s, d) for s, d in args]


_LOWERED = {
    "attention": (
        lambda q, k, v, n: _attention.attention(q, k, v, n, causal=True, scale=0.1),
        _shapes(
            ((1, 2, 2, 256, 64), "bfloat16"),
            *[((1, 2, 256, 64), "bfloat16")] * 2,
            ((1,), "int32"),
        ),
        ("__gpu$xla.gpu.triton", 3),
    ),
    "recurrence": (
        _recurrence.recurrence,
        _shapes(*[((2, 100, 64), "float32")] * 3, ((64,), "float32")),
        ("mosaic_gpu", 2),
    ),
}


@pytest.mark.parametrize("name", _LOWERED)
def test_on_cuda_it_is_kernels(name):
    call, shapes, (target, count) = _LOWERED[name]

    def grads(*args):
        return jax.vjp(lambda *v: jnp.sum(call(*v).astype(jnp.float32)), *args)[1](1.0)

    with targets.mesh("NVIDIA H200", 132, "gpu"):
        text = targets.lowered(grads, shapes, "cuda").as_text()
    assert text.count(f"custom_call @{target}") == count
    assert "stablehlo.while" not in text


def test_explain_sees_the_tangents():
    q, k, v = (_f32(*s) for s in _PAIRS["attention"][2])
    call = _PAIRS["attention"][0]
    primal = {e.op for e in jt.explain(call)(q, k, v)}
    report = jt.explain(lambda *x: jax.jvp(lambda q: call(q, *x[1:]), x[:1], x[:1])[1])
    assert primal <= {e.op for e in report(q, k, v)}


def test_a_power_of_2_is_as_close_as_it_says():
    z = np.linspace(-87, 87, 100001, dtype=np.float32)
    want = np.exp(z.astype(np.float64))
    off = np.abs(np.asarray(_recurrence._exp(jnp.asarray(z)), np.float64) - want)
    assert np.all(off <= (2 * np.abs(z) + 2) * np.spacing(want.astype(np.float32)))
