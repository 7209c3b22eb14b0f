"""scan: what each parameter means."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxtile as jt
import oracle
from fibres import floats, ints, rng_of
from oracle import same_bits

_DIRECTIONS = ("prefix", "suffix", "reverse")


@pytest.mark.parametrize("direction", _DIRECTIONS)
@pytest.mark.parametrize("n", [1, 42, 1000, 1601])
def test_ordered_tree_keeps_the_error_bound(direction, n):
    # Each prefix is some grouping of at most n terms: every addition errs by at most
    # eps / 2 of a partial sum that is at most sum|x| (Higham, section 4.2).
    x = floats(rng_of("bound", n), (2, n))
    got = np.asarray(jt.scan(x, 1, jt.add, direction=direction), np.float64)
    order = x if direction == "prefix" else x[:, ::-1]
    want = np.array([oracle.exact_prefixes(row.astype(float)) for row in order])
    want = want if direction == "prefix" else want[:, ::-1]
    bound = n * np.finfo(np.float32).eps * np.abs(x).sum(1, dtype=np.float64)
    assert (np.abs(got - want) <= bound[:, None]).all()


@pytest.mark.parametrize("n", [1, 42, 1000, 1601])
@pytest.mark.parametrize("policy", jt.policy.ALL[1:3], ids=repr)
def test_integer_affine_is_the_loop(n, policy):
    rng = rng_of("int affine", n)
    a, b = rng.integers(-3, 4, (2, n)).astype(np.int32)
    h, want = np.int32(5), []
    with np.errstate(over="ignore"):
        for x, y in zip(a, b, strict=True):
            h = x * h + y
            want.append(h)
    got = jt.linear_recurrence(jnp.asarray(a), jnp.asarray(b), 0, 5, policy=policy)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("policy", [p for p in jt.policy.ALL if p.name != "fold_right"])
@pytest.mark.parametrize("direction", _DIRECTIONS)
def test_first_prefix_is_theelement(policy, direction):
    if policy is jt.policy.fold_left and direction == "suffix":
        return
    bits = np.array([0x80000000, 0x00000001, 0x7FC00001], np.uint32)
    x = np.stack([bits.view(np.float32)] * 3, 1)
    for reducer in (jt.add, jt.multiply, jt.maximum):
        got = (
            jt.scan(jnp.asarray(x), 1, reducer, direction=direction)
            if policy.permits(jt.policy.Transform.PERMUTE)
            else jt.scan(jnp.asarray(x), 1, reducer, direction=direction, policy=policy)
        )
        edge = 0 if direction == "prefix" else -1
        same_bits(got[:, edge], x[:, edge])


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_unordered_scan_of_a_commutative_reducer(policy):
    x = ints(rng_of("unordered"), (2, 42))
    got = jt.scan(x, 1, jt.bitwise_xor, policy=policy)
    np.testing.assert_array_equal(got, np.bitwise_xor.accumulate(x, axis=1))


@pytest.mark.parametrize("policy", jt.policy.ALL[1:], ids=repr)
@pytest.mark.parametrize("direction", _DIRECTIONS)
def test_empty_axis_and_empty_batch(policy, direction):
    params = dict(policy=policy, direction=direction, return_final=True)
    y, last = jt.scan(jnp.zeros((2, 0)), 1, jt.add, **params)
    assert y.shape == (2, 0)
    same_bits(last, np.zeros(2, np.float32))
    y, last = jt.scan(jnp.zeros((2, 0)), 1, jt.maximum, init=3.0, **params)
    same_bits(last, np.full(2, 3, np.float32))
    y, last = jt.scan(jnp.zeros((0, 5)), 1, jt.add, **params)
    assert (y.shape, last.shape) == ((0, 5), (0,))


def test_logaddexp_is_close():
    x = 3 * floats(rng_of("lse"), (2, 300))
    want = np.logaddexp.accumulate(x.astype(np.float64), axis=1)
    # A few eps of a value that is at most max|x| + log n, for each of n merges.
    bound = 4 * 300 * np.finfo(np.float32).eps * (np.abs(x).max() + 7)
    for policy in ("ordered_tree", "fixed_tree", "fold_left"):
        got = jt.scan(x, 1, jt.logaddexp, policy=policy)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def test_out_dtype_and_final_state():
    x = jnp.ones(5000, jnp.bfloat16)
    y, last = jt.scan(x, 0, jt.add, out_dtype=jnp.bfloat16, return_final=True)
    assert y.dtype == jnp.bfloat16
    assert (float(y[255]), float(y[256]), float(y[257])) == (256, 256, 258)
    assert float(y[-1]) == 4992
    same_bits(last, np.float32(5000))


def test_final_is_the_raw_state():
    a, b = jnp.full(3, 0.5), jnp.ones(3)
    h, (decay, state) = jt.scan((a, b), 0, jt.affine, return_final=True)
    np.testing.assert_array_equal(h, [1, 1.5, 1.75])
    assert (decay, state) == (0.125, 1.75)


_VALUES = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=9, max_size=9)


@settings(max_examples=25)
@given(_VALUES)
def test_last_prefix_is_the_reduction(values):
    x = jnp.asarray(np.array(values, np.int32))
    for policy in ("ordered_tree", "fixed_tree", "fold_left", "fold_right"):
        y = jt.scan(x, 0, jt.add, policy=policy)
        assert y[-1] == jt.reduce(x, 0, jt.add, policy=policy)
        y = jt.scan(x, 0, jt.add, policy=policy, direction="suffix")
        assert y[0] == jt.reduce(x, 0, jt.add, policy=policy)


@settings(max_examples=25)
@given(_VALUES, st.integers(-9, 9))
def test_exclusive_is_inclusive_shifted(values, seed):
    x = jnp.asarray(np.array(values, np.int32))
    for direction in _DIRECTIONS:
        params = dict(init=seed, direction=direction, policy="fixed_tree")
        y = jt.scan(x, 0, jt.multiply, **params)
        e = jt.scan(x, 0, jt.multiply, exclusive=True, **params)
        if direction == "prefix":
            np.testing.assert_array_equal(
                e, jnp.concatenate([jnp.array([seed]), y[:-1]])
            )
        else:
            np.testing.assert_array_equal(
                e, jnp.concatenate([y[1:], jnp.array([seed])])
            )


@settings(max_examples=25)
@given(st.lists(st.floats(-9, 9, width=32), min_size=9, max_size=9))
def test_reverse_is_the_scan_of_the_flipped(values):
    x = jnp.asarray(np.array(values, np.float32))
    for policy in ("ordered_tree", "fixed_tree", "fold_left"):
        pair = (x, x)
        got = jt.scan(pair, 0, jt.affine, direction="reverse", policy=policy)
        flipped = jt.scan((x[::-1], x[::-1]), 0, jt.affine, policy=policy)
        same_bits(got, flipped[::-1])


@settings(max_examples=25)
@given(st.lists(st.floats(-9, 9, width=32), min_size=9, max_size=9))
def test_streaming_is_the_whole(values):
    x = jnp.asarray(np.array(values, np.float32))
    for reducer, element in ((jt.add, x), (jt.affine, (x, x)), (jt.welford, x)):
        cut = lambda lo, hi, e=element: jax.tree.map(lambda v: v[lo:hi], e)  # noqa: E731
        whole = jt.scan(element, 0, reducer, policy="fold_left")
        y0, state = jt.scan(
            cut(0, 4), 0, reducer, policy="fold_left", return_final=True
        )
        y1 = jt.scan(cut(4, 9), 0, reducer, policy="fold_left", init=state)
        for a, b, w in zip(*map(jax.tree.leaves, (y0, y1, whole)), strict=True):
            same_bits(np.concatenate([a, b]), w)


def test_linear_recurrence():
    b = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    h = jt.linear_recurrence(0.5, b, 1)
    np.testing.assert_array_equal(h, [[1, 2.5, 4.25], [4, 7, 9.5]])
    h = jt.linear_recurrence(0.5, b, 1, jnp.array([2.0, 4.0]))
    np.testing.assert_array_equal(h, [[2, 3, 4.5], [6, 8, 10]])
    h = jt.linear_recurrence(0.5, b, 1, 2.0, direction="reverse")
    np.testing.assert_array_equal(h, [[3, 4, 4], [8.25, 8.5, 7]])
    h = jt.linear_recurrence(
        jnp.full(3, 0.5, jnp.bfloat16), jnp.ones(3, jnp.bfloat16), 0
    )
    assert h.dtype == jnp.float32


@pytest.mark.parametrize("policy", ["ordered_tree", "fixed_tree", "fold_left"])
def test_recurrence_of_a_weak_number(policy):
    want = 2.0 ** np.arange(1, 51) - 1  # 2^50 is no 32-bit integer
    h = jt.linear_recurrence(2, jnp.ones(50), 0, policy=policy)
    assert h.dtype == jnp.float32
    np.testing.assert_allclose(h, want, rtol=1e-6)
    h = jt.linear_recurrence(jnp.full(50, 2.0), 1, 0, policy=policy)
    np.testing.assert_allclose(h, want, rtol=1e-6)
    h = jt.linear_recurrence(3, jnp.arange(4), 0, 1, policy=policy)
    np.testing.assert_array_equal(h, [3, 10, 32, 99])
    # A weak 0.1 is not rounded to bfloat16 on the way to the float32 accumulator.
    h = jt.linear_recurrence(0.1, jnp.ones(2, jnp.bfloat16), 0, policy=policy)
    np.testing.assert_array_equal(h, np.float32([1, np.float32(0.1) + np.float32(1)]))


def test_recurrence_of_a_weak_number_beside_64_bits(x64):
    for dtype in (jnp.float32, jnp.float64):
        slope = jax.grad(
            lambda a, d=dtype: jt.linear_recurrence(a, jnp.ones(3, d), 0)[2]
        )
        assert jt.linear_recurrence(0.5, jnp.ones(3, dtype), 0).dtype == dtype
        assert float(slope(0.5)) == 2.0


def test_recurrence_of_tiles_joins_their_dims():
    rows, time = jt.dims("rows time")
    b = np.arange(6, dtype=np.float32).reshape(2, 3)
    a, h0 = np.float32([0.5, 2.0, -1.0]), np.float32([1.0, -1.0])
    got = jt.linear_recurrence(
        jt.tile(a, time), jt.tile(b, (rows, time)), time, jt.tile(h0, rows)
    )
    h, want = h0, []
    for t in range(3):
        h = a[t] * h + b[:, t]
        want.append(h)
    assert got.dims == (rows, time)
    np.testing.assert_array_equal(got.array, np.stack(want, 1))
    got = jt.linear_recurrence(0.5, jt.tile(b, (rows, time)), rows)
    np.testing.assert_array_equal(got.array, [b[0], 0.5 * b[0] + b[1]])


def test_pytree_elements():
    x = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3, 4], jnp.int8)}
    both = jt.Reducer(
        merge=lambda s, t: {"a": s["a"] + t["a"], "b": jnp.maximum(s["b"], t["b"])},
        laws=jt.Laws(True, True),
    )
    got = jt.scan(x, 0, both)
    np.testing.assert_array_equal(got["a"], [1, 3])
    same_bits(got["b"], np.array([3, 4], np.int8))


def test_user_update_functions():
    digits = jt.Reducer(
        merge=lambda a, b: a,
        identity=0,
        update=lambda s, e: 10 * s + e,
        update_right=lambda e, s: e + 10 * s,
    )
    x = jnp.array([1, 2, 3])
    fold = dict(policy="fold_left")
    np.testing.assert_array_equal(jt.scan(x, 0, digits, **fold), [1, 12, 123])
    got = jt.scan(x, 0, digits, direction="reverse", **fold)
    np.testing.assert_array_equal(got, [321, 32, 3])
    got = jt.scan(x, 0, digits, direction="suffix", **fold)
    np.testing.assert_array_equal(got, [123, 23, 3])
    got = jt.scan(x, 0, digits, policy="fold_right")
    np.testing.assert_array_equal(got, [1, 21, 321])
    got = jt.scan(x, 0, digits, direction="suffix", policy="fold_right")
    np.testing.assert_array_equal(got, [321, 32, 3])
