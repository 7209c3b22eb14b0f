"""reduce: the same bits as the oracles, in every batch and on either axis."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
import oracle
from fibres import (
    LENGTHS,
    REDUCERS,
    STRICT,
    element,
    init_of,
    legal,
    rng_of,
    seed_of,
    shown,
)
from oracle import same_bits

_NARROW = [
    ("add", ml_dtypes.bfloat16),
    ("add", np.float16),
    ("multiply", np.float16),
    ("affine", ml_dtypes.bfloat16),
    ("welford", ml_dtypes.bfloat16),
]


_BIT_CASES = [
    (name, policy, n)
    for name in REDUCERS
    for policy in STRICT
    if legal(name, policy)
    for n in sorted(rng_of(name, policy).choice(LENGTHS, 2, replace=False).tolist())
]


@pytest.mark.parametrize(("name", "policy", "n"), _BIT_CASES)
def test_bits(name, policy, n):
    rng = rng_of(name, policy, n)
    reducer, op, makers, _ = REDUCERS[name]
    axis = int(rng.integers(2))
    leaves = [make(rng, (3, n)) for make in makers]
    mask = rng.random((3, n)) < 0.6 if rng.random() < 0.5 else None
    if mask is not None:
        mask[:, rng.integers(n)] = True  # an empty fibre is another test
    placed = [jnp.asarray(v if axis else v.T) for v in leaves]
    where = None if mask is None else jnp.asarray(mask if axis else mask.T)
    got = jt.reduce(element(placed), axis, reducer, where=where, policy=policy)
    flags = [None] * 3 if mask is None else mask
    want = [
        oracle.REDUCTIONS[policy](op, row, mask=m)
        for row, m in zip(oracle.rows(leaves), flags, strict=True)
    ]
    for g, w in shown(got, want, 3):
        same_bits(g, w)


@pytest.mark.parametrize("n", [7, 11, 15, 143])
def test_counts_that_are_constants(n):
    # XLA knows every count; a quotient of two of them is still rounded once.
    x = np.random.default_rng(n).integers(0, 17, (n, 64)).astype(np.float32)
    reducer, op, _, _ = REDUCERS["welford"]
    got = jax.jit(lambda v: jt.reduce(v, 0, reducer, policy="fixed_tree"))(x)
    want = [oracle.REDUCTIONS["fixed_tree"](op, row) for row in oracle.rows([x.T])]
    for g, w in shown(got, want, 64):
        same_bits(g, w)


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("n", [*LENGTHS, 1000])
def test_bits_everywhere(name, policy, n):
    if legal(name, policy):
        test_bits(name, policy, n)


@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "affine", "minus"])
@pytest.mark.parametrize("policy", STRICT)
def test_seed_bits(name, policy):
    if not legal(name, policy):
        return
    reducer, op, makers, _ = REDUCERS[name]
    rng = rng_of("seed", name, policy)
    leaves = [make(rng, (2, 7)) for make in makers]
    mask = rng.random((2, 7)) < 0.5
    mask[1] = False  # nothing but the seed
    seed = seed_of(name)
    init = init_of(seed, ())
    got = jt.reduce(element(leaves), 1, reducer, init=init, where=mask, policy=policy)
    rows = oracle.rows(leaves)
    want = [oracle.REDUCTIONS[policy](op, rows[i], seed, mask[i]) for i in (0, 1)]
    for g, w in shown(got, want, 2):
        same_bits(g, w)


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize(("name", "dtype"), _NARROW)
def test_narrow_floats_accumulate_wide(policy, dtype, name):
    reducer, op, makers, _ = REDUCERS[name]
    rng = rng_of("narrow", policy, name)
    leaves = [make(rng, (2, 42)).astype(dtype) for make in makers]
    got = jt.reduce(element(leaves), 1, reducer, policy=policy)
    wide = [v.astype(np.float32) for v in leaves]
    want = [oracle.REDUCTIONS[policy](op, row) for row in oracle.rows(wide)]
    for g, w in shown(got, want, 2):
        same_bits(g, w)


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize(("name", "dtype"), _NARROW[:-1])
def test_each_combine_rounds_to_a_narrow_accumulator(policy, dtype, name):
    reducer, op, makers, _ = REDUCERS[name]
    rng = rng_of("acc", policy, name)
    leaves = [make(rng, (2, 42)) for make in makers]
    got = jt.reduce(element(leaves), 1, reducer, policy=policy, acc_dtype=dtype)
    narrow = [v.astype(dtype) for v in leaves]
    want = [oracle.REDUCTIONS[policy](op, row) for row in oracle.rows(narrow)]
    for g, w in shown(got, want, 2):
        same_bits(g, w)


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("name", ["add", "affine", "argmax"])
def test_a_row_has_the_same_bits_in_every_batch(policy, name):
    reducer, _, makers, _ = REDUCERS[name]
    rng = rng_of("batch", policy, name)
    leaves = [jnp.asarray(make(rng, (64, 43))) for make in makers]

    def run(x, axis=-1):
        return jt.reduce(x, axis, reducer, policy=policy)

    def check(got, rows):
        for g, w in zip(jax.tree.leaves(got), whole, strict=True):
            same_bits(g, np.asarray(w)[rows])

    x = element(leaves)
    whole = jax.tree.leaves(run(x))
    for rows in (slice(0, 1), slice(0, 3)):
        check(run(jax.tree.map(lambda v, r=rows: v[r], x)), rows)
    check(run(jax.tree.map(jnp.transpose, x), 0), slice(None))
    check(jax.jit(jax.vmap(run))(x), slice(None))
    one = jax.jit(run)
    for i in (0, 17, 63):
        check(one(jax.tree.map(lambda v, i=i: v[i], x)), i)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("reducer", [jt.maximum, jt.minimum, jt.logaddexp], ids=str)
def test_no_nan_is_lost_in_a_long_reduction(reducer, dtype, axis):
    rng = np.random.default_rng(0)
    fn = jax.jit(lambda x: jt.reduce(x, axis, reducer))
    for fill in (0, np.inf, -np.inf):
        for place in rng.integers(0, 4096, 4):
            x = rng.standard_normal((2, 4096)).astype(jnp.dtype(dtype))
            x[:, ::7] += jnp.dtype(dtype).type(fill)
            x[0, place] = np.nan
            found = np.isnan(np.asarray(fn(x if axis else x.T), np.float32))
            assert found.tolist() == [True, False]


@pytest.mark.parametrize("n", [3, 700, 5000])
@pytest.mark.parametrize(("reducer", "few"), [(jt.maximum, 0.0), (jt.minimum, -0.0)])
def test_the_extreme_of_zeros_has_its_sign(reducer, few, n):
    x = np.full((3, n), -few, np.float32)
    x[0, n // 2] = x[1, -1] = few
    found = np.asarray(jax.jit(lambda x: jt.reduce(x, 1, reducer))(x))
    assert np.signbit(found).tolist() == np.signbit([few, few, -few]).tolist()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_an_ordered_tree_never_permutes(platform):
    # XLA's own reduction sums in lanes: x[0] + x[8] + ... is no regrouping.
    x = jax.ShapeDtypeStruct((64, 5000), "float32")

    def text(policy):
        def fn(v):
            return jt.reduce(v, 1, jt.add, policy=policy, implementation="reference")

        lowered = jax.jit(fn).trace(x).lower(lowering_platforms=(platform,))
        return lowered.as_text()

    assert "stablehlo.reduce" in text("unordered_tree")
    assert "stablehlo.reduce" not in text("ordered_tree")
