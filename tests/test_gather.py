"""gather and take: bits along an axis by an index."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError

FORMATS = sorted(set(jt.formats.FORMATS) - {"float64", "int64", "uint64"})
INDICES = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]


def _codes(name, count, rng):
    """Random bits of a format, every NaN payload among them."""
    fmt = jt.formats.FORMATS[name]
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if fmt.bits == 4:
        codes = rng.integers(0, 16, count).astype(np.uint8)
        return codes.view(np.int8).astype(np.float32).astype(fmt.dtype)
    word = np.dtype(f"uint{fmt.bits}")
    codes = rng.integers(0, np.iinfo(word).max, count, word, endpoint=True)
    return codes.view(fmt.dtype)


def _bytes(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_every_bit_of_every_format_survives(name, wrap):
    rng = np.random.default_rng(1)
    x = _codes(name, 300, rng)
    index = rng.integers(-50, 350, 500)
    fill = _codes(name, 1, rng)
    got = wrap(lambda x, i, f: jt.gather(x, i, 0, f))(x, index, fill[0])
    want = b"".join(
        _bytes(x[i : i + 1] if 0 <= i < 300 else fill).tobytes() for i in index
    )
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(_bytes(got), np.frombuffer(want, np.uint8))


@pytest.mark.parametrize("name", ["float64", "int64", "uint64"])
def test_every_bit_of_64(name, x64):
    x = _codes(name, 99, np.random.default_rng(2))
    index = np.array([98, 3, -1, 99, 2**40, -(2**40)])
    got = np.asarray(jt.gather(x, index, 0))
    zero = np.zeros(1, x.dtype)
    want = np.concatenate([x[[98, 3]], zero, zero, zero, zero])
    np.testing.assert_array_equal(_bytes(got), _bytes(want))


@pytest.mark.parametrize("dtype", INDICES)
@pytest.mark.parametrize("n", [0, 1, 5, 127, 128, 255, 300])
def test_an_index_of_any_width_is_outside_where_its_value_is(dtype, n):
    info = np.iinfo(dtype)
    values = {info.min, -1, 0, 1, n - 1, n, n + 1, 127, 128, 255, 256, info.max}
    index = np.array(sorted(v for v in values if info.min <= v <= info.max), dtype)
    x = np.arange(1000, 1000 + n, dtype=np.float32)
    want = [x[int(i)] if 0 <= int(i) < n else -7 for i in index]
    np.testing.assert_array_equal(jt.gather(x, index, 0, -7.0), np.float32(want))


def _naive(x, index, axis, batch, fill):
    """One element after the other."""
    head = sum(d < axis for d in batch)
    own = index.shape[head : index.ndim - len(batch) + head]
    shape = (*x.shape[:axis], *own, *x.shape[axis + 1 :])
    out = np.empty(shape, x.dtype)
    for place in np.ndindex(*shape):
        rest = place[axis + len(own) :]
        source = [*place[:axis], None, *rest]
        at = [
            *(place[d] for d in batch if d < axis),
            *place[axis : axis + len(own)],
            *(rest[d - axis - 1] for d in batch if d > axis),
        ]
        i = int(index[tuple(at)])
        source[axis] = i
        out[place] = x[tuple(source)] if 0 <= i < x.shape[axis] else fill
    return out


@pytest.mark.parametrize(
    ("shape", "axis", "batch", "own"),
    [
        ((4,), 0, (), ()),
        ((4,), 0, (), (3, 2)),
        ((3, 4), 1, (0,), (5,)),
        ((3, 4), 0, (1,), (5,)),
        ((3, 4, 2), 1, (0, 2), (3,)),
        ((3, 4, 2), 1, (2,), (2, 2)),
        ((3, 4, 2), 1, (0,), ()),
        ((3, 4, 2), -1, (0, 1), (1,)),
        ((3, 0, 2), 1, (0,), (2,)),
        ((3, 4), 1, (), (0,)),
    ],
)
def test_axes_that_x_and_index_share(shape, axis, batch, own):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape).astype(np.float32)
    place = axis % len(shape)
    first = [shape[d] for d in batch if d < place]
    last = [shape[d] for d in batch if d > place]
    index = rng.integers(-1, shape[axis] + 1, (*first, *own, *last))
    got = jt.gather(x, index, axis, 9.0, batch=batch)
    np.testing.assert_array_equal(got, _naive(x, index, place, batch, np.float32(9)))
    if len(batch) == len(shape) - 1:
        np.testing.assert_array_equal(jt.gather(x, index, axis, 9.0, batch="all"), got)


def test_take_is_a_lookup_of_whole_slices():
    table = np.random.default_rng(4).standard_normal((7, 3)).astype(np.float32)
    ids = np.array([[0, 6], [7, -1]])
    got = jt.take(table, ids, 0, np.float32(2))
    want = np.stack([table[0], table[6], np.full(3, 2), np.full(3, 2)]).reshape(2, 2, 3)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jt.take(table, 1, 1), table[:, 1])


def test_tiles_share_dims_by_identity():
    r, c, k = jt.dims("r c k")
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    t = jt.tile(x, (r, c))
    got = jt.gather(t, jt.tile(np.array([2, 0]), k), r)
    assert got.dims == (k, c)
    np.testing.assert_array_equal(got.array, x[[2, 0]])
    index = np.array([[0, 1, 3], [3, 2, 4]])
    got = jt.gather(t, jt.tile(index, (k, r)), c, -1.0)
    assert got.dims == (r, k)
    want = [[x[a, i] if i < 4 else -1 for i in index[:, a]] for a in range(3)]
    np.testing.assert_array_equal(got.array, want)
    # The axis itself may be a dim of the index: a shift by one.
    places = jt.tile(np.arange(4) - 1, c)
    got = jt.gather(t, places, c, 0.0)
    assert got.dims == (r, c)
    np.testing.assert_array_equal(got.array, np.pad(x, ((0, 0), (1, 0)))[:, :4])
    got = jt.gather(t, 1, r)
    assert got.dims == (c,)
    np.testing.assert_array_equal(got.array, x[1])
    fill = jt.tile(np.float32([5, 6, 7]), r)
    got = jt.gather(t, jt.tile(np.array([9]), k), c, fill)
    np.testing.assert_array_equal(got.array, np.float32([[5], [6], [7]]))
    with pytest.raises(TileShapeError, match=r"take: expected.*\(r\) in both"):
        jt.take(t, jt.tile(np.array([0, 1, 2]), r), c)


def test_a_fill_for_each_place():
    x = np.float32([1, 2, 3])
    fill = np.float32([[10, 20], [30, 40]])
    got = jt.gather(x, np.array([[0, 9], [-1, 2]]), 0, fill)
    np.testing.assert_array_equal(got, [[1, 20], [30, 3]])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_cotangents_of_narrow_tables_add_up_in_float32(name):
    """300 ones: 256 in a bfloat16 accumulator."""
    x = jnp.ones(3, name)
    index = jnp.zeros(300, jnp.int32)
    (got,) = jax.vjp(lambda x: jt.gather(x, index, 0), x)[1](jnp.ones(300, name))
    assert got.dtype == name
    np.testing.assert_array_equal(got.astype(np.float32), [300, 0, 0])


def test_what_was_not_picked_gets_no_cotangent_of_nan():
    x = jnp.array([1.0, jnp.nan, jnp.inf])
    g = jax.grad(lambda x: jnp.sum(jt.gather(x, jnp.array([0, 7]), 0) ** 2))(x)
    np.testing.assert_array_equal(g, [2, 0, 0])


X = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: jt.gather(X, np.array([True]), 0), "an index of integers; got bool"),
        (lambda: jt.gather(X, np.float32([1]), 0), "an index of integers; got float32"),
        (lambda: jt.gather(X, 1.5, 0), "an index of integers; got float32"),
        (
            lambda: jt.gather(X, [0, 1], 0),
            "expected arrays, tiles or numbers; got list",
        ),
        (lambda: jt.gather(X, np.zeros(3, int), 1, fill="x"), "got str"),
        (
            lambda: jt.gather(X.astype(np.int8), 0, 0, fill=200),
            "a value that int8 holds, to stand for what is outside; got 200",
        ),
        (
            lambda: jt.gather(X, 0, 0, fill=np.float16([1])),
            "float32 holds.*got float16",
        ),
        (lambda: jt.gather(X, 0, 0, fill=X), "broadcasts to \\(4,\\)"),
        (lambda: jt.gather(X, 0, 2), "an axis in \\[-2, 2\\); got 2"),
        (
            lambda: jt.gather(X, np.zeros(3, int), 1, batch=(1,)),
            "batch axes other than",
        ),
        (lambda: jt.gather(X, np.zeros(2, int), 1, batch=(0,)), "Size 1 does not"),
        (lambda: jt.gather(X, 0, 1, batch=(0,)), "an index with the axes of batch="),
        (lambda: jt.gather(X, 0, 1, batch="most"), 'batch axes, or "all"'),
        (lambda: jt.gather(X, jt.tile(np.zeros(3, int), jt.Dim()), 0), "both arrays"),
        (lambda: jt.gather(X, 0, 0, fill=1e300), "float32 holds.*got 1e\\+300"),
        (lambda: jt.gather(X, 0, 0, fill=np.float64(-1e39)), "float32 holds"),
        (lambda: jt.gather(X.astype("float8_e4m3fn"), 0, 0, fill=0.1), "e4m3fn holds"),
        (lambda: jt.gather(X.astype("float8_e4m3fn"), 0, 0, fill=500), "e4m3fn holds"),
        (lambda: jt.gather(X.astype("float8_e8m0fnu"), 0, 0, fill=0), "e8m0fnu holds"),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises((TileTypeError, TileShapeError), match=sentence):
        call()


def test_a_dim_has_one_size():
    r, c = jt.dims("r c")
    t = jt.tile(X, (r, c))
    with pytest.raises(TileShapeError, match="one size for dim c; got 4 and 2"):
        jt.gather(t, jt.tile(np.array([0, 1]), c), c)


@pytest.mark.parametrize("fill", [1.5, -0.0, np.inf, np.nan, 57344])
def test_a_fill_that_a_storage_format_holds(fill):
    x = np.ones(2, "float8_e5m2")
    got = jt.gather(x, -1, 0, fill=fill)
    np.testing.assert_array_equal(_bytes(got), _bytes(np.array(fill).astype(x.dtype)))


def test_refusals_of_tiles():
    r, c, k = jt.dims("r c k")
    t, index = jt.tile(X, (r, c)), jt.tile(np.array([0, 1]), k)
    for call, sentence in (
        (lambda: jt.gather(t, index, r, batch="all"), "batch= with arrays only"),
        (lambda: jt.gather(t, index, r, batch=3), "batch=3 with a tile"),
        (lambda: jt.gather(t, [[1], [1, 2]], r), "arrays, tiles or numbers; got list"),
        (lambda: jt.take(t, index, r, fill=t), r"a tile of dims among \(k, c\)"),
    ):
        with pytest.raises((TileTypeError, TileShapeError), match=sentence):
            call()


def test_storage_formats_keep_their_type_in_a_tile():
    r = jt.Dim("r")
    x = np.arange(4).astype(ml_dtypes.float8_e4m3fn)
    got = jt.gather(jt.tile(x, r), jt.tile(np.array([3, 9, 0, 1]), r), r)
    np.testing.assert_array_equal(_bytes(got.array), _bytes(x[[3, 0, 0, 1]]))


@pytest.mark.parametrize("index", [2**40, np.array([2**40]), np.int64(-(2**33))])
def test_an_index_beyond_32_bits(index):
    x = jnp.arange(4.0)
    sentence = (
        "at most 32 bits.*Point into the axis, whose places are fewer, or set jax"
    )
    for call in (jt.gather, jt.take):
        with pytest.raises(TileTypeError, match=sentence):
            call(x, index, 0)
    with pytest.raises(TileTypeError, match=sentence):
        jt.scatter(jnp.ones(1), np.reshape(index, 1), 0, 4, jt.add)
