"""quantize_blocks and decode_blocks against fractions, block by block."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import codes
import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError

F32 = np.dtype(np.float32)


def _data(shape, seed=0, dtype=F32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(rng.normal(0, 3, shape))
    return x.astype(dtype)


def _blocks(x, extents):
    """The flat indices of every block, in the order of the scales."""
    place = np.arange(x.size).reshape(x.shape)
    grid = [n // e for n, e in zip(x.shape, extents, strict=True)]
    for index in np.ndindex(*grid):
        cut = [slice(i * e, (i + 1) * e) for i, e in zip(index, extents, strict=True)]
        yield place[tuple(cut)].ravel()


def _power(ratio, up):
    """The power of two next to a positive fraction."""
    k = math.floor(math.log2(ratio)) - 1
    while Fraction(2) ** (k + 1) <= ratio:
        k += 1
    return Fraction(2) ** (k + (up and Fraction(2) ** k < ratio))


def _wanted_scale(block, name, scale_format, how):
    finite = np.abs(block[np.isfinite(block)].astype(np.float64))
    top = Fraction(finite.max(initial=0).item())
    if top == 0:
        return 1.0
    largest = Fraction(codes.magnitudes(name)[-2])
    if how == "ocp":
        return float(_power(top, False) / _power(largest, False))
    ratio = top / largest
    if scale_format == "float8_e8m0fnu":
        low = _power(ratio, False)
        nearest = low * (1 + (ratio / low >= Fraction(3, 2)))
        return float(_power(ratio, True) if how == "up" else nearest)
    near = np.float32(float(ratio))
    if how == "nearest_even":
        return near.item()
    return (np.nextafter(near, np.float32(np.inf)) if near < ratio else near).item()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn", "int8"])
@pytest.mark.parametrize(
    ("scale_format", "how"),
    [
        ("float32", "up"),
        ("float32", "nearest_even"),
        ("float8_e8m0fnu", "up"),
        ("float8_e8m0fnu", "nearest_even"),
        ("float8_e8m0fnu", "ocp"),
    ],
)
def test_scales_and_codes_are_exact(name, scale_format, how):
    x = _data((3, 64))
    x[0, :32] = 0
    x[1, 3], x[1, 40] = np.nan, np.inf
    x[2, 32:] = np.float32(1e-44)
    params = dict(scale_format=scale_format, scale_rounding=how)
    q = jax.jit(lambda v: jt.quantize_blocks(v, name, (1, 32), **params))(x)
    assert (q.codes.shape, q.scales.shape) == ((3, 64), (3, 2))
    assert q.scales.dtype.name == scale_format
    scales = np.asarray(q.scales.astype(jnp.float32)).ravel()
    if scale_format != "float32":
        scales = np.asarray(jt.decode(q.scales)).ravel()
    for scale, places in zip(scales, _blocks(x, (1, 32)), strict=True):
        block = x.ravel()[places]
        want = max(_wanted_scale(block, name, scale_format, how), 2.0**-149)
        if scale_format != "float32":
            want = max(want, 2.0**-127)
        assert scale.item() == want
        exact = [
            Fraction(v) / Fraction(want) if math.isfinite(v) and v else v
            for v in block.tolist()
        ]
        codes.check(np.asarray(q.codes).ravel()[places], exact, name)


@pytest.mark.parametrize("rounding", [*codes.ROUNDINGS, "stochastic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_quotient_is_rounded_once(rounding, dtype, x64):
    rng = np.random.default_rng(4)
    x = _data((300, 1), 1, jnp.dtype(dtype))
    s = np.exp(rng.normal(0, 2, (300, 1))).astype(F32)
    s[::2] = np.float32(x[::2] / np.float32(3.25))  # quotients near and on a tie
    x[:20], s[:10] = 1e-7 * x[:20], np.float32(1e-40)
    bits = rng.integers(0, 2**32, x.shape, np.uint32)
    named = dict(bits=bits) if rounding == "stochastic" else {}
    q = jt.quantize_blocks(
        jnp.asarray(x), "float8_e4m3fn", (1, 1), scales=s, rounding=rounding, **named
    )
    pairs = zip(x.ravel().tolist(), s.ravel().tolist(), strict=True)
    exact = [Fraction(a) / Fraction(b) if a else a / b for a, b in pairs]
    got = np.asarray(q.codes).ravel()
    codes.check(got, exact, "float8_e4m3fn", rounding, random=bits.ravel())


def test_special_scales_follow_ieee():
    x = jnp.float32([1, 0, -1, jnp.inf, 5, 5, jnp.nan, 3])
    s = jnp.float32([0, 0, 0, jnp.inf, jnp.inf, jnp.nan, 1, -1])
    q = jt.quantize_blocks(x, "float8_e5m2", 1, scales=s)
    want = [np.inf, np.nan, -np.inf, np.nan, 0, np.nan, np.nan, -3]
    np.testing.assert_array_equal(q.codes.astype(jnp.float32), want)


@pytest.mark.parametrize("name", codes.ALL)
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_decoding_rounds_the_exact_product_once(name, target):
    every = codes.every_code(name)
    rng = np.random.default_rng(5)
    s = np.exp(rng.normal(0, 30, every.size)).astype(F32)
    s[::5] = np.exp(rng.normal(0, 2, s[::5].size)).astype(F32)
    dtype = jnp.dtype(target)
    got = jt.decode_blocks(jnp.asarray(every), s, dtype=dtype)
    assert got.dtype == dtype
    with np.errstate(all="ignore"):
        # 8 bits times 24 are exact in float64, and its conversion rounds once.
        wide = every.astype(np.float64) * s.astype(np.float64)
        if target == "bfloat16":
            want = np.asarray(jt.cast(wide, jnp.bfloat16))
        else:
            want = wide.astype(dtype)
    want, got = want.astype(F32), np.asarray(got).astype(F32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_the_smallest_power_of_two_is_no_zero():
    least = jnp.zeros(1, jnp.uint8).view(jnp.float8_e8m0fnu)
    assert np.asarray(jt.decode(least)).view(np.uint32) == 0x400000
    one = jt.quantize(jnp.ones(1), "float8_e4m3fn")
    got = jax.jit(jt.decode_blocks)(one, least)
    assert np.asarray(got).view(np.uint32) == 0x400000
    x = jnp.zeros(1, jnp.uint32).at[0].set(0x400000).view(jnp.float32)
    q = jt.quantize_blocks(x, "float8_e4m3fn", 1, scales=least)
    assert float(q.codes.astype(jnp.float32)[0]) == 1


@pytest.mark.parametrize(
    ("block", "grid"),
    [
        (None, (1, 1)),
        ((None, None), (1, 1)),
        ((1, None), (6, 1)),
        ((None, 1), (1, 40)),
        (20, (6, 2)),
        ((3, 8), (2, 5)),
        ({1: 8}, (6, 5)),
        ((100, 100), (1, 1)),
    ],
    ids=str,
)
def test_a_scale_for_a_tensor_a_channel_or_a_block(block, grid):
    x = _data((6, 40))
    q = jt.quantize_blocks(x, "float8_e4m3fn", block, scale_format="float32")
    assert q.scales.shape == grid
    extents = [n // g for n, g in zip(x.shape, grid, strict=True)]
    scales, near = np.asarray(q.scales), np.empty_like(x)
    for scale, places in zip(scales.ravel(), _blocks(x, extents), strict=True):
        want = _wanted_scale(x.ravel()[places], "float8_e4m3fn", "float32", "up")
        assert scale.item() == want
        near.ravel()[places] = scale
    y = jt.decode_blocks(q.codes, q.scales)
    # Half a unit in the last place, or of the least code.
    assert np.all(np.abs(y - x) <= np.maximum(np.abs(x) / 16, near * 2.0**-10) * 1.0001)
    named = dict(scale_format="float32", out_dtype=jnp.float32)
    fused = jt.quantize_blocks(x, "float8_e4m3fn", block, **named)
    np.testing.assert_array_equal(fused, y)


def test_blocks_across_devices_of_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    x = jnp.arange(1, 97, dtype=jnp.float32).reshape(8, 12)
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    with jax.set_mesh(mesh):
        for block in ((2, 1), (None, 1), (8, 3), (1, 3)):
            got = jt.quantize_blocks(rows, "int8", block)
            jax.tree.map(
                np.testing.assert_array_equal, got, jt.quantize_blocks(x, "int8", block)
            )
        with pytest.raises(TileShapeError, match="2 blocks, sharded.*reshard"):
            jt.quantize_blocks(rows, "int8", (4, 1))


def test_up_never_saturates_and_ocp_may():
    x = np.float32([[1.9, 0.1]])
    up = jt.quantize_blocks(x, "float8_e4m3fn", 32)
    ocp = jt.quantize_blocks(x, "float8_e4m3fn", 32, scale_rounding="ocp")
    assert float(jt.decode_blocks(*up)[0, 0]) == 1.875
    assert float(jt.decode_blocks(*ocp)[0, 0]) == 1.75
    assert float(jt.decode(ocp.scales)[0, 0]) == 2.0**-8


def test_tiles_and_mappings_of_dims():
    r, c = jt.dims("rows cols")
    x = _data((4, 64))
    t = jt.quantize_blocks(jt.tile(x, (r, c)), "float8_e4m3fn", {c: 32})
    want = jt.quantize_blocks(x, "float8_e4m3fn", (1, 32))
    assert t.codes.dims == (r, c)
    np.testing.assert_array_equal(codes.raw(t.codes.array), codes.raw(want.codes))
    back = jt.decode_blocks(t.codes, t.scales)
    np.testing.assert_array_equal(back.array, jt.decode_blocks(*want))


def test_vmap_is_a_loop():
    x = _data((3, 4, 64))
    f = lambda v: jt.quantize_blocks(v, "float4_e2m1fn", 32)  # noqa: E731
    got = jax.vmap(f, 1, 1)(jnp.asarray(x))
    for i in range(4):
        want = f(x[:, i])
        np.testing.assert_array_equal(codes.raw(got.codes[:, i]), codes.raw(want.codes))
        np.testing.assert_array_equal(
            codes.raw(got.scales[:, i]), codes.raw(want.scales)
        )


def test_vmap_over_either_operand():
    x, s = _data((3, 4, 8)), np.exp(_data((3, 4, 2), 1) / 50).astype(F32)
    f = lambda v, k: jt.quantize_blocks(v, "int8", 4, scales=k).codes  # noqa: E731
    g = lambda c, k: jt.decode_blocks(c, k)  # noqa: E731
    for axes in ((0, 0), (0, None), (None, 0)):
        xs, ks = (v if a == 0 else v[0] for a, v in zip(axes, (x, s), strict=True))
        got = jax.vmap(f, axes)(jnp.asarray(xs), ks)
        back = jax.vmap(g, (0, axes[1]))(got, ks)
        for i in range(3):
            a, k = x[i if axes[0] == 0 else 0], s[i if axes[1] == 0 else 0]
            np.testing.assert_array_equal(got[i], f(a, k))
            np.testing.assert_array_equal(back[i], g(f(a, k), k))
    none = jax.vmap(f, (0, None))(jnp.zeros((0, 4, 8)), s[0])
    assert none.shape == (0, 4, 8)


def test_explain_counts_scales_once_a_block():
    x = jax.ShapeDtypeStruct((64, 128), "float32")
    s = jax.ShapeDtypeStruct((64, 4), "float32")
    call = lambda v, k: jt.quantize_blocks(v, "int8", 32, scales=k).codes  # noqa: E731
    (entry,) = jt.explain(call)(x, s)
    assert entry.bytes == 64 * (128 * 4 + 4 * 4 + 128)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_empty_arrays_and_scalars(shape):
    q = jt.quantize_blocks(jnp.ones(shape), "float8_e4m3fn", (3,) * len(shape))
    assert jt.decode_blocks(q.codes, q.scales).shape == shape


ONES = jnp.ones((4, 8))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: jt.quantize_blocks(ONES, "int8", (1, 2, 3)),
            TileShapeError,
            "2 extents",
        ),
        (
            lambda: jt.quantize_blocks(ONES, "int8", 0),
            TileValueError,
            "1 or more; got 0",
        ),
        (
            lambda: jt.quantize_blocks(ONES, "int8", 3),
            TileShapeError,
            "divide.*jnp.pad",
        ),
        (
            lambda: jt.quantize_blocks(ONES, "int8", 1.5),
            TileTypeError,
            "integer extents",
        ),
        (
            lambda: jt.quantize_blocks(ONES, "int8", {2: 4}),
            TileShapeError,
            "an axis in",
        ),
        (
            lambda: jt.quantize_blocks(ONES, "int8", 4, scales=jnp.ones((4, 3))),
            TileShapeError,
            r"broadcast to \(4, 2\)",
        ),
        (
            lambda: jt.quantize_blocks(ONES, "int8", 4, scales=jnp.ones((4, 2), int)),
            TileTypeError,
            "scales of float32 or float8_e8m0fnu; got int32",
        ),
        (lambda: jt.quantize_blocks(ONES.astype(int), "int8"), TileTypeError, "floats"),
        (
            lambda: jt.quantize_blocks(ONES, "int8", scale_format="float16"),
            TileValueError,
            "scale_format in",
        ),
        (
            lambda: jt.quantize_blocks(ONES, "int8", scale_format=[32]),
            TileValueError,
            "scale_format in",
        ),
        (
            lambda: jt.quantize_blocks(
                ONES, "int8", scale_format="float32", scale_rounding="ocp"
            ),
            TileValueError,
            "powers of two",
        ),
        (
            lambda: jt.decode_blocks(ONES.astype(jnp.int8), jnp.ones((4, 3))),
            TileShapeError,
            r"divide \(4, 8\)",
        ),
        (
            lambda: jt.decode_blocks(ONES.astype(jnp.int8), jnp.ones(4)),
            TileShapeError,
            r"got \(4,\)",
        ),
        (
            lambda: jt.decode_blocks(
                ONES.astype(jnp.int8), jnp.ones((4, 1)), dtype=jnp.int32
            ),
            TileTypeError,
            "products with scales; got int32",
        ),
        (
            lambda: jt.decode_blocks(
                ONES.astype(jnp.int8), jnp.ones((4, 1)), dtype="float8_e5m2"
            ),
            TileTypeError,
            "products with scales; got float8_e5m2",
        ),
        (
            lambda: jt.decode_blocks(ONES, jnp.ones((4, 1))),
            TileTypeError,
            "got float32",
        ),
    ],
)
def test_refusals_say_what_and_the_way_out(call, error, sentence):
    with pytest.raises(
        error, match=f"(quantize_blocks|decode|decode_blocks): .*{sentence}"
    ):
        call()
