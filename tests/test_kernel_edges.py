"""What a kernel refuses: ragged blocks where no edge is skipped, and settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError

X = jnp.arange(273.0).reshape(13, 21)


def _one(body, x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jt.kernel(out=out)(body)(x)


def test_a_ragged_dim_is_no_domain():
    def body(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        x.tile(r, c).load().domain(r.dim)

    with pytest.raises(TileShapeError, match="ragged blocks of 4 over 13"):
        _one(body, X)


@pytest.mark.parametrize(
    "op",
    [
        lambda t, d: jt.sort(t, d),
        lambda t, d: jt.argsort(t, d),
        lambda t, d: jt.topk(t, d, 2).values,
        lambda t, d: jt.gather(t, 0, d),
        lambda t, d: jt.scatter(t, jnp.zeros(4, int), d, {jt.Dim("s"): 2}, jt.add),
        lambda t, d: jt.shift(t, d, 1),
        lambda t, d: jt.flip(t, d),
    ],
    ids="sort argsort topk gather scatter shift flip".split(),
)
def test_a_ragged_dim_is_not_ordered_or_moved(op):
    def body(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        op(x.tile(r, c).load(), r.dim)

    with pytest.raises(TileShapeError, match="ragged blocks of 4"):
        _one(body, X)


def _copy(nest, x, y, *, block=4):
    i = nest.parallel(x.shape[0], block)
    y.tile(i).store(x.tile(i).load())


_X = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (
            lambda: jt.kernel(out=lambda x: x, tuned=["triton"])(_copy),
            TileTypeError,
            "kernel: expected tuned a mapping of keyword arguments.*got ..triton",
        ),
        (
            lambda: jt.kernel(out=lambda x: x, tuned={"gpu": {}})(_copy),
            TileValueError,
            "kernel: expected tuned for an implementation in .'reference'.*got 'gpu'",
        ),
        (
            lambda: jt.kernel(out=lambda x: x, tuned={"triton": 3})(_copy)(_X),
            TileTypeError,
            r"_copy: expected tuned\['triton'\] a mapping.*got 3",
        ),
        (
            lambda: jt.kernel(out=lambda x: x, tuned={"reference": lambda: {}})(_copy)(
                _X
            ),
            TileTypeError,
            "_copy: expected the arguments of <lambda>",
        ),
        (
            lambda: copy(_X, block=np.array([4])),
            TileTypeError,
            "_copy: expected block a value known while tracing, that hashes; got a ndarr",
        ),
        (
            lambda: jax.jit(lambda b: copy(_X, block=b))(4),
            TileTypeError,
            "_copy: expected block a value known while tracing",
        ),
        (
            lambda: copy(_X, num_warps=3),
            TileValueError,
            "_copy: expected num_warps a power of two; got 3. Leave it out",
        ),
        (
            lambda: copy(_X, num_stages="a", implementation="triton"),
            TileTypeError,
            "_copy: expected num_stages an integer; got 'a'",
        ),
    ],
)
def test_settings_that_do_not_fit(call, kind, sentence):
    with pytest.raises(kind, match=sentence):
        call()


copy = jt.kernel(out=lambda x: x)(_copy)


def test_settings_are_told_apart_by_their_bits():
    @jt.kernel(out=lambda x: x)
    def fill(nest, x, y, *, v=0.0):
        rows = nest.parallel(x.shape[0], 2)
        y.tile(rows).store(nest.full(rows, v, x.dtype))

    x = jnp.ones(3)
    assert not np.signbit(fill(x, v=0.0)).any()
    assert np.signbit(fill(x, v=-0.0)).all()


@pytest.mark.parametrize("through", [jax.jit, jax.vmap, jax.grad])
def test_a_tuned_kernel_may_close_over_a_traced_value(through):
    def call(c):
        @jt.kernel(out=lambda x: x, tuned={"triton": {"block": 4}})
        def shifted(nest, x, y, *, block=2):
            rows = nest.parallel(x.shape[0], block)
            y.tile(rows).store(x.tile(rows).load() + c)

        return shifted(jnp.ones(3)).sum()

    want = {jax.jit: 9.0, jax.vmap: np.array([9.0, 12.0]), jax.grad: 3.0}[through]
    c = jnp.array([2.0, 3.0]) if through is jax.vmap else jnp.float32(2)
    np.testing.assert_array_equal(through(call)(c), want)


def _states(nest, x, y, low):
    rows = nest.parallel(x.shape[0], 4)
    start = nest.full(rows, jnp.inf, x.dtype)

    @nest.serial(x.shape[1], 5, init=start, start=rows.start * 0)
    def least(cols, s):
        t = x.tile(rows, cols).load()
        return jt.minimum(s, jt.reduce(t, cols.dim, jt.minimum))

    @nest.serial(x.shape[1], 5)
    def _(cols):
        y.tile(rows, cols).store(x.tile(rows, cols).load() * 2)

    low.tile(rows).store(least)


@pytest.mark.parametrize("name", [None, "interpret"])
def test_no_tracer_outlives_its_trace(name):
    out = (X, jax.ShapeDtypeStruct(X.shape[:1], X.dtype))
    kernel = jt.kernel(out=out)(_states)
    with jax.checking_leaks():
        double, low = kernel(X, implementation=name)
        slope = jax.grad(lambda x: kernel(x, implementation=name)[1].sum())(X)
        heads = X[None, None]
        attended = jax.jit(jt.nn.attention)(heads, heads, heads)
    np.testing.assert_array_equal(double, 2 * X)
    np.testing.assert_array_equal(low, X[:, 0])
    np.testing.assert_array_equal(slope, np.arange(21) == np.zeros((13, 1)))
    np.testing.assert_array_equal(attended[0, 0, -1], X[-1])
