"""Products of scaled codes against float64 NumPy, and their derivatives."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
from codes import dtype_of
from folds import same_derivatives
from jaxtile.errors import TileShapeError, TileTypeError
from scaled import E4M3, F32, GRIDS, RNG, case, scales, some, values


@pytest.mark.parametrize("name", GRIDS)
def test_product(name):
    args, want, size = case(name)
    got = jt.nn.scaled_matmul(*args)
    assert got.dtype == F32
    np.testing.assert_array_less(np.abs(got - want), 3e-6 * size + 1e-30)
    wide = (jnp.asarray(values(*v), F32) for v in (args[::2], args[1::2]))
    plain = jnp.matmul(*wide, precision="highest")
    np.testing.assert_array_less(np.abs(got - plain), 3e-6 * size + 1e-30)


def test_exact_sums_are_exact():
    """Small integers in units of powers of two: no sum rounds, in whatever order."""
    a, b = (
        RNG.integers(-8, 9, n).astype(dtype_of(E4M3)) for n in ((20, 256), (256, 9))
    )
    s, t = (2.0 ** RNG.integers(-3, 4, n) for n in ((20, 4), (4, 9)))
    want = values(a, s) @ values(b, t)
    for unit in (F32, ml_dtypes.float8_e8m0fnu):
        got = jt.nn.scaled_matmul(a, b, s.astype(unit), t.astype(unit))
        np.testing.assert_array_equal(got, want)
    half = jt.nn.scaled_matmul(a, b, s.astype(F32), t.astype(F32), out_dtype="bfloat16")
    np.testing.assert_array_equal(half, want.astype(ml_dtypes.bfloat16))


def test_blocks_with_nan_and_blocks_of_zeros():
    a, s = some(E4M3, 4, 64), scales(4, 2)
    a[1, 40], a[2] = np.nan, 0
    got = np.asarray(jt.nn.scaled_matmul(a, some(E4M3, 64, 6), s, scales(2, 6)))
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2, 3]]).all()
    assert (got[2] == 0).all()


def test_what_quantize_blocks_gives():
    a, b = RNG.standard_normal((9, 256)), RNG.standard_normal((256, 128))
    a, b = a.astype(F32), b.astype(F32)
    one = jt.quantize_blocks(a, E4M3, (1, 128), scale_format="float32")
    two = jt.quantize_blocks(b, E4M3, (128, 128), scale_format="float32")
    got = jt.nn.scaled_matmul(one.codes, two.codes, one.scales, two.scales)
    np.testing.assert_array_equal(jt.nn.quantized_matmul(a, b), got)
    assert np.abs(got - a @ b).max() < 0.05 * np.abs(a @ b).max()


def test_steps_of_k_hold_one_scale_and_128_elements_at_most():
    for name, most in (("rows and columns", 128), ("other runs", 16)):
        report = jt.explain(jt.nn.scaled_matmul)(*case(name)[0])
        (product,) = (e for e in report if e.op == "mma")
        assert product.operands[0].endswith(f",{most}]")


def test_transformations():
    a, b, s, t = (
        some(E4M3, 3, 5, 64),
        some(E4M3, 64, 6),
        scales(3, 5, 2),
        scales(2, 1),
    )
    want = jt.nn.scaled_matmul(a, b, s, t)
    by_row = jax.jit(jax.vmap(jt.nn.scaled_matmul, (0, None, 0, None)))(a, b, s, t)
    np.testing.assert_allclose(by_row, want, rtol=1e-6)
    args = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (a, b, s, t)]
    exported = jax.export.export(jax.jit(jt.nn.scaled_matmul))(*args)
    np.testing.assert_array_equal(exported.call(a, b, s, t), want)


def test_derivative_of_scales():
    a, b = some(E4M3, 3, 8), some(E4M3, 8, 4)
    left, right = a.astype(F32), b.astype(F32)

    def plain(s, t):
        wide = jnp.repeat(s, 4, 1), jnp.repeat(jnp.repeat(t, 4, 0), 2, 1)
        return jnp.matmul(left * wide[0], right * wide[1], precision="highest")

    s, t = (jnp.asarray(RNG.uniform(1e-4, 2e-4, n), F32) for n in ((3, 2), (2, 2)))
    call = lambda s, t: jt.nn.scaled_matmul(a, b, s, t)  # noqa: E731
    same_derivatives(call, plain, s, t, rtol=3e-4, atol=1e-3)


def test_derivative_of_codes_is_rounded_once():
    """The sum over all columns is taken before the cotangent narrows to 8 bits."""
    a, b, s, t = some(E4M3, 2, 4), some(E4M3, 4, 200), scales(2, 1), scales(1, 1)
    s, t = s / s, t / t / 64
    got = jax.grad(lambda a: jt.nn.scaled_matmul(a, b, s, t).sum())(jnp.asarray(a))
    want = np.clip(values(b, t).sum(1), -448, 448).astype(dtype_of(E4M3))
    np.testing.assert_array_equal(got, np.broadcast_to(want, (2, 4)))


def _rounded(x, block):
    """Blocks of two axes rounded to e4m3fn as their largest magnitude allows, by NumPy."""
    out, (rows, cols) = np.empty_like(x), block
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            part = x[i : i + rows, j : j + cols]
            scale = np.abs(part).max().astype(np.float64) / 448
            up = np.nextafter(F32(scale), F32(np.inf))
            scale = F32(scale) if np.float64(F32(scale)) >= scale else up
            codes = (part.astype(np.float64) / scale).astype(dtype_of(E4M3))
            out[i : i + rows, j : j + cols] = codes.astype(F32) * scale
    return out


def test_training_sees_through_the_rounding():
    a, b = (RNG.standard_normal(n).astype(F32) for n in ((5, 12), (12, 8)))
    shift = _rounded(a, (1, 4)) - a, _rounded(b, (4, 4)) - b

    def plain(a, b):
        return jnp.matmul(a + shift[0], b + shift[1], precision="highest")

    call = lambda a, b: jt.nn.quantized_matmul(a, b, block=4)  # noqa: E731
    np.testing.assert_allclose(call(a, b), plain(a, b), rtol=1e-5, atol=1e-5)
    given = jnp.asarray(a), jnp.asarray(b)
    same_derivatives(call, plain, *given, rtol=1e-4, atol=1e-4)


def test_operands_of_16_bits():
    a, b = (
        RNG.standard_normal(n).astype(ml_dtypes.bfloat16) for n in ((3, 64), (64, 2))
    )
    got = jt.nn.quantized_matmul(a, b, block=32, out_dtype="bfloat16", format="e5m2")
    assert got.dtype == jnp.bfloat16
    exact = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    np.testing.assert_array_less(np.abs(np.float64(got) - exact), size / 4)
    grad = jax.grad(lambda a: jt.nn.quantized_matmul(a, b, block=32).sum())(
        jnp.asarray(a)
    )
    assert grad.dtype == jnp.bfloat16


def test_operands_that_do_not_fit():
    a, b, s, t = some(E4M3, 2, 8), some(E4M3, 8, 4), scales(2, 2), scales(2, 4)
    x, call, quantized = (
        np.ones((2, 8), F32),
        jt.nn.scaled_matmul,
        jt.nn.quantized_matmul,
    )
    for error, match, run in (
        (TileShapeError, r"a of shape \[\.\.\., depth\]", lambda: call(a, a, s, s)),
        (TileShapeError, "none empty", lambda: call(a[:0], b, s[:0], t)),
        (
            TileShapeError,
            r"sizes that divide \(2, 8\)",
            lambda: call(a, b, s[:, :0], t),
        ),
        (TileShapeError, r"divide \(8, 4\)", lambda: call(a, b, s, scales(3, 4))),
        (TileShapeError, "extents that divide", lambda: quantized(x, x.T, block=3)),
        (TileShapeError, "a of shape", lambda: quantized(x, x)),
        (TileTypeError, "a of float8_e4m3fn or .*float32", lambda: call(x, b, s, t)),
        (TileTypeError, "scales of float32", lambda: call(a, b, s.astype("int32"), t)),
        (TileTypeError, "expected floats", lambda: quantized(x.astype("int32"), x.T)),
        (TileTypeError, "the format float8", lambda: quantized(x, x.T, format="int8")),
        (TileTypeError, "block an integer", lambda: quantized(x, x.T, block=1.5)),
        (
            TileTypeError,
            "an out_dtype of floats",
            lambda: call(a, b, s, t, out_dtype="int32"),
        ),
    ):
        with pytest.raises(error, match=match):
            run()
