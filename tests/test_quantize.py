"""quantize and decode: codes against ml_dtypes and against exact arithmetic."""

import functools
import math

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import codes
import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = pytest.mark.parametrize("name", codes.ALL)
HALVES = [np.dtype(np.float16), BF16]


def _theirs(x, name):
    with np.errstate(all="ignore"):
        return x.astype(codes.dtype_of(name))


def _quantize(x, name, **named):
    return jax.jit(lambda v: jt.quantize(v, name, **named))(jnp.asarray(x))


def _low(x):
    """Where ml_dtypes does not take the nearest: it rounds up all above 2^-127."""
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float64)
    return (x > 2.0**-127) & (x < 1.5 * 2.0**-127)


@pytest.mark.parametrize("name", codes.FLOATS)
@pytest.mark.parametrize("source", HALVES, ids=str)
def test_every_16_bit_code_has_the_bits_of_ml_dtypes(name, source):
    x = np.arange(65536, dtype=np.uint16).view(source)
    got = codes.raw(_quantize(x, name, overflow=codes.PLAIN[name]))
    want = codes.raw(_theirs(x, name))
    if name == "float8_e8m0fnu":
        off = _low(x)
        assert off.sum() == (31 if source == BF16 else 0)
        np.testing.assert_array_equal(got[off], 0)
        got, want = got[~off], want[~off]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", codes.FLOATS)
def test_float32_around_every_boundary_has_the_bits_of_ml_dtypes(name):
    x = np.concatenate([codes.boundaries(name), codes.samples(20000)])
    got = codes.raw(_quantize(x, name, overflow=codes.PLAIN[name]))
    want = codes.raw(_theirs(x, name))
    if name == "float8_e8m0fnu":
        got, want = got[~_low(x)], want[~_low(x)]
    np.testing.assert_array_equal(got, want)


@FORMATS
@pytest.mark.parametrize("rounding", codes.ROUNDINGS)
def test_every_rounding_and_mode_is_exact(name, rounding):
    near = codes.boundaries(name)
    pick = np.random.default_rng(1).permutation(near.size)[:300]
    x = np.concatenate([near[pick], codes.samples(100)])
    exact = x.astype(np.float64).tolist()
    for overflow in codes.MODES[name]:
        got = _quantize(x, name, rounding=rounding, overflow=overflow)
        codes.check(got, exact, name, rounding, overflow)


_ROUGH = ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn", "int8", "uint4")
SOURCES = [("float64", name) for name in codes.ALL]
SOURCES += [(s, n) for s in ("int64", "uint64", "int32", "uint32") for n in _ROUGH]
SOURCES += [("int8", "int4"), ("uint16", "float8_e4m3fnuz"), ("bool", "float8_e5m2")]


@pytest.mark.parametrize(("source", "name"), SOURCES)
def test_every_source_is_rounded_once(name, source, x64):
    rng = np.random.default_rng(3)
    if source == "float64":
        low = np.array(codes.magnitudes(name)[:-1])
        middle = (low[1:] + low[:-1]) / 2
        x = np.concatenate([np.nextafter(middle, 0), np.nextafter(middle, 1e300)])
        x = rng.choice(np.concatenate([x, -x, [1e300, 5e-324, -0.0, math.nan]]), 300)
    elif source == "bool":
        x = np.array([False, True])
    else:
        info = np.iinfo(source)
        wide = rng.integers(info.min, info.max, 100, source, endpoint=True)
        small = wide >> rng.integers(0, info.bits, 100).astype(source)
        x = np.concatenate([wide, small, np.array([info.min, info.max, 0, 1], source)])
    for rounding in ("nearest_even", "up")[: 1 + (source == "float64")]:
        got = _quantize(x, name, rounding=rounding)
        codes.check(got, x.tolist(), name, rounding)


@FORMATS
def test_stochastic_rounding_is_a_function_of_its_bits(name):
    x = np.concatenate([codes.boundaries(name)[::7], codes.samples(300)])
    bits = np.random.default_rng(2).integers(0, 2**32, x.size, np.uint32)
    run = jax.jit(lambda v, b: jt.quantize(v, name, rounding="stochastic", bits=b))
    got = run(x, bits)
    codes.check(got, x.tolist(), name, "stochastic", random=bits)
    again = jt.quantize(x, name, rounding="stochastic", bits=jnp.asarray(bits))
    np.testing.assert_array_equal(codes.raw(got), codes.raw(again))


def test_stochastic_rounding_is_unbiased():
    x = jnp.full(20000, 1 + 3 / 64)  # 3/8 of the way from 1 to 1.125
    bits = jax.random.bits(jax.random.key(0), x.shape)
    got = jt.quantize(x, "e4m3fn", rounding="stochastic", bits=bits, out_dtype=x.dtype)
    assert set(np.unique(got).tolist()) == {1.0, 1.125}
    assert abs(np.mean(np.asarray(got)) - (1 + 3 / 64)) < 5 * 0.0625 / math.sqrt(20000)


@FORMATS
@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16", "float64", "int32"])
def test_decode_is_exact_or_refused(name, wide, x64):
    every = codes.every_code(name)
    wide = np.dtype(jnp.dtype(wide))
    with np.errstate(all="ignore"):
        back = every.astype(np.float32).astype(wide).astype(np.float64)
    value = every.astype(np.float64)
    exact = np.array_equal(value, back, equal_nan=wide != np.int32)
    if not exact:
        with pytest.raises(TileTypeError, match=f"holds every value of {name}; got"):
            jt.decode(jnp.asarray(every), wide)
        return
    got = np.asarray(jax.jit(lambda v: jt.decode(v, wide))(jnp.asarray(every)))
    assert got.dtype == wide
    np.testing.assert_array_equal(got.astype(np.float64), value)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(value))


@FORMATS
def test_decode_inverts_quantize(name):
    every = codes.every_code(name)
    plain = codes.MODES[name][-1]
    back = jt.quantize(jt.decode(jnp.asarray(every)), name, overflow=plain)
    keep = np.ones(every.size, bool)
    if name == "float8_e5m2":  # the payloads of NaN become one
        keep = ~np.isnan(every.astype(np.float32))
    np.testing.assert_array_equal(codes.raw(back)[keep], codes.raw(every)[keep])


@FORMATS
def test_out_dtype_is_decode_of_quantize(name):
    x = codes.samples(200)
    for overflow in codes.MODES[name]:
        got = _quantize(x, name, overflow=overflow, out_dtype=jnp.float32)
        want = jt.decode(_quantize(x, name, overflow=overflow), jnp.float32)
        np.testing.assert_array_equal(codes.raw(got), codes.raw(want))


def test_every_spelling_of_a_format():
    x = jnp.arange(4.0)
    for spelled in (
        "e4m3fn",
        "float8_e4m3fn",
        jnp.float8_e4m3fn,
        ml_dtypes.float8_e4m3fn,
    ):
        assert jt.quantize(x, spelled).dtype == jnp.float8_e4m3fn
    assert jt.quantize(x, jnp.dtype("int8")).dtype == jnp.int8
    for wrong in ("e4m3", "float8_e4m3", "float32", None, 3, object(), jnp.bfloat16):
        with pytest.raises(
            TileTypeError, match="quantize: expected one of float8_e4m3fn"
        ):
            jt.quantize(x, wrong)


X = jnp.ones((2, 3))
BITS = np.zeros((2, 3), np.uint32)


@pytest.mark.parametrize(
    ("named", "error", "sentence"),
    [
        (dict(rounding="even"), TileValueError, "rounding in .*got 'even'"),
        (
            dict(overflow="inf"),
            TileValueError,
            "overflow in .*float8_e4m3fn has no code",
        ),
        (dict(overflow=None), TileValueError, "overflow in .*got None"),
        (dict(rounding="stochastic"), TileValueError, "without bits=.*jax.random.bits"),
        (dict(bits=BITS), TileValueError, "'nearest_even' with bits="),
        (dict(rounding="stochastic", bits=X), TileTypeError, "uint32; got float32"),
        (dict(rounding="stochastic", bits=3), TileTypeError, "uint32; got int"),
        (dict(rounding="stochastic", bits=BITS[0]), TileShapeError, r"got \(3,\)"),
        (dict(out_dtype=jnp.int32), TileTypeError, "every value of float8_e4m3fn"),
        (dict(out_dtype=jnp.float64), TileTypeError, "jax_enable_x64"),
        (dict(out_dtype=jnp.float8_e5m2), TileTypeError, "storage format float8_e5m2"),
    ],
    ids=str,
)
def test_refusals_say_what_and_the_way_out(named, error, sentence):
    with pytest.raises(error, match=f"quantize: .*{sentence}"):
        jt.quantize(X, "float8_e4m3fn", **named)


@pytest.mark.parametrize("name", ["int8", "int4", "float4_e2m1fn"])
def test_formats_without_nan_and_inf_saturate_alone(name):
    for mode in ("nan", "inf"):
        with pytest.raises(TileValueError, match=rf"\('saturate',\).*{name} has no"):
            jt.quantize(X, name, overflow=mode)


def test_codes_are_not_quantized_again_and_numbers_not_decoded():
    eight = jt.quantize(X, "float8_e4m3fn")
    with pytest.raises(TileTypeError, match="quantize: .*storage.*jaxtile.decode"):
        jt.quantize(eight, "float8_e5m2")
    for dtype in ("float32", "bool", "int16"):
        with pytest.raises(TileTypeError, match=f"decode: .*got {dtype}.*jaxtile.cast"):
            jt.decode(X.astype(dtype))


def test_64_bits_count_exactly_while_they_are_off():
    value = 1.0625 + 2.0**-40
    for x in (value, np.float64(value), np.full(3, value)):
        assert np.all(np.asarray(jt.quantize(x, "e4m3fn"), np.float32) == 1.125)
    assert int(jt.quantize(2**40, "int8")) == 127


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (3, 0, 2)])
def test_every_shape(shape):
    y = jt.quantize(jnp.ones(shape), "float8_e5m2")
    assert (y.shape, y.dtype) == (shape, jnp.float8_e5m2)
    assert jt.decode(y).shape == shape


def test_tiles_keep_their_dims():
    r, c = jt.dims("rows cols")
    x = jt.tile(jnp.arange(6.0).reshape(2, 3), (r, c))
    bits = jt.tile(jnp.zeros((3, 2), jnp.uint32), (c, r))
    y = jt.quantize(x, "float8_e4m3fn", rounding="stochastic", bits=bits)
    assert y.dims == (r, c)
    back = jt.decode(y)
    assert back.dims == (r, c)
    np.testing.assert_array_equal(back.array, x.array)


def test_vmap_over_either_operand():
    x = jnp.asarray(codes.samples(20)).reshape(4, 12)
    bits = jax.random.bits(jax.random.key(1), x.shape)
    f = functools.partial(jt.quantize, format="e5m2", rounding="stochastic")
    want = codes.raw(f(x, bits=bits))
    got = jax.vmap(lambda v, b: f(v, bits=b), (1, 1), 1)(x, bits)
    np.testing.assert_array_equal(codes.raw(got), want)
    got = jax.vmap(lambda b: f(x[0], bits=b))(bits)
    np.testing.assert_array_equal(codes.raw(got)[0], want[0])


def test_export_and_back():
    x = jnp.asarray(codes.samples(50))
    fn = jax.jit(lambda v: jt.decode(jt.quantize(v, "e4m3fn", overflow="nan")))
    exported = jax.export.export(fn, platforms=["cpu", "cuda", "tpu"])(x)
    blob = exported.serialize()
    got = jax.export.deserialize(blob).call(x)
    np.testing.assert_array_equal(codes.raw(got), codes.raw(fn(x)))
