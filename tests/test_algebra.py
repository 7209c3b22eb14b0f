"""XLA's algebra: rewritings of what was asked for that change bits, none of which happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from oracle import same_bits

_RNG = np.random.default_rng(0)
_POSITIVE = [np.exp(_RNG.normal(size=500)).astype(np.float32) for _ in range(4)]
_SPECIAL = np.array(
    [-0.0, 0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 200, 3e38], np.float32
)

# Each of four arrays; what XLA makes of it on some jax line.
_EXPRESSIONS = {
    "a * (1 / c)": lambda a, b, c, d: a / np.float32(7),
    "a / (b * c)": lambda a, b, c, d: a / b / c,
    "(a * c) / b": lambda a, b, c, d: a / (b / c),
    "(a * d) / (b * c)": lambda a, b, c, d: (a / b) / (c / d),
    "a": lambda a, b, c, d: (a + np.float32(1e3)) - np.float32(1e3),
    "a + (c1 + c2)": lambda a, b, c, d: (a + np.float32(0.1)) + np.float32(0.2),
    "a * (c1 * c2)": lambda a, b, c, d: (a * np.float32(0.1)) * np.float32(0.3),
    "a * (c1 / c2)": lambda a, b, c, d: (a * np.float32(0.1)) / np.float32(0.3),
    "fma(a, b, a * c)": lambda a, b, c, d: a * b + a * c,
    "fma(-a, b, c)": lambda a, b, c, d: c - a * b,
    "a * (b + c)": lambda a, b, c, d: b * a + c * a,
}


def _constant(a, c):
    return jnp.full_like(a, c) if isinstance(a, jax.Array) else np.full_like(a, c)


_CONSTANTS = {
    "a * const": lambda a, b, c, d: a * (_constant(a, 3) / _constant(a, 7)),
    "a - const": lambda a, b, c, d: (a + _constant(a, 5)) - _constant(a, 5),
}


@pytest.mark.parametrize("name", [*_EXPRESSIONS, *_CONSTANTS])
def test_maps_compute_what_is_written(name):
    fn = {**_EXPRESSIONS, **_CONSTANTS}[name]
    want = fn(*_POSITIVE)
    for run in (jt.map, jax.jit(jt.map, static_argnums=0)):
        same_bits(run(fn, *_POSITIVE), want)


@pytest.mark.parametrize("name", _EXPRESSIONS)
@pytest.mark.parametrize("policy", ["fold_left", "fixed_tree"])
def test_regions_compute_what_is_written(name, policy):
    fn, n = _EXPRESSIONS[name], 37
    values = [v[:n] for v in _POSITIVE]

    @jax.jit
    def total(*values):
        @jt.fold(n, init=jnp.float32(0), policy=policy)
        def run(i, s):
            return s + fn(*(v[i] for v in values))

        return run

    each = jax.jit(
        lambda v: jt.reduce(v, 0, jt.add, init=jnp.float32(0), policy=policy)
    )
    same_bits(total(*values), each(fn(*values)))


def test_constants_across_maps():
    def add(v, c):
        return jt.map(lambda a, b: a + b, v, jnp.full_like(v, c))

    x = _POSITIVE[0]
    same_bits(
        jax.jit(lambda v: add(add(v, 1e3), -1e3))(x), (x + np.float32(1e3)) - 1000
    )


@pytest.mark.parametrize("at", ["inside", "outside"])
def test_a_zero_added_to_minus_zero(at):
    def add_zero(v):
        if at == "inside":
            return jt.map(lambda a: a + 0.0, v)
        return jt.map(lambda a, b: a + b, v, jnp.zeros_like(v))

    same_bits(jax.jit(add_zero)(_SPECIAL), _SPECIAL + np.float32(0))


@pytest.mark.parametrize(
    "policy", ["ordered_tree", "fixed_tree", "fold_left", "fold_right"]
)
@pytest.mark.parametrize("op", ["reduce", "scan", "segment_reduce"])
def test_a_constant_zero_as_seed(op, policy):
    x, zero = np.full((3, 4), -0.0, np.float32), jnp.float32(0)

    @jax.jit
    def run(x):
        if op == "segment_reduce":
            seeds = jnp.zeros((2, 4))
            to = jnp.array([0, 1, 1])
            return jt.segment_reduce(x, to, 2, jt.add, init=seeds, policy=policy)
        return getattr(jt, op)(x, 1, jt.add, init=zero, policy=policy)

    assert not np.signbit(run(x)).any()


def test_exponentials_are_computed():
    x, y = np.float32([200, -200, 1]), np.float32([-200, 200, 2])
    product = jax.jit(lambda *v: jt.map(lambda a, b: jnp.exp(a) * jnp.exp(b), *v))(x, y)
    np.testing.assert_allclose(product, [np.nan, np.nan, np.exp(3)], rtol=1e-6)
    log = jax.jit(lambda v: jt.map(lambda a: jnp.log(jnp.exp(a)), v))(x)
    np.testing.assert_allclose(log, [np.inf, -np.inf, 1], rtol=1e-6)
