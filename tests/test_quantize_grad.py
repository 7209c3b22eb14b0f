"""The straight-through derivatives of quantize, decode and their forms with scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codes
import jaxtile as jt
from jaxtile.errors import NoDerivativeError

F32 = jnp.float32
# Inside, on the last tie that stays inside, past it, far outside, and not finite.
X = jnp.array([0.3, -448.0, 464.0, 465.0, -1e5, jnp.inf, 2.0**-20])
INSIDE = np.float32([1, 1, 1, 0, 0, 0, 1])


def _through(**named):
    return lambda v: jt.quantize(v, "float8_e4m3fn", out_dtype=F32, **named)


@pytest.mark.parametrize("overflow", ["saturate", "nan"])
def test_it_is_one_inside_and_zero_where_it_overflowed(overflow):
    f = _through(overflow=overflow)
    w = jnp.float32([3.1, 5.3, 7.7, 1.0, 1.0, 1.0, 0.1])
    y, pull = jax.vjp(f, X)
    np.testing.assert_array_equal(pull(w)[0], INSIDE * w)
    out, dy = jax.jvp(f, (X,), (w,))
    np.testing.assert_array_equal(dy, INSIDE * w)
    np.testing.assert_array_equal(out, y)
    _, again = jax.jit(lambda v, t: jax.jvp(f, (v,), (t,)))(X, w)
    np.testing.assert_array_equal(again, dy)


def test_the_range_is_that_of_the_rounding():
    grad = jax.grad(lambda v, r: _through(rounding=r)(v), argnums=0)
    for rounding, inside in (
        ("toward_zero", True),
        ("down", True),
        ("up", False),
        ("nearest_even", True),
    ):
        assert grad(450.0, rounding) == inside
    bits = jnp.array([0, 2**32 - 1], jnp.uint32)
    f = lambda v: _through(rounding="stochastic", bits=bits)(v).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(f)(jnp.full(2, 450.0)), [1, 0])


@pytest.mark.parametrize("name", ["int8", "int4", "float4_e2m1fn", "float8_e8m0fnu"])
def test_every_format_has_it_with_out_dtype(name):
    f = lambda v: jt.quantize(v, name, out_dtype=F32).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(f)(jnp.array([1.3, jnp.inf])), [1, 0])


def test_second_order_is_that_of_what_stands_round_it():
    f = lambda v: _through()(v) ** 3  # noqa: E731
    value = float(_through()(F32(1.3)))
    assert jax.grad(f)(1.3) == 3 * value**2
    assert jax.grad(jax.grad(f))(1.3) == 6 * F32(value)
    assert jax.jvp(jax.grad(f), (1.3,), (1.0,))[1] == 6 * F32(value)


def test_narrow_and_wide_sources(x64):
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float64):
        x = jnp.asarray([0.3, 1e4], dtype)
        got = jax.grad(lambda v: _through()(v).sum())(x)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(F32), [1, 0])
    y, dy = jax.jvp(
        lambda i: jt.quantize(i, "int8"), (3,), (np.zeros((), jax.dtypes.float0),)
    )
    assert (int(y), dy.dtype) == (3, jax.dtypes.float0)


def test_codes_of_8_bits_have_tangents_of_8_bits():
    t = jnp.float32([0.3, 0.3, 1000.0, 1.0, 1.0, 1.0, 2.0])
    y, dy = jax.jvp(lambda v: jt.quantize(v, "float8_e4m3fn"), (X,), (t,))
    assert y.dtype == dy.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(dy.astype(F32), [0.3125, 0.3125, 448, 0, 0, 0, 2])

    def f(v):
        return jnp.sum(jt.decode(jt.quantize(v, "float8_e4m3fn")) * t)

    np.testing.assert_array_equal(jax.grad(f)(X), [0.3125, 0.3125, 448, 0, 0, 0, 2])


def test_integers_and_powers_of_two_have_none_without_out_dtype():
    for name in ("int8", "float8_e8m0fnu"):
        f = lambda v, n=name: jt.decode(jt.quantize(v, n)).sum()  # noqa: E731
        np.testing.assert_array_equal(jax.grad(f)(X), np.zeros(7))


def test_quantize_itself_is_not_linear():
    f = lambda v: jt.quantize(v, "e4m3fn", out_dtype=F32)  # noqa: E731
    with pytest.raises(NoDerivativeError, match="quantize: .*not linear.*jax.grad"):
        jax.linear_transpose(f, X)(X)


def test_scales_that_are_given_have_the_derivative_of_the_quotient():
    x, s = jnp.float32([[1.3, -2.7, 900.0]]), jnp.float32([[0.7]])

    def f(x, s):
        named = dict(scales=s, out_dtype=F32)
        return jt.quantize_blocks(x, "float4_e2m1fn", (1, 3), **named)

    y, pull = jax.vjp(f, x, s)
    v = np.asarray(y, np.float64) / 0.7
    np.testing.assert_allclose(v, [[2, -4, 6]], rtol=1e-6)
    dx, ds = pull(jnp.float32([[1.0, 10.0, 100.0]]))
    np.testing.assert_array_equal(dx, [[1, 10, 0]])
    want = (2 - 1.3 / 0.7) + 10 * (-4 + 2.7 / 0.7) + 100 * 6
    np.testing.assert_allclose(ds, [[want]], rtol=1e-5)


def test_scales_that_are_computed_count_as_constants():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), F32)
    w = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64)), F32)
    for scale in ("float32", "float8_e8m0fnu"):

        def f(v, scale=scale):
            named = dict(scale_format=scale, out_dtype=F32)
            return jnp.sum(w * jt.quantize_blocks(v, "float8_e4m3fn", 32, **named))

        np.testing.assert_array_equal(jax.grad(f)(x), w)


def test_decode_blocks_is_linear_in_codes_and_scales():
    every = codes.every_code("float8_e4m3fn")
    x = jnp.asarray(every[~np.isnan(every.astype(np.float32))][:252].reshape(2, 126))
    s = jnp.float32([[0.5], [3.0]])
    y, dy = jax.jvp(lambda c, k: jt.decode_blocks(c, k), (x, s), (x, 2 * s))
    np.testing.assert_array_equal(dy, 3 * y)
    ct = jnp.ones_like(y)
    dx, ds = jax.vjp(jt.decode_blocks, x, s)[1](ct)
    assert dx.dtype == x.dtype
    np.testing.assert_array_equal(dx.astype(F32), np.broadcast_to(s, x.shape))
    np.testing.assert_allclose(ds[:, 0], x.astype(F32).sum(1), rtol=1e-6)
