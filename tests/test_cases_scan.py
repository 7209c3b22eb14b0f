"""Reports from the field about scans, by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import oracle
from oracle import same_bits

_NAN, _INF = jnp.nan, jnp.inf
_TREES = ("ordered_tree", "fixed_tree", "fold_left")


@pytest.mark.parametrize("policy", [*_TREES, "fold_right"])
def test_c04_earlier_is_the_left_operand(policy):
    rng = np.random.default_rng(4)
    n = 1000 if policy != "fold_right" else 100
    a, b = rng.uniform(-1, 1, (2, n)).astype(np.float32)
    h, want = 0.0, []
    for x, y in zip(a.astype(float), b.astype(float), strict=True):
        h = x * h + y
        want.append(h)
    got = jt.linear_recurrence(jnp.asarray(a), jnp.asarray(b), 0, policy=policy)
    # |h| stays below n max|b| and every step errs by two roundings of it.
    np.testing.assert_allclose(got, want, atol=4e-6)
    i, j = (rng.integers(-3, 4, n).astype(np.int32) for _ in "ab")
    h, want = np.int32(0), []
    with np.errstate(over="ignore"):
        for x, y in zip(i, j, strict=True):
            h = x * h + y
            want.append(h)
    got = jt.linear_recurrence(jnp.asarray(i), jnp.asarray(j), 0, policy=policy)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("policy", _TREES)
def test_c10_reverse_and_suffix(policy):
    a, x = jnp.array([1, 1.5, 0.8, 2]), jnp.array([1, -1, 0.5, 2])
    got = jt.linear_recurrence(a, x, 0, direction="reverse", policy=policy)
    np.testing.assert_allclose(got, [3.15, 2.15, 2.1, 2.0], rtol=1e-6)
    got = jt.linear_recurrence(a, x, 0, direction="suffix", policy=policy)
    np.testing.assert_allclose(got, [3.8, 1.4, 3.0, 2.0], rtol=1e-6)


def test_c11_wide_carry():
    x = np.random.default_rng(11).standard_normal(10000).astype(jnp.bfloat16)
    want = np.cumsum(x.astype(np.float64))
    for policy in _TREES:
        y = jt.scan(jnp.asarray(x), 0, jt.add, policy=policy, out_dtype=jnp.bfloat16)
        y = np.asarray(y).astype(np.float64)
        # Half a bfloat16 ulp of the result, and the float32 chain's own rounding.
        half_ulp = 2.0 ** (np.floor(np.log2(np.abs(want) + 1e-30)) - 8)
        chain = 10000 * 2.0**-24 * np.abs(want).max()
        assert (np.abs(y - want) <= half_ulp * 1.01 + chain).all()


@pytest.mark.parametrize(("dtype", "last"), [(jnp.float16, 5000), (jnp.bfloat16, 4992)])
def test_c11_prefixes_of_ones(dtype, last):
    y = jt.scan(jnp.ones(5000, dtype), 0, jt.add, out_dtype=dtype)
    assert float(y[-1]) == last
    assert (float(y[256]), float(y[257])) == (
        (256, 258) if last == 4992 else (257, 258)
    )


def test_c14_the_policy_decides():
    x = jnp.ones(2**24 + 4)
    assert jt.reduce(x, 0, jt.add, policy="fold_left") == 16777216
    assert jt.reduce(x, 0, jt.add, policy="ordered_tree") == 16777220
    last = jax.jit(lambda v, p: jt.scan(v, 0, jt.add, policy=p)[-1], static_argnums=1)
    assert last(x, "fold_left") == 16777216
    assert last(x, "ordered_tree") == 16777220
    assert last(x, "fixed_tree") == 16777220


def test_c14_large_values():
    x = (np.random.default_rng(14).standard_normal(10000) * 1e10).astype(np.float32)
    want = np.array(oracle.exact_prefixes(x.astype(float)))
    chain = [
        s[0] for s in oracle.scan(oracle.ADD, [(v,) for v in x[:300]], "fold_left")
    ]
    got = jt.scan(jnp.asarray(x), 0, jt.add, policy="fold_left")
    same_bits(got[:300], np.array(chain))
    total = np.abs(x).sum(dtype=np.float64)
    tree = np.asarray(jt.scan(jnp.asarray(x), 0, jt.add, policy="fixed_tree"))
    # 14 levels of the tree and as many blocks of a prefix: each adds eps / 2 of sum|x|.
    assert np.abs(tree - want).max() <= 28 * np.finfo(np.float32).eps / 2 * total


def test_c14_float64_accumulator(x64):
    x = (np.random.default_rng(14).standard_normal(10000) * 1e10).astype(np.float32)
    want = np.array(oracle.exact_prefixes(x.astype(float)), np.float32)
    got = jt.scan(
        jnp.asarray(x), 0, jt.add, acc_dtype=jnp.float64, out_dtype=jnp.float32
    )
    assert (np.abs(np.asarray(got) - want) <= np.spacing(np.abs(want))).all()


def _f(reducer, **params):
    return lambda x: jt.scan(x, 0, reducer, **params)


@pytest.mark.parametrize("policy", _TREES)
def test_c21_masked_prefix_of_logaddexp(policy):
    x = jnp.array([-_INF, -_INF, 0, 1])
    lse = _f(jt.logaddexp, policy=policy)
    np.testing.assert_allclose(lse(x), [-_INF, -_INF, 0, 1.3132617], rtol=1e-6)
    got = jax.grad(lambda x: lse(x)[-1])(x)
    np.testing.assert_allclose(got, [0, 0, 0.2689414, 0.7310586], rtol=1e-6)


@pytest.mark.parametrize("policy", _TREES)
@pytest.mark.parametrize(
    ("x", "want"),
    [
        ([2, 0, 3, 4], [1, 32, 0, 0]),
        ([0, 2, 3], [9, 0, 0]),
        ([2, 3, 0], [4, 2, 6]),
        ([2, 0, 0, 3], [1, 2, 0, 0]),
        ([0], [1]),
    ],
)
def test_c22_product_gradient_without_division(policy, x, want):
    prefixes = _f(jt.multiply, policy=policy)
    got = jax.grad(lambda x: prefixes(x).sum())(jnp.array(x, jnp.float32))
    np.testing.assert_array_equal(got, want)


def test_c22_squares():
    got = jax.grad(lambda x: (_f(jt.multiply)(x) ** 2).sum())(jnp.array([1.0, 0.0]))
    np.testing.assert_array_equal(got, [2, 0])
    got = jax.grad(lambda x: jt.reduce(x, 0, jt.multiply))(jnp.array([2.0, 0, 3]))
    np.testing.assert_array_equal(got, [0, 6, 0])


@pytest.mark.parametrize("policy", _TREES)
def test_c23_linear_recurrence_with_zeros(policy):
    h = jt.linear_recurrence(jnp.full(300, 0.5), jnp.ones(300), 0, policy=policy)
    assert h[-1] == 2
    a, x = jnp.array([0.5, 0, 0.5, 0.9]), jnp.array([1.0, 2, 3, 4])

    def total(a, x):
        return jt.linear_recurrence(a, x, 0, policy=policy).sum()

    h = jt.linear_recurrence(a, x, 0, policy=policy)
    np.testing.assert_allclose(h, [1, 2, 4, 7.6], rtol=1e-6)
    da, dx = jax.grad(total, (0, 1))(a, x)
    np.testing.assert_allclose(da, [0, 1.95, 3.8, 4], rtol=1e-6)
    np.testing.assert_allclose(dx, [1, 1.95, 1.9, 1], rtol=1e-6)


@pytest.mark.parametrize("policy", [*_TREES, "fold_right"])
def test_c34_nan_in_running_extremes(policy):
    x = jnp.array([1, 3, _NAN, 5, 4])
    nan = np.nan
    np.testing.assert_array_equal(
        _f(jt.maximum, policy=policy)(x), [1, 3, nan, nan, nan]
    )
    np.testing.assert_array_equal(
        _f(jt.maximum_number, policy=policy)(x), [1, 3, 3, 5, 5]
    )
    np.testing.assert_array_equal(
        _f(jt.minimum, policy=policy)(x), [1, 1, nan, nan, nan]
    )


@pytest.mark.parametrize("policy", _TREES)
def test_c35_exclusive(policy):
    def scan(x, **params):
        x = jnp.array(x, jnp.float32)
        return jt.scan(x, 0, jt.add, exclusive=True, policy=policy, **params)

    np.testing.assert_array_equal(scan([1, 1, 1]), [0, 1, 2])
    np.testing.assert_array_equal(scan([1, 1, 1], init=10), [10, 11, 12])
    y, last = scan([1, 1, 1], return_final=True)
    np.testing.assert_array_equal([*y, last], [0, 1, 2, 3])
    np.testing.assert_array_equal(scan([_INF, 1]), [0, _INF])


@pytest.mark.parametrize("policy", [*_TREES, "fold_right"])
def test_c36_running_maximum_gives_to_the_first_winner(policy):
    top = _f(jt.maximum, policy=policy)
    total = jax.grad(lambda x: top(x).sum())
    last = jax.grad(lambda x: top(x)[-1])
    np.testing.assert_array_equal(total(jnp.array([1.0, 2, 0])), [1, 2, 0])
    np.testing.assert_array_equal(total(jnp.ones(3)), [3, 0, 0])
    np.testing.assert_array_equal(last(jnp.ones(3)), [1, 0, 0])


def test_c36_ties_backward():
    """A suffix gives to the lowest index; reverse is the scan of the flipped."""
    top = _f(jt.maximum, direction="suffix")
    np.testing.assert_array_equal(jax.grad(lambda x: top(x)[0])(jnp.ones(3)), [1, 0, 0])
    np.testing.assert_array_equal(
        jax.grad(lambda x: top(x).sum())(jnp.ones(3)), [1, 1, 1]
    )
    back = _f(jt.maximum, direction="reverse")
    flipped = lambda x: _f(jt.maximum)(x[::-1])[::-1]  # noqa: E731
    for f in (back, flipped):
        got = jax.grad(lambda x, f=f: f(x)[0])(jnp.ones(3))
        np.testing.assert_array_equal(got, [0, 0, 1])


def test_c43_replicas_are_not_contributions():
    row = jnp.broadcast_to(jnp.ones(32), (4, 32))
    want = np.broadcast_to(np.arange(1, 33, dtype=np.float32), (4, 32))
    same_bits(jt.scan(row, 1, jt.add), want)
    same_bits(jt.reduce(row, 1, jt.add), np.full(4, 32, np.float32))


@pytest.mark.parametrize("policy", _TREES)
def test_c53_lambda_returns(policy):
    r, v = jnp.array([1.0, 0, 2]), jnp.array([0.5, 1, 3])
    g, decay = 0.9, 0.8
    got = jt.linear_recurrence(
        g * decay, r + g * (1 - decay) * v, 0, 3.0, direction="reverse", policy=policy
    )
    np.testing.assert_allclose(got, [3.65608, 3.564, 4.7], rtol=1e-6)


def test_c67_integer_width():
    x = jnp.array([10000] * 3, jnp.int32)
    assert jt.scan(x, 0, jt.multiply, acc_dtype=jnp.int32)[-1] == -727379968
    x = jnp.array([100, 27, 1], jnp.int8)
    got = jt.scan(x, 0, jt.add, acc_dtype=jnp.int8)
    assert (got.dtype, int(got[-1])) == (jnp.int8, -128)
    got = jt.scan(x, 0, jt.add)
    assert (got.dtype, int(got[-1])) == (jnp.int32, 128)
    assert jt.reduce(x, 0, jt.add).dtype == got.dtype


def test_c67_int64(x64):
    x = jnp.array([10000] * 3, jnp.int32)
    assert jt.scan(x, 0, jt.multiply, acc_dtype=jnp.int64)[-1] == 10**12
    assert jt.scan(x, 0, jt.multiply).dtype == jnp.int32


def test_c68_tuple_states_of_narrow_ints():
    value = jnp.array([1.0, 3, 2, 3, 5])
    index = jnp.arange(5, dtype=jnp.int16)
    bigger = jt.Reducer(
        merge=lambda a, b: jax.tree.map(
            lambda x, y: jnp.where(b[0] > a[0], y, x), a, b
        ),
        laws=jt.Laws(associative=True),
    )
    top, where = jt.scan((value, index), 0, bigger)
    np.testing.assert_array_equal(top, [1, 3, 3, 3, 5])
    same_bits(where, np.array([0, 1, 1, 1, 4], np.int16))
    valid = jt.Reducer(
        merge=lambda a, b: jnp.where(b >= 0, b, a), laws=jt.Laws(associative=True)
    )
    got = jt.scan(jnp.array([0, -1, 2, -1, -1], jnp.int16), 0, valid)
    same_bits(got, np.array([0, 0, 2, 2, 2], np.int16))
    top, where = jt.scan(value, 0, jt.argmax)
    np.testing.assert_array_equal(where, [0, 1, 1, 1, 4])


def test_c73_run_to_run():
    k = np.arange(1_000_003)
    x = jnp.asarray((np.pi * k % 1).astype(np.float32))
    run = jax.jit(lambda v: jt.scan(v, 0, jt.add))
    first = run(x)
    for _ in range(3):
        same_bits(run(x), first)


@pytest.mark.parametrize("policy", ["ordered_tree", "fold_left"])
@pytest.mark.parametrize("reducer", ["affine", "welford"])
def test_c89_the_program_does_not_grow(policy, reducer):
    def size(n):
        x = jnp.ones(n)
        if reducer == "affine":
            fn = lambda v: jt.linear_recurrence(v, v, 0, policy=policy)  # noqa: E731
        else:
            fn = lambda v: jt.scan(v, 0, jt.welford, policy=policy)  # noqa: E731
        lowered = jax.jit(fn).lower(x)
        equations = len(jax.make_jaxpr(fn)(x).jaxpr.eqns)
        return equations, len(lowered.as_text().splitlines())

    assert size(16384) == size(2**20)


def test_c89_derivatives_do_not_grow():
    def lines(n):
        fn = jax.grad(lambda a, b: jt.linear_recurrence(a, b, 0).sum(), (0, 1))
        return len(jax.jit(fn).lower(jnp.ones(n), jnp.ones(n)).as_text().splitlines())

    assert lines(16384) == lines(2**20)
