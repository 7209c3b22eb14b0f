"""Dims and tiles: identity, the join, projections, pytrees, and every error."""

import copy
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtile import catalogue, elementwise
from jaxtile.dims import Dim, IndexSet, dims
from jaxtile.errors import TileError, TileShapeError, TileTypeError, TileValueError
from jaxtile.tile import Tile, tile

R, C, K = dims("rows cols k")
X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)


def test_a_dim_is_an_identity():
    assert Dim("a") != Dim("a")
    assert R is copy.deepcopy(R)
    assert repr(R) == "rows"
    assert dims("a, b")[1].label == "b"
    assert len(dims("one")) == 1


def test_the_attributes():
    x = tile(X, (R, C))
    assert (x.shape, x.dtype, x.ndim, x.dims) == ((2, 3), np.float32, 2, (R, C))
    assert (x.dim(0), x.dim(-1)) == (R, C)
    assert x.domain(C) == IndexSet((C,), (3,))
    assert x.domain().shape == (2, 3)
    assert tile(X[0], C).dims == (C,)
    assert tile(np.float32(3), ()).shape == ()


@pytest.mark.parametrize("index", [-100, -1, 0, 1, 2, 100])
@pytest.mark.parametrize("dtype", ["int8", "int32"])
@pytest.mark.parametrize("form", ["float32", "float8_e5m2"])
def test_a_traced_index_outside_reads_the_nearest_end(index, dtype, form):
    x = tile(X.astype(form), (R, C))
    got = jax.jit(lambda i: x.at({R: i}).array)(jnp.asarray(index, dtype))
    np.testing.assert_array_equal(got, X.astype(form)[np.clip(index, 0, 1)])


@pytest.mark.parametrize("index", [1, np.uint8(1), jnp.int32(1)])
def test_at_keeps_the_payloads_of_8_bit_nans(index):
    codes = np.arange(512).astype(np.uint8).reshape(2, 256)
    x = tile(codes.view("float8_e5m2"), (R, C))
    for wrap in (lambda f: f, jax.jit):
        got = wrap(lambda x: x.at({R: index}))(x).array
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), codes[1])


def test_the_domain_walks_in_order():
    domain = tile(X, (R, C)).domain(C, R)
    assert domain.size == 6
    walked = [tuple(domain.coordinate(i).values()) for i in range(6)]
    assert walked == [(c, r) for c in range(3) for r in range(2)]
    traced = jax.jit(lambda i: domain.coordinate(i)[C])(5)
    assert traced == 2


@pytest.mark.parametrize("wrap", [lambda i: i, np.int32, jnp.int32])
def test_at_projects(wrap):
    x = tile(X, (R, C))
    got = x.at({R: wrap(1)})
    assert got.dims == (C,)
    np.testing.assert_array_equal(got.array, X[1])
    both = x.at({C: wrap(2), R: wrap(0)})
    assert both.dims == ()
    assert both.array == X[0, 2]
    np.testing.assert_array_equal(jax.jit(lambda i: x.at({C: i}).array)(1), X[:, 1])


BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
]


@pytest.mark.parametrize("op", BINARY, ids=lambda f: f.__name__)
def test_operators_on_every_kind_of_operand(op):
    x = tile(X, (R, C))
    for other in (2.0, np.float32(2), jnp.float32(2), tile(np.float32(2), ())):
        right = op(x, other)
        left = op(other, x)
        assert right.dims == left.dims == (R, C)
        np.testing.assert_allclose(right.array, op(X, np.float32(2)), rtol=1e-6)
        np.testing.assert_allclose(left.array, op(np.float32(2), X), rtol=1e-6)
    row = np.array([3.0, 1.0, 2.0], np.float32)
    for got, want in (
        (op(x, tile(row, C)), op(X, row)),
        (op(tile(row, C), x), op(row, X)),
        (op(x, tile(X.T.copy(), (C, R))), op(X, X)),
    ):
        assert got.dims[0] in (R, C)
        np.testing.assert_allclose(got.array, want, rtol=1e-6)


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor])
def test_bit_operators(op):
    n = X.astype(np.int32)
    got = op(tile(n, (R, C)), 6)
    np.testing.assert_array_equal(got.array, op(n, 6))
    np.testing.assert_array_equal(op(6, tile(n, (R, C))).array, op(6, n))


def test_unary_operators():
    n = X.astype(np.int32) - 3
    x = tile(n, (R, C))
    for op in (operator.neg, operator.pos, operator.abs, operator.invert):
        np.testing.assert_array_equal(op(x).array, op(n))


@settings(max_examples=25)
@given(st.permutations([R, C, K]), st.sets(st.sampled_from([R, C, K])))
def test_the_join_aligns_by_identity(order, some):
    sizes = {R: 2, C: 3, K: 4}
    inner = [d for d in (K, R, C) if d in some]
    big = np.arange(24.0, dtype=np.float32).reshape([sizes[d] for d in order])
    small = np.arange(1.0, 1 + np.prod([sizes[d] for d in inner]), dtype=np.float32)
    small = small.reshape([sizes[d] for d in inner])
    letters = {R: "r", C: "c", K: "k"}
    to, fro = ("".join(letters[d] for d in ds) for ds in (order, inner))
    want = np.einsum(f"{to},{fro}->{to}", big, small)
    got = tile(big, order) * tile(small, inner)
    assert got.dims == tuple(order)
    np.testing.assert_array_equal(got.array, want)


def test_three_operands_join_in_the_widest():
    c = tile(np.array([True, False]), R)
    got = elementwise.ite(c, tile(X, (R, C)), tile(np.zeros(3, np.float32), C))
    np.testing.assert_array_equal(got.array, np.where([[True], [False]], X, 0))
    np.testing.assert_array_equal(elementwise.exp(tile(X, (R, C))).array, jnp.exp(X))


def test_reducers_merge_tiles():
    got = catalogue.maximum(tile(X, (R, C)), tile(np.full(3, 3, np.float32), C))
    np.testing.assert_array_equal(got.array, np.maximum(X, 3))
    n = tile(np.arange(3, dtype=np.int32), C)
    value, index = catalogue.argmax((tile(X[0], C), n), (tile(X[1], C), n))
    assert value.dims == index.dims == (C,)
    np.testing.assert_array_equal(value.array, X[1])


def test_a_tile_is_a_pytree():
    x = tile(X, (R, C))
    leaves, tree = jax.tree.flatten(x)
    assert len(leaves) == 1
    assert jax.tree.unflatten(tree, [None]).dims == (R, C)
    assert isinstance(jax.tree.map(lambda v: object(), x), Tile)
    traces = []

    @jax.jit
    def double(t):
        traces.append(1)
        return t + t

    for _ in range(2):
        got = double(tile(X, (R, C)))
    assert (got.dims, len(traces)) == ((R, C), 1)
    double(tile(X, (R, Dim("cols"))))
    assert len(traces) == 2
    grad = jax.grad(lambda t: (t * t).array.sum())(x)
    np.testing.assert_array_equal(grad.array, 2 * X)
    carried, _ = jax.lax.scan(lambda t, _: (t + 1, None), x, None, length=3)
    np.testing.assert_array_equal(carried.array, X + 3)


def test_tiles_made_inside_vmap():
    got = jax.vmap(lambda v: (tile(v, C) * 2).array)(X)
    np.testing.assert_array_equal(got, X * 2)
    back = jax.vmap(lambda v: tile(v, C) * 2)(X)
    with pytest.raises(TileShapeError, match="does not cross vmap"):
        back + 1
    again = jax.vmap(lambda t: t + 1)(back)
    np.testing.assert_array_equal(again.array, X * 2 + 1)


def test_numpy_and_jax_arrays_on_the_left_are_refused_not_absorbed():
    x = tile(X, (R, C))
    for array in (X, jnp.asarray(X)):
        with pytest.raises(TileShapeError, match=r"jaxtile\.tile\(array, dims\)"):
            array + x


SAME = dims("cols")[0]
T = tile(X, (R, C))
ERRORS = [
    (lambda: Dim(3), TileTypeError, "Dim: expected a label that is a string; got 3"),
    (lambda: dims(3), TileTypeError, "dims: expected a string of labels; got 3"),
    (lambda: dims(" "), TileShapeError, "dims: expected at least one label"),
    (lambda: tile([1.0], C), TileTypeError, "tile: expected an array; got list"),
    (lambda: tile(X, "rc"), TileTypeError, "tile: expected dims made by"),
    (lambda: tile(X, (R, 1)), TileTypeError, "tile: expected dims made by"),
    (lambda: tile(X, 3), TileTypeError, "tile: expected dims made by"),
    (lambda: tile(X, C), TileShapeError, r"one dim for each axis of shape \(2, 3\)"),
    (lambda: tile(X, (C, C)), TileShapeError, r"distinct dims; got \(cols, cols\)"),
    (lambda: T.dim(2), TileShapeError, r"Tile.dim: expected an axis in \[-2, 2\)"),
    (lambda: T.dim("rows"), TileTypeError, "expected an integer axis; got 'rows'"),
    (lambda: T.dim(True), TileTypeError, "expected an integer axis; got True"),
    (lambda: T.dim(1.0), TileTypeError, "expected an integer axis; got 1.0"),
    (
        lambda: T.domain([]),
        TileShapeError,
        r"Tile.domain: expected a dim of .*; got \[\]",
    ),
    (lambda: T.domain().coordinate("a"), TileTypeError, "an integer scalar array; got"),
    (lambda: T.domain().coordinate(1.5), TileTypeError, "an integer scalar array; got"),
    (lambda: -(T > 0), TileTypeError, r"neg: .*that neg takes, not \(bool\)"),
    (lambda: (T > 0) - (T > 0), TileTypeError, r"sub: .*not \(bool, bool\)"),
    (lambda: ~T, TileTypeError, r"invert: .*not \(float32\)"),
    (lambda: T & T, TileTypeError, r"and: .*not \(float32, float32\).*jaxtile.cast"),
    (lambda: T | 1.5, TileTypeError, r"or: .*not \(float32, float\)"),
    (lambda: T == jax.random.key(0), TileTypeError, "eq: .*got dtype key<fry>"),
    (lambda: tile(1j * X, (R, C)), TileTypeError, "tile: .*got dtype complex"),
    (lambda: T.domain(K), TileShapeError, r"Tile.domain: .*\(rows, cols\); got k"),
    (lambda: T.domain(C, C), TileShapeError, "Tile.domain: expected distinct dims"),
    (lambda: T.at({SAME: 0}), TileShapeError, "equal labels do not suffice"),
    (lambda: T.at({R: 2}), TileValueError, r"an index in \[0, 2\) for rows; got 2"),
    (lambda: T.at({R: -1}), TileValueError, "Negative indices do not wrap"),
    (lambda: T.at({R: 0.5}), TileTypeError, "an integer scalar for each dim"),
    (lambda: T.at({R: True}), TileTypeError, "an integer scalar for each dim"),
    (lambda: T.at({R: [[1], [1, 2]]}), TileTypeError, r"got \[\[1\], \[1, 2\]\] for"),
    (lambda: tile(X[:0], (R, C)).at({R: jnp.int32(0)}), TileValueError, r"in \[0, 0\)"),
    (lambda: T.at({R: np.arange(2)}), TileTypeError, r"array of shape \(2,\)"),
    (lambda: T.at(1), TileTypeError, "Tile.at: expected a mapping from dims"),
    (lambda: T.domain().coordinate(6), TileShapeError, r"an index in \[0, 6\)"),
    (lambda: T @ T, TileTypeError, r"@: .*jaxtile\.matmul"),
    (lambda: 2 @ T, TileTypeError, r"@: .*jaxtile\.matmul"),
    (lambda: bool(T), TileTypeError, "bool: expected a tile without dims"),
    (lambda: T + X, TileShapeError, "a tile and an array of shape"),
    (
        lambda: tile(X[:, 0], R) * tile(X[0], C),
        TileShapeError,
        r"mul: .*got \(rows\) and \(cols\)\. .*jaxtile.broadcast or jaxtile.reindex",
    ),
    (
        lambda: T + tile(X[0], SAME),
        TileShapeError,
        "jaxtile.broadcast or jaxtile.reindex",
    ),
    (
        lambda: T + tile(X[0, :1], C),
        TileShapeError,
        "one size for dim cols; got 3 and 1",
    ),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), ERRORS)
def test_errors(call, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        call()
    assert isinstance(caught.value, TileError)


@pytest.mark.parametrize("other", ["x", [1.0], None, 1j])
def test_foreign_operands_are_pythons_error(other):
    with pytest.raises(TypeError):
        T + other
    assert not isinstance(T == other, Tile)


def test_an_empty_tile_without_dims_is_a_truth_value():
    assert bool(tile(np.float32(1), ()) == 1.0)
    with pytest.raises(TypeError, match="unhashable"):
        hash(T)
    assert "dims=(rows, cols)" in repr(T)
