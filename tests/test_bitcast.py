"""bitcast: float32 and uint32 read as each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtile.casting import bitcast
from jaxtile.dims import dims
from jaxtile.errors import TileTypeError
from jaxtile.tile import tile

CODES = np.array(
    [0, 0x80000000, 1, 0x7F800001, 0xFFC12345, 0x7F800000, 0x3F800000, 0xFFFFFFFF],
    np.uint32,
)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap])
def test_every_bit_survives_both_ways(wrap):
    there = wrap(lambda u: bitcast(u, jnp.float32))(CODES)
    assert there.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(there).view(np.uint32), CODES)
    back = wrap(lambda u: bitcast(bitcast(u, jnp.float32), jnp.uint32))(CODES)
    np.testing.assert_array_equal(back, CODES)


def test_random_codes():
    codes = np.random.default_rng(3).integers(0, 2**32, (50, 20), np.uint32)
    got = bitcast(codes.view(np.float32), "uint32")
    np.testing.assert_array_equal(got, codes)


PAIRS = [
    ("float32", "int32"),
    ("int32", "float32"),
    ("float32", "float32"),
    ("uint32", "uint32"),
    ("bfloat16", "uint16"),
    ("float16", "float32"),
    ("uint8", "uint32"),
    ("bool", "uint32"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_other_pair_is_refused(source, target):
    with pytest.raises(TileTypeError, match=f"bitcast: .*got {source} to {target}"):
        bitcast(jnp.ones(4, source), target)


@pytest.mark.parametrize("x", [1.0, np.float64(1), np.arange(3), np.ones(3)])
def test_64_bits_are_not_narrowed_first(x):
    with pytest.raises(TileTypeError, match="64 to"):
        bitcast(x, jnp.uint32)


@pytest.mark.parametrize("x", [[1.0], None, "x"])
def test_what_is_no_array_is_refused(x):
    with pytest.raises(
        TileTypeError, match="bitcast: expected arrays, tiles or numbers"
    ):
        bitcast(x, jnp.uint32)


def test_a_dtype_without_a_row_is_refused():
    with pytest.raises(TileTypeError, match="bitcast: expected one of"):
        bitcast(jnp.ones(3), np.complex64)


def test_a_tile_keeps_its_dims():
    r, c = dims("rows cols")
    got = bitcast(tile(jnp.ones((2, 3)), (r, c)), jnp.uint32)
    assert got.dims == (r, c)
    np.testing.assert_array_equal(got.array, np.full((2, 3), 0x3F800000))


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (2, 0)])
def test_every_shape(shape):
    assert bitcast(jnp.ones(shape), jnp.uint32).shape == shape


def test_it_has_no_derivative():
    def f(x):
        return bitcast(bitcast(x, jnp.uint32) ^ jnp.uint32(1), jnp.float32).sum()

    np.testing.assert_array_equal(jax.grad(f)(jnp.ones(3)), np.zeros(3))
