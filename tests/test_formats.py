"""The table of formats against ml_dtypes' and NumPy's own descriptions."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import TileTypeError
from jaxtile.formats import FORMATS, Category

_ARITHMETIC = [f for f in FORMATS.values() if f.category is Category.ARITHMETIC]
_STORAGE = [f for f in FORMATS.values() if f.category is Category.STORAGE]
_FLOATS = [f for f in FORMATS.values() if jnp.issubdtype(f.dtype, jnp.floating)]


def _ids(fmt):
    return fmt.name


def test_the_categories():
    assert {f.name for f in _ARITHMETIC} == {
        *"float16 bfloat16 float32 float64 bool".split(),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    }
    names = {f.name for f in _STORAGE}
    assert {
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    } < names
    assert {"float8_e8m0fnu", "int4"} < names
    assert "float8_e4m3" not in FORMATS


@pytest.mark.parametrize("fmt", _FLOATS, ids=_ids)
def test_floats_are_what_ml_dtypes_says(fmt):
    info = ml_dtypes.finfo(fmt.dtype)
    assert fmt.bits == info.bits
    assert fmt.fraction_bits == info.nmant
    assert fmt.exponent_bits == info.bits - info.nmant - (fmt.name != "float8_e8m0fnu")
    assert float(fmt.largest) == float(info.max)


@pytest.mark.parametrize("fmt", [f for f in _FLOATS if f.bits == 8], ids=_ids)
def test_nan_and_infinity_codes(fmt):
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float64)
    assert np.isnan(codes).sum() == fmt.nan_codes
    assert bool(np.isinf(codes).any()) == fmt.has_inf
    assert np.nanmax(codes[np.isfinite(codes)]) == float(fmt.largest)


@pytest.mark.parametrize("fmt", _STORAGE, ids=_ids)
@pytest.mark.parametrize("op", [jt.reduce, jt.scan])
def test_storage_formats_do_no_arithmetic(fmt, op):
    try:
        x = jnp.zeros(3, fmt.dtype)
    except TypeError:
        pytest.skip(f"this jax has no {fmt.name}")
    with pytest.raises(TileTypeError, match=f"got storage format {fmt.name}"):
        op(x, 0, jt.add)


@pytest.mark.parametrize("fmt", _ARITHMETIC, ids=_ids)
def test_accumulators(fmt):
    acc = jt.formats.accumulator(fmt.dtype)
    if fmt.dtype == np.dtype(bool) or fmt.bits >= 32:
        assert acc == fmt.dtype
    else:
        assert acc.itemsize == 4
        assert jnp.issubdtype(acc, jnp.floating) == jnp.issubdtype(
            fmt.dtype, jnp.floating
        )
        assert jnp.issubdtype(acc, jnp.unsignedinteger) == jnp.issubdtype(
            fmt.dtype, jnp.unsignedinteger
        )


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "wrong", ["complex64", "float8_e4m3", "nonsense", object(), KEY]
)
def test_what_has_no_row(wrong):
    with pytest.raises(TileTypeError, match="expected one of float16, "):
        jt.formats.format_of(wrong)


def test_64_bits_need_x64():
    with pytest.raises(TileTypeError, match="jax_enable_x64"):
        jt.formats.require_enabled("float64", "op")
    assert jt.formats.require_enabled("int32", "op") == np.int32
