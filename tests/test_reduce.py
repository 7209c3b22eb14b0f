"""reduce: what each parameter means."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import jaxtile as jt
import oracle
from fibres import REDUCERS, STRICT, floats, rng_of, stacked
from jaxtile.errors import TileShapeError
from oracle import same_bits


def _exported(fn, spec, *dtypes):
    """fn on symbolic shapes, through export."""
    shape = jax.export.symbolic_shape(spec)
    args = [jax.ShapeDtypeStruct(shape, d) for d in dtypes]
    return jax.export.export(jax.jit(fn))(*args).call


SYMBOLIC = ["unordered_tree", "ordered_tree", "fold_left", "fold_right"]


@pytest.mark.parametrize("policy", [*SYMBOLIC, "fixed_tree"])
@pytest.mark.parametrize("spec", ["m, 64", "4, n", "m, n"])
@pytest.mark.parametrize("reducer", [jt.add, jt.maximum, jt.argmax], ids=repr)
def test_export_with_symbolic_sizes(reducer, spec, policy):
    def run(x, keep):
        return jt.reduce(x, 1, reducer, policy=policy, where=keep)

    if policy == "fixed_tree" and "n" in spec:
        with pytest.raises(TileShapeError, match="known sizes.*by another policy"):
            _exported(run, spec, np.float32, bool)
        return
    call = _exported(run, spec, np.float32, bool)
    x = rng_of(spec).integers(-9, 9, (4, 64)).astype(np.float32)  # exact in any order
    jax.tree.map(np.testing.assert_array_equal, call(x, x > 3), run(x, x > 3))


@pytest.mark.parametrize("policy", SYMBOLIC)
def test_derivatives_on_symbolic_sizes(policy):
    def run(x):
        y = jt.reduce(x, 1, jt.maximum, policy=policy) ** 2
        return jt.reduce(y, 0, jt.add, policy=policy)

    x = floats(rng_of("symbolic"), (3, 17))
    call = _exported(jax.grad(run), "m, n", np.float32)
    same_bits(call(x), jax.grad(run)(x))


@pytest.mark.parametrize("spec", ["m, 17", "3, n", "m, n"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "reducer", [jt.argmax, jt.multiply, jt.welford, jt.logaddexp], ids=repr
)
def test_derivatives_of_states_on_symbolic_sizes(reducer, axis, spec):
    def run(x):
        leaves = jax.tree.leaves(jt.reduce(x, axis, reducer))
        return sum(jnp.sum(jnp.sin(v)) for v in leaves)

    x = floats(rng_of("states"), (3, 17)) / 8
    call = _exported(jax.grad(run), spec, np.float32)
    np.testing.assert_allclose(call(x), jax.grad(run)(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", [*SYMBOLIC, "fixed_tree"])
def test_scans_of_symbolic_sizes(policy):
    def run(x):
        return jt.scan(x, 1, jt.add, policy=policy)

    x = rng_of("scans").integers(-9, 9, (3, 300)).astype(np.float32)
    same_bits(_exported(run, "m, 300", np.float32)(x), x.cumsum(1))
    if policy == "fixed_tree":
        with pytest.raises(TileShapeError, match="scan: expected known sizes.*another"):
            _exported(run, "m, n", np.float32)
    elif policy != "fold_right":
        same_bits(_exported(run, "m, n", np.float32)(x), x.cumsum(1))


def test_a_symbolic_size_that_may_be_zero():
    with pytest.raises(TileShapeError, match="1 or more.*n - 1.*constrain"):
        _exported(lambda x: jt.reduce(x[1:], 0, jt.add), "n", np.float32)


@pytest.mark.parametrize("policy", ["unordered_tree", *STRICT])
def test_several_axes_are_lexicographic(policy):
    x = floats(rng_of("axes"), (3, 4, 5))
    for axes in ((0, 2), (2, 0), [-1, 0]):
        got = jt.reduce(x, axes, jt.add, policy=policy)
        flat = x.transpose(1, 0, 2).reshape(4, 15)
        same_bits(got, jt.reduce(flat, 1, jt.add, policy=policy))
    if policy != "unordered_tree":
        want = [
            oracle.REDUCTIONS[policy](oracle.ADD, r)[0] for r in oracle.rows([flat])
        ]
        same_bits(got, np.array(want))
    value, index = jt.reduce(x, (0, 2), jt.argmax, policy=policy)
    same_bits(index, flat.argmax(1).astype(np.int32))
    same_bits(value, flat.max(1))
    same_bits(
        jt.reduce(x, None, jt.add, policy=policy),
        jt.reduce(x.ravel(), 0, jt.add, policy=policy),
    )


@pytest.mark.parametrize("policy", ["unordered_tree", "ordered_tree"])
@pytest.mark.parametrize("n", [1, 42, 129, 1000])
def test_any_tree_keeps_the_error_bound(policy, n):
    # n - 1 additions in whatever grouping: each partial sum is at most sum|x|, and each
    # addition errs by at most eps / 2 of it, to first order (Higham, section 4.2).
    x = floats(rng_of("bound", n), (5, n))
    got = jt.reduce(x, 1, jt.add, policy=policy)
    eps = np.finfo(np.float32).eps
    for g, row in zip(np.asarray(got), x, strict=True):
        error = abs(float(g) - float(oracle.exact_sum(row)))
        assert error <= n * eps * float(np.abs(row).sum(dtype=np.float64))


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
@pytest.mark.parametrize("name", ["maximum", "minimum_number", "argmin", "xor"])
def test_exact_reducers_do_not_depend_on_the_policy(policy, name):
    reducer, op, makers, _ = REDUCERS[name]
    x = makers[0](rng_of("exact", name), (4, 129))
    got = jt.reduce(x, 1, reducer, policy=policy)
    want = [oracle.fold_left(op, row) for row in oracle.rows([x])]
    for g, w in zip(jax.tree.leaves(got), stacked(want, 4), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
@pytest.mark.parametrize("n", [1, 42, 1000])
def test_logaddexp_is_close(policy, n):
    x = 3 * floats(rng_of("lse", n), (3, n))
    got = jt.reduce(x, 1, jt.logaddexp, policy=policy)
    want = np.logaddexp.reduce(x.astype(np.float64), axis=1)
    # Each of the n merges errs by a few eps of a value that is at most max|x| + log n.
    bound = 4 * n * np.finfo(np.float32).eps * (np.abs(x).max() + np.log(n) + 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


_ALL_DTYPES = (
    "float16 bfloat16 float32 int8 int16 int32 uint8 uint16 uint32 bool".split()
)
_WIDE = {"float16": "float32", "bfloat16": "float32", "int8": "int32"}
_WIDE |= {"int16": "int32", "uint8": "uint32", "uint16": "uint32", "bool": "int32"}


@pytest.mark.parametrize("dtype", _ALL_DTYPES)
def test_accumulator_rule(dtype):
    x = jnp.ones((2, 3), dtype)
    sums = jt.reduce(x, 1, jt.add)
    assert sums.dtype == _WIDE.get(dtype, dtype)
    np.testing.assert_array_equal(sums, 3)
    for reducer in (jt.maximum, jt.minimum, jt.first):
        policy = "ordered_tree"
        assert jt.reduce(x, 1, reducer, policy=policy).dtype == dtype
    assert jt.reduce(x, 1, jt.argmax)[0].dtype == dtype
    assert jt.reduce(x, 1, jt.argmax)[1].dtype == jnp.int32
    if dtype != "bool":
        assert jt.reduce(x, 1, jt.add, acc_dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_64_bits(x64, dtype):
    x = np.arange(1, 8, dtype=dtype).reshape(1, 7) / np.array(2, dtype)
    x = x.astype(dtype)
    for policy in STRICT:
        got = jt.reduce(jnp.asarray(x), 1, jt.add, policy=policy)
        (row,) = oracle.rows([x])
        same_bits(got, np.array([oracle.REDUCTIONS[policy](oracle.ADD, row)[0]]))
    assert (
        jt.reduce(jnp.ones(3, jnp.float32), 0, jt.add, acc_dtype=dtype).dtype == dtype
    )


def test_integers_wrap_only_in_the_stated_accumulator():
    x = jnp.array([100, 27, 1], jnp.int8)
    assert jt.reduce(x, 0, jt.add) == 128
    assert jt.reduce(x, 0, jt.add, acc_dtype=jnp.int8) == -128
    assert jt.reduce(x, 0, jt.add, out_dtype=jnp.int8) == -128
    assert jt.reduce(x, 0, jt.multiply) == 2700


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_empty_fibres(policy):
    x = jnp.zeros((2, 0))
    zero = np.zeros(2, np.float32)
    same_bits(jt.reduce(x, 1, jt.add, policy=policy), zero)
    same_bits(jt.reduce(x, 1, jt.multiply, policy=policy), zero + 1)
    same_bits(jt.reduce(x, 1, jt.logaddexp, policy=policy), zero - np.inf)
    same_bits(jt.reduce(x, 1, jt.maximum, init=-3.0, policy=policy), zero - 3)
    same_bits(jt.reduce(x, 1, jt.add, init=-0.0, policy=policy), -zero)
    assert jt.reduce(jnp.zeros((0, 3)), 1, jt.maximum, policy=policy).shape == (0,)
    assert jt.reduce(x, 1, jt.welford, policy=policy).count.tolist() == [0, 0]


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_masking_everything_is_the_empty_fibre(policy):
    x, none = jnp.array([[jnp.nan, 3.0]]), jnp.zeros((1, 2), bool)
    one = np.zeros(1, np.float32)
    same_bits(jt.reduce(x, 1, jt.add, where=none, policy=policy), one)
    same_bits(jt.reduce(x, 1, jt.multiply, where=none, policy=policy), one + 1)
    same_bits(jt.reduce(x, 1, jt.maximum, where=none, policy=policy), one - np.inf)
    got = jt.reduce(x, 1, jt.maximum, where=none, init=-5.0, policy=policy)
    same_bits(got, one - 5)
    got = jt.reduce(x, 1, jt.logaddexp, where=none, policy=policy)
    same_bits(got, one - np.inf)


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_one_element_keeps_its_bits(policy):
    bits = np.array([0x80000000, 0x7FC00001, 0x00000001, 0xFF800000], np.uint32)
    x = jnp.asarray(bits.view(np.float32)[:, None])
    for reducer in (jt.add, jt.multiply, jt.maximum, jt.minimum):
        same_bits(jt.reduce(x, 1, reducer, policy=policy), bits.view(np.float32))


def test_where_broadcasts_and_seeds_broadcast():
    x = jnp.arange(6.0).reshape(2, 3)
    where = jnp.array([True, False, True])
    np.testing.assert_array_equal(jt.reduce(x, 1, jt.add, where=where), [2, 8])
    where = jnp.array([[True], [False]])
    np.testing.assert_array_equal(jt.reduce(x, 1, jt.add, where=where), [3, 0])
    init = jnp.array([10.0, 20.0])
    np.testing.assert_array_equal(jt.reduce(x, 1, jt.add, init=init), [13, 32])
    np.testing.assert_array_equal(jt.reduce(x, 1, jt.add, init=1), [4, 13])


@pytest.mark.parametrize("init", [0.0, 0, np.float32(0), jnp.zeros((), "bfloat16")])
@pytest.mark.parametrize("acc", ["float32", "bfloat16", "float16"])
def test_a_seed_of_another_float_dtype_converts(init, acc):
    x = jnp.ones(3, acc)
    if acc == "float16" and np.asarray(init).dtype == ml_dtypes.bfloat16:
        return  # neither holds the other: refused, see test_errors
    same_bits(
        jt.reduce(x, 0, jt.add, init=init, acc_dtype=acc),
        np.asarray(3, jnp.dtype(acc)),
    )


def test_keepdims():
    x = jnp.ones((2, 3, 4))
    assert jt.reduce(x, (0, 2), jt.add, keepdims=True).shape == (1, 3, 1)
    value, index = jt.reduce(x, 1, jt.argmax, keepdims=True)
    assert value.shape == index.shape == (2, 1, 4)
    assert jt.reduce(x, None, jt.add, keepdims=True).shape == (1, 1, 1)


def test_out_dtype_rounds_once_after_finish():
    x = jnp.ones(5000, jnp.bfloat16)
    same_bits(
        jt.reduce(x, 0, jt.add, out_dtype=jnp.bfloat16),
        np.asarray(4992, ml_dtypes.bfloat16),
    )
    value, index = jt.reduce(jnp.ones(3), 0, jt.argmax, out_dtype=jnp.bfloat16)
    assert (value.dtype, index.dtype) == (jnp.bfloat16, jnp.int32)
    value, index = jt.reduce(jnp.ones(3), 0, jt.argmax, out_dtype=(None, jnp.int8))
    assert (value.dtype, index.dtype) == (jnp.float32, jnp.int8)


def test_pytree_elements():
    x = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3, 4], jnp.int8)}
    both = jt.Reducer(
        merge=lambda s, t: {"a": s["a"] + t["a"], "b": jnp.maximum(s["b"], t["b"])},
        laws=jt.Laws(True, True),
    )
    got = jt.reduce(x, 0, both)
    assert (float(got["a"]), int(got["b"])) == (3.0, 4)
    assert got["b"].dtype == jnp.int8


def test_user_update_functions():
    digits = jt.Reducer(
        merge=lambda a, b: a,
        identity=0,
        update=lambda s, e: 10 * s + e,
        update_right=lambda e, s: e + 10 * s,
        name="digits",
    )
    x = jnp.array([1, 2, 3])
    assert jt.reduce(x, 0, digits, policy="fold_left") == 123
    assert jt.reduce(x, 0, digits, policy="fold_right") == 321
    assert jt.reduce(x, 0, digits, policy="fold_left", init=9) == 9123
    where = jnp.array([True, False, True])
    assert jt.reduce(x, 0, digits, policy="fold_left", where=where) == 13


@settings(max_examples=25)
@given(st.lists(st.integers(-128, 127), min_size=7, max_size=7), st.integers(-9, 9))
def test_integer_sums_do_not_depend_on_the_policy(values, seed):
    x = jnp.array(values, jnp.int8)
    for policy in jt.policy.ALL:
        assert jt.reduce(x, 0, jt.add, init=seed, policy=policy) == sum(values) + seed


def test_implementation():
    x = jnp.arange(4.0)
    same_bits(jt.reduce(x, 0, jt.add, implementation="reference"), np.float32(6))
