"""Functions of scalars: what they read, and their constants."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile as jt

_FACTOR = 1.0


def _scaled(v):
    return v * _FACTOR


def test_globals_that_change_are_read_again(monkeypatch):
    x = np.float32([1, 2])
    for factor in (2.0, 3.0, np.float32(4), jnp.float32(5)):
        monkeypatch.setattr(sys.modules[__name__], "_FACTOR", factor)
        np.testing.assert_array_equal(jt.map(lambda v: v * _FACTOR, x), x * factor)
        np.testing.assert_array_equal(jt.map(lambda v: _scaled(v), x), x * factor)
        total = jt.Reducer(
            merge=lambda a, b: a + b,
            lift=lambda v: v * _FACTOR,
            identity=0.0,
            laws=jt.Laws(associative=True, commutative=True),
            name="scaled",
        )
        assert jt.reduce(x, 0, total) == 3 * factor


def test_quotients_by_constants_are_rounded_once():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for divisor in (67.0, 3.0, 1e-3):
        want = x / np.float32(divisor)
        np.testing.assert_array_equal(jt.map(lambda v, d=divisor: v / d, x), want)
        run = jax.jit(lambda v, d=divisor: jt.map(lambda e: e / d, v))
        np.testing.assert_array_equal(run(x), want)
