"""pack and unpack: the address map, against NumPy's own shifts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codes
import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError

NAMES = ("int4", "uint4", "float4_e2m1fn")


def _nibbles(x):
    """The 4-bit codes of an array in bytes."""
    if x.dtype.name == "float4_e2m1fn":
        return x.view(np.uint8) & 15
    return x.astype(np.int8).astype(np.uint8) & 15


def _packed(nibbles, axis, order, pairing):
    moved = np.moveaxis(nibbles, axis, 0)
    n = moved.shape[0] // 2
    first, second = (
        (moved[0::2], moved[1::2]) if pairing == "adjacent" else (moved[:n], moved[n:])
    )
    low, high = (first, second) if order == "low_first" else (second, first)
    return np.moveaxis(low | (high << 4), 0, axis)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["low_first", "high_first"])
@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
@pytest.mark.parametrize("axis", [0, -1])
def test_every_address_map(name, order, pairing, axis):
    every = codes.every_code(name)
    x = np.random.default_rng(0).choice(every, (4, 3, 6))
    params = dict(order=order, pairing=pairing)
    got = jax.jit(lambda v: jt.pack(v, axis, **params))(jnp.asarray(x))
    assert got.dtype == jnp.uint8
    np.testing.assert_array_equal(got, _packed(_nibbles(x), axis, order, pairing))
    back = jt.unpack(got, name, axis, **params)
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(_nibbles(np.asarray(back)), _nibbles(x))


@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
def test_every_byte_survives(pairing):
    every = np.arange(256, dtype=np.uint8)
    for name in NAMES:
        out = jt.unpack(every, name, pairing=pairing)
        np.testing.assert_array_equal(jt.pack(out, pairing=pairing), every)


def test_vmap_keeps_the_axis():
    x = jnp.asarray(np.random.default_rng(1).integers(-8, 8, (2, 4, 6))).astype(
        jnp.int4
    )
    got = jax.vmap(lambda v: jt.pack(v, 0), 1, 1)(x)
    np.testing.assert_array_equal(got[:, 2], jt.pack(x[:, 2], 0))
    back = jax.vmap(lambda v: jt.unpack(v, "int4", 0), 1, 1)(got)
    np.testing.assert_array_equal(back, x)


def test_a_tile_is_packed_along_its_dim():
    r, c = jt.dims("rows cols")
    x = jnp.ones((4, 3), jnp.int4)
    np.testing.assert_array_equal(jt.pack(jt.tile(x, (r, c)), r), jt.pack(x, 0))


def test_there_is_no_derivative():
    def f(v):
        packed = jt.pack(jt.quantize(v, "float4_e2m1fn"))
        return jt.decode(jt.unpack(packed, "float4_e2m1fn")).sum()

    np.testing.assert_array_equal(jax.grad(f)(jnp.ones(4)), np.zeros(4))


FOUR = jnp.ones((4, 3), jnp.int4)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: jt.pack(FOUR.astype(jnp.int8)), TileTypeError, "4 bits.*got int8"),
        (lambda: jt.pack(FOUR), TileShapeError, "even number.*axis 1.*jnp.pad"),
        (lambda: jt.pack(FOUR, 2), TileShapeError, "an axis in"),
        (lambda: jt.pack(FOUR, 0, order="big"), TileValueError, "order in.*'big'"),
        (lambda: jt.pack(FOUR, 0, pairing="odd"), TileValueError, "pairing in.*'odd'"),
        (lambda: jt.unpack(FOUR, "int4"), TileTypeError, "uint8.*got int4"),
        (
            lambda: jt.unpack(FOUR.astype(jnp.uint8), "int8"),
            TileTypeError,
            "got uint8 for int8",
        ),
    ],
)
def test_refusals_say_what_and_the_way_out(call, error, sentence):
    with pytest.raises(error, match=f"pack: .*{sentence}"):
        call()
