"""What a kernel refuses along a block whose end lies outside of its axis."""

import jax
import jax.numpy as jnp
import pytest

import jaxtile as jt
from jaxtile.errors import TileShapeError

X = jnp.arange(273.0).reshape(13, 21)


def _one(body, x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jt.kernel(out=out)(body)(x)


def test_a_ragged_dim_is_no_domain():
    def body(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        x.tile(r, c).load().domain(r.dim)

    with pytest.raises(TileShapeError, match="ragged blocks of 4 over 13"):
        _one(body, X)


@pytest.mark.parametrize(
    "op",
    [
        lambda t, d: jt.sort(t, d),
        lambda t, d: jt.argsort(t, d),
        lambda t, d: jt.topk(t, d, 2).values,
        lambda t, d: jt.gather(t, 0, d),
        lambda t, d: jt.scatter(t, jnp.zeros(4, int), d, {jt.Dim("s"): 2}, jt.add),
        lambda t, d: jt.shift(t, d, 1),
        lambda t, d: jt.flip(t, d),
    ],
    ids="sort argsort topk gather scatter shift flip".split(),
)
def test_a_ragged_dim_is_not_ordered_or_moved(op):
    def body(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        op(x.tile(r, c).load(), r.dim)

    with pytest.raises(TileShapeError, match="ragged blocks of 4"):
        _one(body, X)
