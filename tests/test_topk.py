"""topk: exactness, ties, a count known only when it runs, derivatives, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import order
from fibres import rng_of
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError

R, C = jt.dims("rows cols")
_topk = jax.jit(
    lambda x, payload, axis, k, largest, nan: jt.topk(
        x, axis, k, payload, largest=largest, nan=nan
    ),
    static_argnums=(2, 3, 4, 5),
)


def _check(x, axis, k, largest=True, nan="last"):
    (values, indices), moved = _topk(x, x, axis, k, largest, nan)
    want = order.argsort(x, axis, descending=largest, nan=nan)
    want = np.take(want, range(k), axis)
    order.same(indices, want)
    order.same(values, np.take_along_axis(x, want, axis))
    order.same(moved, np.take_along_axis(x, want, axis))


@pytest.mark.parametrize("nan", order.NANS)
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", order.FORMATS)
def test_any_bits_of_every_format(dtype, largest, nan):
    x = order.anything(rng_of(dtype, nan), (3, 300), jnp.dtype(dtype))
    if x.dtype.kind in "biu" and nan != "last":
        nan, x = "last", x[:, :200]
    _check(x, 1, 5, largest, nan)


@pytest.mark.parametrize("n", [1, 2, 31, 64, 100, 1000])
def test_every_k(n):
    x = order.anything(rng_of(n), (2, n), "float32")
    for k in sorted({0, 1, 2, 3, 18, 33, 64, n // 2, n - 1, n}):
        if k <= n:
            _check(x, 1, k)


@pytest.mark.parametrize("n", [4096, 5003, 2**16 + 11])
@pytest.mark.parametrize("ties", [False, True])
def test_long_rows_by_blocks(n, ties):
    rng = rng_of(n, ties)
    x = order.anything(rng, (2, n), "float32")
    if ties:
        x = rng.integers(0, 3, (2, n)).astype(np.float32)
    for k in (1, 8, 64):
        _check(x, 1, k, nan="largest")
        _check(x, 1, k, largest=False)


def test_what_is_last_is_found_in_the_odd_end_of_a_row():
    x = np.full((1, 1003), -np.inf, np.float32)
    x[0, -2:] = np.nan
    _check(x, 1, 3, nan="first")
    _check(x, 1, 3)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes(axis):
    shape = [3, 4, 5]
    shape[axis] = 70
    _check(order.anything(rng_of(axis), shape, "float32"), axis, 4)


def test_other_platforms_find_the_same():
    from jaxtile.primitives import _best, _order

    for n, k in ((5003, 8), (300, 5), (64, 64), (70001, 64), (1500, 700)):
        x = order.anything(rng_of(n), (2, n), "float32")
        run = jax.jit(_best.best, static_argnums=(1, 2, 3))
        found = run(x, _order.Order(True, "last"), k, "cuda")
        order.same(found, order.argsort(x, 1, descending=True)[:, :k])


def test_a_count_known_when_it_runs_recompiles_nothing():
    traces = []

    @jax.jit
    def run(x, count):
        traces.append(count)
        return jt.topk(x, 1, 5, x, valid_count=count)

    x = rng_of("count").standard_normal((3, 40)).astype(np.float32)
    (full, places), _ = jt.topk(x, 1, 5, x)
    for count in (-1, 0, 2, 5, 9):
        (values, indices), moved = run(x, count)
        wanted = np.arange(5) < count
        order.same(indices, np.where(wanted, places, -1).astype(np.int32))
        order.same(values, np.where(wanted, full, np.float32(0)))
        order.same(moved, values)
    assert len(traces) == 1
    counts = jnp.array([0, 3, 5])
    got = jt.topk(x, 1, 5, valid_count=counts)
    for row, count in enumerate([0, 3, 5]):
        want = jt.topk(x[row], 0, 5, valid_count=count)
        order.same(got.indices[row], want.indices)
    mapped = jax.vmap(lambda c: jt.topk(x[1], 0, 5, valid_count=c).indices)(counts)
    order.same(mapped[1], got.indices[1])


def test_the_gradient_of_a_counted_topk_stops_at_the_count():
    x = jnp.arange(6.0)
    grad = jax.grad(lambda x: jnp.sum(jt.topk(x, 0, 4, valid_count=2).values ** 2))(x)
    np.testing.assert_array_equal(grad, [0, 0, 0, 0, 8, 10])


@pytest.mark.parametrize("largest", [False, True])
def test_derivatives(largest):
    x = jnp.asarray(rng_of("grad").permutation(40).reshape(4, 10), jnp.float32)

    def loss(x, a):
        best, moved = jt.topk(x, 1, 3, a, largest=largest)
        return jnp.sum(best.values**3) + jnp.sum(moved * best.values)

    p = order.argsort(x, 1, descending=largest)[:, :3]
    chosen = np.zeros((4, 10), np.float32)
    np.put_along_axis(chosen, p, 1, 1)
    a = x / 4
    gx, ga = jax.grad(loss, (0, 1))(x, a)
    np.testing.assert_allclose(gx, chosen * (3 * x**2 + a), rtol=1e-6)
    np.testing.assert_allclose(ga, chosen * x, rtol=1e-6)
    second = jax.hessian(loss)(x, a).reshape(40, 40)
    np.testing.assert_allclose(second, np.diag((chosen * 6 * x).ravel()), rtol=1e-6)
    tangents = jax.jvp(lambda x: jt.topk(x, 1, 3), (x,), (jnp.ones_like(x),))[1]
    assert tangents.indices.dtype == jax.dtypes.float0


def test_tiles_get_a_dim_for_their_places():
    x = rng_of("tile").standard_normal((4, 6)).astype(np.float32)
    t = jt.tile(x, (R, C))
    best = jt.topk(t, C, 2)
    assert best.values.dims == best.indices.dims
    assert best.values.dims[0] == R
    assert best.values.dims[1] not in (R, C)
    places = jt.Dim("places")
    counts = jt.tile(np.array([0, 1, 2, 2]), R)
    best, moved = jt.topk(t, C, 2, t, dim=places, valid_count=counts)
    assert best.values.dims == moved.dims == (R, places)
    np.testing.assert_array_equal((best.indices.array >= 0).sum(1), [0, 1, 2, 2])


def test_compiling_stays_a_matter_of_seconds():
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    compiled = jax.jit(lambda x: jt.topk(x, 0, 128)).lower(x).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    assert memory < 2 * 4 << 20  # a sort of the row alone needs more


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda x: jt.topk(x, 1, 4), TileValueError, r"k in \[0, 3\].*got 4"),
        (lambda x: jt.topk(x, 1, -1), TileValueError, r"k in \[0, 3\].*got -1"),
        (lambda x: jt.topk(x, 1, 1.5), TileTypeError, "valid_count="),
        (lambda x: jt.topk(x, 1, 1, largest=0), TileTypeError, "True or False"),
        (lambda x: jt.topk(x, 1, 1, valid_count=1.5), TileTypeError, "an integer"),
        (
            lambda x: jt.topk(x, 1, 1, valid_count=jnp.ones(3, int)),
            TileShapeError,
            r"valid_count that broadcasts to \(2,\)",
        ),
        (lambda x: jt.topk(x, 1, 1, dim=C), TileTypeError, "with x a tile"),
        (
            lambda x: jt.topk(jt.tile(x, (R, C)), C, 1, dim=C),
            TileShapeError,
            "a Dim that x lacks",
        ),
        (lambda x: jt.topk(x, 1, 1, nan="drop"), TileValueError, "nan in"),
    ],
)
def test_refusals(call, kind, sentence):
    with pytest.raises(kind, match=f"topk: .*{sentence}"):
        call(jnp.ones((2, 3)))


def test_a_traced_k_is_refused():
    with pytest.raises(TileTypeError, match="got a traced value.*valid_count="):
        jax.jit(lambda x, k: jt.topk(x, 0, k))(jnp.ones(3), 2)
