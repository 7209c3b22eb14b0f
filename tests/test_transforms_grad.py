"""Derivatives of every case of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxtile as jt
from cases import CASES
from jaxtile.errors import NoDerivativeError

_MOVING = [c for c in CASES if c.grads]
_LINEAR = [c for c in CASES if c.linear]


def _float_call(case, args):
    """The call as a function of its float arguments, with float results."""
    places = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def call(*moving):
        full = list(args)
        for i, v in zip(places, moving, strict=True):
            full[i] = v
        leaves = jax.tree.leaves(case.call(*full))
        return [v for v in leaves if jnp.issubdtype(v.dtype, jnp.floating)]

    return call, [args[i] for i in places]


@pytest.mark.parametrize("case", _MOVING, ids=repr)
def test_check_grads(x64, case):
    call, args = _float_call(case, case.make(np.float64))
    # Central differences in float64: the step is 1e-5, so that truncation leaves 1e-9
    # and rounding 1e-10 of first derivatives, the root of that of second ones.
    check_grads(
        jax.jit(call),
        args,
        order=case.grads,
        modes=("fwd", "rev"),
        eps=1e-5,
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("case", _MOVING[::2], ids=repr)
def test_jvp_of_vjp_is_symmetric(x64, case):
    call, args = _float_call(case, case.make(np.float64))

    def scalar(*args):
        return sum(jnp.sum(jnp.sin(v)) for v in call(*args))

    rng = np.random.default_rng(0)
    u, v = ([jnp.asarray(rng.standard_normal(a.shape)) for a in args] for _ in "uv")
    every = tuple(range(len(args)))

    @jax.jit
    def curvature(args, u, v):
        _, hu = jax.jvp(jax.grad(scalar, every), tuple(args), tuple(u))
        return sum(jnp.vdot(a, b) for a, b in zip(hu, v, strict=True))

    left, right = curvature(args, u, v), curvature(args, v, u)
    assert np.isfinite(left)
    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", _MOVING[1::4], ids=repr)
def test_remat(x64, case):
    call, args = _float_call(case, case.make(np.float64))

    def loss(fn):
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(v * v) for v in fn(*a))))

    got, want = loss(jax.checkpoint(call))(*args), loss(call)(*args)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", _LINEAR, ids=repr)
def test_linear_transpose(x64, case):
    """<ct, L(t)> = <L^T(ct), t>, with the other arguments fixed."""
    args = case.make(np.float64)
    moving = [args[i] for i in case.linear]

    def linear(*moving):
        full = list(args)
        for i, v in zip(case.linear, moving, strict=True):
            full[i] = v
        return jax.tree.leaves(case.call(*full))

    rng = np.random.default_rng(0)
    ct = [jnp.asarray(rng.standard_normal(v.shape)) for v in linear(*moving)]
    back = jax.jit(lambda c: jax.linear_transpose(linear, *moving)(c))(ct)
    inner = lambda p, q: sum(map(jnp.vdot, p, q))  # noqa: E731
    np.testing.assert_allclose(
        inner(ct, linear(*moving)), inner(back, moving), rtol=1e-12
    )


@pytest.mark.parametrize("case", _MOVING[::3], ids=repr)
def test_vmap_of_grad_equals_a_loop(x64, case):
    call, args = _float_call(case, case.make(np.float64))
    wide = [jnp.stack([a, a + 0.01, a - 0.02]) for a in args]

    def scalar(*args):
        return sum(jnp.sum(jnp.cos(v)) for v in call(*args))

    gradient = jax.jit(jax.grad(scalar))
    got = jax.jit(jax.vmap(jax.grad(scalar)))(*wide)
    want = [gradient(*(w[i] for w in wide)) for i in range(3)]
    np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-10, atol=1e-10)


def test_what_is_not_linear_has_no_transpose():
    x = jnp.ones(3)
    for linear, sentence in [
        (lambda v: jt.reduce(v, 0, jt.multiply), "reduce: expected a linear reducer"),
        (lambda v: jt.scan(v, 0, jt.multiply), "scan: expected a linear scan"),
        (
            lambda v: jt.linear_recurrence(v, x, 0),
            "scan: expected A of the affine scan",
        ),
    ]:
        with pytest.raises(NoDerivativeError, match=sentence):
            jax.linear_transpose(linear, x)(x if "scan" in sentence else x[0])


@pytest.mark.parametrize("where", [True, False])
@pytest.mark.parametrize("reducer", [jt.maximum, jt.minimum])
@pytest.mark.parametrize("policy", ["unordered_tree", "fold_left", "fold_right"])
def test_a_masked_element_never_gets_the_cotangent(where, reducer, policy):
    x, seed = jnp.array([0.5, -0.25]), jnp.float32(-3 if reducer is jt.maximum else 3)
    mask = jnp.array([False, where])

    def f(x, seed):
        return jt.reduce(x, 0, reducer, init=seed, where=mask, policy=policy)

    dx, dseed = jax.grad(f, (0, 1))(x, seed)
    np.testing.assert_array_equal(dx, [0, 1] if where else [0, 0])
    assert dseed == (0 if where else 1)


@pytest.mark.parametrize("wrap", [jt.product, jt.segmented])
def test_selections_inside_composites_keep_the_rule_of_ties(wrap):
    x = jnp.ones(3)

    def f(x):
        if wrap is jt.product:
            return jt.reduce((x,), 0, wrap(jt.maximum))[0]
        head = jnp.array([True, False, False])
        return jt.reduce((head, x), 0, wrap(jt.maximum), policy="ordered_tree")

    np.testing.assert_array_equal(jax.grad(f)(x), [1, 0, 0])


def test_derivatives_keep_the_accumulator():
    x = jnp.ones(3, jnp.bfloat16)
    dx = jax.grad(lambda v: jt.reduce(v, 0, jt.multiply))(x)
    assert dx.dtype == jnp.bfloat16
    _, dy = jax.jvp(lambda v: jt.scan(v, 0, jt.logaddexp), (x,), (x,))
    assert dy.dtype == jnp.float32


@pytest.mark.parametrize(
    ("policy", "direction"), [("fold_right", "prefix"), ("fold_left", "suffix")]
)
def test_a_fold_against_the_direction(x64, policy, direction):
    """Each prefix is a chain of its own: the right derivative, or a clear refusal."""
    minus = jt.Reducer(merge=lambda a, b: a - jnp.sin(b), name="a - sin(b)")
    x = jnp.array([0.3, -0.5, 0.8])

    def f(x):
        return jt.scan(x, 0, minus, policy=policy, direction=direction)

    try:
        got = jax.jacfwd(f)(x)
    except NoDerivativeError:
        return
    h = 1e-6
    want = [(f(x.at[i].add(h)) - f(x.at[i].add(-h))) / (2 * h) for i in range(3)]
    np.testing.assert_allclose(got, np.stack(want, 1), atol=1e-8)
