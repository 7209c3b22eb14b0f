"""fold with a contract: merges that the body does not show, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from folds import RNG, TREES, XJ, X, ops, policies, same_derivatives
from jaxtile.composite import WelfordState
from jaxtile.errors import ContractError, TileTypeError
from oracle import same_bits


def _merge_softmax(a, b):
    m = jnp.maximum(a["m"], b["m"])
    ca, cb = jnp.exp(a["m"] - m), jnp.exp(b["m"] - m)
    acc = a["acc"] * ca[:, None] + b["acc"] * cb[:, None]
    return {"m": m, "l": a["l"] * ca + b["l"] * cb, "acc": acc}


ONLINE = jt.Reducer(
    merge=_merge_softmax,
    identity={"m": -1e30, "l": 0.0, "acc": 0.0},
    laws=jt.Laws(associative=True, commutative=True),
    name="online_softmax",
)


def _attention(q, k, v, policy="unordered_tree", contract=ONLINE):
    n = q.shape[0]
    init = {"m": jnp.full(n, -1e30), "l": jnp.zeros(n), "acc": jnp.zeros((n, 4))}

    @jt.fold(k.shape[0] // 2, init=init, contract=contract, policy=policy)
    def out(i, s):
        kb = jax.lax.dynamic_slice_in_dim(k, 2 * i, 2)
        vb = jax.lax.dynamic_slice_in_dim(v, 2 * i, 2)
        scores = q @ kb.T
        m = jnp.maximum(s["m"], scores.max(1))
        p, keep = jnp.exp(scores - m[:, None]), jnp.exp(s["m"] - m)
        acc = s["acc"] * keep[:, None] + p @ vb
        return {"m": m, "l": s["l"] * keep + p.sum(1), "acc": acc}

    return out["acc"] / out["l"][:, None]


def _softmax_oracle(q, k, v):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    p = np.exp(q @ k.T - (q @ k.T).max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True)) @ v


@policies()
def test_online_softmax_by_contract(policy):
    q, k, v = (
        jnp.asarray(RNG.standard_normal((n, 4)), jnp.float32) for n in (3, 10, 10)
    )
    got = _attention(q, k, v, policy)
    np.testing.assert_allclose(got, _softmax_oracle(q, k, v), rtol=2e-5, atol=1e-6)
    got = jax.jit(_attention, static_argnums=3)(q, k, v, policy)
    np.testing.assert_allclose(got, _softmax_oracle(q, k, v), rtol=2e-5, atol=1e-6)


@policies(("unordered_tree", "fixed_tree"))
def test_derivatives_and_batches_of_a_contract(policy, x64):
    q, k, v = (jnp.asarray(RNG.standard_normal((n, 4))) for n in (3, 6, 6))
    call = functools.partial(_attention, policy=policy)
    same_derivatives(
        call, lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, q, k, v, order=1
    )
    got = jax.vmap(call, (0, None, None))(jnp.stack([q, 2 * q]), k, v)
    np.testing.assert_allclose(got[1], call(2 * q, k, v), rtol=1e-12)


@policies(TREES)
def test_welford_by_contract(policy):
    zeros = jnp.zeros(6)

    def run(x, contract=jt.welford):
        init = WelfordState(zeros, zeros, zeros, zeros)

        @jt.fold(11, init=init, contract=contract, policy=policy)
        def out(i, s):
            one = jnp.ones(6)
            return jt.welford(s, WelfordState(one, x[i], 0 * one, 0 * one))

        return out

    got = run(XJ)
    np.testing.assert_allclose(got.mean, X.mean(0, dtype="f8"), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.m2 / 11, X.var(0, dtype="f8"), rtol=1e-5)
    assert ops(jax.make_jaxpr(run)(XJ)) == (1, 0)


def _matmul(a, b):
    return a @ b


@policies(("ordered_tree", "fixed_tree"))
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_of_a_contribution_is_kept(policy, side):
    m = jnp.asarray(RNG.integers(-2, 3, (7, 2, 2)), jnp.int32)
    product = jt.Reducer(_matmul, identity=None, laws=jt.Laws(associative=True))

    @jt.fold(7, init=jnp.eye(2, dtype=jnp.int32), contract=product, policy=policy)
    def got(i, s):
        return s @ m[i] if side == "left" else m[i] @ s

    want = np.eye(2, dtype=np.int32)
    for x in np.asarray(m):
        want = want @ x if side == "left" else x @ want
    np.testing.assert_array_equal(got, want)


def test_contracts_that_do_not_hold():
    def run(contract, body=lambda i, s: s + XJ[i]):
        return jt.fold(11, init=jnp.zeros(6), contract=contract)(body)

    with pytest.raises(ContractError, match="as maximum merges it.*got .* by add"):
        run(jt.maximum)
    with pytest.raises(ContractError, match="as maximum merges it"):
        jax.jit(lambda: run(jt.maximum))()
    same_bits(run(jt.add), run(None))
    lawless = jt.Reducer(lambda a, b: a / 2 + b, identity=0.0, name="decay")
    with pytest.raises(ContractError, match=r"fold: expected a reducer with the laws"):
        run(lawless)
    laws = jt.Laws(True, True)
    wrong = jt.Reducer(lambda a, b: a / 3 + b, identity=0.0, laws=laws, name="third")
    half = lambda i, s: s / 2 + XJ[i]  # noqa: E731
    with pytest.raises(ContractError, match=r"a body that follows third: body\(c, s\)"):
        run(wrong, half)
    none = jt.Reducer(lambda a, b: a / 3 + b, laws=laws, name="third")
    with pytest.raises(ContractError, match="third without one"):
        run(none, half)
    with pytest.raises(TileTypeError, match="merge to take two states like init"):
        run(jt.Reducer(lambda a, b: a[0] + b["x"], identity=0.0, laws=laws))
    with pytest.raises(TileTypeError, match="contract a Reducer, or None; got 'add'"):
        run("add")


@policies()
def test_mma_accumulates_over_blocks(policy):
    a, b = (
        jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((5, 12), (12, 3))
    )

    def run(a, b, epilogue=None):
        @jt.fold(3, init=(jnp.zeros((5, 3)), 0), policy=policy)
        def out(i, s):
            left = jax.lax.dynamic_slice_in_dim(a, 4 * i, 4, 1)
            right = jax.lax.dynamic_slice_in_dim(b, 4 * i, 4, 0)
            return jt.mma(left, right, s[0], epilogue=epilogue), s[1] + 1

        return out[0]

    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(run(a, b), want, rtol=1e-5, atol=1e-5)
    got = jax.grad(lambda a: run(a, b).sum())(a)
    want = np.broadcast_to(np.asarray(b).sum(1), a.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if policy in TREES:
        with pytest.raises(ContractError, match="an update through tile_mma"):
            run(a, b, lambda v: v * 2)


def _merge_means(a, b):
    (weight, mean), (more, other) = a, b
    total = weight + more
    return total, mean * (weight / total) + other * (more / total)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_merge_of_tiles_broadcasts_by_dims(width):
    rows, cols, keys = jt.dims("rows cols keys")
    weights = np.float32(RNG.uniform(1, 2, (4, 6)))
    values = np.float32(RNG.standard_normal((4, width, 6)))
    w = jt.tile(weights, (rows, keys))
    v = jt.tile(values, (rows, cols, keys))
    contract = jt.Reducer(
        merge=_merge_means,
        identity=(1e-30, 0.0),
        laws=jt.Laws(associative=True, commutative=True),
        name="means",
    )
    none = (
        jt.tile(jnp.full(4, 1e-30), rows),
        jt.tile(jnp.zeros((4, width)), (rows, cols)),
    )

    @jt.fold(w.domain(keys), init=none, contract=contract)
    def state(c, s):
        return _merge_means(s, (w.at(c), v.at(c)))

    want = np.einsum("rk,rck->rc", weights, values) / weights.sum(1)[:, None]
    np.testing.assert_allclose(state[1].array, want, rtol=1e-5, atol=1e-6)
