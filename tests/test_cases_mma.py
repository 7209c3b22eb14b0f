"""Cases of mma that users of other libraries met, by their numbers in the list."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
import targets
from oracle import same_bits
from products import STRICT, make


def test_c25_default_precision():
    for drop in (12, 9):
        value = np.float32(1 + 2.0**-drop)
        assert float(jt.mma(np.array([[value]]), np.ones((1, 1), "f"))[0, 0]) == value
    a, b = make((512, 512), "float32"), make((512, 512), "float32", 1)
    exact = a.astype(np.float64) @ b
    error = np.linalg.norm(jt.matmul(a, b) - exact) / np.linalg.norm(exact)
    assert error < 1e-6


@pytest.mark.parametrize("setting", ["tensorfloat32", "bfloat16", None])
def test_c25_no_setting_lowers_it(setting):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with jax.default_matmul_precision(setting or "default"):
        text = jax.jit(jt.matmul).lower(x, x).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text


def test_c29_a_row_alone_and_in_a_batch():
    x, w = make((64, 4096), "float32"), make((4096, 32), "float32", 1)
    kept = jax.jit(functools.partial(jt.mma, policy=STRICT))
    whole = kept(x, w)
    for rows in (1, 2, 8):
        same_bits(kept(x[:rows], w), np.asarray(whole)[:rows])
    row = jax.jit(functools.partial(jt.mma, spec="k,kn->n", policy=STRICT))
    same_bits(jax.jit(jax.vmap(row, (0, None)))(x[:8], w), np.asarray(whole)[:8])
    same_bits(jax.lax.map(lambda v: row(v, w), x[:3]), np.asarray(whole)[:3])
    one = jax.jit(functools.partial(jt.mma, spec="k,k->", policy=STRICT))
    same_bits(one(x[5], w[:, 7]), np.asarray(whole)[5, 7])


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_c38_mma_decodes_every_code(format):
    kind = getattr(ml_dtypes, f"float8_{format}")
    codes = np.arange(256, dtype=np.uint8).view(kind)
    got = np.asarray(jt.mma(codes[:, None], np.ones((1, 1), kind)))[:, 0]
    nan = {
        "e4m3fn": [0x7F, 0xFF],
        "e5m2": [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF],
    }.get(format, [0x80])
    inf = [0x7C, 0xFC] if format == "e5m2" else []
    assert np.flatnonzero(np.isnan(got)).tolist() == nan
    assert np.flatnonzero(np.isinf(got)).tolist() == inf


@pytest.mark.parametrize("name", ["bf16", "bf16x3", "bf16x6", "tf32", "tf32x3", "f32"])
def test_c40_named_precisions_in_kernels(name):
    policy = jt.MmaPolicy(input_precision=name)
    shape = (64, 64)

    def body(a, b, c, o):
        o[...] = jt.mma(a[...], b[...], c[...], policy)

    operands = [make(shape, "float32", i) for i in range(3)]
    out = targets.spec(shape)
    got = pl.pallas_call(body, out_shape=out, interpret=True)(*operands)
    same_bits(got, jax.jit(functools.partial(jt.mma, policy=policy))(*operands))
    count = {"bf16x3": 3, "tf32x3": 3, "bf16x6": 6}.get(name, 1)
    text = targets.triton(body, out, *[out] * 3)
    assert text.count("tt.dot ") == count
    assert ("inputPrecision = tf32" in text) == name.startswith("tf32")
    assert targets.tpu(body, out, *[out] * 3).count("tpu.matmul") == count


def test_c46_a_row_picked_by_a_product_keeps_its_digits():
    one_hot = np.array([[1.0, 0.0]], np.float32)
    table = np.array([[1 + 2.0**-12], [7.0]], np.float32)
    assert float(jt.mma(one_hot, table)[0, 0]) == 1.000244140625
    # A product is no gather: what is not finite in another row shows.
    assert np.isnan(jt.mma(one_hot, np.array([[1.0], [np.inf]], np.float32)))


def test_c62_mixed_products_are_exact():
    a = jnp.array([-1.6171875, 0.5703125], jnp.bfloat16)
    b = jnp.array([127, -4], jnp.int8)
    for policy in (None, STRICT):
        assert float(jt.mma(a, b, None, policy, spec="k,k->")) == -207.6640625
    assert float(jt.matmul(a, b, out_dtype=jnp.bfloat16)) == -208


@pytest.mark.parametrize("every", [None, 256])
def test_c77_a_contraction_that_no_tile_divides(every):
    a, b = make((4, 128, 384), "float32"), make((4, 384, 128), "float32", 1)
    a, b = np.round(a), np.round(b)
    poison = np.full((4, 1, 384), np.nan, np.float32)
    held = jnp.concatenate([a, poison], 1)[:, :128]
    policy = jt.MmaPolicy(promote_every=every)
    np.testing.assert_array_equal(jt.mma(held, b, policy=policy), a @ b)
