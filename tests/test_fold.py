"""fold: recognised updates, contracts and chains, against loops in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import oracle
from folds import FOLDS, RNG, TREES, XJ, W, X, ops, policies, same_derivatives
from jaxtile.errors import ContractError, TileShapeError, TileTypeError
from oracle import same_bits

K, C = jt.dims("k c")


@policies(FOLDS)
@pytest.mark.parametrize("side", ["state first", "element first"])
def test_the_body_keeps_its_operand_order(policy, side):
    x = jt.tile(jnp.array([1.0, 2.0, 3.0]), K)

    @jt.fold(x.domain(K), init=0.0, policy=policy)
    def got(r, s):
        return s - x.at(r) if side == "state first" else x.at(r) - s

    order = [1.0, 2.0, 3.0] if policy == "fold_left" else [3.0, 2.0, 1.0]
    want = 0.0
    for v in order:
        want = want - v if side == "state first" else v - want
    assert float(got) == want
    known = {("fold_left", "state first"): -6, ("fold_right", "element first"): 2}
    assert want == known.get((policy, side), want)


_ORACLES = {
    "fold_left": oracle.fold_left,
    "fold_right": oracle.fold_right,
    "fixed_tree": oracle.fixed_tree,
}
_SUM = oracle.Op(lambda a, b: (np.float32(a[0] + b[0]),))


@policies(("fixed_tree", *FOLDS))
def test_a_sum_of_products_has_the_bits_of_its_order(policy):
    rows = RNG.standard_normal((37, 2)).astype(np.float32)

    def run(a, b):
        @jt.fold(37, init=jnp.float32(0.5), policy=policy)
        def total(i, s):
            return s + a[i] * b[i]

        return total

    a, b = jnp.asarray(rows.T)
    terms = [(np.float32(x * y),) for x, y in rows]
    (want,) = _ORACLES[policy](_SUM, terms, (np.float32(0.5),))
    same_bits(run(a, b), want)
    same_bits(jax.jit(run)(a, b), want)


@policies()
def test_independent_components_are_a_product(policy):
    def run(x):
        init = {
            "sum": jnp.zeros(6),
            "low": jnp.full(6, jnp.inf),
            "top": jnp.float32(-jnp.inf),
            "all": True,
            "bits": jnp.int32(0),
            "count": 0,
        }

        @jt.fold(11, init=init, policy=policy)
        def out(i, s):
            return {
                "sum": s["sum"] + x[i] * 2,
                "low": jnp.minimum(x[i], s["low"]),
                "top": jnp.maximum(s["top"], jt.reduce(x[i], 0, jt.maximum)),
                "all": s["all"] & (x[i, 0] > -9),
                "bits": s["bits"] ^ (1 << i),
                "count": s["count"] + 1,
            }

        return out

    got = jax.jit(run)(XJ)
    np.testing.assert_allclose(got["sum"], 2 * X.sum(0), rtol=2e-5)
    same_bits(got["low"], X.min(0))
    same_bits(got["top"], X.max())
    assert bool(got["all"])
    assert (int(got["bits"]), int(got["count"])) == (2**11 - 1, 11)
    assert ops(jax.make_jaxpr(run)(XJ))[0] == 7


@policies(TREES)
def test_a_product_and_a_logical_or(policy):
    @jt.fold(range(2, 9, 3), init=(jnp.int32(1), jnp.zeros(2, bool)), policy=policy)
    def out(i, s):
        return s[0] * i, jnp.logical_or(s[1], jnp.arange(2) == i - 5)

    assert int(out[0]) == 2 * 5 * 8
    np.testing.assert_array_equal(out[1], [True, False])


def test_merges_of_the_catalogue_are_recognised():
    def run(x):
        @jt.fold(11, init=(jnp.full(6, -jnp.inf), jnp.full(6, jnp.nan)))
        def out(i, s):
            return jt.logaddexp(s[0], x[i]), jt.maximum_number(x[i], s[1])

        return out

    lse, top = run(XJ)
    np.testing.assert_allclose(lse, np.log(np.exp(X.astype("f8")).sum(0)), rtol=1e-6)
    np.testing.assert_array_equal(top, X.max(0))
    assert "reducer=logaddexp" in str(jax.make_jaxpr(run)(XJ))


def test_a_masked_contribution_is_skipped_whatever_it_holds():
    broken = XJ.at[3].set(jnp.nan)

    def run(x):
        @jt.fold(11, init=(jnp.zeros(6), 0.0))
        def out(i, s):
            here = jnp.where(i != 3, s[0] + x[i], s[0])
            return here, jnp.where(i == 3, s[1], s[1] + x[i, 0])

        return out

    got = run(broken)
    keep = np.arange(11) != 3
    np.testing.assert_allclose(got[0], X[keep].sum(0), rtol=1e-5)
    np.testing.assert_allclose(got[1], X[keep, 0].sum(), rtol=1e-5)
    assert ops(jax.make_jaxpr(run)(broken)) == (2, 0)


@policies(FOLDS)
def test_two_contributions_at_one_coordinate_enter_in_turn(policy):
    a, b = np.float32([1e8, 1.0, -1e8]), np.float32([3.0, -1e8, 7.0])

    @jt.fold(3, init=0.0, policy=policy)
    def got(i, s):
        return s + jnp.asarray(a)[i] - jnp.asarray(b)[i]

    want = np.float32(0)
    for i in range(3) if policy == "fold_left" else (2, 1, 0):
        want = np.float32(np.float32(want + a[i]) - b[i])
    same_bits(got, want)


def test_a_load_of_every_coordinate_is_the_array_itself():
    def run(x):
        @jt.fold((11, 6), init=0.0)
        def total(at, s):
            return s + x[at]

        @jt.fold(5, init=jnp.zeros((2, 6)))
        def blocks(i, s):
            return s + jax.lax.dynamic_slice(x, (2 * i, 0), (2, 6))

        return total, blocks

    text = str(jax.make_jaxpr(run)(XJ))
    assert "gather" not in text
    assert " dynamic_slice[" not in text
    total, blocks = run(XJ)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-4)
    np.testing.assert_allclose(blocks, X[:10].reshape(5, 2, 6).sum(0), rtol=1e-4)


def test_gathers_outside_the_array_keep_jax_meaning():
    x = XJ
    index = jnp.array([4, 0, 10, 2])

    @jt.fold(4, init=jnp.zeros(6))
    def total(i, s):
        return s + x[index[i]] + x[i + 9]  # x[11] and x[12] read x[10]

    want = X[np.asarray(index)].sum(0) + X[[9, 10, 10, 10]].sum(0)
    np.testing.assert_allclose(total, want, rtol=1e-5)


def test_a_cast_in_a_contribution_survives():
    x = jnp.full(4, np.float32(np.pi))

    @jax.jit
    def run(x):
        @jt.fold(4, init=0.0, policy="fold_left")
        def total(i, s):
            return s + jt.cast(jt.cast(x[i], jnp.bfloat16), jnp.float32)

        return total

    assert float(run(x)) == 4 * 3.140625


def test_the_state_is_the_accumulator():
    ones = jnp.ones(5000, jnp.bfloat16)

    @jt.fold(5000, init=jnp.bfloat16(0), policy="fold_left")
    def narrow(i, s):
        return s + ones[i]

    @jt.fold(5000, init=0.0)
    def wide(i, s):
        return s + ones[i]

    assert (float(narrow), narrow.dtype) == (256, jnp.bfloat16)
    assert (float(wide), wide.dtype) == (5000, jnp.float32)


@policies()
def test_an_empty_domain_gives_init(policy):
    x = jnp.zeros((0, 3))

    @jt.fold(0, init={"a": 2.5, "b": jt.tile(jnp.ones(3), C)}, policy=policy)
    def out(i, s):
        return {"a": s["a"] + 1.0, "b": s["b"] + jt.tile(x[i], C)}

    assert float(out["a"]) == 2.5
    np.testing.assert_array_equal(out["b"].array, np.ones(3))


def test_tiles_as_states_and_contributions():
    x, w = jt.tile(XJ, (K, C)), jt.tile(jnp.asarray(W), (K, C))
    start = jt.tile(jnp.zeros(6), C)

    @jt.fold(x.domain(K), init=start)
    def out(r, s):
        return s + x.at(r) * w.at(r)

    assert out.dims == (C,)
    np.testing.assert_allclose(out.array, (X * W).sum(0), rtol=1e-4, atol=1e-6)

    @jt.fold(x.domain(C, K), init=0.0)
    def total(at, s):
        return s + x.at(at)

    np.testing.assert_allclose(total, X.sum(), rtol=1e-4)


def _decay(x, policy, domain=11):
    @jt.fold(domain, init=jnp.zeros(6), policy=policy)
    def out(i, s):
        return 0.5 * s + x[i]

    return out


def test_an_unknown_update_is_refused_by_name():
    with pytest.raises(
        ContractError,
        match=r"fold: expected an update of the state that policy unordered_tree may "
        r'regroup.*got add mixed with mul. State the merge.*policy="fold_left"',
    ):
        _decay(XJ, "unordered_tree")
    with pytest.raises(ContractError, match=r"the state\['l'\] .*depends on .*\['m'\]"):

        @jt.fold(3, init={"m": 0.0, "l": 0.0})
        def _(i, s):
            m = jnp.maximum(s["m"], 1.0 * i)
            return {"m": m, "l": s["l"] + jnp.exp(s["m"])}

    for body, found in (
        (lambda i, s: 1.0 - s, "subtracted from a contribution"),
        (lambda i, s: s + s, "add of the state with itself"),
        (lambda i, s: s * 0 + 1.0, "add mixed with mul"),
        (lambda i, s: jnp.float32(1), "does not depend on the state"),
        (lambda i, s: jnp.sin(s), "an update through sin"),
    ):
        with pytest.raises(ContractError, match=found):
            jt.fold(3, init=0.0)(body)


@policies(FOLDS)
def test_an_unknown_update_keeps_its_chain(policy):
    want = np.zeros(6, np.float32)
    for i in range(11) if policy == "fold_left" else range(10, -1, -1):
        want = np.float32(0.5) * want + X[i]
    same_bits(_decay(XJ, policy), want)
    same_bits(jax.jit(_decay, static_argnums=1)(XJ, policy), want)


@policies(("unordered_tree", "fixed_tree", "fold_right"))
def test_derivatives_and_batches_of_recognised_updates(policy, x64):
    x, z = jnp.asarray(RNG.standard_normal((5, 3))), jnp.ones(3)

    def run(x, z):
        @jt.fold(5, init=(z, jnp.full(3, -9.0), 1.0), policy=policy)
        def out(i, s):
            return s[0] + jnp.sin(x[i]), jnp.maximum(s[1], x[i]), s[2] * x[i, 0]

        return out

    def plain(x, z):
        return z + jnp.sin(x).sum(0), x.max(0), x[:, 0].prod()

    same_derivatives(run, plain, x, z)
    got = jax.vmap(run, (0, None))(jnp.stack([x, x + 1]), z)
    for a, b in zip(got, run(x + 1, z), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-12)


@policies(FOLDS)
def test_derivatives_of_a_chain(policy, x64):
    x = jnp.asarray(RNG.standard_normal((5, 6)))
    weights = 0.5 ** np.arange(4.0, -1, -1)[:, None]
    weights = weights if policy == "fold_left" else weights[::-1]
    same_derivatives(
        lambda x: _decay(jnp.sin(x), policy, 5),
        lambda x: (weights * jnp.sin(x)).sum(0),
        x,
    )


def test_a_custom_derivative_in_a_contribution_is_kept():
    @jax.custom_jvp
    def odd(v):
        return v * 2

    odd.defjvp(lambda p, t: (p[0] * 2, t[0] * 100))

    def run(x):
        @jt.fold(4, init=0.0)
        def out(i, s):
            return s + odd(x[i])

        return out

    np.testing.assert_array_equal(jax.grad(run)(jnp.ones(4)), np.full(4, 100.0))


def test_large_contributions_become_a_chain():
    a = jnp.ones((64, 2))

    def run(a):
        @jt.fold(64, init=jnp.zeros((1024, 1024)))
        def out(i, s):
            return s + jnp.outer(jnp.full(1024, a[i, 0]), jnp.full(1024, a[i, 1]))

        return out

    assert ops(jax.make_jaxpr(run)(a)) == (0, 1)


def test_what_fold_does_not_take():
    body = lambda i, s: s + 1.0  # noqa: E731
    for domain, match in ((-1, "a size >= 0; got -1"), (2**31, "fewer than 2")):
        with pytest.raises(TileShapeError, match=match):
            jt.fold(domain, init=0.0)(body)
    for domain in (2.5, True, "k"):
        with pytest.raises(TileTypeError, match="expected a domain"):
            jt.fold(domain, init=0.0)(body)
    with pytest.raises(
        TileTypeError, match="the state to stay int32, the dtype of init"
    ):
        jt.fold(3, init=0)(body)
    with pytest.raises(TileShapeError, match=r"keep init's shape \(\); got \(2,\)"):
        jt.fold(3, init=0.0)(lambda i, s: s + jnp.ones(2))
    with pytest.raises(TileTypeError, match="returns a state like init"):
        jt.fold(3, init=0.0)(lambda i, s: (s, s))
    with pytest.raises(TileTypeError, match="init with at least one"):
        jt.fold(3, init=())(body)
    with pytest.raises(TileTypeError, match="arithmetic format"):
        jt.fold(3, init=jnp.zeros(2, jnp.float8_e5m2))(body)
    with pytest.raises(TileTypeError, match="a body; got 3"):
        jt.fold(3, init=0.0)(3)
    with pytest.raises(TileTypeError, match="jax can trace on"):
        jt.fold(3, init=0.0)(lambda i: i)
    with pytest.raises(TileTypeError, match="without side effects"):

        @jt.fold(3, init=0.0)
        def _(i, s):
            jax.debug.print("{}", i)
            return s + 1.0


def test_a_kept_component_is_init():
    @jt.fold(3, init=(1.5, 0))
    def out(i, s):
        return s[0], s[1] + 1

    assert (float(out[0]), int(out[1])) == (1.5, 3)


def test_fold_inside_a_kernel_keeps_its_chain():
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref):
        x = x_ref[...]

        @jt.fold(11, init=jnp.zeros(6), policy="fold_left")
        def out(i, s):
            return 0.5 * s + x[i]

        y_ref[...] = out

    shape = jax.ShapeDtypeStruct((6,), jnp.float32)
    got = pl.pallas_call(kernel, out_shape=shape, interpret=True)(XJ)
    same_bits(got, _decay(XJ, "fold_left"))
