"""Functions of scalars: what they read, and their constants."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("divisor", [67.0, 3.0, 1e-3])
def test_quotients_by_constants_are_rounded_once(dtype, divisor, x64):
    kind = jnp.dtype(dtype)
    x = np.random.default_rng(0).standard_normal(1000).astype(kind)
    by = np.asarray(divisor).astype(kind)
    wide = np.float64 if kind.itemsize < 8 else np.longdouble
    want = (x.astype(wide) / by.astype(wide)).astype(kind)
    whole = jnp.full(1000, by)
    for fn in (
        lambda v: jt.map(lambda e: e / by, v),
        lambda v: jt.map(lambda e: e / jnp.asarray(by), v),
        lambda v: jt.map(lambda e, d: e / d, v, whole),
    ):
        for run in (fn, jax.jit(fn)):
            np.testing.assert_array_equal(np.asarray(run(x)), want)


@pytest.mark.parametrize("divisor", [7.0, 11.0, 49.0])
def test_quotients_of_constants_are_rounded_once(divisor):
    x, by = np.ones(64, np.float32), np.float32(divisor)

    @jax.jit
    def run(x, by):
        three, all_by = jnp.full_like(x, 3), jnp.full_like(x, divisor)
        constants = jt.map(lambda e, a, b: e * (a / b), x, three, all_by)
        traced = jt.map(lambda a, b: a / b, three, jnp.broadcast_to(by, x.shape))
        return constants, traced

    for got in run(x, by):
        np.testing.assert_array_equal(got, np.full(64, np.float32(3) / by))


def test_helpers_that_share_helpers_have_one_key_each():
    space = {"f0": lambda v: v, "f1": lambda v: v + 1, "__name__": "elsewhere"}
    space["table"] = {1: "a", "b": [2]}  # keys of two types
    for k in range(2, 60):
        exec(f"def f{k}(v): return f{k - 1}(v) if table else f{k - 2}(v)", space)
    np.testing.assert_array_equal(jt.map(space["f59"], np.float32([1, 2])), [2, 3])
