"""The kernel language in plain jax, against NumPy on ragged shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from folds import same_derivatives
from jaxtile.errors import (
    ContractError,
    TileShapeError,
    TileTypeError,
    TileValueError,
)
from oracle import same_bits

RNG = np.random.default_rng(11)
X = jnp.asarray(RNG.standard_normal((13, 21)), jnp.float32)
B = jnp.asarray(RNG.standard_normal((21, 10)), jnp.float32)


@jt.kernel(out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype))
def gemm(nest, a, b, c, *, bm=4, bn=4, bk=4):
    m, n = nest.parallel(a.shape[0], bm), nest.parallel(b.shape[1], bn)

    @nest.pipeline(a.shape[1], bk, init=nest.zeros((m, n), jnp.float32))
    def acc(k, acc):
        return jt.mma(a.tile(m, k).load(), b.tile(k, n).load(), acc)

    c.tile(m, n).store(jt.cast(acc, c.dtype))


@pytest.mark.parametrize("blocks", [(4, 4, 4), (13, 10, 21), (5, 3, 8), (1, 1, 1)])
def test_a_matrix_product_of_ragged_blocks(blocks):
    bm, bn, bk = blocks
    got = gemm(X, B, bm=bm, bn=bn, bk=bk)
    want = np.asarray(X, np.float64) @ np.asarray(B, np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_what_lies_outside_never_counts():
    """NaN made of the padding (0 / 0) reaches neither sums, extrema nor products."""

    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct((3, x.shape[0]), x.dtype))
    def run(nest, x, y):
        r = nest.parallel(x.shape[0], 4)
        zero = nest.zeros(r, jnp.float32)

        @nest.serial(x.shape[1], 8, init=(zero, zero + jnp.inf, zero))
        def state(k, s):
            t = x.tile(r, k).load()
            t = t / t * t
            square = jt.mma(t, t, nest.zeros(r, jnp.float32))
            low = jt.minimum(s[1], jt.reduce(t, k.dim, jt.minimum))
            return s[0] + jt.reduce(t, k.dim, jt.add), low, s[2] + square

        for i in range(3):
            y.tile(i, r).store(state[i])

    x = np.asarray(X) + np.float32(10)
    got = run(jnp.asarray(x))
    np.testing.assert_allclose(got[0], x.sum(1), rtol=1e-5)
    same_bits(got[1], (x / x * x).min(1))
    np.testing.assert_allclose(got[2], (x * x).sum(1), rtol=1e-5)


def test_a_state_that_streams_through_blocks():
    @jt.kernel(out=lambda x: (x, jax.ShapeDtypeStruct((x.shape[0],), x.dtype)))
    def cumsum(nest, x, y, total, *, block):
        r = nest.parallel(x.shape[0], 5)

        @nest.serial(x.shape[1], block, init=nest.zeros(r, jnp.float32))
        def last(k, s):
            run = jt.scan(
                x.tile(r, k).load(),
                k.dim,
                jt.add,
                init=s,
                return_final=True,
                policy="fold_left",
            )
            y.tile(r, k).store(run[0])
            return run[1]

        total.tile(r).store(last)

    want = np.zeros((13, 21), np.float32)
    acc = np.zeros(13, np.float32)
    for i in range(21):
        acc = acc + np.asarray(X)[:, i]
        want[:, i] = acc
    for block in (4, 21, 1):
        prefixes, total = cumsum(X, block=block)
        same_bits(prefixes, want)
        same_bits(total, acc)


@pytest.mark.parametrize("policy", jt.policy.ALL, ids=repr)
def test_a_fold_over_blocks(policy):
    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct((x.shape[0],), x.dtype))
    def run(nest, x, y):
        r = nest.parallel(x.shape[0], 4)

        @nest.reduce(x.shape[1], 8, init=nest.zeros(r, jnp.float32), policy=policy)
        def total(k, s):
            return s + jt.reduce(x.tile(r, k).load(), k.dim, jt.add)

        y.tile(r).store(total)

    np.testing.assert_allclose(run(X), np.asarray(X).sum(1), rtol=1e-4, atol=1e-5)


def test_points_windows_and_coordinates():
    """A transposed band: y[j, i] = x[i, i + j - 1], zero outside."""
    i_dim = jt.Dim("band")

    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct((3, x.shape[0]), x.dtype))
    def band(nest, x, y, *, low=0.0):
        i = nest.parallel(x.shape[0])
        window = jt.Window(i.index - 1, i_dim, 3)
        whole = jt.Dim("whole")
        y.tile(whole, i).store(x.tile(i, window).load().array)

    x = np.asarray(X)
    want = np.zeros((3, 13), np.float32)
    for i in range(13):
        for j in range(3):
            want[j, i] = x[i, i + j - 1] if 0 <= i + j - 1 < 21 else 0
    same_bits(band(X), want)

    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32))
    def places(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), nest.parallel(x.shape[1], 8)
        at = nest.coordinates(r) * 100 + nest.full((r, c), 0, jnp.int32)
        y.tile(r, c).store(at + nest.coordinates(c))

    want = np.arange(13)[:, None] * 100 + np.arange(21)
    np.testing.assert_array_equal(places(X), want)


def test_bounds_give_an_identity():
    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct((3,), x.dtype))
    def tops(nest, x, y, *, bounds):
        k = nest.parallel(x.shape[0], 8)
        t = x.tile(k, bounds=bounds).load().array  # no dims: nothing is skipped
        y.tile(nest.parallel(3)).store(jt.reduce(t, 0, jt.maximum))

    with pytest.raises(
        TileShapeError, match="the same for every instance of .*: a race"
    ):
        tops(-jnp.ones(21), bounds="zero")

    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct((1, 3), x.dtype))
    def last(nest, x, y, *, bounds):
        window = jt.Window(16, jt.Dim("w"), 8)
        t = x.tile(window, bounds=bounds).load().array
        y.tile(0, jt.Dim("three")).store(jnp.stack([t[4], t[5], t.max()]))

    x = -1 - jnp.arange(21.0)
    np.testing.assert_array_equal(last(x, bounds="zero"), [[-21, 0, 0]])
    np.testing.assert_array_equal(last(x, bounds=jt.maximum), [[-21, -np.inf, -17]])
    with pytest.raises(TileShapeError, match="surely lies inside axis 0, of size 21"):
        last(x, bounds="error")
    with pytest.raises(TileValueError, match='bounds "zero", "error" or a reducer'):
        last(x, bounds="wrap")
    with pytest.raises(TileTypeError, match="a reducer with an identity of one"):
        last(x, bounds=jt.argmax)


def test_operands_with_dims():
    rows, cols = jt.dims("rows cols")

    @jt.kernel(out=lambda x: x)
    def scaled(nest, x, y, *, block=4):
        r, c = nest.parallel(rows, block), nest.parallel(cols, block)
        y.tile(r, c).store(x.tile(r, c).load() * 2)

    got = scaled(jt.view(X, (rows, cols)))
    assert got.dims == (rows, cols)
    same_bits(got.array, 2 * np.asarray(X))
    with pytest.raises(
        TileShapeError, match="a Dim of an operand; got rows, which none"
    ):
        scaled(X)

    @jt.kernel(out=lambda x: x)
    def turned(nest, x, y):
        r, c = nest.parallel(rows, 4), nest.parallel(cols, 4)
        y.tile(r, c).store(x.tile(c, r).load())

    square = jt.view(X[:, :13], (rows, cols))
    with pytest.raises(TileShapeError, match="a handle over rows for axis 0"):
        turned(square)


def _one(body, *args, out=lambda x, *_: x):
    return jt.kernel(out=out)(body)(*args)


def test_races_and_barriers_are_refused():
    scalar = lambda x: jax.ShapeDtypeStruct((), x.dtype)  # noqa: E731

    def whole(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        t = jt.reduce(x.tile(r, c).load(), c, jt.add)
        y.tile().store(jt.reduce(t, r.dim, jt.add))

    with pytest.raises(
        TileShapeError, match=r"result 0.store: .*parallel parallel: a race"
    ):
        _one(whole, X, out=scalar)

    def reads(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        y.tile(r, c).store(x.tile(r, c).load())
        y.tile(r, c).load()

    with pytest.raises(TileValueError, match="that would need a barrier. Keep what"):
        _one(reads, X)

    def overwrites(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        x.tile(r, c).store(x.tile(r, c).load())

    with pytest.raises(TileValueError, match="a result; got an operand"):
        _one(overwrites, X)

    def overlaps(nest, x, y):
        r = nest.parallel(x.shape[0])
        w = jt.Window(0, jt.Dim("w"), 3)
        y.tile(r, w).store(x.tile(r, w).load())

    with pytest.raises(TileShapeError, match="a window of axis 1, which may overlap"):
        _one(overlaps, X)

    def late(nest, x, y):
        c = jt.Dim("c")
        y.tile(jt.Dim("all"), c).store(x.tile(jt.Dim("r"), c).load().array)
        nest.parallel(x.shape[0], 4)

    with pytest.raises(TileShapeError, match="a race"):
        _one(late, X)

    def inside(nest, x, y):
        @nest.serial(3)
        def _(k):
            nest.parallel(4)

    with pytest.raises(TileShapeError, match="before the loops of the kernel"):
        _one(inside, X)

    def folds(nest, x, y):
        r = nest.parallel(x.shape[0])

        @nest.reduce(x.shape[1], init=0.0)
        def _(k, s):
            y.tile(r, k).store(s)
            return s + 1.0

    with pytest.raises(TileShapeError, match="a body without stores"):
        _one(folds, X)

    def never(nest, x, y):
        nest.parallel(x.shape[0])

    with pytest.raises(TileShapeError, match="no store to result 0"):
        _one(never, X)


def test_shapes_and_dtypes_that_do_not_fit():
    def stores(value, out=lambda x, *_: x):
        def body(nest, x, y):
            r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
            y.tile(r, c).store(value(x.tile(r, c).load(), c))

        return lambda: _one(body, X, out=out)

    half = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)  # noqa: E731
    for call, error, match in (
        (stores(lambda t, c: jt.reduce(t, c, jt.add)), TileShapeError, "of dims .*, c"),
        (stores(lambda t, c: t.array[1:]), TileShapeError, r"shape \(4, 21\); got \(3"),
        (stores(lambda t, c: t, half), TileTypeError, "bfloat16, the result's dtype"),
    ):
        with pytest.raises(error, match=match):
            call()

    def tiles(*where):
        def body(nest, x, y):
            r = nest.parallel(x.shape[0], 4)
            x.tile(*(r if w == "r" else w for w in where)).load()

        return lambda: _one(body, X)

    c = jt.Dim("c")
    for call, error, match in (
        (tiles("r"), TileShapeError, "a part of each axis"),
        (tiles(c, "r"), TileShapeError, "a handle over axis 1, of size 21; got .* 13"),
        (tiles(c, c), TileShapeError, "expected distinct dims"),
        (tiles("r", 2.5), TileTypeError, "a part of axis 1; got 2.5"),
    ):
        with pytest.raises(error, match=match):
            call()

    def extents(extent, block=None):
        return lambda: _one(lambda nest, x, y: nest.parallel(extent, block), X)

    for call, error, match in (
        (extents(0), TileShapeError, "an extent and a block of at least 1; got 0"),
        (extents(4, 0), TileShapeError, "at least 1; got 4 and 0"),
        (extents(2.5), TileTypeError, "an extent; got 2.5"),
    ):
        with pytest.raises(error, match=match):
            call()
    with pytest.raises(TileTypeError, match="out a ShapeDtypeStruct"):
        _one(lambda nest, x, y: None, X, out=lambda x: 3)
    with pytest.raises(
        TileTypeError, match="that tiles of this kernel|tiles of this k"
    ):
        _one(lambda nest, x, y: nest.zeros(jt.Dim("new"), jnp.float32), X)
    with pytest.raises(TileValueError, match="implementation in"):
        gemm(X, B, implementation="magic")


def test_transforms_of_a_kernel():
    want = jax.vmap(lambda a: a @ B)(jnp.stack([X, 2 * X]))
    got = jax.vmap(gemm, (0, None))(jnp.stack([X, 2 * X]), B)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    with jax.enable_x64(True):
        a, b = (jnp.asarray(np.asarray(v, np.float64)) for v in (X[:5, :6], B[:6, :3]))

        @jt.kernel(out=lambda a, b: jax.ShapeDtypeStruct((5, 3), a.dtype))
        def product(nest, a, b, c):
            m, n = nest.parallel(5, 2), nest.parallel(3, 2)

            @nest.serial(6, 4, init=nest.zeros((m, n), jnp.float64))
            def acc(k, acc):
                return jt.mma(a.tile(m, k).load(), b.tile(k, n).load(), acc)

            c.tile(m, n).store(acc)

        same_derivatives(product, lambda a, b: a @ b, a, b)


def test_instances_are_side_by_side_and_loads_are_blocks():
    @jt.kernel(out=lambda x: x)
    def double(nest, x, y):
        r, c = nest.parallel(x.shape[0], 4), nest.parallel(x.shape[1], 7)
        y.tile(r, c).store(x.tile(r, c).load() * 2)

    text = str(jax.make_jaxpr(lambda x: double(x))(X))
    assert " gather[" not in text
    assert " scan[" not in text
    same_bits(double(X), 2 * np.asarray(X))
    (entry,) = jt.explain(double)(X)
    assert (entry.op, entry.implementation) == ("map", "reference")


def test_tune_keeps_the_contract_and_remembers():
    space = {"bm": [4, 13], "bk": [7, 21]}
    chosen = jt.tune(gemm, (X, B), space)
    assert chosen in [{"bm": m, "bk": k} for m in (4, 13) for k in (7, 21)]
    assert jt.tune(gemm, (X, B), space) == chosen

    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
    def total(nest, x, y, *, policy):
        r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
        y.tile(r).store(jt.reduce(x.tile(r, c).load(), c, jt.add, policy=policy))

    with pytest.raises(ContractError, match="one contract.*'fold_left'.*differs in"):
        jt.tune(total, (X,), {"policy": ["fixed_tree", "fold_left"]})
    with pytest.raises(TileTypeError, match="a kernel; got 3"):
        jt.tune(3, (X,), space)
    with pytest.raises(TileTypeError, match="got traced ones"):
        jax.jit(lambda x: jt.tune(gemm, (x, B), space))(X)
    with pytest.raises(TileValueError, match="values to try"):
        jt.tune(gemm, (X, B), {})
