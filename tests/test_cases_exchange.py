"""Reports from the field about gathers, segments and moves, by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt


def test_c30_linear_transposes():
    x = jnp.arange(3.0)
    gather = lambda x: jt.gather(x, jnp.array([0, 0, 2]), 0)  # noqa: E731
    ct = jnp.array([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(jax.linear_transpose(gather, x)(ct)[0], [3, 0, 3])
    flip = lambda x: jt.reindex(x, 2, lambda i: 2 - i)  # noqa: E731
    np.testing.assert_array_equal(jax.linear_transpose(flip, x)(ct[:2])[0], [0, 2, 1])

    def normal(v):  # the normal operator of a banded matrix, which cg needs
        a = lambda v: 3 * v + jt.shift(v, 0, 1)  # noqa: E731
        return jax.linear_transpose(a, v)(a(v))[0]

    b = jnp.array([1.0, -2.0, 0.5])
    got, _ = jax.scipy.sparse.linalg.cg(normal, b)
    a = np.array([[3, 0, 0], [1, 3, 0], [0, 1, 3]])
    np.testing.assert_allclose(got, np.linalg.solve(a.T @ a, b), rtol=1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_c46_a_gather_is_a_bit_copy(wrap):
    gather = wrap(lambda x, i: jt.gather(x, i, 0))
    zero = jnp.array([0])
    assert float(gather(jnp.array([1, jnp.nan, 3]), zero)[0]) == 1
    x = jnp.array([1 + 2.0**-12, jnp.inf])
    assert float(gather(x, zero)[0]) == 1.000244140625


def test_c47_one_rule_for_what_is_outside():
    """Strict: negative ones too are outside."""
    got = jt.gather(jnp.arange(5), jnp.array([10, -6, -1]), 0, fill=0)
    np.testing.assert_array_equal(got, [0, 0, 0])
    i = jnp.array([-5, -4, -1, 3, 4])
    for dtype in (jnp.float32, jnp.int32):
        got = jt.gather(jnp.ones(4, dtype), i, 0, fill=-10)
        np.testing.assert_array_equal(got, [-10, -10, -10, 1, -10])
    clipped = jt.gather(jnp.arange(5), jnp.clip(jnp.array([10, -6, -1]), 0, 4), 0)
    np.testing.assert_array_equal(clipped, [4, 0, 0])


def test_c71_segments_with_any_reducer():
    ids = jnp.array([0, 0, 2])

    def f(x):
        return jt.segment_reduce(x, ids, 3, jt.logaddexp)

    x = jnp.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(f(x), [1.3132617, -np.inf, 2], rtol=1e-6)
    g = jax.grad(lambda x: f(x)[0] + f(x)[2])(x)
    np.testing.assert_allclose(g, [0.2689414, 0.7310586, 1], rtol=1e-6)


def test_c73_runs_agree():
    k = jnp.arange(1, 100_003)
    x = jnp.asarray(np.modf(np.pi * np.arange(1, 100_003))[0], jnp.float32)
    runs = [jt.segment_reduce(x, k % 17, 17, jt.add) for _ in range(3)]
    assert len({np.asarray(r).tobytes() for r in runs}) == 1


def test_c80_an_index_has_no_cotangent():
    x, i = jnp.arange(3.0), jnp.array([2, 0])
    y, dy = jax.jvp(
        lambda x, i: jt.gather(x, i, 0),
        (x, i),
        (x, np.zeros(2, jax.dtypes.float0)),
    )
    np.testing.assert_array_equal(dy, y)
    g = jax.grad(lambda i: jt.gather(x, i, 0).sum(), allow_int=True)(i)
    assert g.dtype == jax.dtypes.float0
    ints = jax.jvp(
        lambda n: jt.gather(n, i, 0), (i,), (np.zeros(2, jax.dtypes.float0),)
    )
    assert ints[1].dtype == jax.dtypes.float0


def test_c83_shapes_of_kernels():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 1000)).astype(np.float32)
    column = rng.integers(0, 1000, (128, 1))
    got = jt.gather(x, column, 1, batch="all")
    np.testing.assert_array_equal(got, np.take_along_axis(x, column, 1))
    table = rng.standard_normal((256, 128)).astype(np.float32)
    ids = rng.integers(0, 256, 32)
    np.testing.assert_array_equal(jt.take(table, ids, 0), table[ids])
