"""scatter and segment_reduce: the elements of each target, in a stated order."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
import oracle
from jaxtile.errors import ContractError, PolicyError, TileShapeError, TileTypeError
from jaxtile.primitives import scatter_p
from jaxtile.primitives._define import REFERENCES
from oracle import same_bits
from rules import through

POLICIES = ["fixed_tree", "fold_left", "fold_right"]
REDUCERS = {
    "add": (jt.add, oracle.ADD, np.float32(0)),
    "multiply": (jt.multiply, oracle.MULTIPLY, np.float32(1)),
    "maximum": (jt.maximum, oracle.MAXIMUM, -np.float32(np.inf)),
    "minimum": (jt.minimum, oracle.MINIMUM, np.float32(np.inf)),
    "minus": (
        jt.Reducer(lambda a, b: a - b, laws=jt.Laws(associative=True), name="minus"),
        oracle.SUBTRACT,
        np.float32(0),
    ),
}


def _data(n, seed=0):
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(n) * 10.0 ** rng.integers(-4, 5, n)
    return wide.astype(np.float32)


def _each(op, x, ids, size, policy, empty, seeds=None):
    """Each target alone, by the oracle of reduce."""
    out = []
    for t in range(size):
        mine = [(v,) for v, i in zip(x, ids, strict=True) if i == t]
        seed = None if seeds is None else (seeds[t],)
        found = oracle.REDUCTIONS[policy](op, mine, seed)
        out.append(empty if found is None else found[0])
    return np.array(out)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("seeded", [False, True])
def test_every_bit_is_that_of_the_target_alone(name, policy, seeded):
    reducer, op, empty = REDUCERS[name]
    x, size = _data(400), 9
    ids = np.random.default_rng(1).integers(-2, size + 2, 400)
    ids[ids == 4] = 5  # a target without elements
    seeds = _data(size, 2) if seeded else None
    want = _each(op, x, ids, size, policy, empty, seeds)
    call = jax.jit(
        lambda x, i, z: jt.scatter(x, i, 0, size, reducer, policy=policy, init=z)
    )
    same_bits(call(x, ids, seeds), want)
    order = np.argsort(ids, kind="stable")
    got = jt.segment_reduce(
        x[order], ids[order], size, reducer, policy=policy, init=seeds, is_sorted=True
    )
    same_bits(got, want)


@pytest.mark.parametrize("policy", ["unordered_tree", *POLICIES])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_what_runs_on_cuda_has_the_same_bits(policy, is_sorted):
    """Runs are looked for there, not counted; no float add by atomics."""
    x, ids = _data(300), np.random.default_rng(3).integers(-1, 8, 300)
    ids = np.sort(ids) if is_sorted else ids
    call = lambda x, i: jt.scatter(  # noqa: E731
        x, i, 0, 7, jt.add, policy=policy, is_sorted=is_sorted
    )
    run = functools.partial(REFERENCES[scatter_p], platform="cuda")
    (got,) = through({scatter_p: run}, call, x, ids)
    if policy == "unordered_tree":
        policy = "fixed_tree"
    same_bits(got, _each(oracle.ADD, x, ids, 7, policy, np.float32(0)))


@pytest.mark.parametrize("policy", POLICIES)
def test_argmax_gives_the_place_in_x(policy):
    x = np.float32([3, np.nan, 7, 7, np.nan, 1, -0.0, 0.0])
    ids = np.array([0, 1, 0, 0, 1, 2, 3, 3])
    value, index = jt.scatter(x, ids, 0, 4, jt.argmax, policy=policy)
    same_bits(value, np.float32([7, np.nan, 1, -0.0]))
    np.testing.assert_array_equal(index, [2, 1, 5, 6])
    assert index.dtype == np.int32


@pytest.mark.parametrize("policy", ["ordered_tree", "fixed_tree", "fold_left"])
def test_the_source_order_is_kept(policy):
    x = np.arange(100)
    ids = np.random.default_rng(3).integers(0, 7, 100)
    for reducer, end in ((jt.first, 0), (jt.last, -1)):
        got = jt.scatter(x, ids, 0, 7, reducer, policy=policy)
        np.testing.assert_array_equal(got, [x[ids == t][end] for t in range(7)])


@pytest.mark.parametrize("policy", POLICIES)
def test_welford(policy):
    x, size = _data(200, 5), 4
    ids = np.random.default_rng(6).integers(0, size, 200)
    got = jt.segment_reduce(x, ids, size, jt.welford, policy=policy)
    for t in range(size):
        mine = [(v,) for v in x[ids == t]]
        want = oracle.REDUCTIONS[policy](oracle.WELFORD, mine)
        for leaf, w in zip(got, want[:3], strict=True):
            same_bits(np.asarray(leaf)[t], np.float32(w))


@pytest.mark.parametrize("policy", ["unordered_tree", *POLICIES])
def test_bits_do_not_depend_on_the_neighbours(policy):
    """Alone, in a batch, along another axis, with more targets, or among others."""
    x = _data(257, 7)
    ids = np.random.default_rng(8).integers(0, 5, 257)
    call = lambda x, i, **p: jt.scatter(x, i, p.pop("axis", 0), 5, jt.add, **p)  # noqa: E731
    alone = call(x, ids, policy=policy)
    rows = np.stack([_data(257, 9), x])
    same_bits(jax.vmap(lambda v: call(v, ids, policy=policy))(rows)[1], alone)
    same_bits(call(rows, ids, axis=1, policy=policy)[1], alone)
    same_bits(call(rows.T, ids, policy=policy)[:, 1], alone)
    each = np.stack([ids[::-1], ids])
    same_bits(call(rows, each, axis=1, batch=0, policy=policy)[1], alone)
    wide = np.stack([x, _data(257, 10)], 1).reshape(-1)
    both = np.stack([2 * ids, 2 * ids + 1], 1).reshape(-1)
    got = jt.scatter(wide, both, 0, 10, jt.add, policy=policy)
    same_bits(got[::2], alone)
    first = call(x, ids, policy=policy)
    for _ in range(3):
        same_bits(call(x, ids, policy=policy), first)


@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree", "fold_right"])
def test_signed_zeros_nan_and_targets_without_elements(policy):
    x = np.float32([-0.0, -0.0, np.nan, 1, np.inf, -np.inf])
    ids = np.array([0, 0, 1, 1, 2, 2])
    got = np.asarray(jt.scatter(x, ids, 0, 4, jt.add, policy=policy))
    same_bits(got, np.float32([-0.0, np.nan, np.nan, 0.0]))
    high = jt.scatter(x, ids, 0, 4, jt.maximum, policy=policy)
    same_bits(high, np.float32([-0.0, np.nan, np.inf, -np.inf]))
    zeros = jt.scatter(np.float32([-0.0, 0.0]), np.zeros(2, int), 0, 1, jt.minimum)
    same_bits(zeros, np.float32([-0.0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("policy", ["unordered_tree", "fold_left"])
def test_the_accumulator_rule(dtype, policy):
    x = np.ones(300).astype(jnp.dtype(dtype))
    got = jt.scatter(x, np.zeros(300, int), 0, 2, jt.add, policy=policy)
    assert got.dtype == jt.reduce(x, 0, jt.add).dtype
    np.testing.assert_array_equal(got, [300, 0])
    if dtype == "bfloat16":
        got = jt.scatter(
            x, np.zeros(300, int), 0, 2, jt.add, policy=policy, acc_dtype="bfloat16"
        )
        assert policy != "fold_left" or float(got[0]) == 256
        narrow = jt.scatter(x, np.zeros(300, int), 0, 1, jt.add, out_dtype="bfloat16")
        assert narrow.dtype == jnp.bfloat16
        assert float(narrow[0]) == 300


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int32"])
def test_indices_of_every_width(dtype):
    info = np.iinfo(dtype)
    ids = np.array([0, 1, info.max, info.min, 1], dtype)
    got = jt.scatter(np.arange(1, 6), ids, 0, 3, jt.add)
    want = [1 + 4 * (info.min == 0), 7, 0]
    np.testing.assert_array_equal(got, want)


def test_64_bits(x64):
    x = np.array([2**40, 1, 2**41], np.int64)
    ids = np.array([1, 2**40, 1], np.int64)
    got = jt.scatter(x, ids, 0, 2, jt.add)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, [0, 2**40 + 2**41])
    y = np.array([1e300, 1e-300, -1e300])
    got = jt.scatter(y, np.zeros(3, int), 0, 1, jt.add, policy="fold_left")
    np.testing.assert_array_equal(got, [0.0])


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("policy", ["unordered_tree", *POLICIES])
def test_empty_and_single(n, size, policy):
    x, ids = np.ones((2, n), np.float32), np.zeros(n, int)
    want = np.zeros((2, size), np.float32)
    want[:, :n] = 1
    same_bits(jt.scatter(x, ids, 1, size, jt.add, policy=policy), want)
    seed = np.full((2, size), 5, np.float32)
    same_bits(
        jt.scatter(x, ids, 1, size, jt.add, init=seed, policy=policy), seed + want
    )
    g = jax.grad(lambda x: jt.scatter(x, ids, 1, size, jt.maximum, init=seed).sum())(x)
    assert g.shape == x.shape


@pytest.mark.parametrize("name", ["float32", "float8_e5m2", "bfloat16", "int4"])
def test_unique_copies_bits(name):
    dtype = jt.formats.format_of(name).dtype
    rng = np.random.default_rng(11)
    codes = rng.integers(0, 256, 4 * 6, np.uint8)
    x = codes.view(dtype)[:6] if name != "int4" else codes[:6].astype(dtype)
    to = np.array([3, -1, 0, 8, 5, 1])
    got = np.asarray(jt.scatter(x, to, 0, 7, unique=True))
    want = np.zeros(7, dtype)
    want[[3, 0, 5, 1]] = x[[0, 2, 4, 5]]
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_unique_into_what_is_there():
    there = np.float32([[1, 2, 3], [4, 5, 6]])
    x = np.float32([[-1, -2], [-3, -4]])
    got = jt.scatter(x, np.array([2, 0]), 1, 3, unique=True, init=there)
    np.testing.assert_array_equal(got, [[-2, 2, -1], [-4, 5, -3]])


def test_tiles():
    r, c, k = jt.dims("r c k")
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    t = jt.tile(x, (r, c))
    got = jt.scatter(t, jt.tile(np.array([1, 0, 1]), r), r, {k: 2}, jt.add)
    assert got.dims == (k, c)
    np.testing.assert_array_equal(got.array, [x[1], x[0] + x[2]])
    each = np.array([[0, 1, 1], [1, 1, 0], [0, 0, 0], [2, 2, 2]])
    got = jt.scatter(t, jt.tile(each, (c, r)), c, {k: 2}, jt.add)
    want = [[x[a][each[:, a] == b].sum() for b in range(2)] for a in range(3)]
    assert got.dims == (r, k)
    np.testing.assert_array_equal(got.array, want)
    seed = jt.tile(np.float32([10, 20]), k)
    got = jt.scatter(
        t, jt.tile(np.array([1, 0, 1]), r), r, {k: 2}, jt.add, init=seed.array[:, None]
    )
    np.testing.assert_array_equal(got.array, [x[1] + 10, x[0] + x[2] + 20])
    value, index = jt.segment_reduce(
        t, jt.tile(np.array([0, 0, 0]), r), {k: 1}, jt.argmax, axis=r
    )
    assert value.dims == index.dims == (k, c)
    for size, sentence in ((3, "size={dim: n}"), ({c: 3}, "none of \\(c\\)")):
        with pytest.raises((TileTypeError, TileShapeError), match=sentence):
            jt.scatter(t, jt.tile(np.array([1, 0, 1]), r), r, size, jt.add)
    with pytest.raises(TileShapeError, match="an index with dim r and others of x"):
        jt.scatter(t, jt.tile(np.array([1, 0, 1]), k), r, {k: 2}, jt.add)


X, TO = np.ones((3, 4), np.float32), np.zeros(3, int)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: jt.scatter(X, TO, 0, 2), ContractError, "got neither"),
        (
            lambda: jt.scatter(X, TO, 0, 2, jt.add, unique=True),
            ContractError,
            "got both",
        ),
        (lambda: jt.scatter(X, TO, 0, 2, jt.first), ContractError, "commutative"),
        (lambda: jt.scatter(X, TO, 1, 2, jt.add), TileShapeError, "along the axes"),
        (
            lambda: jt.scatter(X, TO[:, None], 0, 2, jt.add),
            TileShapeError,
            "of its own",
        ),
        (lambda: jt.scatter(X, TO > 0, 0, 2, jt.add), TileTypeError, "got bool"),
        (
            lambda: jt.scatter(X, TO, 0, -1, jt.add),
            TileShapeError,
            r"size in \[0, 2",
        ),
        (lambda: jt.scatter(X, TO, 0, 2**70, jt.add), TileShapeError, "size in"),
        (lambda: jt.scatter(X, TO, 0, 1.5, jt.add), TileTypeError, "size, an integer"),
        (
            lambda: jt.scatter(X, TO, 0, 3, unique=True, policy="any"),
            PolicyError,
            "fold_left",
        ),
        (
            lambda: jt.scatter(X, TO, 0, 3, unique=True, is_sorted=1),
            TileTypeError,
            "is_sorted to be",
        ),
        (
            lambda: jt.scatter(X, TO, 0, 3, unique=True, out_dtype="float16"),
            ContractError,
            "with a reducer only",
        ),
        (
            lambda: jt.scatter(X, TO, 0, 2, jt.add, init=jnp.ones((), "int4")),
            TileTypeError,
            "storage format int4",
        ),
        (
            lambda: jt.scatter(X, TO, 0, 2, jt.add, acc_dtype=jax.random.key(0)),
            TileTypeError,
            "got an array",
        ),
        (lambda: jt.scatter(X, TO, 0, 2, sum), TileTypeError, "expected a Reducer"),
        (
            lambda: jt.scatter(X, TO, 0, 2, jt.add, init=np.ones(3, np.float32)),
            TileShapeError,
            "init that broadcasts to \\(2, 4\\)",
        ),
        (
            lambda: jt.scatter(X.astype(ml_dtypes.float8_e5m2), TO, 0, 2, jt.add),
            TileTypeError,
            "storage format float8_e5m2",
        ),
        (
            lambda: jt.segment_reduce(X, TO, 2, jt.add, is_sorted=1),
            TileTypeError,
            "segment_reduce: expected is_sorted",
        ),
    ],
)
def test_refusals(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()
