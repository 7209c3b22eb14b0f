"""The layers of jaxtile.nn against float64 NumPy, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import layers
from folds import same_derivatives
from jaxtile import _kernels
from jaxtile.errors import TileShapeError, TileTypeError

RNG = np.random.default_rng(3)


def _normal(*shape):
    return RNG.standard_normal(shape)


def _close(call, oracle, *args, dtype=np.float32, rtol=1e-5, atol=1e-5):
    given = [
        jnp.asarray(a, dtype) if a.dtype.kind == "f" else jnp.asarray(a) for a in args
    ]
    got = np.asarray(call(*given), np.float64)
    seen = [
        np.asarray(a, a.dtype if a.dtype.kind == "i" else np.float64) for a in given
    ]
    np.testing.assert_allclose(got, oracle(*seen), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 50), (2, 9, 17)])
def test_rows(shape, dtype):
    x, w, b = 4 * _normal(*shape) + 1, _normal(shape[-1]), _normal(shape[-1])
    loose = {"dtype": dtype, "rtol": 1e-5 if dtype == jnp.float32 else 8e-3}
    _close(jt.nn.softmax, layers.softmax, x, **loose)
    _close(jt.nn.layer_norm, layers.layer_norm, x, w, b, **loose)
    _close(jt.nn.rms_norm, layers.rms_norm, x, w, **loose)


def test_layer_norm_far_from_zero():
    x = _normal(4, 1000) + 3e4
    one, zero = np.ones(1000), np.zeros(1000)
    _close(jt.nn.layer_norm, layers.layer_norm, x, one, zero, atol=2e-3)


def _losses(x, w, labels):
    logits = x @ w
    top = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return total - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def test_cross_entropy_over_ragged_words():
    labels = RNG.integers(0, 1100, (2, 7))
    _close(jt.nn.cross_entropy, _losses, _normal(2, 7, 12), _normal(12, 1100), labels)


def test_cross_entropy_never_holds_the_logits():
    x, w = jnp.zeros((256, 8)), jnp.zeros((8, 8192))
    labels = jnp.zeros(256, jnp.int32)

    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars)
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                yield from sizes(inner) if hasattr(inner, "eqns") else ()

    loss = lambda x, w: jt.nn.cross_entropy(x, w, labels).sum()  # noqa: E731
    found = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)
    assert max(sizes(found.jaxpr)) < 256 * 8192


def _attend(q, k, v, lengths, causal):
    out = np.zeros(q.shape)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            n = lengths[b]
            keys, values = k[b, h // share, :n], v[b, h // share, :n]
            scores = q[b, h] @ keys.T / np.sqrt(q.shape[-1])
            if causal:
                i = np.arange(q.shape[2])[:, None]
                hidden = np.arange(n) > i + n - q.shape[2]
                scores = np.where(hidden, -np.inf, scores)
            seen = np.isfinite(scores).any(1)
            out[b, h, seen] = layers.softmax(scores[seen]) @ values
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [4, 128])
def test_attention(causal, block):
    q, k, v = _normal(2, 6, 9, 8), _normal(2, 2, 11, 8), _normal(2, 2, 11, 8)
    for lengths in (None, np.array([11, 3])):
        _close(
            lambda q, k, v, n=lengths: jt.nn.attention(
                q, k, v, causal=causal, lengths=n, block=block
            ),
            lambda q, k, v, n=lengths: _attend(
                q, k, v, [11, 11] if n is None else n, causal
            ),
            q,
            k,
            v,
        )


def _recur(x, decay, gate, rate):
    h, out = np.zeros((x.shape[0], x.shape[2])), np.zeros(x.shape)
    for t in range(x.shape[1]):
        a = np.exp(-8 * np.log1p(np.exp(rate)) / (1 + np.exp(-decay[:, t])))
        h = a * h + np.sqrt(1 - a * a) * x[:, t] / (1 + np.exp(-gate[:, t]))
        out[:, t] = h
    return out


def test_gated_recurrence():
    x, decay, gate = _normal(2, 300, 5), _normal(2, 300, 5) - 3, _normal(2, 300, 5)
    _close(jt.nn.gated_recurrence, _recur, x, decay, gate, _normal(5) - 2)


def test_linear_gelu():
    def oracle(a, b, bias):
        z = a @ b + bias
        return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))

    _close(
        jt.nn.linear_gelu, oracle, _normal(2, 70, 150), _normal(150, 131), _normal(131)
    )


def _plain_attention(q, k, v):
    mask = jnp.tril(jnp.ones((q.shape[2], k.shape[2]), bool))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ v


def _plain_norm(x, w, b):
    scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x - x.mean(-1, keepdims=True)) * scale * w + b


_GRADS = {
    "softmax": (jt.nn.softmax, jax.nn.softmax, [(3, 5)]),
    "layer_norm": (jt.nn.layer_norm, _plain_norm, [(3, 5), (5,), (5,)]),
    "attention": (
        lambda q, k, v: jt.nn.attention(q, k, v, causal=True, block=2),
        _plain_attention,
        [(1, 2, 4, 3)] * 3,
    ),
}


@pytest.mark.parametrize("name", _GRADS)
def test_derivatives(name):
    call, plain, shapes = _GRADS[name]
    args = [jnp.asarray(_normal(*s), jnp.float32) for s in shapes]
    same_derivatives(call, plain, *args, order=1, rtol=2e-4, atol=2e-5)


def test_derivative_of_a_recurrence():
    args = [jnp.asarray(_normal(1, 7, 3), jnp.float32) for _ in range(3)]
    rate = jnp.asarray(_normal(3), jnp.float32)

    def plain(x, decay, gate, rate):
        log_a = -8 * jax.nn.softplus(rate) * jax.nn.sigmoid(decay)
        a, b = (
            jnp.exp(log_a),
            jnp.sqrt(-jnp.expm1(2 * log_a)) * x * jax.nn.sigmoid(gate),
        )
        h, out = jnp.zeros((1, 3)), []
        for t in range(7):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return jnp.stack(out, 1)

    same_derivatives(
        jt.nn.gated_recurrence, plain, *args, rate, order=1, rtol=2e-4, atol=2e-5
    )


def test_shapes_that_do_not_fit():
    one, x = jnp.ones(3), jnp.ones((2, 3))
    q = jnp.ones((1, 3, 2, 4))
    for call, match in (
        (lambda: jt.nn.softmax(1.0), "an array with a last axis"),
        (lambda: jt.nn.softmax(jnp.ones((0, 3))), "no empty one"),
        (lambda: jt.nn.layer_norm(x, one, jnp.ones(2)), r"bias of shape \(3,\)"),
        (lambda: jt.nn.cross_entropy(x, x, one), r"w of shape \(3, words\)"),
        (lambda: jt.nn.cross_entropy(x, x.T, one), r"labels of shape \(2,\)"),
        (lambda: jt.nn.attention(q, q[:, :2], q[:, :2]), "k that fits q"),
        (lambda: jt.nn.attention(q, q, q, lengths=one), r"lengths of shape \(1,\)"),
        (lambda: jt.nn.gated_recurrence(x, x, x, one), "batch, time, lanes"),
        (lambda: jt.nn.linear_gelu(x, x, one), r"b of shape \(3, columns\)"),
    ):
        with pytest.raises(TileShapeError, match=match):
            call()


def test_attention_of_depth_one():
    q, k, v = _normal(1, 2, 3, 1), _normal(1, 1, 130, 1), _normal(1, 1, 130, 1)
    _close(jt.nn.attention, lambda *a: _attend(*a, [130], False), q, k, v)


def test_attention_in_blocks_beyond_the_keys():
    q, k, v = _normal(1, 1, 3, 2), _normal(1, 1, 5, 2), _normal(1, 1, 5, 2)
    call = lambda *a: jt.nn.attention(*a, block=10**6)  # noqa: E731
    _close(call, lambda *a: _attend(*a, [5], False), q, k, v)


def test_long_rows_far_beyond_the_root_of_the_largest():
    x, one = jnp.full((2, 40), 1e25), jnp.ones(40)
    got = _kernels.layer_norm(x, one, 3 * one, eps=1e-5, width=16)
    np.testing.assert_array_equal(got, 3 * np.ones((2, 40)))


def test_float64(x64):
    labels = np.array([2**32, 1, -(2**32), 8, 3])  # none of the first and third
    x, w, bias = _normal(5, 3), _normal(3, 9), _normal(9)
    inside = np.where((labels >= 0) & (labels < 9), labels, 0)
    picked = np.where(inside == labels, (x @ w)[np.arange(5), inside], 0)
    total = _losses(x, w, inside) + (x @ w)[np.arange(5), inside]
    loss = jt.nn.cross_entropy(x, w, labels)
    assert loss.dtype == np.float64
    np.testing.assert_allclose(loss, total - picked, rtol=1e-12)
    narrow = jt.nn.cross_entropy(jnp.float32(x), jnp.float32(w), labels)
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, total - picked, rtol=1e-5)
    z = x @ w + bias
    want = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    found = jt.nn.linear_gelu(x, w, bias)
    np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-12)
    mixed = jt.nn.cross_entropy(x, jnp.float32(w), labels)
    np.testing.assert_allclose(mixed, total - picked, rtol=1e-5)
    for call, names in (
        (lambda: jt.nn.attention(_Q, jnp.float32(_Q), _Q), "q, k, v"),
        (
            lambda: jt.nn.gated_recurrence(_Q[0], _Q[0], _Q[0], jnp.ones(2, "float32")),
            "x, decay, gate, rate",
        ),
    ):
        with pytest.raises(TileTypeError, match=f"expected {names} all of float64, or"):
            call()


_Q = np.ones((1, 1, 3, 2))
_X, _ONE, _L = jnp.ones((2, 3)), jnp.ones(3), jnp.zeros(2, int)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: jt.nn.softmax(_L), "softmax: expected x of floats; got int32. Cast"),
        (lambda: jt.nn.softmax(_X > 0), "softmax: expected x of floats; got bool"),
        (
            lambda: jt.nn.layer_norm(_X, _ONE.astype("int8"), _ONE),
            "layer_norm: expected weight of floats; got int8",
        ),
        (
            lambda: jt.nn.rms_norm(_X, _ONE.astype("float8_e5m2")),
            "rms_norm: expected an arithmetic format; got storage format float8_e5m2",
        ),
        (
            lambda: jt.nn.cross_entropy(_X, _X.T, jnp.ones(2)),
            "cross_entropy: expected labels of integers; got float32",
        ),
        (
            lambda: jt.nn.attention(_Q, _Q, np.int8(_Q)),
            "attention: expected v of floats; got int8",
        ),
        (
            lambda: jt.nn.attention(_Q, _Q, _Q, lengths=jnp.array([1.5])),
            "attention: expected lengths of integers; got float32",
        ),
        (
            lambda: jt.nn.attention(_Q, _Q, _Q, causal="no"),
            "attention: expected causal to be True or False; got 'no'",
        ),
        (
            lambda: jt.nn.attention(_Q, _Q, _Q, block=1.5),
            "attention: expected block an integer; got 1.5",
        ),
        (
            lambda: jax.grad(lambda s: jt.nn.attention(_Q, _Q, _Q, scale=s).sum())(0.5),
            "attention: expected scale a number; got a traced value. Multiply q",
        ),
        (
            lambda: jt.nn.gated_recurrence(_Q[0], np.int32(_Q[0]), _Q[0], jnp.ones(2)),
            "gated_recurrence: expected decay of floats; got int32",
        ),
        (
            lambda: jt.nn.linear_gelu(_X, _X.T, _L),
            "linear_gelu: expected bias of floats; got int32",
        ),
        (
            lambda: jt.nn.rms_norm(_X, _ONE, eps="a"),
            "rms_norm: expected eps a number; got 'a'",
        ),
        (
            lambda: jt.nn.layer_norm(_X, _ONE, _ONE, eps=_ONE),
            "layer_norm: expected eps a number; got Array",
        ),
        (
            lambda: jt.nn.rms_norm(_X, _ONE, eps=None),
            "rms_norm: expected eps a number; got None",
        ),
    ],
)
def test_values_that_do_not_fit(call, sentence):
    with pytest.raises(TileTypeError, match=sentence):
        call()


def test_tiles_are_no_operands():
    x = jt.tile(jnp.ones((2, 2)), jt.dims("rows cols"))
    for call in (
        lambda: jt.nn.softmax(x),
        lambda: jt.nn.rms_norm(jnp.ones((2, 2)), x),
        lambda: jt.nn.quantized_matmul(x, x),
    ):
        with pytest.raises(
            TileTypeError, match=r"got a tile of shape \(2, 2\).*\.array"
        ):
            call()


def test_what_lies_beyond_the_keys_is_not_seen():
    q, v = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 8, 4)).at[:, :, 5:].set(jnp.nan)
    for block in (4, 8, None):
        got = jt.nn.attention(q, v, v, lengths=jnp.array([4]), block=block)
        np.testing.assert_array_equal(got, jnp.ones_like(q))
    low = jt.nn.attention(
        1e16 * q, -1e16 * jnp.ones_like(v), jnp.ones_like(v), scale=1.0
    )
    np.testing.assert_array_equal(low, jnp.ones_like(q))


def test_labels_beyond_what_float32_counts():
    w = (jnp.arange(2**24 + 4) % 7)[None].astype(jnp.float32)
    label = jnp.array([2**24])
    got = jt.nn.cross_entropy(jnp.ones((1, 1)), w, label)
    want = jax.nn.logsumexp(w[0]) - w[0, 2**24]
    assert abs(got[0] - want) < 1e-3  # the label's neighbours are off by 1


def test_saturated_gates_keep_their_size(x64):
    x = jnp.full((1, 1, 1), 1e40)
    zero = jnp.zeros_like(x)
    got = jt.nn.gated_recurrence(x, zero, zero - 100.0, jnp.zeros(1, x.dtype))
    want = 1e40 * np.sqrt(1 - np.exp(-8 * np.log(2))) / (1 + np.exp(100.0))
    np.testing.assert_allclose(got[0, 0, 0], want, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("decay", [-60.0, -75.0, -80.0])
def test_what_closed_gates_let_in_keeps_its_size(x64, decay, dtype):
    x = jnp.ones((1, 2, 1), dtype)
    args = x, decay * x, 0 * x, jnp.zeros(1, dtype)
    got, pull = jax.vjp(jt.nn.gated_recurrence, *args)
    # a is 1 here, and 1 - a^2 twice the logarithm of 1 / a.
    root = 0.5 * np.sqrt(16 * np.log(2) * np.exp(decay))
    rtol = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(got[0, :, 0], [root, 2 * root], rtol=rtol)
    dx, ddecay, dgate, _ = pull(x)
    for grad, part in ((dx, 1), (ddecay, 0.5), (dgate, 0.5)):
        want = np.multiply([2, 1], part * root)
        np.testing.assert_allclose(grad[0, :, 0], want, rtol=rtol)


@pytest.mark.parametrize("open_by", [17.0, 25.0, 60.0])
def test_what_open_gates_still_feel_keeps_its_size(open_by):
    x = jnp.ones((1, 1, 1), "float32")
    args = x, open_by * x, open_by * x, jnp.full(1, -3.0, "float32")
    _, _, ddecay, dgate = (g.item() for g in _with_gates(*args))
    slow, rest = -8 * np.log1p(np.exp(-3.0)), 1 / (1 + np.exp(open_by))
    a = np.exp(slow * (1 - rest))
    root = np.sqrt(1 - a * a)
    np.testing.assert_allclose(ddecay, -a * a * slow / root * rest, rtol=1e-5)
    np.testing.assert_allclose(dgate, root * rest, rtol=1e-5)


def _with_gates(*args):
    y, pull = jax.vjp(jt.nn.gated_recurrence, *args)
    dx, ddecay, dgate, _ = pull(jnp.ones_like(y))
    return y, dx, ddecay, dgate
