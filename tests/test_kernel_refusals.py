"""What a kernel refuses says the way out, in place of a raw error or a wrong value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import (
    NoDerivativeError,
    TileShapeError,
    TileTypeError,
    TileValueError,
    UnsupportedOnBackend,
)

X = jnp.arange(10.0).reshape(5, 2)


def _kernel(body):
    return jt.kernel(out=lambda x, *_: x)(body)


def _copy(nest, x, y, *, block=2):
    i, cols = nest.parallel(x.shape[0], block), jt.Dim("cols")
    y.tile(i, cols).store(x.tile(i, cols).load())


copy = _kernel(_copy)


def _by_handle(nest, x, y):
    i, cols = nest.parallel(x.shape[0], 2), jt.Dim("cols")
    jt.reduce(x.tile(i, cols).load(), i, jt.add)


def _unasked_state(nest, x, y):
    nest.serial(x.shape[0])(lambda handle, state: state)


def _no_state(nest, x, y):
    nest.pipeline(x.shape[0], init=0.0)(lambda handle: 0.0)


def _beyond(place):
    def body(nest, x, y):
        cols = jt.Dim("cols")
        y.tile(place, cols).store(x.tile(0, cols).load())

    return _kernel(body)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (
            lambda: copy(X, blok=2),
            TileTypeError,
            r"keywords blok; got _copy\(nest, x, y, \*, block=2\): an unexpected",
        ),
        (lambda: copy(X, X), TileTypeError, r"2 operands, 1 results; got _copy\(nest,"),
        (
            lambda: copy(X, implementation="cuda"),
            TileValueError,
            "implementation in .*'interpret'.*got 'cuda'.*run it as plain jax",
        ),
        (lambda: _kernel(_by_handle)(X), TileTypeError, r"Pass its \.dim"),
        (
            lambda: _kernel(_unasked_state)(X),
            TileTypeError,
            r"nest.serial: expected a body of \(handle\).*got .*\(handle, state\)",
        ),
        (
            lambda: _kernel(_no_state)(X),
            TileTypeError,
            r"nest.pipeline: expected a body of \(handle, state\).*got .*\(handle\)",
        ),
        (lambda: _beyond(-1)(X), TileShapeError, r"in \[0, 5\) of axis 0; got -1"),
        (lambda: _beyond(5)(X), TileShapeError, r"in \[0, 5\) of axis 0; got 5"),
    ],
)
def test_sentences(call, kind, sentence):
    with pytest.raises(kind, match=sentence):
        call()


def test_numpy_integers_are_coordinates():
    body = _beyond(np.int64(3))
    np.testing.assert_array_equal(body(X)[3], X[0])


@pytest.mark.parametrize(
    ("args", "space", "options", "kind", "sentence"),
    [
        (X, {"block": [1]}, {}, TileTypeError, r"operands in a tuple.*\(x,\)"),
        ((X,), {"block": 4}, {}, TileValueError, "lists of values that hash"),
        ((X,), {"block": [[1], [2]]}, {}, TileValueError, "lists of values that hash"),
        ((X,), {"block": [1]}, {"rounds": 0}, TileValueError, "rounds at least 1"),
        ((X,), {"block": [1]}, {"rounds": 1.5}, TileTypeError, "rounds an integer"),
    ],
)
def test_what_tune_refuses(args, space, options, kind, sentence):
    with pytest.raises(kind, match=f"tune: expected .*{sentence}"):
        jt.tune(copy, args, space, **options)


def test_tune_takes_numbers():
    @jt.kernel(out=lambda x, s: x)
    def scale(nest, x, s, y, *, block):
        i, cols = nest.parallel(x.shape[0], block), jt.Dim("cols")
        y.tile(i, cols).store(x.tile(i, cols).load() * s.at())

    assert jt.tune(scale, (X, 2.0), {"block": [2]}, rounds=1) == {"block": 2}


@pytest.mark.parametrize(
    "closed", [jnp.float32(2), np.ones(2, np.float32)], ids=["scalar", "array"]
)
def test_a_pallas_kernel_closes_over_no_array(closed):
    @_kernel
    def body(nest, x, y):
        i, cols = nest.parallel(x.shape[0], 2), jt.Dim("cols")
        with_dims = jt.tile(closed, (cols,) * closed.ndim)
        y.tile(i, cols).store(x.tile(i, cols).load() * with_dims)

    np.testing.assert_array_equal(body(X), X * closed)
    with pytest.raises(UnsupportedOnBackend, match="Make the array an operand"):
        body(X, implementation="interpret")


@pytest.mark.parametrize("name", [None, "interpret"])
def test_a_batch_of_nothing(name):
    def call(x):
        return copy(x, implementation=name)

    assert jax.vmap(call)(jnp.zeros((0, 5, 2))).shape == (0, 5, 2)
    assert jax.vmap(jax.vmap(call))(jnp.zeros((3, 0, 5, 2))).shape == (3, 0, 5, 2)
    grad = jax.vmap(jax.grad(lambda x: call(x).sum()))
    assert jax.jit(grad)(jnp.zeros((0, 5, 2))).shape == (0, 5, 2)


@pytest.fixture
def ruled():
    """x * w, with a rule for reverse mode."""

    @jt.kernel(out=lambda x, w: x)
    def times(nest, x, w, y):
        i, cols = nest.parallel(x.shape[0], 2), jt.Dim("cols")
        y.tile(i, cols).store(x.tile(i, cols).load() * w.tile(cols).load())

    times.defvjp(
        lambda x, w: (times(x, w), (x, w)),
        lambda kept, dy: (dy * kept[1], (dy * kept[0]).sum(0)),
    )
    return times


@pytest.mark.parametrize(
    "mode",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jit(jax.jacfwd(f))(x),
        lambda f, x: jax.hessian(lambda v: f(v).sum())(x),
        lambda f, x: jax.linearize(f, x)[1](x),
    ],
    ids="jvp jacfwd hessian linearize".split(),
)
def test_forward_mode_through_a_rule_for_reverse_mode(ruled, mode):
    with pytest.raises(NoDerivativeError, match="defvjp: .*forward_mode=True"):
        mode(lambda x: ruled(x, jnp.ones(2)), X)


def test_reverse_mode_takes_the_rule_through_every_transformation(ruled):
    w = jnp.array([2.0, 3.0])

    def loss(x, w):
        def step(c, _):
            return ruled(c, w), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, None, length=2)[0])

    # sum of x_ij w_j^2
    for through in (lambda f: f, jax.jit):
        dx, dw = through(jax.grad(loss, (0, 1)))(X, w)
        np.testing.assert_allclose(dx, np.broadcast_to(w**2, X.shape))
        np.testing.assert_allclose(dw, 2 * w * X.sum(0))
    both = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(jnp.stack([X, 2 * X]), w)
    np.testing.assert_allclose(both[1], [2 * w * X.sum(0), 4 * w * X.sum(0)])
    # Not in a scan, where jax loses the order of residuals: it does so without kernels too.
    twice = jax.grad(lambda w: ruled(ruled(X, w), w).sum())
    np.testing.assert_allclose(jax.jacrev(twice)(w), np.diag(2 * X.sum(0)))
    undone = jax.linear_transpose(
        lambda dy: jax.vjp(lambda x: ruled(x, w), X)[1](dy)[0], X
    )
    np.testing.assert_allclose(undone(X)[0], X * w)
