"""Derivatives that a kernel's author gives, against those of plain jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError

RNG = np.random.default_rng(23)
X = jnp.asarray(RNG.standard_normal((6, 9)), jnp.float32)
W = jnp.asarray(RNG.standard_normal(9), jnp.float32)
NAMES = (None, "reference", "interpret")


def _body(nest, x, w, y, *, gain, block=4):
    rows, cols = nest.parallel(x.shape[0], block), jt.Dim("cols")
    t = jt.tanh(x.tile(rows, cols).load())
    y.tile(rows, cols).store(t * w.tile(cols).load() * gain)


@jt.kernel(out=lambda x, w: (x, x))
def saving(nest, x, w, y, saved, *, gain, block=4):
    rows, cols = nest.parallel(x.shape[0], block), jt.Dim("cols")
    t = jt.tanh(x.tile(rows, cols).load())
    y.tile(rows, cols).store(t * w.tile(cols).load() * gain)
    saved.tile(rows, cols).store(t)


@jt.kernel(out=lambda t, w, dy: (t, w))
def backward(nest, t, w, dy, dx, dw, *, gain, block=4):
    cols, rows = nest.parallel(t.shape[1], block), jt.Dim("rows")
    tile, up = t.tile(rows, cols).load(), dy.tile(rows, cols).load() * gain
    dx.tile(rows, cols).store(up * w.tile(cols).load() * (1.0 - tile * tile))
    dw.tile(cols).store(jt.reduce(up * tile, rows, jt.add))


def _forward(x, w, **config):
    y, t = saving(x, w, **config)
    return y, (t, w)


@pytest.fixture
def scaled():
    """gain * w * tanh(x), whose derivative is a kernel."""
    made = jt.kernel(out=lambda x, w: x)(_body)
    made.defvjp(_forward, backward)
    return made


def _plain(x, w, gain=3.0):
    return gain * w * jnp.tanh(x)


def _grads(fn):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w))), (0, 1))


def _close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_and_a_kernel_give_the_derivative(scaled, name):
    fn = lambda x, w: scaled(x, w, gain=3.0, block=2, implementation=name)  # noqa: E731
    _close(fn(X, W), _plain(X, W))
    _close(_grads(fn)(X, W), _grads(_plain)(X, W))
    _close(jax.jit(_grads(fn))(X, W), _grads(_plain)(X, W))
    many = jnp.stack([X, 2 * X, X - 1])
    for axes in ((0, None), (1, None)):
        got = jax.jit(jax.vmap(_grads(fn), axes))(jnp.moveaxis(many, 0, axes[0]), W)
        _close(got, jax.vmap(_grads(_plain), (0, None))(many, W))
    batched = lambda f: lambda x, w: jax.vmap(f, (0, None))(x, w)  # noqa: E731
    _close(_grads(batched(fn))(many, W), _grads(batched(_plain))(many, W))


def test_both_rules_are_what_runs(scaled):
    text = jax.make_jaxpr(_grads(lambda x, w: scaled(x, w, gain=3.0)))(
        X, W
    ).pretty_print()
    assert text.count("tile_reduce[") == 1
    kernels = jax.make_jaxpr(
        _grads(lambda x, w: scaled(x, w, gain=3.0, implementation="interpret"))
    )(X, W)
    assert str(kernels).count("pallas_call[") == 2


def test_second_derivatives_go_through_the_rule(scaled):
    def second(fn):
        inner = lambda x, w: jnp.sum(jnp.cos(_grads(fn)(x, w)[0]))  # noqa: E731
        return jax.jit(jax.grad(inner, (0, 1)))(X, W)

    _close(second(lambda x, w: scaled(x, w, gain=3.0)), second(_plain))


@jt.kernel(out=lambda x: (x, x))
def exp_forward(nest, x, y, saved, **_):
    i = nest.parallel(x.shape[0], 4)
    t = jt.exp(x.tile(i).load())
    y.tile(i).store(t)
    saved.tile(i).store(t)


@jt.kernel(out=lambda y, dy: y)
def exp_backward(nest, y, dy, dx, *, weight=1.0, **_):
    i = nest.parallel(y.shape[0], 4)
    dx.tile(i).store(y.tile(i).load() * dy.tile(i).load() * weight)


def _exp():
    @jt.kernel(out=lambda x: x)
    def exp(nest, x, y, *, weight=1.0):
        i = nest.parallel(x.shape[0], 4)
        y.tile(i).store(jt.exp(x.tile(i).load()))

    return exp


@pytest.mark.parametrize("name", NAMES)
def test_two_kernels_and_one_operand(name):
    exp = _exp()
    run = lambda x, **kw: exp(x, implementation=name, **kw)  # noqa: E731
    grad = lambda **kw: jax.grad(lambda x: jnp.sum(run(x, **kw)))(W)  # noqa: E731
    _close(grad(), jnp.exp(W))
    exp.defvjp(exp_forward, exp_backward)
    _close(
        grad(weight=5.0), 5 * jnp.exp(W)
    )  # the rule's, and it sees the call's config
    exp.defvjp(
        lambda x, weight=1.0: (exp(x), None), lambda _, dy, weight=1.0: (7 * dy,)
    )
    _close(grad(weight=5.0), jnp.full(9, 7.0))  # the last one given
    exp.defvjp(lambda x: (exp(x), x), lambda x, dy: (None,))
    _close(grad(), jnp.zeros(9))


ROWS, COLS = jt.dims("rows cols")


@jt.kernel(out=lambda x, n: (x, n))
def repeated(nest, x, n, y, same):
    r, c = nest.parallel(ROWS, 4), COLS
    count = n.tile(r).load()
    y.tile(r, c).store(x.tile(r, c).load() * jt.cast(count, jnp.float32))
    same.tile(r).store(count)


@jt.kernel(out=lambda n, dy: (dy, None))
def repeated_back(nest, n, dy, dx):
    r, c = nest.parallel(ROWS, 4), COLS
    times = jt.cast(n.tile(r).load(), jnp.float32) * 10.0
    dx.tile(r, c).store(dy.tile(r, c).load() * times)


@pytest.mark.parametrize("name", NAMES)
def test_tiles_and_integers(name):
    made = jt.kernel(out=repeated.out)(repeated.body)
    made.defvjp(lambda x, n: (made(x, n), n), repeated_back)
    x, n = jt.tile(X, (ROWS, COLS)), jnp.arange(6, dtype=jnp.int32)

    def loss(x):
        y, same = made(x, n, implementation=name)
        return jnp.sum(y.array * W) + jnp.sum(same)

    got = jax.jit(jax.grad(loss))(x)
    assert got.dims == (ROWS, COLS)
    _close(got.array, 10.0 * n[:, None] * W * jnp.ones_like(X))


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_beside_a_rule(name):
    made = jt.kernel(out=repeated.out)(repeated.body)

    def backward(n, dy):
        rows = jt.tile(n, (ROWS,)).array[:, None]
        return jt.tile(dy[0].array * rows, dy[0].dims), None

    made.defvjp(lambda x, n: (made(x, n), n), backward, forward_mode=True)
    x, n = jt.tile(X, (ROWS, COLS)), jnp.arange(6, dtype=jnp.int32)
    want = n[:, None] * W * jnp.ones_like(X)

    def loss(x):
        y, same = made(x, n, implementation=name)
        return jnp.sum(y.array * W) + jnp.sum(same)

    got = jax.jit(jax.grad(loss))(x)
    assert got.dims == (ROWS, COLS)
    _close(got.array, want)
    _close(jax.jvp(loss, (x,), (x,))[1], jnp.sum(X * want))
    made.defvjp(lambda x, n: (made(x, n), n), lambda n, dy: (None, None))
    _close(jax.grad(loss)(x).array, jnp.zeros_like(X))
    made.defvjp(
        lambda x, n: (made(x, n), n), lambda n, dy: (None, None), forward_mode=True
    )
    _close(jax.grad(loss)(x).array, jnp.zeros_like(X))
    with pytest.raises(TileTypeError, match="forward_mode to be True or False; got 1"):
        made.defvjp(backward, backward, forward_mode=1)


def test_config_and_explain_see_it():
    exp = _exp()
    exp.defvjp(exp_forward, exp_backward)
    assert [e.op for e in jt.explain(lambda x: exp(x))(W)] == ["map"]
    report = jt.explain(jax.grad(lambda x: jnp.sum(exp(x, weight=2.0))))(W)
    assert "map" in {e.op for e in report}
    assert jt.tune(exp, (W,), {"weight": [1.0, 2.0]})["weight"] in (1.0, 2.0)


_GOOD = (lambda x: (x, x), lambda r, dy: (dy,))
_WRONG = {
    "no pair": (
        (lambda x: x, _GOOD[1]),
        TileTypeError,
        r"exp.defvjp: expected fwd to return \(results, residuals\); got float32\[9\]. R",
    ),
    "results of another shape": (
        (lambda x: (x[1:], x), _GOOD[1]),
        TileShapeError,
        r"fwd's results like the kernel's, float32\[9\]; got float32\[8\]. Return",
    ),
    "results of another dtype": (
        (lambda x: (jnp.int32(x), x), _GOOD[1]),
        TileTypeError,
        r"the kernel's, float32\[9\]; got int32\[9\]",
    ),
    "results of another structure": (
        (lambda x: ((x, x), x), _GOOD[1]),
        TileTypeError,
        r"float32\[9\]; got \(float32\[9\], float32\[9\]\)",
    ),
    "a residual that is no array": (
        (lambda x: (x, "x"), _GOOD[1]),
        TileTypeError,
        "exp.defvjp: expected arrays, tiles or numbers; got str",
    ),
    "too many cotangents": (
        (_GOOD[0], lambda r, dy: (dy, dy)),
        TileTypeError,
        r"bwd to return a cotangent for each of 1 operands; got .float32.*None w",
    ),
    "nothing": ((_GOOD[0], lambda r, dy: None), TileTypeError, "operands; got None"),
    "a cotangent of another shape": (
        (_GOOD[0], lambda r, dy: (dy[:2],)),
        TileShapeError,
        r"bwd's cotangent like operand 0, float32\[9\]; got float32\[2\]",
    ),
    "a cotangent of another dtype": (
        (_GOOD[0], lambda r, dy: (dy.astype(jnp.bfloat16),)),
        TileTypeError,
        r"operand 0, float32\[9\]; got bfloat16\[9\]",
    ),
    "other keyword arguments": (
        (lambda x, block: (x, x), _GOOD[1]),
        TileTypeError,
        "the arguments of <lambda>.x, block.; got .*'block'",
    ),
    "a kernel of other operands": (
        (_GOOD[0], exp_forward),
        TileTypeError,
        "exp_forward: expected the arguments of <lambda>.x.; got too many",
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_rule_that_does_not_fit(name):
    rules, error, match = _WRONG[name]
    exp = _exp()
    exp.defvjp(*rules)
    config = {"weight": 1.0} if "keyword" in name else {}
    with pytest.raises(error, match=match):
        jax.grad(lambda x: jnp.sum(exp(x, **config)))(W)


def test_an_integer_operand_has_no_cotangent():
    made = jt.kernel(out=repeated.out)(repeated.body)
    made.defvjp(lambda x, n: (made(x, n), n), lambda n, dy: (dy[0], n))
    x, n = jt.tile(X, (ROWS, COLS)), jnp.arange(6, dtype=jnp.int32)
    with pytest.raises(TileTypeError, match=r"operand 1, None; got int32\[6\]"):
        jax.grad(lambda x: jnp.sum(made(x, n)[0].array))(x)
    made.defvjp(lambda x, n: (made(x, n), n), lambda n, dy: (dy[0].array, None))
    with pytest.raises(
        TileTypeError, match="operand 0, .* with dims .rows, cols.; got"
    ):
        jax.grad(lambda x: jnp.sum(made(x, n)[0].array))(x)


def test_a_rule_is_two_functions():
    for given in ((3, _GOOD[1]), (_GOOD[0], None)):
        with pytest.raises(TileTypeError, match="exp.defvjp: expected .wd; got"):
            _exp().defvjp(*given)
