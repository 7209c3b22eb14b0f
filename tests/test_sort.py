"""sort, argsort: bits, ties, NaN, shapes, payloads, derivatives and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtile as jt
import order
from fibres import rng_of
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError

LENGTHS = (0, 1, 2, 3, 7, 64, 129)
R, C = jt.dims("rows cols")
_sorted = jax.jit(
    lambda x, payload, axis, descending, nan: jt.sort(
        x, axis, payload, descending=descending, nan=nan, return_indices=True
    ),
    static_argnums=(2, 3, 4),
)


def _check(x, axis, descending, nan):
    payload = {"place": np.arange(x.size, dtype=np.int32).reshape(x.shape), "x": x}
    (values, indices), moved = _sorted(x, payload, axis, descending, nan)
    want = order.argsort(x, axis, descending=descending, nan=nan)
    order.same(indices, want)
    for got, source in ((values, x), (moved["x"], x), (moved["place"], None)):
        source = payload["place"] if source is None else source
        order.same(got, np.take_along_axis(source, want, axis))


@pytest.mark.parametrize("nan", order.NANS)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", order.FORMATS)
def test_any_bits_of_every_format(dtype, descending, nan):
    x = order.anything(rng_of(dtype, nan), (5, 67), jnp.dtype(dtype))
    if x.dtype.kind in "biu" and nan != "last":
        nan, x = "last", x[:, :9]
    _check(x, 1, descending, nan)
    order.same(
        jt.sort(x, 1, descending=descending, nan=nan),
        np.take_along_axis(x, order.argsort(x, 1, descending=descending, nan=nan), 1),
    )


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_alone_and_one_that_is_not(dtype, descending, x64):
    x = order.anything(rng_of(dtype), (4, 70), dtype)
    x = np.where(np.isnan(x) | (x == 0), np.ones_like(x), x)
    x[1, 1] = 0
    run = jax.jit(lambda x: jt.sort(x, 1, descending=descending))
    for odd in (2.0, np.nan, -0.0):
        x[2, 3] = odd
        want = order.argsort(x, 1, descending=descending)
        order.same(run(x), np.take_along_axis(x, want, 1))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
@pytest.mark.parametrize("descending", [False, True])
def test_64_bits(dtype, descending, x64):
    x = order.anything(rng_of(dtype), (3, 50), dtype)
    _check(x, 1, descending, "last")
    got = jt.topk(x, 1, 7, largest=descending)
    want = order.argsort(x, 1, descending=descending)[:, :7]
    order.same(got.indices, want)
    order.same(got.values, np.take_along_axis(x, want, 1))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_lengths_and_axes(n, axis):
    shape = [2, 3, 4]
    shape[axis] = n
    _check(order.anything(rng_of(n, axis), shape, "float32"), axis, False, "last")


@pytest.mark.parametrize("n", [2**16, 2**16 + 1])
def test_long_rows_of_narrow_keys(n):
    x = order.anything(rng_of(n), (1, n), jnp.bfloat16)
    order.same(jt.argsort(x, 1), order.argsort(x, 1))


@given(st.binary(min_size=4, max_size=256), st.booleans(), st.sampled_from(order.NANS))
def test_random_bit_patterns(data, descending, nan):
    x = np.frombuffer(data[: len(data) // 4 * 4], np.float32)
    padded = np.resize(x, (2, 64))
    _check(padded, 1, descending, nan)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "bool"])
def test_payloads_of_every_format_move(dtype):
    x = rng_of(dtype).standard_normal((3, 8)).astype(np.float32)
    load = jnp.asarray(order.anything(rng_of("p"), (3, 8), "int8") & 7).astype(dtype)
    _, moved = jt.sort(x, 1, load)
    want = np.take_along_axis(np.asarray(load), order.argsort(x, 1), 1)
    assert moved.dtype == load.dtype
    np.testing.assert_array_equal(np.asarray(moved).view(np.uint8), want.view(np.uint8))


def test_an_empty_payload_is_none():
    assert jt.sort(jnp.ones(3), 0, ()).shape == (3,)
    assert isinstance(jt.sort(jnp.ones(3), 0, return_indices=True), jt.Ranked)


def test_tiles_keep_their_dims():
    x = rng_of("tile").standard_normal((4, 6)).astype(np.float32)
    t = jt.tile(x, (R, C))
    load = jt.tile(x.T * 2, (C, R))
    (values, indices), moved = jt.sort(t, R, {"a": load}, return_indices=True)
    assert values.dims == indices.dims == moved["a"].dims == (R, C)
    want = order.argsort(x, 0)
    order.same(indices.array, want)
    order.same(moved["a"].array, np.take_along_axis(x * 2, want, 0))
    order.same(jt.argsort(t, C).array, order.argsort(x, 1))


def _spread(shape):
    return jnp.asarray(rng_of(shape).permutation(np.prod(shape)).reshape(shape), float)


@pytest.mark.parametrize("descending", [False, True])
def test_derivatives_go_to_the_source(descending):
    x, w = _spread((3, 7)), _spread((3, 7)) / 7
    p = order.argsort(x, 1, descending=descending)

    def loss(x, payload):
        y, moved = jt.sort(x, 1, payload, descending=descending)
        return jnp.sum(w * y**2) + jnp.sum(w * moved["a"] ** 3)

    load = {"a": _spread((3, 7)) / 3, "n": jnp.arange(21).reshape(3, 7)}
    gx, ga = jax.grad(lambda x, a: loss(x, {**load, "a": a}), argnums=(0, 1))(
        x, load["a"]
    )
    back = np.argsort(p, 1)
    moved_w = np.take_along_axis(np.asarray(w), back, 1)
    np.testing.assert_allclose(gx, 2 * moved_w * x, rtol=1e-6)
    np.testing.assert_allclose(ga, 3 * moved_w * load["a"] ** 2, rtol=1e-6)
    hessian = jax.hessian(lambda x: loss(x, load))(x).reshape(21, 21)
    np.testing.assert_allclose(hessian, np.diag(2 * moved_w.ravel()), rtol=1e-6)


def test_tangents_of_indices_and_integers_are_float0():
    x = jnp.arange(4.0)[::-1]
    call = lambda x: jt.sort(x, 0, jnp.arange(4), return_indices=True)  # noqa: E731
    (values, indices), moved = jax.jvp(call, (x,), (jnp.ones(4),))[1]
    assert indices.dtype == moved.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(values, np.ones(4))
    n = jnp.arange(4)
    zero = np.zeros(4, jax.dtypes.float0)
    assert jax.jvp(lambda n: jt.sort(n, 0), (n,), (zero,))[1].dtype == zero.dtype


def test_ties_give_the_tangent_to_the_lower_index_first():
    x = jnp.array([1.0, 0.0, 1.0])
    first = jax.grad(lambda x: jt.sort(x, 0, descending=True)[0])(x)
    np.testing.assert_array_equal(first, [1, 0, 0])


def test_one_sort_is_one_primitive():
    jaxpr = jax.make_jaxpr(lambda x: jt.argsort(x, 0))(jnp.ones(3)).jaxpr
    assert [e.primitive.name for e in jaxpr.eqns] == ["tile_sort"]


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda x: jt.sort(x, 2), TileShapeError, r"axis in \[-2, 2\)"),
        (lambda x: jt.sort(x, None), TileTypeError, "an integer axis or a Dim"),
        (lambda x: jt.sort(x, C), TileShapeError, "one of the tile's dims"),
        (
            lambda x: jt.sort(x, 0, nan="end"),
            TileValueError,
            "nan in .*got 'end'.*both",
        ),
        (lambda x: jt.sort(x, 0, nan=None), TileValueError, "nan in .*got None"),
        (lambda x: jt.sort(x, 0, ties="any"), TileValueError, "ties in .*source index"),
        (lambda x: jt.sort(x, 0, descending=1), TileTypeError, "True or False"),
        (
            lambda x: jt.sort(x, 0, x[0]),
            TileShapeError,
            r"payload.*\(2, 3\); got \(3,\)",
        ),
        (lambda x: jt.sort(x, 0, jt.tile(x, (R, C))), TileShapeError, "an array; got"),
        (
            lambda x: jt.sort(x.astype("float8_e5m2"), 0),
            TileTypeError,
            "storage format",
        ),
        (lambda x: jt.sort((x, x), 0), TileTypeError, "got tuple"),
        (
            lambda x: jt.sort(x, 0, implementation="cub"),
            TileValueError,
            "implementation",
        ),
    ],
)
def test_refusals(call, kind, sentence):
    with pytest.raises(kind, match=f"sort: .*{sentence}"):
        call(jnp.ones((2, 3)))


@pytest.mark.parametrize("name", ["triton", "tpu"])
def test_a_backend_without_a_kernel_of_whole_arrays_says_so(name):
    with pytest.raises(jt.errors.UnsupportedOnBackend, match="no whole-array kernel"):
        jt.sort(jnp.ones(3), 0, implementation=name)
