"""What every op takes as an operand, and what none takes, by its sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError

R, C = jt.dims("rows cols")
X = np.arange(6, dtype=np.float32).reshape(2, 3)
ONES = jnp.ones(3)


def _seed(x):
    """Seeds zeros of the seed's kind, and of floats where it has none."""
    kind = getattr(x, "dtype", np.dtype(np.float32))
    number = isinstance(kind, np.dtype) and kind.kind in "iuf"
    native = kind.newbyteorder("=") if number else np.float32
    dtype = jax.dtypes.canonicalize_dtype(native)
    return jt.reduce(jnp.zeros((2, 3), dtype), 0, jt.add, init=x)


def _number(x):
    """A one that leaves the accumulator's format to x."""
    return np.ones((), np.int8)


OPS = {
    "reduce": lambda x: jt.reduce(x, 0, jt.add),
    "scan": lambda x: jt.scan(x, 0, jt.add),
    "linear_recurrence": lambda x: jt.linear_recurrence(x, x, 0),
    "map": lambda x: jt.map(lambda v: v, x),
    "exp": jt.exp,
    "gelu": jt.gelu,
    "ite": lambda x: jt.ite(True, x, x),
    "tile": lambda x: jt.tile(x, C).array,
    "gather": lambda x: jt.gather(x, jnp.arange(3), 0),
    "scatter": lambda x: jt.scatter(x, jnp.arange(3), 0, 3, unique=True),
    "shift": lambda x: jt.shift(x, 0, 0),
    "sort": lambda x: jt.sort(x, 0),
    "topk": lambda x: jt.topk(x, 0, 1).values,
    "payload": lambda x: jt.sort(ONES, 0, x)[1],
    "maximum": lambda x: jt.maximum(x, x),
    "init": _seed,
    "mma": lambda x: jt.mma(x, _number(x), spec="m,->m"),
    "matmul": lambda x: jt.matmul(x, x),
    "einsum": lambda x: jt.einsum("i->", x),
}
EXACT = {
    "cast": lambda x: jt.cast(x, jnp.float32),
    "bitcast": lambda x: jt.bitcast(x, jnp.uint32),
    "quantize": lambda x: jt.quantize(x, "int8"),
}
CODES = {
    "decode": jt.decode,
    "quantize_blocks": lambda x: jt.quantize_blocks(x, "int8"),
    "decode_blocks": lambda x: jt.decode_blocks(x, jnp.ones(1)),
    "pack": jt.pack,
    "unpack": lambda x: jt.unpack(x, "int4"),
}


def _each(ops):
    return pytest.mark.parametrize("op", ops.values(), ids=ops)


@_each(OPS)
@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_64_bits_never_overflow_on_the_way_in(op, dtype):
    narrow = dtype.replace("64", "32")
    sentence = (
        "expected values of at most 32 bits while jax_enable_x64 is off; got an array of "
        rf'{dtype}.*Narrow it by jaxtile.cast\(x, "{narrow}"\), or set .*jax_enable_x64'
    )
    with jax.enable_x64(True):
        wide = jnp.ones(3, dtype)
    large = np.array([1, 1, 1e300 if dtype == "float64" else 2**40]).astype(dtype)
    for x in (large, wide):
        with pytest.raises(TileTypeError, match=sentence):
            op(x)
    op(np.ones(3, dtype))
    op(jt.cast(np.ones(3, dtype), narrow))


@_each(OPS)
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bits_are_kept_where_they_are_on(op, dtype, x64):
    x = np.full(3, 2**40 + 1, dtype)
    out = np.asarray(op(x))
    assert out.dtype.itemsize == 8
    adding = "reduce linear_recurrence matmul einsum".split()
    if op not in [OPS[name] for name in ("exp", "gelu", *adding)]:
        assert out.ravel()[0] == 2**40 + 1


def test_a_cast_takes_64_bits_exactly_from_jax_too():
    with jax.enable_x64(True):
        wide = jnp.asarray([1 + 2.0**-24 + 2.0**-40, 1.0])
        whole = jnp.asarray([2**24 + 2**16 + 1])
    np.testing.assert_array_equal(jt.cast(wide, jnp.float32), [1 + 2.0**-23, 1])
    assert float(jt.cast(whole, jnp.bfloat16)[0]) == 2**24 + 2**17
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(TileTypeError, match="cast: .*at most 64 bits; got"):
            jt.cast(number, jnp.float32)


def test_scalars_take_jaxs_precision_but_do_not_overflow():
    t = jt.tile(X, (R, C))
    root = np.sqrt(2.0)
    np.testing.assert_array_equal((t * root).array, X * np.float32(root))
    assert int(jt.reduce(jnp.arange(3), 0, jt.add, init=np.int64(4))) == 7
    assert int(jt.abs(-(2**31) + 1)) == 2**31 - 1
    for value in (2**31, -(2**31) - 1, np.int64(2**40), np.uint64(2**32)):
        for call in (
            lambda v=value: jt.abs(v),
            lambda v=value: jt.exp(v),
            lambda v=value: jt.ite(True, 1, v),
            lambda v=value: jt.map(lambda a, b: a * b, ONES, v),
            lambda v=value: t + v,
            lambda v=value: jt.reduce(X, 0, jt.add, init=v),
        ):
            with pytest.raises(
                TileTypeError, match=f"the integer {value}. Write it as a f"
            ):
                call()
    for value in (1e300, np.float64(-1e300), -3.5e38):
        for call in (
            lambda v=value: jt.exp(v),
            lambda v=value: t + v,
            lambda v=value: jt.scan(X, 0, jt.add, init=v),
        ):
            with pytest.raises(
                TileTypeError, match="which float32 does not represent.*jaxtile.cast"
            ):
                call()
    for value in (np.inf, -np.inf, 3.4e38):
        assert jt.maximum(value, -np.inf) == np.float32(value)
    with jax.enable_x64(True):
        assert int(jt.abs(-(2**40))) == 2**40


@_each(OPS | EXACT | CODES)
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.ma.masked_array(np.ones(3, np.float32), [0, 1, 0]), "where=~x.mask"),
        (jax.random.split(jax.random.key(0), 3), "one of float16.*got dtype key<fry>"),
        (jnp.ones(3, jnp.complex64), "one of float16, .*got dtype complex64"),
        (np.array(["a", "b", "c"]), "one of float16, .*got dtype <U1"),
        (np.array([None] * 3), "one of float16, .*got dtype object"),
    ],
    ids=["masked", "key", "complex", "string", "object"],
)
def test_arrays_of_no_format(op, value, sentence):
    with pytest.raises(TileTypeError, match=sentence):
        op(value)


@_each(OPS | EXACT | CODES)
@pytest.mark.parametrize("value", ["a", b"a", 1j, object(), range(3)])
def test_what_is_no_array(op, value):
    with pytest.raises(
        TileTypeError, match=f"expected a.*; got {type(value).__name__}"
    ):
        op(value)


@_each({"reduce": OPS["reduce"], "exp": jt.exp, "map": OPS["map"]})
def test_a_ref_has_to_be_read(op):
    def kernel(x_ref, o_ref):
        o_ref[...] = op(x_ref)

    call = pl.pallas_call(kernel, out_shape=ONES, interpret=True)
    with pytest.raises(TileTypeError, match=r"got Ref.*float32\[3\].*Read it first"):
        call(ONES)


class _Like:
    """What carries an array, as a pandas.Series or a module's parameter does."""

    def __init__(self, method, value):
        setattr(type(self), method, lambda self, dtype=None, copy=None: value)


@pytest.mark.parametrize("method", ["__array__", "__jax_array__"])
def test_array_likes_count_as_their_array(method):
    kind = type("Like", (_Like,), {})
    value = np.float32([1, 2]) if method == "__array__" else jnp.float32([1, 2])
    assert float(jt.reduce(kind(method, value), 0, jt.add)) == 3
    np.testing.assert_array_equal(jt.square(kind(method, value)), [1, 4])
    if method == "__array__":
        with pytest.raises(TileTypeError, match="an array of float64"):
            jt.square(kind(method, np.full(2, 1e300)))


@pytest.mark.parametrize("op", OPS)
def test_bytes_in_any_order(op):
    # jax itself takes native arrays alone.
    x = np.float32([1, 2, 3])
    swapped = OPS[op](x.astype(x.dtype.newbyteorder()))
    jax.tree.map(np.testing.assert_array_equal, swapped, OPS[op](x))


def test_masks_and_seeds_that_are_tiles_go_by_their_dims():
    x = jt.tile(np.arange(9, dtype=np.float32).reshape(3, 3), (R, C))
    keep, seed = np.array([True, False, True]), np.float32([10, 20, 30])
    got = jt.reduce(x, C, jt.add, where=jt.tile(keep, R), init=jt.tile(seed, R))
    want = np.where(keep[:, None], np.asarray(x.array), 0).sum(1) + seed
    np.testing.assert_array_equal(got.array, want)
    turned = jt.tile(np.asarray(x.array).T > 3, (C, R))
    got = jt.scan(x, C, jt.maximum, where=turned, init=jt.tile(seed, R))
    kept = np.where(np.asarray(x.array) > 3, np.asarray(x.array), seed[:, None])
    want = np.maximum.accumulate(np.maximum(kept, seed[:, None]), 1)
    np.testing.assert_array_equal(got.array, want)
    other = jt.Dim("rows")
    for bad in ({"where": jt.tile(keep, other)}, {"init": jt.tile(seed, C)}):
        with pytest.raises(TileShapeError, match=r"a tile of dims among \(rows"):
            jt.reduce(x, C, jt.add, **bad)
    with pytest.raises(TileShapeError, match="got a tile of"):
        jt.reduce(X, 0, jt.add, where=jt.tile(X > 0, (R, C)))
