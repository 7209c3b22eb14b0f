"""mma and matmul on arrays and tiles, against NumPy in float64 and in single steps."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
from oracle import same_bits
from products import STRICT, chain, close, make

FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


PAIRS = [
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float16", "float32"),
    ("float16", "bfloat16", "float32"),
    ("float32", "bfloat16", "float32"),
    ("bfloat16", "int8", "float32"),
    ("uint8", "float16", "float32"),
    ("int32", "bfloat16", "float32"),
    ("float8_e4m3fn", "float8_e5m2", "float32"),
    ("float8_e4m3fnuz", "float8_e5m2fnuz", "float32"),
    ("float8_e5m2", "bfloat16", "float32"),
    ("float4_e2m1fn", "float16", "float32"),
    ("int8", "int8", "int32"),
    ("int8", "uint8", "int32"),
    ("uint8", "uint8", "uint32"),
    ("int4", "int8", "int32"),
    ("uint4", "uint4", "uint32"),
    ("int16", "int8", "int32"),
    ("int32", "int32", "int32"),
    ("uint32", "uint16", "uint32"),
]


@pytest.mark.parametrize(
    ("da", "db", "acc"), PAIRS, ids=[f"{a}-{b}" for a, b, _ in PAIRS]
)
def test_formats_and_accumulators(da, db, acc):
    a, b = make((5, 37), da), make((37, 6), db, 1)
    got = jt.mma(a, b)
    assert got.dtype == acc
    if np.dtype(acc).kind == "f":
        close(got, "mk,kn->mn", a, b)
    else:
        want = np.asarray(a, np.int64) @ np.asarray(b, np.int64)
        np.testing.assert_array_equal(got, want.astype(acc))
    np.testing.assert_array_equal(jt.mma(a, b, policy=STRICT).dtype, acc)


@pytest.mark.parametrize(
    "policy", [jt.MmaPolicy(), STRICT, jt.MmaPolicy(promote_every=5)]
)
def test_float64(x64, policy):
    a, b = make((3, 21), "float64"), make((21, 4), "float32", 1)
    got = jt.mma(a, b, policy=policy)
    assert got.dtype == np.float64
    close(got, "mk,kn->mn", a, b, 2.0**-53)
    wide = jt.mma(a.astype("f"), b, acc_dtype=jnp.float64, policy=policy)
    close(wide, "mk,kn->mn", a.astype("f"), b, 2.0**-53)


@pytest.mark.parametrize("fp8", FP8)
def test_every_code_of_a_storage_format_enters_exactly(fp8):
    codes = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, fp8))
    for policy in (None, STRICT):
        got = np.asarray(
            jt.mma(codes[:, None], jnp.ones((1, 1), jnp.bfloat16), 0, policy)
        )
        want = codes.astype(np.float32)[:, None]
        np.testing.assert_array_equal(got, want)  # NaN equals NaN here


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("k", [0, 1, 7, 8, 41])
def test_a_chain_keeps_the_order_of_k(dtype, seeded, k):
    a, b = make((3, k), dtype), make((k, 5), dtype, 1)
    c = make((3, 5), "float32", 2) if seeded else None
    got = jax.jit(functools.partial(jt.mma, policy=STRICT))(a, b, c)
    want = chain(a, b, c)
    same_bits(got, want if k or seeded else np.zeros_like(want))


def test_a_chain_neither_fuses_nor_regroups():
    tiny, one = np.float32(2.0**-12), np.float32(1)
    # (1 + e)^2 - 1 with the product rounded first: 2e, and not 2e + e^2.
    a = np.array([[one + tiny, one]])
    b = np.array([[one + tiny], [-one]])
    assert float(jt.mma(a, b, policy=STRICT)[0, 0]) == 2 * tiny
    large = np.array([[2.0**24, 1, 1, -(2.0**24)]], np.float32)
    ones = np.ones((4, 1), np.float32)
    assert float(jt.mma(large, ones, policy=STRICT)[0, 0]) == 0
    assert float(jt.mma(large[:, ::-1].copy(), ones, policy=STRICT)[0, 0]) == 2
    turned = jt.mma(large[:, [0, 3, 1, 2]], ones, policy=STRICT)
    assert float(turned[0, 0]) == 2
    seeded = jt.mma(large[:, :2], ones[:2], -(2.0**24), policy=STRICT)
    assert float(seeded[0, 0]) == 1


def test_signed_zeros_of_chains_and_empty_sums():
    minus = np.full((1, 1), -0.0, np.float32)
    one = np.ones((1, 1), np.float32)
    assert np.signbit(jt.mma(minus, one, policy=STRICT))
    assert np.signbit(jt.mma(minus, one, minus, policy=STRICT))
    assert not np.signbit(jt.mma(minus, one, -minus, policy=STRICT))
    for policy in (None, STRICT, jt.MmaPolicy(promote_every=4)):
        empty = np.zeros((1, 0), np.float32), np.zeros((0, 1), np.float32)
        assert not np.signbit(jt.mma(*empty, policy=policy))
        assert np.signbit(jt.mma(*empty, minus, policy=policy))


@pytest.mark.parametrize("acc", ["bfloat16", "float16"])
def test_a_narrow_accumulator_rounds_each_step(acc):
    a, b, c = make((3, 19), acc), make((19, 4), acc, 1), make((3, 4), acc, 2)
    for policy in (None, STRICT):
        got = jt.mma(a, b, c, policy, acc_dtype=acc)
        same_bits(got, chain(a, b, c, acc))


def test_integers_wrap_in_any_order():
    a = np.full((2, 6), 2**30, np.int32)
    b = make((6, 3), "int32", 1)
    want = (a.astype(object) @ b.astype(object)) % 2**32
    for policy in (None, STRICT, jt.MmaPolicy(promote_every=4)):
        got = np.asarray(jt.mma(a, b, policy=policy)).astype(np.uint32)
        np.testing.assert_array_equal(got, want.astype(np.uint32))
    wide = np.full((1, 4), 100, np.int8)
    assert jt.mma(wide, wide.T, acc_dtype="int8").dtype == np.int8
    assert int(jt.mma(wide, wide.T, acc_dtype="int8")[0, 0]) == np.int64(40000).astype(
        "b"
    )


SPECS = [
    ("mk,kn->mn", (3, 4), (4, 5)),
    ("km,kn->nm", (4, 3), (4, 5)),
    ("bmk,bkn->bmn", (2, 3, 4), (2, 4, 5)),
    ("mbk,nkb->bnm", (3, 2, 4), (5, 4, 2)),
    ("mkl,nlk->mn", (3, 4, 6), (5, 6, 4)),
    ("k,k->", (7,), (7,)),
    ("m,n->nm", (3,), (4,)),
    ("b,b->b", (3,), (3,)),
    (",n->n", (), (4,)),
    (",->", (), ()),
    ("abk,kc->acb", (2, 3, 4), (4, 2)),
]


@pytest.mark.parametrize(("spec", "a", "b"), SPECS, ids=[s[0] for s in SPECS])
def test_specs(spec, a, b):
    a, b = make(a, "float32"), make(b, "float32", 1)
    a, b = np.round(a * 4), np.round(b * 4)
    want = np.einsum(spec, a, b)
    c = np.round(4 * make(want.shape, "float32", 2))
    for policy in (None, STRICT, jt.MmaPolicy(promote_every=3)):
        np.testing.assert_array_equal(jt.mma(a, b, c, policy, spec=spec), want + c)


def test_the_order_of_k_is_that_of_the_first_operand():
    a, b = make((3, 4, 6), "float32"), make((5, 6, 4), "float32", 1)
    got = jt.mma(a, b, spec="mkl,nlk->mn", policy=STRICT)
    flat = a.reshape(3, 24), b.transpose(2, 1, 0).reshape(24, 5)
    same_bits(got, chain(*flat))


SHAPES = [
    ((3, 4), (4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((1, 3, 4), (7, 4, 5)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (4,)),
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((2, 0, 4), (4, 5)),
    ((1, 1, 1), (1, 1, 1)),
]


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("policy", [None, STRICT], ids=["any", "kept"])
def test_matmul_is_numpys(a, b, policy):
    a, b = (np.round(4 * make(s, "float32", i)) for i, s in enumerate((a, b)))
    got = jt.matmul(a, b, policy)
    want = np.matmul(a, b)
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)
    if min(a.ndim, b.ndim) > 1:
        np.testing.assert_array_equal(jt.mma(a, b, 2.0, policy), want + 2)


def test_a_batch_axis_of_one_operand_is_not_broadcast():
    x, y = (
        jax.ShapeDtypeStruct((64, 1, 8, 16), "float32"),
        jax.ShapeDtypeStruct((5, 16, 4), "float32"),
    )
    text = jax.jit(jt.matmul).lower(x, y).as_text()
    assert "broadcast_in_dim" not in text


def test_the_epilogue_sees_the_accumulator_and_one_rounding_follows():
    a, b = (
        np.array([[3.0, 1 / 3]], np.float32),
        np.array([[1.0], [2.0**-9]], np.float32),
    )
    z = np.float32(3 + np.float32(1 / 3) * np.float32(2.0**-9))
    got = jt.mma(a, b, epilogue=lambda v: (v - 3) * 512, out_dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert got[0, 0] == ((z - 3) * 512).astype(jnp.bfloat16)
    flags = jt.mma(a, b, epilogue=lambda v: v > 3)
    assert flags.dtype == bool
    assert bool(flags[0, 0])


def test_an_epilogue_closes_over_scalars():
    a, b = make((4, 8), "int8"), make((8, 3), "int8", 1)

    @jax.jit
    def scaled(s):
        return jt.mma(a, b, epilogue=lambda z: z * s, out_dtype=jnp.float32)

    want = (a.astype(int) @ b.astype(int)).astype("f") * np.float32(0.3)
    np.testing.assert_array_equal(scaled(jnp.float32(0.3)), want)
    jaxpr = str(jax.make_jaxpr(scaled)(1.0))
    assert jaxpr.count("tile_mma") == 1
    assert "tile_map" not in jaxpr
    slope = jax.grad(lambda s: scaled(s).sum())(jnp.float32(0.3))
    np.testing.assert_allclose(slope, (a.astype(int) @ b.astype(int)).sum(), rtol=1e-6)
    batched = jax.vmap(scaled)(jnp.float32([0.3, 2]))
    np.testing.assert_array_equal(batched[0], want)


def test_lifted_functions_are_epilogues():
    a, b = make((4, 8), "bfloat16"), make((8, 3), "bfloat16", 1)
    got = jt.mma(a, b, 0.5, epilogue=jt.gelu, out_dtype=jnp.bfloat16)
    want = jt.cast(jt.gelu(jt.mma(a, b, 0.5)), jnp.bfloat16)
    same_bits(got, np.asarray(want))


@pytest.mark.parametrize("policy", [None, STRICT], ids=["any", "kept"])
def test_nan_and_infinity_propagate(policy):
    a = np.array([[1, np.nan], [np.inf, 0], [np.inf, -np.inf], [1, 2]], np.float32)
    b = np.array([[1.0, 0.0], [1.0, 1.0]], np.float32)
    with np.errstate(all="ignore"):
        want = a @ b
    np.testing.assert_array_equal(jt.mma(a, b, policy=policy), want)
    nothing = jt.mma(np.zeros((1, 1), "f"), np.full((1, 1), np.inf, "f"), 7.0, policy)
    assert math.isnan(float(nothing[0, 0]))
