"""cast: bits against NumPy, ml_dtypes and exact integer arithmetic."""

import bisect
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxtile.casting import cast
from jaxtile.dims import dims
from jaxtile.errors import TileTypeError
from jaxtile.tile import Tile, tile

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
FLOATS = (F16, BF16, np.dtype(np.float32), np.dtype(np.float64))
INTEGERS = tuple(np.dtype(f"{s}int{b}") for s in ("", "u") for b in (8, 16, 32, 64))
ALL = (*FLOATS, *INTEGERS, np.dtype(bool))
STORAGE = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int4", "float4_e2m1fn")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 127.5, 255.5, 65504.0, 65520.0)
SPECIAL += (1e-8, -1e-40, 9.1835e-41, 3.39e38, 3.4e38, -1e300, 1e-320, 2.0**31, 2.0**63)
SPECIAL += (math.inf, -math.inf, math.nan, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-40)
SPECIAL += (1 + 3 * 2.0**-8, 1 + 2.0**-11 + 2.0**-40, 2.0**-25, 3 * 2.0**-25, 2.0**-134)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype != bool else x


def samples(dtype):
    rng = np.random.default_rng(5)
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            some = np.array(SPECIAL).astype(dtype)
        raw = rng.integers(0, 256, 200 * dtype.itemsize, np.uint8).view(dtype)
        near = np.exp(rng.normal(0, 6, 100)) * rng.choice([-1, 1], 100)
        with np.errstate(over="ignore"):
            return np.concatenate([some, raw, near.astype(dtype)])
    info = np.iinfo(dtype)
    ends = [info.min, info.max, info.max - 1, info.max // 2 + 1, 0, 1, 100]
    wide = [v for v in (16973823, 2**24 + 1, 2**53 + 1, 65519, 65520) if v <= info.max]
    spread = rng.integers(info.min, info.max, 100, dtype, endpoint=True)
    small = spread >> rng.integers(0, info.bits, 100).astype(dtype)
    return np.concatenate([np.array(ends + wide, dtype), spread, small])


def table(dtype):
    """The values of the codes from +0 to +inf, the last as the next power of two."""
    inf = int(bits(np.array(np.inf, dtype)))
    values = np.arange(inf, dtype=np.uint16).view(dtype).astype(np.float64)
    return [*values.tolist(), 2 * values[-1] - values[-2]]


TABLES = {dtype: table(dtype) for dtype in (F16, BF16)}


def narrow(value, dtype):
    """The code of the 16-bit float nearest to an exact Python number."""
    if value != value:
        return None
    sign = 0x8000 if math.copysign(1, value) < 0 else 0
    size, values = abs(value), TABLES[dtype]
    code = bisect.bisect_right(values, size) - 1
    if code < len(values) - 1:
        # The midpoint has one bit more than the format, so that it is exact.
        middle = (values[code] + values[code + 1]) / 2
        code += size > middle or (size == middle and code % 2 == 1)
    return sign | code


def to_integer(value, dtype):
    info = np.iinfo(dtype)
    if value != value:
        return 0
    if math.isinf(value):
        return info.max if value > 0 else info.min
    return min(max(math.trunc(value), info.min), info.max)


def check(x, got, dtype):
    """Compare with what exact arithmetic and NumPy's single roundings say."""
    got = np.asarray(got)
    assert got.dtype == dtype
    exact = [v.item() for v in (x.astype(np.float64) if x.dtype in FLOATS else x)]
    if dtype in (F16, BF16):
        want = [narrow(v, dtype) for v in exact]
        for v, code, w, g in zip(exact, bits(got).tolist(), want, got, strict=True):
            if w is None:
                assert np.isnan(g), v
            else:
                assert code == w, (v, hex(code), hex(w))
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in INTEGERS and x.dtype in FLOATS:
            want = np.array([to_integer(v, dtype) for v in exact], dtype)
        else:
            want = x.astype(dtype)
    nan = np.isnan(want) if dtype in FLOATS else np.zeros(want.shape, bool)
    np.testing.assert_array_equal(np.isnan(got) if dtype in FLOATS else nan, nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("target", ALL, ids=str)
@pytest.mark.parametrize("source", ALL, ids=str)
def test_every_pair_of_formats_has_the_exact_bits(source, target):
    x = samples(source)
    check(x, cast(jnp.asarray(x), target), target)


@pytest.mark.parametrize("target", [BF16, F16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("source", [BF16, F16], ids=str)
def test_all_codes_of_the_16_bit_floats(source, target):
    x = np.arange(65536, dtype=np.uint16).view(source)
    got = np.asarray(cast(jnp.asarray(x), target))
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(np.float32).astype(target)
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


@pytest.mark.parametrize("target", [BF16, F16], ids=str)
def test_a_narrowed_nan_is_quiet_and_keeps_its_sign(target):
    codes = np.array([0x7F800001, 0xFF800001, 0x7FC12345, 0xFFFFFFFF], np.uint32)
    got = bits(cast(jnp.asarray(codes).view(jnp.float32), target))
    fraction = 7 if target == BF16 else 10
    np.testing.assert_array_equal(got >> 15, codes >> 31)
    assert np.all((got >> (fraction - 1)) & 1)


def _there_and_back(x):
    return cast(cast(x, jnp.bfloat16), jnp.float32)


def test_c02_a_round_trip_rounds_eagerly_jitted_and_fused():
    x = np.random.default_rng(0).normal(size=100).astype(np.float32)
    x[0] = math.pi
    want = x.astype(BF16).astype(np.float32)
    assert want[0] == 3.140625
    assert np.sum(want != x) > 90
    for f in (_there_and_back, jax.jit(_there_and_back), jax.vmap(_there_and_back)):
        np.testing.assert_array_equal(f(x), want)
    fused = jax.jit(lambda x: _there_and_back(x * 2) / 2 - x)
    np.testing.assert_array_equal(fused(x), want - x)
    remat = jax.jit(jax.grad(lambda x: jax.checkpoint(_there_and_back)(x).sum()))
    np.testing.assert_array_equal(remat(x), np.ones_like(x))
    loop = jax.jit(
        lambda x: jax.lax.fori_loop(0, 3, lambda i, v: _there_and_back(v), x)
    )
    np.testing.assert_array_equal(loop(x), want)


def test_c02_a_sum_is_rounded_before_it_is_used():
    x = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)

    @jax.jit
    def rounded(x):
        y = cast(x + 1, jnp.bfloat16)
        return cast(y, jnp.float32) + x

    want = (x + np.float32(1)).astype(BF16).astype(np.float32) + x
    np.testing.assert_array_equal(rounded(x), want)


C09 = [
    (1 + 2.0**-8 + 2.0**-40, BF16, 1.0078125),
    (16973823, BF16, 16908288.0),
    (1 + 2.0**-11 + 2.0**-40, F16, 1.0009765625),
]


@pytest.mark.parametrize(("value", "target", "want"), C09)
def test_c09_wide_sources_round_once(value, target, want):
    for x in (value, np.array([value]), np.array(value)[()]):
        assert np.all(np.asarray(cast(x, target)).astype(np.float64) == want)
        inside = jax.jit(lambda x=x: cast(x, target))
        assert np.all(np.asarray(inside()).astype(np.float64) == want)
    with jax.enable_x64(True):
        got = jax.jit(lambda x: cast(x, target))(jnp.asarray(value))
        assert np.asarray(got).astype(np.float64) == want
    if isinstance(value, int):
        got = jax.jit(lambda x: cast(x, target))(jnp.int32(value))
        assert np.asarray(got).astype(np.float64) == want


def test_c37_subnormals_survive_from_double_and_single():
    least = 9.1835e-41
    for x in (np.float64(least), np.float32(least), jnp.float32(least)):
        assert bits(cast(x, jnp.bfloat16)) == 1
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.float32):
            x = jnp.asarray(np.array([least, -least], dtype))
            got = jax.jit(lambda x: cast(x, jnp.bfloat16))(x)
            np.testing.assert_array_equal(bits(got), [1, 0x8001])


@pytest.mark.parametrize("name", STORAGE)
def test_storage_formats_are_refused_both_ways(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    with pytest.raises(TileTypeError, match=rf"cast: expected .*{name}.*quantize"):
        cast(jnp.ones(3), dtype)
    with pytest.raises(TileTypeError, match=rf"storage format {name}.*decode"):
        cast(jnp.ones(3).astype(dtype), jnp.float32)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, float])
def test_64_bits_need_x64(dtype):
    with pytest.raises(TileTypeError, match="jax_enable_x64"):
        cast(jnp.ones(3), dtype)
    with jax.enable_x64(True):
        assert cast(jnp.ones(3), dtype).dtype == np.dtype(dtype)


@pytest.mark.parametrize("x", [[1.0], "one", None, 1j, object()])
def test_what_is_no_array_is_refused(x):
    with pytest.raises(TileTypeError, match="cast: expected arrays, tiles or numbers"):
        cast(x, jnp.float32)


@pytest.mark.parametrize("dtype", [np.complex64, "float8_e4m3", "nonsense", object])
def test_a_dtype_without_a_row_is_refused(dtype):
    with pytest.raises(TileTypeError, match="cast: expected one of float16"):
        cast(jnp.ones(3), dtype)


def test_a_tile_keeps_its_dims():
    r, c = dims("rows cols")
    got = cast(tile(jnp.full((2, 3), math.pi), (r, c)), "bfloat16")
    assert isinstance(got, Tile)
    assert got.dims == (r, c)
    assert got.dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1), (2, 3, 4)])
def test_every_shape(shape):
    x = np.full(shape, math.pi, np.float32)
    got = cast(x, jnp.bfloat16)
    assert got.shape == shape
    np.testing.assert_array_equal(np.asarray(got), x.astype(BF16))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap(axis):
    x = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)
    got = jax.vmap(lambda v: cast(v, jnp.bfloat16), axis, axis)(x)
    np.testing.assert_array_equal(np.asarray(got), x.astype(BF16))


def test_the_tangent_is_the_cast_tangent_in_both_modes():
    x = jnp.array([1.001, 2.0, -3.3])
    dx = jnp.array([math.pi, 1.0, 2.0])
    _, dy = jax.jvp(lambda x: cast(x, jnp.bfloat16), (x,), (dx,))
    np.testing.assert_array_equal(np.asarray(dy), np.asarray(dx).astype(BF16))
    _, pull = jax.vjp(lambda x: cast(x, jnp.bfloat16), x)
    (ct,) = pull(jnp.ones(3, jnp.bfloat16))
    assert ct.dtype == jnp.float32
    np.testing.assert_array_equal(ct, np.ones(3))
    (ct,) = jax.linear_transpose(lambda x: cast(x, jnp.float32), jnp.bfloat16(1))(
        jnp.float32(math.pi)
    )
    assert ct == jnp.bfloat16(math.pi)


@pytest.mark.usefixtures("x64")
def test_derivatives_to_second_order():
    x = jnp.linspace(0.5, 2.0, 4)
    square = lambda x: cast(cast(x, jnp.float64) ** 2, jnp.float64)  # noqa: E731
    check_grads(square, (x,), order=2, modes=("fwd", "rev"))
    hessian = jax.vmap(jax.grad(jax.grad(lambda v: cast(v, jnp.float32) ** 3)))(x)
    np.testing.assert_allclose(hessian, 6 * x, rtol=1e-6)


def test_integers_carry_no_derivative():
    grad = jax.grad(lambda x: cast(cast(x, jnp.int32), jnp.float32).sum())
    np.testing.assert_array_equal(grad(jnp.ones(3)), np.zeros(3))
