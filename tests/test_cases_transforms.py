"""Reports from the field about transformations and kernels, by number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
from oracle import same_bits


def _kernel(fn, out_shape):
    """`fn` as the body of an interpreted kernel over whole arrays."""
    out_shape = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(*v), out_shape, is_leaf=_pair
    )
    count = len(jax.tree.leaves(out_shape))

    def body(*refs):
        ins, outs = refs[:-count], refs[-count:]
        results = jax.tree.leaves(fn(*(r[...] for r in ins)))
        for ref, value in zip(outs, results, strict=True):
            ref[...] = value

    return pl.pallas_call(body, out_shape=out_shape, interpret=True)


def _pair(value):
    return isinstance(value, tuple) and isinstance(value[0], tuple)


@pytest.mark.parametrize("policy", ["ordered_tree", "fixed_tree", "fold_left"])
def test_c18_every_derivative(policy):
    x = jnp.array([0.9, 1.1, -0.7])

    def f(x):
        return jt.reduce(
            jt.scan(x, 0, jt.multiply, policy=policy), 0, jt.multiply, policy=policy
        )

    def g(x):
        return jnp.prod(jnp.cumprod(x))

    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(jax.grad(f)(x), jax.grad(g)(x))
    close(jax.jacfwd(f)(x), jax.jacfwd(g)(x))
    close(jax.hessian(f)(x), jax.hessian(g)(x))
    (p, t), (q, s) = jax.jvp(f, (x,), (x,)), jax.jvp(g, (x,), (x,))
    close(p, q)
    close(t, s)
    close(jax.jvp(jax.grad(f), (x,), (x,))[1], jax.jvp(jax.grad(g), (x,), (x,))[1])


def test_c18_through_a_kernel_body():
    fn = lambda v: jt.scan(v, 1, jt.multiply)  # noqa: E731
    x = jnp.array([[0.9, 1.1, -0.7]])
    call = _kernel(fn, ((1, 3), jnp.float32))
    got, want = (jax.jvp(f, (x,), (jnp.ones_like(x),)) for f in (call, fn))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_c27_padding_is_never_visible():
    def blocks(fn, out_dtype=jnp.float32, width=1):
        def body(x, out):
            place = pl.program_id(0) * 4 + jax.lax.broadcasted_iota(jnp.int32, (4,), 0)
            out[...] = jnp.broadcast_to(fn(x[...], place < 10), (width,))

        return pl.pallas_call(
            body,
            grid=3,
            in_specs=[pl.BlockSpec((4,), lambda i: i)],
            out_specs=pl.BlockSpec((width,), lambda i: i),
            out_shape=jax.ShapeDtypeStruct((3 * width,), out_dtype),
            interpret=True,
        )(jnp.ones(10))

    got = blocks(lambda x, m: jt.reduce(x, 0, jt.add, where=m))
    np.testing.assert_array_equal(got, [4, 4, 2])
    got = blocks(lambda x, m: jt.reduce(x, 0, jt.maximum, where=m))
    np.testing.assert_array_equal(got, [1, 1, 1])
    got = blocks(lambda x, m: jt.scan(x, 0, jt.add, where=m), width=4)
    np.testing.assert_array_equal(got[:10], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    got = blocks(lambda x, m: jt.reduce(x, 0, jt.argmin, where=m)[1], jnp.int32)
    np.testing.assert_array_equal(got, [0, 0, 0])


def test_c30_linear_transposes():
    x = jnp.arange(3.0)
    (got,) = jax.linear_transpose(lambda v: jt.reduce(v, 0, jt.add), x)(jnp.float32(2))
    np.testing.assert_array_equal(got, [2, 2, 2])
    scan = lambda v: jt.scan(v, 0, jt.add)  # noqa: E731
    (got,) = jax.linear_transpose(scan, x)(x)
    np.testing.assert_array_equal(got, [3, 3, 2])
    narrow = jnp.arange(3, dtype=jnp.bfloat16)
    widen = lambda v: jt.cast(v, jnp.float32)  # noqa: E731
    (got,) = jax.linear_transpose(widen, narrow)(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, [0, 1, 2])


def test_c30_conjugate_gradient():
    scan = lambda v: jt.scan(v, 0, jt.add)  # noqa: E731
    x = jnp.arange(5.0)

    def normal(v):
        (back,) = jax.linear_transpose(scan, v)(scan(v))
        return back

    solved, _ = jax.scipy.sparse.linalg.cg(normal, normal(x), tol=1e-7)
    np.testing.assert_allclose(solved, x, atol=1e-3)


def test_c43_in_a_kernel():
    fn = lambda v: jt.scan(jnp.broadcast_to(v, (4, 32)), 1, jt.add)  # noqa: E731
    got = _kernel(fn, ((4, 32), jnp.float32))(jnp.ones((1, 32)))
    same_bits(got, np.broadcast_to(np.arange(1, 33, dtype=np.float32), (4, 32)))


@pytest.mark.parametrize("shape", [(5, 5), (8, 100), (33, 64)])
def test_c45_in_a_kernel(shape):
    x = np.random.default_rng(45).integers(-9, 9, shape).astype(np.float32)
    total = lambda v: jt.reduce(v, 1, jt.add)  # noqa: E731
    got = _kernel(total, (shape[:1], jnp.float32))(jnp.asarray(x))
    np.testing.assert_array_equal(got, x.sum(1))
    prefix = lambda v: jt.scan(v, 1, jt.maximum)  # noqa: E731
    got = _kernel(prefix, (shape, jnp.float32))(jnp.asarray(x))
    np.testing.assert_array_equal(got, np.maximum.accumulate(x, 1))


def test_c75_kernel_and_array_form():
    x = np.random.default_rng(75).standard_normal((8, 2048)).astype(jnp.bfloat16)

    def norm(x):
        wide = jt.cast(x, jnp.float32)
        squares = jt.reduce(wide * wide, 1, jt.add, policy="fixed_tree", keepdims=True)
        return jt.cast(wide * jax.lax.rsqrt(squares / 2048), jnp.bfloat16)

    got = _kernel(norm, (x.shape, jnp.bfloat16))(jnp.asarray(x))
    same_bits(got, jax.jit(norm)(jnp.asarray(x)))


def test_c79_unbatched_seed():
    x, seed = jnp.arange(6.0).reshape(3, 2), jnp.float32(10)
    f = lambda x, z: jt.reduce(x, 0, jt.add, init=z, policy="fold_left")  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, seed), [11, 15, 19])
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(x[0], jnp.arange(2.0)), [1, 2])
    jaxpr = str(jax.make_jaxpr(jax.vmap(f, (0, None)))(x, seed))
    assert "policy=fold_left" in jaxpr


def test_c79_batch_of_nothing():
    f = lambda x: jt.scan(x, 0, jt.affine.named("a"), policy="fold_left")  # noqa: E731
    empty = jnp.zeros((0, 4))
    assert jax.vmap(lambda a: f((a, a)))(empty).shape == (0, 4)
    for policy in jt.policy.ALL:
        g = lambda a, p=policy: jt.reduce(a, 0, jt.add, policy=p)  # noqa: E731
        assert jax.vmap(g)(empty).shape == (0,)
        long = jnp.zeros((0, 64))
        s = lambda a, p=policy: jt.scan(a, 0, jt.add, policy=p)  # noqa: E731
        assert jax.vmap(s)(long).shape == (0, 64)
        both = lambda a, p=policy: jt.reduce(a, (0, 1), jt.add, policy=p)  # noqa: E731
        assert jax.vmap(both)(jnp.zeros((0, 3, 4))).shape == (0,)


def test_c80_integer_tangents_are_float0():
    x = jnp.array([1.0, 3.0, 2.0])
    _, (dv, di) = jax.jvp(lambda x: jt.reduce(x, 0, jt.argmax), (x,), (x,))
    assert (dv, di.dtype) == (3, jax.dtypes.float0)
    _, (dv, di) = jax.jvp(lambda x: jt.scan(x, 0, jt.argmax), (x,), (x,))
    np.testing.assert_array_equal(dv, [1, 3, 3])
    assert di.dtype == jax.dtypes.float0
    assert di.shape == (3,)
    i = jnp.arange(3)
    zero = np.zeros(3, jax.dtypes.float0)
    for op in (jt.reduce, jt.scan):
        y, dy = jax.jvp(lambda i, op=op: op(i, 0, jt.add), (i,), (zero,))
        assert (dy.shape, dy.dtype) == (y.shape, jax.dtypes.float0)


def test_c80_integers_beside_floats():
    i, x = jnp.array([1, 0, 2]), jnp.array([1.0, 2.0, 3.0])

    def f(x):
        return jt.reduce((i, x), 0, jt.product(jt.add, jt.multiply))[1]

    np.testing.assert_array_equal(jax.grad(f)(x), [6, 3, 2])
    _, tangents = jax.jvp(
        lambda x: jt.scan((i, x), 0, jt.product(jt.maximum, jt.add)), (x,), (x,)
    )
    assert tangents[0].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(tangents[1], [1, 3, 6])
