"""Symbolic sizes of an export, in the ops that order, move and exchange elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxtile as jt
from fibres import rng_of

_X = rng_of("symbolic order").integers(-4, 5, (6, 4)).astype(np.float32)
_IDS = np.array([0, 2, 2, 1, -1, 5], np.int32)


def _exported(fn, *rest):
    """fn of (n, 4) floats and n places, exported, on the values."""
    n = export.symbolic_shape("n", constraints=["n >= 2"])[0]
    specs = [jax.ShapeDtypeStruct((n, *v.shape[1:]), v.dtype) for v in (_X, _IDS)]
    return export.export(jax.jit(fn))(*specs, *rest).call(_X, _IDS)


def _compare(fn):
    got, want = _exported(fn), fn(_X, _IDS)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5)


_MOVES = {
    "sort": lambda x, i: jt.sort(x, 0, (x, i[:, None] + jnp.zeros((1, 4), jnp.int32))),
    "argsort": lambda x, i: jt.argsort(x, 0, descending=True),
    "topk": lambda x, i: jt.topk(x, 0, 2, valid_count=1),
    "topk of rows": lambda x, i: jt.topk(x, 1, 2),
    "topk_merge": lambda x, i: jt.reduce(x, 0, jt.topk_merge(2)),
    "topk_merge past the end": lambda x, i: jt.reduce(x, 0, jt.topk_merge(9)),
    "argmax": lambda x, i: jt.reduce(x, 0, jt.argmax),
    "gather": lambda x, i: jt.gather(x, i, 0, fill=7),
    "gather, 8 bits": lambda x, i: jt.gather(x, i.astype(jnp.uint8), 0, fill=7),
    "flip": lambda x, i: jt.flip(x, 0),
    "shift": lambda x, i: jt.shift(x, 0, -2, fill=3),
    "shift far": lambda x, i: jt.shift(x, 0, 2**40, fill=3),
    "shift traced": lambda x, i: jt.shift(x, 0, i[1], fill=3),
    "shift along another axis": lambda x, i: jt.shift(x, 1, 1),
    "butterfly": lambda x, i: jt.butterfly(x, 0, 1, fill=0),
    "transpose": lambda x, i: jt.transpose(x),
    "broadcast": lambda x, i: jt.broadcast(x, (3, *x.shape)),
    "chain": lambda x, i: jt.flip(jt.shift(jt.transpose(x), 1, 1), 1),
    "split": lambda x, i: jt.reindex(x, (*x.shape, 1), lambda i, j, k: (i, j + k)),
    "every other": lambda x, i: jt.reindex(x, (3, 4), lambda i, j: (2 * i, j), fill=0),
    "no affine map": lambda x, i: jt.reindex(x, x.shape, lambda i, j: (i // 2, j)),
    "unique": lambda x, i: jt.scatter(x, i, 0, x.shape[0], unique=True),
}


@pytest.mark.parametrize("fn", _MOVES.values(), ids=_MOVES)
def test_moves(fn):
    _compare(fn)


@pytest.mark.parametrize("name", ["topk_merge", "gather", "shift", "flip", "chain"])
def test_derivatives_of_moves(name):
    def loss(x, i):
        leaves = jax.tree.leaves(_MOVES[name](x, i))
        return sum(jnp.sum(v * v) for v in leaves if v.dtype == jnp.float32)

    _compare(jax.grad(loss))


_ORDERS = ["unordered_tree", "fixed_tree", "fold_left", "fold_right"]


@pytest.mark.parametrize("policy", _ORDERS)
@pytest.mark.parametrize("reducer", [jt.add, jt.multiply], ids=repr)
def test_segments(reducer, policy):
    _compare(lambda x, i: jt.segment_reduce(x, i, 3, reducer, policy=policy))


@pytest.mark.parametrize("policy", ["unordered_tree", "fold_right"])
def test_derivatives_of_segments(policy):
    def loss(x, i):
        return jnp.sum(jt.segment_reduce(x, i, 3, jt.multiply, policy=policy) ** 2)

    _compare(jax.grad(loss))


def test_as_many_targets_as_elements():
    _compare(lambda x, i: jt.segment_reduce(x, i, x.shape[0], jt.logaddexp))


@pytest.mark.parametrize("count", [2, 9])
def test_a_size_that_is_not_known_to_suffice(count):
    n = export.symbolic_shape("n")[0]
    spec = jax.ShapeDtypeStruct((n,), np.float32)
    with pytest.raises(jt.errors.TileValueError, match=f'constraints=."n >= {count}"'):
        export.export(jax.jit(lambda x: jt.topk(x, 0, count)))(spec)
    with pytest.raises(jt.errors.TileValueError, match="Pass fill="):
        export.export(jax.jit(lambda x: jt.reindex(x, count, lambda i: i)))(spec)


def test_places_of_an_unknown_size_have_the_widest_index(x64):
    def index(constraints):
        n = export.symbolic_shape("n", constraints=constraints)[0]
        spec = jax.ShapeDtypeStruct((n,), np.float32)
        out = export.export(jax.jit(lambda x: jt.argsort(x, 0)))(spec)
        return out.out_avals[0].dtype

    assert index([]) == np.int64
    assert index(["n <= 2147483647"]) == np.int32
