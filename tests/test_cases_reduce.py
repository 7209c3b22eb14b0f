"""Reports from the field about reductions, by number."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
import oracle
from oracle import same_bits

_BF16, _F16 = jnp.bfloat16, jnp.float16
_NAN, _INF = jnp.nan, jnp.inf
_FLOATS = [_BF16, _F16, jnp.float32]


@pytest.mark.parametrize(
    ("n", "dtype", "out", "want"),
    [
        (5000, _BF16, _BF16, 4992),
        (70000, _BF16, _BF16, 70144),
        (20000, _F16, _F16, 20000),
        (70000, _F16, _F16, np.inf),
        (70000, _F16, jnp.float32, 70000),
        (70000, _F16, None, 70000),
    ],
)
def test_c01_one_rounding_at_the_end(n, dtype, out, want):
    got = jt.reduce(jnp.ones(n, dtype), 0, jt.add, out_dtype=out)
    assert got.dtype == (out or jnp.float32)
    assert float(got) == want


def test_c01_stated_accumulator():
    x = jnp.ones(5000, _BF16)
    got = jt.reduce(x, 0, jt.add, acc_dtype=_BF16, policy="fold_left")
    assert (float(got), got.dtype) == (256, _BF16)
    shown = str(jax.make_jaxpr(lambda v: jt.reduce(v, 0, jt.add, acc_dtype=_BF16))(x))
    assert "states=(dtype(bfloat16),)" in shown


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_c03_nan_in_every_position(policy):
    orders = [np.roll([np.nan, 1, 3, 2], k) for k in range(4)]
    orders += [[*p, 2] for p in itertools.permutations([np.nan, 1, 2])]
    x = jnp.asarray(np.array(orders, np.float32))
    for reducer in (jt.maximum, jt.minimum):
        assert np.isnan(jt.reduce(x, 1, reducer, policy=policy)).all()
    got = jt.reduce(x, 1, jt.maximum_number, policy=policy)
    np.testing.assert_array_equal(got, np.nanmax(x, axis=1))
    got = jt.reduce(x, 1, jt.minimum_number, policy=policy)
    np.testing.assert_array_equal(got, np.nanmin(x, axis=1))


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_c13_nan_survives_the_seed(dtype, policy):
    x = jnp.array([_NAN, 1], dtype)
    assert jnp.isnan(jt.reduce(x, 0, jt.maximum, init=-1.0, policy=policy))
    assert jt.reduce(x, 0, jt.maximum_number, init=-1.0, policy=policy) == 1
    plain = jnp.ones(2, dtype)
    assert jnp.isnan(jt.reduce(plain, 0, jt.maximum, init=_NAN, policy=policy))


def test_c13_float64(x64):
    x = jnp.array([_NAN, 1.0])
    assert x.dtype == jnp.float64
    assert jnp.isnan(jt.reduce(x, 0, jt.maximum, init=-1.0))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_c13_storage_formats_are_refused(dtype):
    x = jnp.ones(2, dtype)
    for op, reducer in ((jt.reduce, jt.maximum), (jt.scan, jt.add)):
        with pytest.raises(
            jt.errors.TileTypeError, match="expected an arithmetic form"
        ):
            op(x, 0, reducer)


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
@pytest.mark.parametrize(
    ("x", "propagate", "ignore"),
    [
        ([_INF, _NAN], 1, 0),
        ([_NAN, _INF], 0, 1),
        ([_NAN, 6, 8], 0, 2),
    ],
)
def test_c15_argmax_of_nan(policy, x, propagate, ignore):
    x = np.array(x, np.float32)
    for reducer, want in (
        (jt.argmax, propagate),
        (jt.argmax(nan="ignore"), ignore),
    ):
        value, index = jt.reduce(jnp.asarray(x), 0, reducer, policy=policy)
        assert index == want
        same_bits(value, x[want])


@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree", "fold_left"])
def test_c16_index_stays_inside(policy):
    nan, zero = [np.nan], [0.0]
    for reducer, x, want in [
        (jt.argmax, nan * 100, 0),
        (jt.argmax, zero * 50 + nan * 50, 50),
        (jt.argmin, nan * 50 + zero * 50, 0),
        (jt.argmax, [0, np.nan], 1),
        (jt.argmax(nan="ignore"), nan * 100, 0),
        (jt.argmax(ties="last", nan="ignore"), nan * 100, 99),
        (jt.argmin, [np.inf] * 3, 0),
        (jt.argmax, [-np.inf] * 3, 0),
    ]:
        x = jnp.asarray(np.array(x, np.float32))
        value, index = jt.reduce(x, 0, reducer, policy=policy)
        assert index == want
        same_bits(value, x[want])


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_c17_ties(policy):
    for x, first, last in [([1, 3, 3, 3, 2], 1, 3), ([-0.0, 0.0], 0, 1)]:
        x = jnp.array(x, jnp.float32)
        value, index = jt.reduce(x, 0, jt.argmax, policy=policy)
        assert index == first
        same_bits(value, x[first])
        value, index = jt.reduce(x, 0, jt.argmax(ties="last"), policy=policy)
        assert index == last
        same_bits(value, x[last])


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_c20_logsumexp_of_nothing(policy):
    def lse(x):
        return jt.reduce(x, 0, jt.logaddexp, policy=policy)

    x = jnp.array([-_INF, -_INF])
    same_bits(lse(x), np.float32(-np.inf))
    np.testing.assert_array_equal(jax.grad(lse)(x), [0, 0])
    got = jax.grad(lambda t: lse(jnp.array([-_INF, -_INF]) + jnp.array([0, t])))(1.0)
    assert got == 0
    x = jnp.array([_INF, 1.0])
    assert lse(x) == _INF
    np.testing.assert_array_equal(jax.grad(lse)(x), [1, 0])


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
@pytest.mark.parametrize(
    ("mean", "want"), [(0, -1.3416), (100, -1.3415), (1000, -1.3415), (10000, -1.3313)]
)
def test_c24_standardize_with_a_large_mean(policy, mean, want):
    x = np.float32(mean) + np.float32(1e-3) * np.arange(16, dtype=np.float32)
    state = jt.reduce(jnp.asarray(x), 0, jt.welford, policy=policy)
    exact = np.var(x.astype(np.float64))
    # With the mean in two parts the deviations are good to a few units in the last place
    # of the inputs' spread, whatever the mean: n roundings of a sum of non-negatives.
    slack = 16 * np.finfo(np.float32).eps * exact
    assert abs(float(state.variance()) - exact) <= slack
    centred = (x - np.float64(x).mean()) / np.sqrt(float(state.variance()) + 1e-5)
    np.testing.assert_allclose(centred[0], want, atol=1e-4)
    # Each step of the mean is itself rounded, so it may miss the nearest by one.
    assert abs(float(state.mean) - np.float64(x).mean()) <= np.spacing(state.mean)


def test_c24_variance_is_never_negative():
    x = jnp.full((3, 1000), 1e4 + 1e-3, jnp.float32)
    for policy in ("unordered_tree", "fold_left", "fixed_tree"):
        state = jt.reduce(x, 1, jt.welford, policy=policy)
        assert (state.variance() >= 0).all()


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_c26_mask_by_select(dtype, policy):
    x, where = jnp.array([_NAN, 2, _INF], dtype), jnp.array([False, True, False])

    def total(x):
        return jt.reduce(x, 0, jt.add, where=where, policy=policy)

    assert total(x) == jax.jit(total)(x) == 2
    np.testing.assert_array_equal(jax.grad(total)(x), [0, 1, 0])


@pytest.mark.parametrize(
    ("reducer", "want"),
    [(jt.multiply, [0, 1, 0]), (jt.logaddexp, [0, 1, 0]), (jt.maximum, [0, 1, 0])],
)
def test_c26_gradients_of_other_reducers(reducer, want):
    x, where = jnp.array([_NAN, 2, _INF]), jnp.array([False, True, False])
    for policy in ("unordered_tree", "fold_left", "fixed_tree"):
        f = lambda x, p=policy: jt.reduce(x, 0, reducer, where=where, policy=p)  # noqa: E731
        assert f(x) == 2
        np.testing.assert_array_equal(jax.grad(f)(x), want)


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left", "fold_right"])
def test_c28_rows_in_any_batch(policy):
    x = np.random.default_rng(28).standard_normal((64, 4096)).astype(np.float32)
    x = jnp.asarray(x)

    def norm(x):
        squares = jt.reduce(x * x, -1, jt.add, policy=policy)
        return x[..., 0] * jax.lax.rsqrt(squares / x.shape[-1])

    for fn in (lambda v: jt.reduce(v, -1, jt.add, policy=policy), norm):
        whole = fn(x)
        same_bits(fn(x[:1]), whole[:1])
        same_bits(fn(x[:3]), whole[:3])
        same_bits(jax.vmap(fn)(x), whole)
        same_bits(fn(x[40]), whole[40])
    same_bits(
        jt.reduce(x.T, 0, jt.add, policy=policy), jt.reduce(x, 1, jt.add, policy=policy)
    )


def test_c28_logsumexp_rows():
    x = np.random.default_rng(28).standard_normal((64, 128)).astype(np.float32)
    whole = jt.reduce(x, 1, jt.logaddexp, policy="fixed_tree")
    same_bits(jt.reduce(x[:1], 1, jt.logaddexp, policy="fixed_tree"), whole[:1])
    same_bits(jt.reduce(x[5], 0, jt.logaddexp, policy="fixed_tree"), whole[5])


_L2 = jt.Reducer(
    merge=lambda a, b: a + b,
    identity=-0.0,
    lift=lambda x: x * x,
    finish=jnp.sqrt,
    laws=jt.Laws(associative=True, commutative=True),
    name="l2",
)


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_c31_wide_through_the_finish(policy):
    x = jnp.full((3, 3), 100, _F16)

    def norm(x):
        return jt.reduce(x, None, _L2, policy=policy, out_dtype=_F16)

    same_bits(norm(x), np.float16(300))
    got = jax.grad(lambda x: norm(x).astype(jnp.float32))(x)
    same_bits(got, np.full((3, 3), 1 / 3, np.float16))


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
@pytest.mark.parametrize("dtype", _FLOATS)
def test_c32_sign_of_zero(policy, dtype):
    zero = jnp.array([-0.0, -0.0], dtype)
    want = np.asarray(zero)[0]

    def total(x, **kw):
        return jt.reduce(x, 0, jt.add, policy=policy, out_dtype=dtype, **kw)

    same_bits(total(zero), want)
    same_bits(total(zero, init=0.0), -want)
    same_bits(total(zero, init=-0.0), want)
    same_bits(total(zero[:0]), -want)
    five = jnp.array([3, -0.0, 7, -0.0, 1], dtype)
    mask = jnp.array([False, True, False, True, False])
    same_bits(total(five, where=mask), want)
    same_bits(total(five, where=jnp.zeros(5, bool)), -want)


def test_c65_gradient_of_ties_and_nan():
    def top(x):
        return jt.reduce(x, 0, jt.maximum)

    np.testing.assert_array_equal(jax.grad(top)(jnp.ones(2)), [1, 0])
    x = jnp.array([1.0, 2.0, _NAN])
    np.testing.assert_array_equal(jax.grad(top)(x), [0, 0, 1])
    value_of_argmax = lambda x: jt.reduce(x, 0, jt.argmax)[0]  # noqa: E731
    np.testing.assert_array_equal(jax.grad(value_of_argmax)(jnp.ones(2)), [1, 0])
    for policy in jt.policy.ALL:
        f = lambda x, p=policy: jt.reduce(x, 0, jt.minimum, policy=p)  # noqa: E731
        np.testing.assert_array_equal(jax.grad(f)(jnp.ones(5)), [1, 0, 0, 0, 0])


def test_c45_middle_axis_argmax():
    x = np.random.default_rng(45).integers(0, 50, (37, 101, 53)).astype(np.float32)
    value, index = jt.reduce(jnp.asarray(x), 1, jt.argmax)
    np.testing.assert_array_equal(index, x.argmax(1))
    np.testing.assert_array_equal(value, x.max(1))


@pytest.mark.parametrize("shape", [(257, 257), (33, 64), (65537, 4), (5, 5), (8, 100)])
def test_c45_ragged_shapes(shape):
    x = np.random.default_rng(45).integers(-9, 9, shape).astype(np.float32)
    for policy in ("unordered_tree", "fixed_tree"):
        got = jt.reduce(jnp.asarray(x), 1, jt.add, policy=policy)
        np.testing.assert_array_equal(got, x.sum(1))
    got = jt.scan(jnp.asarray(x), 1, jt.add)
    np.testing.assert_array_equal(got, x.cumsum(1))


def test_c01_oracle_of_a_bf16_chain():
    x = [(ml_dtypes.bfloat16(1),)] * 300
    assert oracle.fold_left(oracle.ADD, x) == (256,)


@pytest.mark.parametrize("shape", [(8192,), (2048, 3), (3, 4099)])
def test_c32_long_sums_of_negative_zero(shape):
    x = jnp.full(shape, -0.0)
    for policy in ("unordered_tree", "ordered_tree", "fixed_tree"):
        assert np.signbit(
            jt.reduce(x, int(np.argmax(shape)), jt.add, policy=policy)
        ).all()
    assert not np.signbit(jt.reduce(x.at[(1,) * x.ndim].set(0.0), None, jt.add))


def test_c32_a_lone_logaddexp_keeps_its_sign():
    assert np.signbit(jt.reduce(jnp.array([-0.0]), 0, jt.logaddexp))
