"""The vocabulary of reducers: laws, equality by value, calling, and check_laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import oracle
from jaxtile.errors import ContractError, TileTypeError, TileValueError
from jaxtile.laws import check_laws

_FLOATS = [0.0, -0.0, 1.5, -2.25, 3.0, 3.0, 1e-3, -7.0]
_SPECIAL = [*_FLOATS, np.inf, -np.inf, np.nan]
_BOOLS = [True, False]
_PAIRS = [(0.5, 1.0), (-1.5, 0.25), (2.0, -3.0), (0.0, 1.0), (1.0, -0.0)]


def _f32(values):
    return [jax.tree.map(np.float32, v) for v in values]


_ONE = _f32([(((a,),), (b,)) for a, b in _PAIRS])
_CATALOGUE = [
    (jt.add, _f32(_FLOATS)),
    (jt.add, [np.int8(v) for v in (100, -128, 27, 1)]),
    (jt.multiply, _f32(_FLOATS)),
    (jt.maximum, _f32(_SPECIAL)),
    (jt.minimum, _f32(_SPECIAL)),
    (jt.maximum_number, _f32(_SPECIAL)),
    (jt.minimum_number, _f32(_SPECIAL)),
    (jt.maximum, [np.uint8(v) for v in (0, 255, 7)]),
    (jt.logical_and, _BOOLS),
    (jt.logical_or, _BOOLS),
    (jt.bitwise_and, [np.int32(v) for v in (-1, 0, 5, 12)]),
    (jt.bitwise_or, [np.int32(v) for v in (-1, 0, 5, 12)]),
    (jt.bitwise_xor, [np.uint16(v) for v in (65535, 0, 5, 12)]),
    (jt.argmax, _f32(_SPECIAL)),
    (jt.argmin, _f32(_SPECIAL)),
    (jt.argmax(ties="last"), _f32(_SPECIAL)),
    (jt.argmin(nan="ignore"), _f32(_SPECIAL)),
    (jt.logaddexp, _f32(_SPECIAL)),
    (jt.welford, _f32(_FLOATS)),
    (jt.affine, _f32(_PAIRS)),
    (jt.matrix_affine(1), _ONE),
    (jt.first, _f32(_FLOATS)),
    (jt.last, _f32(_FLOATS)),
    (jt.product(jt.add, jt.maximum), [(np.float32(v), np.int8(v)) for v in (1, -2, 3)]),
    (jt.segmented(jt.add), [(h, np.float32(v)) for h in _BOOLS for v in (1.5, -0.0)]),
]


@pytest.mark.parametrize(("reducer", "examples"), _CATALOGUE, ids=repr)
def test_catalogue_keeps_its_laws(reducer, examples):
    report = check_laws(reducer, examples)
    assert "cannot prove" in str(report)
    assert report.reducer == reducer
    assert report.combinations > 0


def test_check_laws_finds_a_counterexample():
    monoid = jt.Laws(associative=True, commutative=True)
    wrong = jt.Reducer(merge=lambda a, b: a - b, identity=0, laws=monoid)
    with pytest.raises(
        ContractError, match=r"to be associative.*for a = 1, b = 1, c = 1"
    ):
        check_laws(wrong, [1, 2, 3])


def test_check_laws_of_floats_allows_rounding_only():
    mean = jt.Reducer(merge=lambda a, b: (a + b) / 2, laws=jt.Laws(associative=True))
    with pytest.raises(ContractError, match="to be associative"):
        check_laws(mean, _f32([1.0, 2.0, 4.0]))
    swap = jt.Reducer(merge=lambda a, b: b, laws=jt.Laws(True, True))
    with pytest.raises(ContractError, match="to be commutative"):
        check_laws(swap, _f32([1.0, 2.0]))


def test_check_laws_of_identity():
    plus = jt.Reducer(merge=lambda a, b: a + b, identity=1, laws=jt.Laws(True, True))
    with pytest.raises(ContractError, match="to be identity.*merge\\(identity, a\\)"):
        check_laws(plus, [1, 2])
    sign = jt.Reducer(
        merge=lambda a, b: a + b, identity=0.0, laws=jt.Laws(True), exact_identity=True
    )
    with pytest.raises(ContractError, match="to be identity"):
        check_laws(sign, _f32([-0.0]))


def test_check_laws_sets_overflow_aside():
    report = check_laws(jt.multiply, _f32([1e30, 1e30, 1e-30]))
    assert report.undecided > 0
    assert "overflowed" in str(report)


def test_check_laws_does_not_try_undeclared_laws():
    report = check_laws(jt.Reducer(merge=lambda a, b: a - b), [1, 2])
    assert report.held == () or report.held == ("identity",)
    assert "associative" in str(report).split("Not declared")[1]


def test_check_laws_needs_examples():
    with pytest.raises(TileTypeError, match="at least one example"):
        check_laws(jt.add, [])


def _scaled(k):
    return jt.Reducer(merge=lambda a, b: a + k * b)


def test_equal_functions_make_equal_reducers():
    assert _scaled(2) == _scaled(2)
    assert hash(_scaled(2)) == hash(_scaled(2))
    assert _scaled(2) != _scaled(3)
    assert _scaled(2) != _scaled(2.0)
    assert jt.product(jt.add, jt.maximum) == jt.product(jt.add, jt.maximum)
    assert jt.argmax(ties="last") == jt.argmax(ties="last") != jt.argmax


def _with_default(k):
    return jt.Reducer(merge=lambda a, b, k=k: a + k * b)


def _with_keyword(k):
    return jt.Reducer(merge=lambda a, b, *, k=k: a + k * b)


def _with_partial(k):
    return jt.Reducer(merge=functools.partial(lambda k, a, b: a + k * b, k))


@pytest.mark.parametrize("make", [_scaled, _with_default, _with_keyword, _with_partial])
@pytest.mark.parametrize(("k", "other"), [(2, 3), (0.0, -0.0), (1, True)])
def test_what_a_function_captured_is_part_of_its_value(make, k, other):
    assert make(k) == make(k)
    assert make(k) != make(other)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_signs_are_part_of_a_reducer(dtype):
    def make(zero):
        return jt.Reducer(merge=lambda a, b: a + b, identity=dtype(zero))

    assert make(0.0) == make(0.0)
    assert make(0.0) != make(-0.0)


def test_a_captured_array_is_part_of_a_reducer():
    def make(values):
        return jt.Reducer(merge=lambda a, b: a + b * values[0])

    assert make(np.array([1.0])) != make(np.array([2.0]))
    x = jnp.arange(3.0)
    for k in (1.0, 2.0):
        got = jt.reduce(x, 0, make(np.array([k], np.float32)), policy="fold_left")
        assert got == 3 * k


def test_a_recursive_function_has_a_value():
    def make():
        def gcd(a, b):
            return a if isinstance(b, int) else gcd(a + b, 0)

        return jt.Reducer(merge=gcd)

    assert make() == make()


def test_calling_a_reducer_merges():
    assert jt.add(2, 3) == 5
    oracle.same_bits(jt.maximum(np.float32(0), np.float32(-0.0)), np.float32(0))
    value, index = jt.argmax((jnp.float32(1), 3), (jnp.float32(1), 1))
    assert (value, index) == (1, 1)


def test_calling_a_reducer_wrongly():
    with pytest.raises(TileTypeError, match="add: expected two states to merge; got 1"):
        jt.add(1)
    with pytest.raises(TileTypeError, match="expected two states"):
        jt.add(ties="last")
    with pytest.raises(TileValueError, match='expected ties="first"|"last"'):
        jt.argmax(ties="random")
    with pytest.raises(TileTypeError, match="a callable merge"):
        jt.Reducer(merge=3)
    with pytest.raises(TileValueError, match="expected k >= 1; got k=0"):
        jt.matrix_affine(0)
    for wrap in (jt.product, jt.segmented):
        with pytest.raises(ContractError, match="do(es)? not take the source index"):
            wrap(jt.argmax)


def test_moments():
    state = jt.reduce(jnp.array([1.0, 2.0, 4.0]), 0, jt.welford)
    assert isinstance(state, jt.Moments)
    assert state.count == 3
    np.testing.assert_allclose(state.variance(), np.var([1, 2, 4]), rtol=1e-6)
    np.testing.assert_allclose(state.variance(ddof=1), 7 / 3, rtol=1e-6)
    assert np.isnan(state.variance(ddof=3))


def test_product_reduces_each_component():
    x, y = jnp.array([3, 1, 2], jnp.int8), jnp.array([0.5, -1.0, 2.0], jnp.bfloat16)
    low, total = jt.reduce((x, y), 0, jt.product(jt.minimum, jt.add))
    oracle.same_bits(low, np.int8(1))
    oracle.same_bits(total, np.float32(1.5))


def test_segmented_restarts_at_heads():
    head = jnp.array([False, False, True, False, True])
    x = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])
    for policy in ("ordered_tree", "fixed_tree", "fold_left"):
        got = jt.scan((head, x), 0, jt.segmented(jt.add), policy=policy)
        np.testing.assert_array_equal(got, [1, 3, 3, 7, 5])


def test_first_and_last():
    x = jnp.array([[3, 1, 2], [7, 8, 9]])
    np.testing.assert_array_equal(
        jt.reduce(x, 1, jt.first, policy="ordered_tree"), [3, 7]
    )
    np.testing.assert_array_equal(jt.reduce(x, 1, jt.last, policy="fixed_tree"), [2, 9])
    where = jnp.array([[False, True, True], [True, True, False]])
    got = jt.reduce(x, 1, jt.last, policy="ordered_tree", where=where)
    np.testing.assert_array_equal(got, [2, 8])
    got = jt.scan(x, 1, jt.first)
    np.testing.assert_array_equal(got, [[3, 3, 3], [7, 7, 7]])


def test_matrix_affine_is_the_recurrence():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-2, 3, (2, 2, 9)), rng.integers(-9, 9, (2, 9))
    h, want = np.zeros(2, int), []
    for t in range(9):
        h = a[:, :, t] @ h + b[:, t]
        want.append(h)
    element = (tuple(map(tuple, jnp.asarray(a))), tuple(jnp.asarray(b)))
    for policy in ("ordered_tree", "fixed_tree", "fold_left", "fold_right"):
        got = jt.scan(element, 0, jt.matrix_affine(2), policy=policy)
        np.testing.assert_array_equal(np.stack(got, 1), want)


def test_logical_reducers_count_nonzero_as_true():
    x = jnp.array([[1, 2, 0], [4, 5, 6]], jnp.int32)
    np.testing.assert_array_equal(jt.reduce(x, 1, jt.logical_and), [False, True])
    np.testing.assert_array_equal(jt.reduce(x, 1, jt.logical_or), [True, True])
    assert jt.reduce(jnp.zeros(0), 0, jt.logical_and) == True  # noqa: E712
    assert jt.reduce(jnp.zeros(0), 0, jt.logical_or) == False  # noqa: E712
