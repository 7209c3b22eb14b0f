"""What the tests of fold share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

RNG = np.random.default_rng(5)
X = RNG.standard_normal((11, 6)).astype(np.float32)
W = RNG.standard_normal((11, 6)).astype(np.float32)
XJ = jnp.asarray(X)
TREES = ("unordered_tree", "ordered_tree", "fixed_tree")
FOLDS = ("fold_left", "fold_right")


def policies(names=(*TREES, *FOLDS)):
    return pytest.mark.parametrize("policy", names)


def same_derivatives(call, plain, *args, order=2, rtol=1e-9, atol=1e-12):
    """Derivatives both ways, up to an order, as jax has them of a plain form."""

    def all_of(fn):
        def total(*xs):
            return sum(jnp.sum(jnp.cos(v)) for v in jax.tree.leaves(fn(*xs)))

        def found(*xs):
            places = tuple(range(len(xs)))
            first = jax.grad(total, places)
            _, forward = jax.jvp(fn, xs, tuple(map(jnp.cos, xs)))
            if order == 1:
                return first(*xs), forward
            return first(*xs), forward, jax.jvp(first, xs, tuple(map(jnp.sin, xs)))[1]

        return jax.jit(found)(*args)

    got, want = jax.tree.leaves(all_of(call)), jax.tree.leaves(all_of(plain))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def ops(jaxpr):
    """How many reduces and loops a jaxpr has."""
    return str(jaxpr).count("tile_reduce["), str(jaxpr).count(" scan[")
