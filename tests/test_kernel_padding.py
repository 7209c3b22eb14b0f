"""What lies outside of a ragged block, where derivatives of padding are no numbers.

A load gives 0 there. Logarithms and reciprocals of that have no finite derivative, which
may not reach what all elements of a block share.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from jaxtile import _kernels

X = np.arange(1.0, 6.0, dtype=np.float32)  # five elements, in blocks of two
S = 2.5
NAMES = (None, "interpret")


def _shared(body):
    @jt.kernel(out=lambda x, s: x)
    def kernel(nest, x, s, y):
        r = nest.parallel(x.shape[0], 2)
        y.tile(r).store(body(nest, r, x.tile(r).load(), s))

    return kernel


def _closure(nest, r, t, s):
    scale = s.at()
    return jt.map(lambda v: jnp.log(v) * scale, t)


def _seed(nest, r, t, s):
    pair = jt.Dim("pair")
    twice = jt.tile(jnp.stack([t.array, t.array]), (pair, r.dim))
    return jt.reduce(twice, pair, jt.add, init=s.at()) / t


def _spread(nest, r, t, s):
    return jt.log(t) * jt.broadcast(jt.tile(s.at(), ()), {r.dim: t.shape[0]})


LOG = np.log(X, dtype=np.float64).sum()
RECIPROCAL = (1 / X.astype(np.float64)).sum()
BODIES = {
    "product": (lambda nest, r, t, s: jt.log(t) * s.at(), LOG),
    "quotient": (lambda nest, r, t, s: s.at() / t, RECIPROCAL),
    "closure": (_closure, LOG),
    "full": (lambda nest, r, t, s: nest.full(r, s.at(), t.dtype) / t, RECIPROCAL),
    "seed": (_seed, RECIPROCAL),
    "broadcast": (_spread, LOG),
    "ite": (
        lambda nest, r, t, s: jt.ite(t > 2, s.at(), jt.log(t)) / t,
        (1 / X[2:].astype(np.float64)).sum(),
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", BODIES)
def test_what_instances_share_has_the_derivative_of_what_lies_inside(case, name):
    body, wanted = BODIES[case]
    kernel = _shared(body)
    got = jax.grad(lambda s: kernel(X, s, implementation=name).sum())(S)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_second_derivatives_too():
    kernel = _shared(lambda nest, r, t, s: jt.log(t) * s.at() * s.at())
    got = jax.hessian(lambda s: kernel(X, s).sum())(S)
    np.testing.assert_allclose(got, 2 * LOG, rtol=1e-5)


def test_a_state_that_meets_a_ragged_block():
    @jt.kernel(out=lambda x, s: jax.ShapeDtypeStruct((), x.dtype))
    def kernel(nest, x, s, y):
        @nest.serial(x.shape[0], 2, init=s.at())
        def total(c, state):
            return state + jt.reduce(jt.log(x.tile(c).load()) * state, c.dim, jt.add)

        y.tile().store(total)

    wanted = np.prod([1 + np.log(X[i : i + 2]).sum() for i in (0, 2, 4)])
    np.testing.assert_allclose(jax.grad(kernel, 1)(X, S), wanted, rtol=1e-5)


def test_a_table_that_a_ragged_block_reads():
    @jt.kernel(out=lambda i, table: jax.ShapeDtypeStruct(i.shape, table.dtype))
    def kernel(nest, i, table, y):
        r, words = nest.parallel(i.shape[0], 2), jt.Dim("words")
        found = jt.gather(table.tile(words).load(), i.tile(r).load(), words)
        y.tile(r).store(jt.log(found))

    index, table = jnp.array([1, 2, 1, 2, 1]), jnp.array([0.0, 1.0, 2.0])
    got = jax.grad(lambda t: kernel(index, t).sum())(table)
    np.testing.assert_allclose(got, [0, 3, 1], rtol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_factors_of_a_product_with_ragged_rows_and_columns(place):
    @jt.kernel(out=lambda a, b: jax.ShapeDtypeStruct((len(a), b.shape[1]), a.dtype))
    def kernel(nest, a, b, y):
        m, n = nest.parallel(a.shape[0], 2), nest.parallel(b.shape[1], 2)
        k = jt.Dim("k")
        t = jt.log(a.tile(m, k).load())
        product = jt.mma(t, b.tile(k, n).load(), spec=[m.dim, n.dim])
        y.tile(m, n).store(jt.log(product))

    rng = np.random.default_rng(7)
    a, b = rng.uniform(2, 3, (3, 4)), rng.uniform(2, 3, (4, 5))
    dz = 1 / (np.log(a) @ b)
    wanted = (dz @ b.T / a, np.log(a).T @ dz)[place]
    got = jax.grad(lambda *v: kernel(*v).sum(), place)(
        *(jnp.asarray(v, jnp.float32) for v in (a, b))
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_softmax_by_pieces_whose_padding_overflows():
    x = np.random.default_rng(3).standard_normal((3, 50)) - 100  # exp(0 + 100) is inf
    up = np.random.default_rng(4).standard_normal((3, 50))
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    wanted = p * (up - (p * up).sum(1, keepdims=True))

    def loss(v):
        return (_kernels.softmax(v, width=16) * jnp.asarray(up, jnp.float32)).sum()

    got = jax.grad(loss)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_cross_entropy_of_words_that_are_ruled_out():
    w = np.array([[1.0, -np.inf, 2.0]], np.float32)
    x, labels = jnp.ones((1, 1)), jnp.array([2])
    got = jax.grad(lambda w: jt.nn.cross_entropy(x, w, labels).sum())(w)
    p = np.exp([1.0, -np.inf, 2.0])
    p /= p.sum()
    np.testing.assert_allclose(got, [p - [0, 0, 1]], rtol=1e-5)
