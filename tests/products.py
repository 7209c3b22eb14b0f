"""Operands of mma, and what NumPy makes of them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxtile as jt

STRICT = jt.MmaPolicy(allow_reassociation=False)


def make(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    if kind.kind in "iu" or "int" in kind.name:
        info = ml_dtypes.iinfo(kind)
        values = rng.integers(max(info.min, -300), min(int(info.max), 300) + 1, shape)
        return values.astype(kind)
    return rng.standard_normal(shape).astype(kind)


def exact(spec, a, b):
    return np.einsum(spec, np.asarray(a, np.float64), np.asarray(b, np.float64))


def close(got, spec, a, b, unit=2.0**-24, c=0.0):
    """Within the bound of any order of so many sums in the accumulator's unit."""
    a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
    k = max(a64.size, b64.size)
    size = np.einsum(spec, np.abs(a64), np.abs(b64)) + np.abs(c)
    np.testing.assert_array_less(
        np.abs(np.asarray(got, np.float64) - (exact(spec, a, b) + c)),
        (k + 2) * unit * size + 1e-30,
    )


def chain(a, b, c=None, acc=np.float32):
    """[M, K] x [K, N] one product at a time, each op rounded to acc."""
    acc = jnp.dtype(acc)
    a, b = np.asarray(a).astype(acc), np.asarray(b).astype(acc)
    z = np.full((a.shape[0], b.shape[1]), -0.0, acc) if c is None else c.astype(acc)
    with np.errstate(all="ignore"):
        for k in range(a.shape[1]):
            z = (z + (a[:, k : k + 1] * b[k : k + 1]).astype(acc)).astype(acc)
    return z
