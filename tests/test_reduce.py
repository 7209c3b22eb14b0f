"""reduce: bits against the oracles, then what each parameter means."""

import zlib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import jaxtile as jt
import oracle
from oracle import same_bits

_LENGTHS = (1, 2, 3, 5, 7, 8, 42, 127, 128, 129)
_STRICT = ("fold_left", "fold_right", "fixed_tree")


def _rng(*key):
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def _floats(rng, shape):
    return rng.standard_normal(shape).astype(np.float32)


def _near_one(rng, shape):
    return rng.uniform(0.8, 1.2, shape).astype(np.float32)


def _special(rng, shape):
    values = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, 2, 2], np.float32)
    return rng.choice(
        values, shape, p=[0.02, 0.06, 0.06, 0.2, 0.2, 0.1, 0.1, 0.13, 0.13]
    )


def _ints(rng, shape):
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def _last_valid(a, b):
    """A state of mixed dtypes: the last index whose flag is set, and a sum."""
    (af, ai, ax), (bf, bi, bx) = a, b
    return af | bf, jnp.where(bf, bi, ai), ax + bx


_MIXED = jt.Reducer(merge=_last_valid, laws=jt.Laws(True), name="last valid")
_MIXED_ORACLE = oracle.Op(
    lambda a, b: (a[0] | b[0], b[1] if b[0] else a[1], a[2] + b[2])
)


def _flags(rng, shape):
    return rng.random(shape) < 0.3


def _int16(rng, shape):
    return rng.integers(-300, 300, shape).astype(np.int16)


_MINUS = jt.Reducer(merge=lambda a, b: a - b, name="minus")
_TWICE = jt.Reducer(merge=lambda a, b: a * b + b, name="user's a * b + b")
_TWICE_ORACLE = oracle.Op(lambda a, b: (a[0] * b[0] + b[0],))

# name: reducer, oracle, makers of the element's leaves
_REDUCERS = {
    "add": (jt.add, oracle.ADD, [_floats]),
    "multiply": (jt.multiply, oracle.MULTIPLY, [_near_one]),
    "maximum": (jt.maximum, oracle.MAXIMUM, [_special]),
    "minimum": (jt.minimum, oracle.MINIMUM, [_special]),
    "maximum_number": (jt.maximum_number, oracle.MAXIMUM_NUMBER, [_special]),
    "minimum_number": (jt.minimum_number, oracle.MINIMUM_NUMBER, [_special]),
    "argmax": (jt.argmax, oracle.argmax(), [_special]),
    "argmin": (jt.argmin, oracle.argmin(), [_special]),
    "argmax last": (jt.argmax(ties="last"), oracle.argmax("last"), [_special]),
    "argmin ignore": (
        jt.argmin(nan="ignore"),
        oracle.argmin(nan="ignore"),
        [_special],
    ),
    "int add": (jt.add, oracle.ADD, [_ints]),
    "xor": (jt.bitwise_xor, oracle.XOR, [_ints]),
    "welford": (jt.welford, oracle.WELFORD, [_floats]),
    "affine": (jt.affine, oracle.AFFINE, [_near_one, _floats]),
    "mixed": (_MIXED, _MIXED_ORACLE, [_flags, _int16, _floats]),
    "minus": (_MINUS, oracle.SUBTRACT, [_floats]),
    "user": (_TWICE, _TWICE_ORACLE, [_near_one]),
}


def _raw(reducer):
    """The reducer without its finish, so that whole states are compared."""
    return reducer if reducer is not jt.affine else _RAW_AFFINE


_RAW_AFFINE = jt.Reducer(
    merge=jt.affine.merge, identity=jt.affine.identity, laws=jt.affine.laws
)


def _element(leaves):
    return leaves[0] if len(leaves) == 1 else tuple(map(jnp.asarray, leaves))


def _stack(states, shape):
    return [np.array(leaf).reshape(shape) for leaf in zip(*states, strict=True)]


def _legal(name, policy):
    return not (policy == "fixed_tree" and name in ("minus", "user"))


_BIT_CASES = [
    (name, policy, n)
    for name in _REDUCERS
    for policy in _STRICT
    if _legal(name, policy)
    for n in sorted(_rng(name, policy).choice(_LENGTHS, 2, replace=False).tolist())
]


@pytest.mark.parametrize(("name", "policy", "n"), _BIT_CASES)
def test_bits(name, policy, n):
    rng = _rng(name, policy, n)
    reducer, op, makers = _REDUCERS[name]
    axis = int(rng.integers(2))
    leaves = [make(rng, (3, n)) for make in makers]
    mask = rng.random((3, n)) < 0.6 if rng.random() < 0.5 else None
    if mask is not None:
        mask[:, rng.integers(n)] = True  # an empty fibre is another test
    placed = [jnp.asarray(v if axis else v.T) for v in leaves]
    where = None if mask is None else jnp.asarray(mask if axis else mask.T)
    got = jt.reduce(_element(placed), axis, _raw(reducer), where=where, policy=policy)
    flags = [None] * 3 if mask is None else mask
    want = [
        oracle.REDUCTIONS[policy](op, row, mask=m)
        for row, m in zip(oracle.rows(leaves), flags, strict=True)
    ]
    for g, w in zip(jax.tree.leaves(got), _stack(want, 3), strict=True):
        same_bits(g, w)


@pytest.mark.slow
@pytest.mark.parametrize("name", _REDUCERS)
@pytest.mark.parametrize("policy", _STRICT)
@pytest.mark.parametrize("n", [*_LENGTHS, 1000])
def test_bits_everywhere(name, policy, n):
    if _legal(name, policy):
        test_bits(name, policy, n)


_SEEDS = {
    "add": (0.5,),
    "multiply": (1.25,),
    "maximum": (1.0,),
    "affine": (0.5, 2.0),
    "minus": (0.5,),
}


@pytest.mark.parametrize("name", _SEEDS)
@pytest.mark.parametrize("policy", _STRICT)
def test_seed_bits(name, policy):
    if not _legal(name, policy):
        return
    reducer, op, makers = _REDUCERS[name]
    rng = _rng("seed", name, policy)
    leaves = [make(rng, (2, 7)) for make in makers]
    mask = rng.random((2, 7)) < 0.5
    mask[1] = False  # nothing but the seed
    seed = tuple(np.float32(v) for v in _SEEDS[name])
    init = jax.tree.map(jnp.asarray, seed if len(seed) > 1 else seed[0])
    got = jt.reduce(
        _element(leaves), 1, _raw(reducer), init=init, where=mask, policy=policy
    )
    rows = oracle.rows(leaves)
    want = [oracle.REDUCTIONS[policy](op, rows[i], seed, mask[i]) for i in (0, 1)]
    for g, w in zip(jax.tree.leaves(got), _stack(want, 2), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("policy", _STRICT)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", ["add", "multiply", "affine", "welford"])
def test_narrow_floats_accumulate_wide(policy, dtype, name):
    reducer, op, makers = _REDUCERS[name]
    rng = _rng("narrow", policy, name)
    leaves = [make(rng, (2, 42)).astype(dtype) for make in makers]
    got = jt.reduce(_element(leaves), 1, _raw(reducer), policy=policy)
    wide = [v.astype(np.float32) for v in leaves]
    want = [oracle.REDUCTIONS[policy](op, row) for row in oracle.rows(wide)]
    for g, w in zip(jax.tree.leaves(got), _stack(want, 2), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("policy", _STRICT)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", ["add", "multiply", "affine"])
def test_each_combine_rounds_to_a_narrow_accumulator(policy, dtype, name):
    reducer, op, makers = _REDUCERS[name]
    rng = _rng("acc", policy, name)
    leaves = [make(rng, (2, 42)) for make in makers]
    got = jt.reduce(_element(leaves), 1, _raw(reducer), policy=policy, acc_dtype=dtype)
    narrow = [v.astype(dtype) for v in leaves]
    want = [oracle.REDUCTIONS[policy](op, row) for row in oracle.rows(narrow)]
    for g, w in zip(jax.tree.leaves(got), _stack(want, 2), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("policy", _STRICT)
@pytest.mark.parametrize("name", ["add", "affine", "argmax"])
def test_a_row_has_the_same_bits_in_every_batch(policy, name):
    reducer, _, makers = _REDUCERS[name]
    rng = _rng("batch", policy, name)
    leaves = [jnp.asarray(make(rng, (64, 43))) for make in makers]

    def run(element, axis=-1):
        return jt.reduce(element, axis, _raw(reducer), policy=policy)

    def check(got, rows):
        for g, w in zip(jax.tree.leaves(got), whole, strict=True):
            same_bits(g, np.asarray(w)[rows])

    element = _element(leaves)
    whole = jax.tree.leaves(run(element))
    for rows in (slice(0, 1), slice(0, 3)):
        check(run(jax.tree.map(lambda v, r=rows: v[r], element)), rows)
    check(run(jax.tree.map(jnp.transpose, element), 0), slice(None))
    check(jax.jit(jax.vmap(run))(element), slice(None))
    one = jax.jit(run)
    for i in (0, 17, 63):
        check(one(jax.tree.map(lambda v, i=i: v[i], element)), i)


@pytest.mark.parametrize("policy", ["unordered_tree", *_STRICT])
def test_several_axes_are_lexicographic(policy):
    x = _floats(_rng("axes"), (3, 4, 5))
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
    x = _floats(_rng("bound", n), (5, n))
    got = jt.reduce(x, 1, jt.add, policy=policy)
    eps = np.finfo(np.float32).eps
    for g, row in zip(np.asarray(got), x, strict=True):
        error = abs(float(g) - float(oracle.exact_sum(row)))
        assert error <= n * eps * float(np.abs(row).sum(dtype=np.float64))


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
@pytest.mark.parametrize("name", ["maximum", "minimum_number", "argmin", "xor"])
def test_exact_reducers_do_not_depend_on_the_policy(policy, name):
    reducer, op, makers = _REDUCERS[name]
    x = makers[0](_rng("exact", name), (4, 129))
    got = jt.reduce(x, 1, reducer, policy=policy)
    want = [oracle.fold_left(op, row) for row in oracle.rows([x])]
    for g, w in zip(jax.tree.leaves(got), _stack(want, 4), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
@pytest.mark.parametrize("n", [1, 42, 1000])
def test_logaddexp_is_close(policy, n):
    x = 3 * _floats(_rng("lse", n), (3, n))
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
    for policy in _STRICT:
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
