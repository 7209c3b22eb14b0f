"""scan: the same bits as the oracles, in every batch and on either axis."""

import itertools

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
)
from oracle import same_bits

_DIRECTIONS = ("prefix", "suffix", "reverse")


def _check_states(got, want, known):
    """Compare leaf by leaf where there is a state; elsewhere it is the empty value."""
    for k, leaf in enumerate(jax.tree.leaves(got)):
        leaf = np.asarray(leaf)
        expected = leaf.copy()
        for place in np.argwhere(known):
            expected[tuple(place)] = want[tuple(place)][k]
        same_bits(leaf, expected)


def _as_array(nested):
    out = np.empty((len(nested), len(nested[0])), object)
    for i, j in np.ndindex(out.shape):
        out[i, j] = nested[i][j]
    return out


def _cases():
    """Each reducer, policy and direction once, the other choices drawn by seed."""
    for name, policy, direction in itertools.product(REDUCERS, STRICT, _DIRECTIONS):
        if legal(name, policy):
            rng = rng_of(name, policy, direction)
            seeded = REDUCERS[name][3] is not None and rng.random() < 0.5
            exclusive = bool(seeded and rng.random() < 0.6)
            masked, axis = bool(rng.random() < 0.5), int(rng.integers(2))
            n = int(rng.choice(LENGTHS))
            yield name, policy, direction, n, seeded, exclusive, masked, axis


@pytest.mark.parametrize(
    ("name", "policy", "direction", "n", "seeded", "exclusive", "masked", "axis"),
    list(_cases()),
)
def test_bits(name, policy, direction, n, seeded, exclusive, masked, axis):
    rng = rng_of("data", name, policy, direction, n)
    reducer, op, makers, _ = REDUCERS[name]
    leaves = [make(rng, (2, n)) for make in makers]
    mask = rng.random((2, n)) < 0.6 if masked else None
    seed = seed_of(name) if seeded else None
    got, last = jt.scan(
        element([v if axis else v.T for v in map(jnp.asarray, leaves)]),
        axis,
        reducer,
        init=init_of(seed, (2,)),
        where=None if mask is None else jnp.asarray(mask if axis else mask.T),
        exclusive=exclusive,
        direction=direction,
        return_final=True,
        policy=policy,
    )
    got = [v if axis else v.T for v in jax.tree.leaves(got)]
    flags = [None] * 2 if mask is None else mask
    rows = list(zip(oracle.rows(leaves), flags, strict=True))
    want = _as_array(
        [oracle.scan(op, r, policy, seed, m, direction, exclusive) for r, m in rows]
    )
    _check_states(got, want, np.vectorize(lambda v: v is not None)(want))
    ends = _as_array(
        [[oracle.final(op, r, policy, seed, m, direction)] for r, m in rows]
    )
    ends = ends[:, 0]
    _check_states(last, ends, np.array([v is not None for v in ends]))


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("direction", _DIRECTIONS)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("masked", [False, True])
def test_bits_everywhere(name, policy, direction, n, masked):
    if legal(name, policy):
        seeded = REDUCERS[name][3] is not None
        test_bits(name, policy, direction, n, seeded, seeded, masked, n % 2)


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("n", [42, 129])
def test_masked_prefix_of_nothing_is_the_empty_value(policy, n):
    x = jnp.full((2, n), jnp.nan)
    where = jnp.arange(n) >= n - 1
    got = jt.scan(x, 1, jt.add, where=where, policy=policy)
    same_bits(got[:, :-1], np.zeros((2, n - 1), np.float32))
    got = jt.scan(x, 1, jt.multiply, where=where, policy=policy)
    same_bits(got[:, :-1], np.ones((2, n - 1), np.float32))


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize(
    ("name", "dtype"), [("add", np.float16), ("affine", ml_dtypes.bfloat16)]
)
@pytest.mark.parametrize("narrow", [False, True])
def test_accumulators(policy, dtype, name, narrow):
    reducer, op, makers, _ = REDUCERS[name]
    leaves = [
        make(rng_of(policy, name, narrow), (2, 19)).astype(dtype) for make in makers
    ]
    acc = dtype if narrow else np.float32
    got = jt.scan(
        element(leaves), 1, reducer, policy=policy, acc_dtype=dtype if narrow else None
    )
    rows = oracle.rows([v.astype(acc) for v in leaves])
    want = _as_array([oracle.scan(op, row, policy) for row in rows])
    _check_states(jax.tree.leaves(got), want, np.ones(want.shape, bool))


@pytest.mark.parametrize("policy", ["fold_left", "fixed_tree"])
@pytest.mark.parametrize("name", ["add", "affine"])
def test_a_row_has_the_same_bits_in_every_batch(policy, name):
    reducer, _, makers, _ = REDUCERS[name]
    leaves = [jnp.asarray(make(rng_of("rows", name), (64, 43))) for make in makers]

    def run(x, axis=-1):
        return jax.tree.leaves(jt.scan(x, axis, reducer, policy=policy))

    x = element(leaves)
    whole = run(x)
    for size in (1, 3):
        for g, w in zip(
            run(jax.tree.map(lambda v, n=size: v[:n], x)), whole, strict=True
        ):
            same_bits(g, w[:size])
    turned = run(jax.tree.map(jnp.transpose, x), 0)
    mapped = jax.jit(jax.vmap(run))(x)
    one = jax.jit(run)
    single = one(jax.tree.map(lambda v: v[17], x))
    for t, m, s, w in zip(turned, mapped, single, whole, strict=True):
        same_bits(t.T, w)
        same_bits(m, w)
        same_bits(s, w[17])
