"""reindex and its special cases: coordinates mapped, bits copied, chains made one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError

X = np.arange(12, dtype=np.float32).reshape(3, 4)
V = np.arange(12)


def _naive(x, shape, f, fill=None):
    """One place after the other."""
    out = np.empty(shape, x.dtype)
    for j in np.ndindex(*out.shape):
        found = f(*j)
        found = found if isinstance(found, tuple) else (found,)
        at = tuple(int(c) for c in found)
        inside = all(0 <= c < n for c, n in zip(at, x.shape, strict=True))
        out[j] = x[at] if inside else fill
    return out


AFFINE = {
    "transpose": (X, (4, 3), lambda i, j: (j, i), None),
    "flip": (X, (3, 4), lambda i, j: (2 - i, 3 - j), None),
    "stride": (X, (2, 2), lambda i, j: (2 * i, 1 + j * 2), None),
    "stride back": (X, (2, 2), lambda i, j: (2 - 2 * i, 3 - j * 3), None),
    "constant": (X, (5,), lambda i: (1, 2), None),
    "one": (X, (), lambda: (1, 2), None),
    "of a scalar": (X[0, 0], (2, 2), lambda i, j: (), None),
    "repeat": (X, (2, 3, 5, 4), lambda a, i, b, j: (i, j), None),
    "diagonal": (X, (3,), lambda i: (i, i), None),
    "other diagonal": (X, (3,), lambda i: (2 - i, 1 + i), None),
    "twice": (X[:3, :3], (3, 2), lambda i, j: (i, i), None),
    "split": (V, (3, 4), lambda i, j: 4 * i + j, None),
    "split back": (V, (2, 3, 2), lambda i, j, k: 11 - 6 * i - 2 * j - k, None),
    "split, one back": (V, (3, 4), lambda i, j: 4 * i + 3 - j, None),
    "split with a stride": (V, (2, 3), lambda i, j: 6 * i + 2 * j + 1, None),
    "shift": (X, (3, 4), lambda i, j: (i - 1, j + 2), -5),
    "shift past the end": (V, (12,), lambda i: i - 40, -5),
    "pad": (X, (7, 9), lambda i, j: (i - 2, j - 3), -5),
    "strided pad": (V, (9,), lambda i: 3 * i - 7, -5),
    "strided pad back": (V, (9,), lambda i: 16 - 3 * i, -5),
    "nothing inside": (X, (3,), lambda i: (i, 7), -5),
    "masked diagonal": (X, (6,), lambda i: (i - 1, i), -5),
    "of nothing": (X[:0], (2, 4), lambda i, j: (i, j), -5),
    "to nothing": (X, (0, 4), lambda i, j: (i, j), None),
}
OTHERS = {
    "one outside": (X, (), lambda: (1, 4), -1),
    "windows": (V, (5, 3), lambda i, j: i + j, None),
    "windows outside": (V, (14, 3), lambda i, j: i + j - 1, -5),
    "corners": (X, (3, 4), lambda i, j: (i + j - 1, j), -5),
    "modulo": (V, (20,), lambda i: i % 12, None),
    "square": (V, (5,), lambda i: i * i, -5),
    "if": (V, (12,), lambda i: jnp.where(i < 6, i, 3), None),
}


@pytest.mark.parametrize("case", AFFINE | OTHERS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_against_a_loop(case, wrap):
    x, shape, f, fill = (AFFINE | OTHERS)[case]
    got = wrap(lambda x: jt.reindex(x, shape, f, fill))(x)
    want = _naive(np.asarray(x), shape, f, fill)
    assert got.dtype == jnp.asarray(x).dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", AFFINE)
def test_affine_maps_are_no_gather(case):
    """Neither the op nor its reverse reads or adds by an index."""
    x, shape, f, fill = AFFINE[case]
    call = lambda x: jt.reindex(x, shape, f, fill)  # noqa: E731
    x = np.asarray(x, np.float32)
    text = jax.jit(call).lower(x).as_text()
    both = (
        text
        + jax.jit(lambda x, c: jax.vjp(call, x)[1](c))
        .lower(x, np.ones(shape, np.float32))
        .as_text()
    )
    assert "gather" not in both
    assert "scatter" not in both


@pytest.mark.parametrize("case", AFFINE | OTHERS)
def test_the_transpose_adds_up_what_was_read(case):
    x, shape, f, fill = (AFFINE | OTHERS)[case]
    x = np.asarray(x, np.float32)
    ct = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    call = lambda x: jt.reindex(x, shape, f, fill)  # noqa: E731
    (got,) = jax.jit(lambda x, c: jax.vjp(call, x)[1](c))(x, ct)
    want = np.zeros(x.shape)
    for j in np.ndindex(*ct.shape):
        found = f(*j)
        at = tuple(int(c) for c in (found if isinstance(found, tuple) else (found,)))
        if all(0 <= c < n for c, n in zip(at, x.shape, strict=True)):
            want[at] += ct[j]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


CODES = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32)


def test_bits_survive():
    x = CODES.view(np.float32)
    for got, want in (
        (jt.flip(x), CODES[::-1]),
        (jt.shift(x, 0, 1, x[1]), CODES[[1, 0, 1, 2]]),
        (jt.broadcast(x, (1, 4)), CODES[None]),
        (jt.butterfly(x, 0, 1), CODES[[1, 0, 3, 2]]),
        (jt.reindex(x, 4, lambda i: (3 * i) % 4), CODES[[0, 3, 2, 1]]),
    ):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want)


NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bool", "uint8"]


@pytest.mark.parametrize("name", NARROW)
def test_every_code_of_a_narrow_format(name):
    dtype = jt.formats.format_of(name).dtype
    count = 2 if name == "bool" else 256
    codes = np.arange(256 * dtype.itemsize, dtype=np.uint8)[: count * dtype.itemsize]
    x = codes.view(dtype)
    got = jax.jit(lambda x: jt.shift(jt.flip(x), 0, 1, x[1]))(x)
    want = np.concatenate([x[1:2], x[::-1][:-1]])
    bits = [np.asarray(v).view(np.uint8) for v in (got, want)]
    np.testing.assert_array_equal(*bits)


def _last(fn, *args):
    """The equation that gives the result, and whether it reads the arguments alone."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    last = jaxpr.eqns[-1]
    assert last.outvars == jaxpr.outvars
    made = {v for eqn in jaxpr.eqns[:-1] for v in eqn.outvars}
    read = [v for v in last.invars if not hasattr(v, "val")]
    return last, jaxpr.invars[0] in read and not made.intersection(read)


def _moves(text):
    return sum(text.count(f" {op}(") for op in ("gather", "dynamic-slice"))


def test_a_chain_of_affine_maps_is_one_reindex():
    def chain(x):
        y = jt.shift(x, 1, 2, 7.0)
        return jt.shift(jt.flip(jt.transpose(y), 0), 0, -1, 8.0)

    want = np.full((3, 4), 7, np.float32)
    want[:, 2:] = X[:, :2]
    want = np.concatenate([want.T[::-1][1:], np.full((1, 3), 8, np.float32)])
    np.testing.assert_array_equal(chain(X), want)
    np.testing.assert_array_equal(jax.jit(chain)(X), want)
    last, alone = _last(chain, X)
    assert (last.primitive.name, alone) == ("tile_reindex", True)
    assert len(last.params["guards"]) == 2
    assert _moves(jax.jit(chain).lower(X).compile().as_text()) == 0


def test_a_chain_undone_is_the_array_itself():
    chain = lambda x: jt.transpose(jt.flip(jt.flip(jt.transpose(x), 1), 1))  # noqa: E731
    last, alone = _last(chain, X)
    assert alone
    assert not last.params["guards"]
    text = jax.jit(chain).lower(X).compile().as_text()
    assert "transpose(" not in text
    assert "reverse(" not in text


def test_a_chain_with_any_map_is_one_gather():
    def chain(x):
        y = jt.reindex(x, 9, lambda i: i * i - 1, fill=5)
        return jt.shift(jt.flip(y), 0, 3, fill=6)

    squares = _naive(V, (9,), lambda i: i * i - 1, 5)
    want = np.concatenate([[6, 6, 6], squares[::-1][:6]])
    np.testing.assert_array_equal(chain(V), want)
    np.testing.assert_array_equal(jax.jit(chain)(V), want)
    last, _ = _last(chain, V)
    assert last.primitive.name == "tile_gather"
    # One read of x, and one of the fills, which are one element each.
    text = jax.jit(chain).lower(V).compile().as_text()
    assert "s32[12]" in text
    assert _moves(text) <= 2


def test_a_long_chain_of_shifts_has_one_guard():
    def walk(x):
        for _ in range(10):
            x = jt.shift(x, 0, 1, -1)
        return x

    last, alone = _last(walk, V)
    assert alone
    assert len(last.params["guards"]) == 1
    np.testing.assert_array_equal(walk(V), [-1] * 10 + [0, 1])
    np.testing.assert_array_equal(jax.jit(walk)(V), [-1] * 10 + [0, 1])


def test_chains_under_vmap_and_grad():
    chain = lambda x: jt.shift(jt.flip(x), 0, 1, 3.0)  # noqa: E731
    got = jax.jit(jax.vmap(chain))(X)
    np.testing.assert_array_equal(got, np.stack([chain(row) for row in X]))
    g = jax.grad(lambda x: jnp.sum(chain(x) * jnp.arange(4.0)))(X[0])
    np.testing.assert_array_equal(g, [0, 3, 2, 1])


@pytest.mark.parametrize(
    ("f", "got"),
    [
        (lambda i: i + 8, "from 8 to 12"),
        (lambda i: i - 1, "from -1 to 3"),
        (lambda i: i * i, "from 0 to 16"),
        (lambda i: 12, "from 12 to 12"),
    ],
)
def test_a_coordinate_known_to_be_outside_needs_a_fill(f, got):
    with pytest.raises(TileValueError, match=rf"\[0, 12\) along axis 0 of x; .*{got}"):
        jt.reindex(V, 5, f)
    with pytest.raises(TileValueError, match=got):
        jax.jit(lambda x: jt.reindex(x, 5, f))(V)


def test_coordinates_known_when_it_runs():
    run = jax.jit(lambda x, k: jt.reindex(x, 4, lambda i: 2 * i + k))
    np.testing.assert_array_equal(run(V, 3), [3, 5, 7, 9])
    np.testing.assert_array_equal(run(V, 8), [8, 10, 11, 11])  # the nearest end
    filled = jax.jit(lambda x, k: jt.reindex(x, 4, lambda i: 2 * i + k, fill=-1))
    np.testing.assert_array_equal(filled(V, 8), [8, 10, -1, -1])


@pytest.mark.parametrize("distance", [0, 1, 5, -3, 12, 100, -(2**31)])
@pytest.mark.parametrize("traced", [False, True])
def test_shift(distance, traced):
    d = np.int32(distance)
    run = jax.jit(lambda d: jt.shift(V, 0, d, fill=-1)) if traced else None
    got = run(d) if run else jt.shift(V, 0, distance, fill=-1)
    want = [V[i - distance] if 0 <= i - distance < 12 else -1 for i in range(12)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("n", [0, 1, 8, 11, 24])
@pytest.mark.parametrize("distance", [0, 1, 2, 5, 7, 8, 33])
def test_butterfly(n, distance):
    x = np.arange(2 * n).reshape(2, n)
    got = jt.butterfly(x, 1, distance, fill=-1)
    at = np.arange(n) ^ distance
    want = np.where(at < n, x[:, np.minimum(at, max(n - 1, 0))], -1)
    np.testing.assert_array_equal(got, want)
    if n and (at >= n).any():
        with pytest.raises(TileValueError, match="butterfly: expected coordinates"):
            jt.butterfly(x, 1, distance)


def test_numpys_own_moves():
    np.testing.assert_array_equal(jt.transpose(X), X.T)
    y = X.reshape(3, 2, 2)
    np.testing.assert_array_equal(jt.transpose(y, (2, 0, 1)), y.transpose(2, 0, 1))
    np.testing.assert_array_equal(jt.flip(y, (0, -1)), np.flip(y, (0, 2)))
    np.testing.assert_array_equal(jt.flip(y), np.flip(y))
    for shape in ((3, 4), (2, 3, 4), (5, 1, 3, 4)):
        np.testing.assert_array_equal(jt.broadcast(X, shape), np.broadcast_to(X, shape))
    got = jt.broadcast(X[:1], (2, 3, 4))
    np.testing.assert_array_equal(got, np.broadcast_to(X[:1], (2, 3, 4)))
    np.testing.assert_array_equal(jt.broadcast(2, (3,)), [2, 2, 2])


def test_tiles():
    r, c, k = jt.dims("r c k")
    t = jt.tile(X, (r, c))
    for got, dims, want in (
        (jt.transpose(t), (c, r), X.T),
        (jt.transpose(t, (c, r)), (c, r), X.T),
        (jt.flip(t, c), (r, c), X[:, ::-1]),
        (jt.shift(t, r, 1), (r, c), np.pad(X, ((1, 0), (0, 0)))[:3]),
        (jt.butterfly(t, c, 1), (r, c), X[:, [1, 0, 3, 2]]),
        (
            jt.broadcast(t, {k: 2, c: 4, r: 3}),
            (k, c, r),
            np.broadcast_to(X.T, (2, 4, 3)),
        ),
        (jt.reindex(t, (c, r), lambda j, i: (i, j)), (c, r), X.T),
        (jt.reindex(t, {k: 2, c: 4}, lambda i, j: {r: i + 1}), (k, c), X[1:]),
        (jt.reindex(t, t.domain(c), lambda j: {r: 2}), (c,), X[2]),
    ):
        assert got.dims == dims
        np.testing.assert_array_equal(got.array, want)
    for call, sentence in (
        (lambda: jt.reindex(t, {k: 2}, lambda i: {r: i}), "none for \\[c\\]"),
        (lambda: jt.reindex(t, {k: 2}, lambda i: {k: i}), "got one for k"),
        (lambda: jt.reindex(t, (3, 4), lambda i, j: (i, j)), "out={dim: size"),
        (lambda: jt.broadcast(t, {k: 2, r: 3}), "a shape that x broadcasts to"),
        (lambda: jt.broadcast(t, {r: 4, c: 4}), "a shape that x broadcasts to"),
        (lambda: jt.transpose(t, r), "each of 2 axes once"),
        (lambda: jt.broadcast(t, [[r], [c, r]]), "an IndexSet, or dims of x"),
    ):
        with pytest.raises((TileShapeError, TileTypeError), match=sentence):
            call()


@pytest.mark.parametrize(
    "far", [2**40, -(2**40), np.int64(2**32), np.uint32(2**32 - 1)]
)
def test_a_constant_coordinate_far_outside_does_not_wrap(far):
    got = jt.reindex(V, 2, lambda i: far, fill=9)
    np.testing.assert_array_equal(got, [9, 9])
    with pytest.raises(TileValueError, match="coordinates in"):
        jt.reindex(V, 2, lambda i: far)


@pytest.mark.parametrize("distance", [8, 2**31, 2**40 + 1, 10**30])
def test_partners_beyond_any_axis_are_the_fill(distance):
    got = jt.butterfly(np.arange(8), 0, distance, fill=-1)
    np.testing.assert_array_equal(got, np.full(8, -1))
    with pytest.raises(TileValueError, match="coordinates in"):
        jt.butterfly(np.arange(8), 0, distance)
    assert jt.butterfly(np.arange(0), 0, distance).shape == (0,)


def _two(i):
    return jnp.arange(2) + i


def _prints(i):
    jax.debug.print("{}", i)
    return i


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: jt.reindex(V, 3, 5), TileTypeError, "f, a function of coord"),
        (lambda: jt.reindex(V, -3, lambda i: i), TileShapeError, r"sizes in \[0, 2"),
        (
            lambda: jt.reindex(V, 1.5, lambda i: i),
            TileTypeError,
            "sizes that are integ",
        ),
        (lambda: jt.reindex(V, 3, lambda i, j: i), TileTypeError, "f to take 1 coord"),
        (
            lambda: jt.reindex(X, 3, lambda i: i),
            TileTypeError,
            "f to give 2 coord.*got 1",
        ),
        (lambda: jt.reindex(V, 3, lambda i: i / 2), TileTypeError, "got float32"),
        (lambda: jt.reindex(V, 3, lambda i: i > 1), TileTypeError, "got bool"),
        (lambda: jt.reindex(V, 3, lambda i: "a"), TileTypeError, "got 'a'"),
        (
            lambda: jt.reindex(V, 3, lambda i: jnp.arange(2) + i),
            TileTypeError,
            "int32\\[2\\]",
        ),
        (
            lambda: jt.reindex(V, 3, lambda i: jax.debug.print("{}", i) or i),
            TileTypeError,
            "side",
        ),
        (
            lambda: jt.reindex(V, 3, lambda i: i, fill=V),
            TileTypeError,
            "a fill that is a",
        ),
        (lambda: jt.reindex(V, 3, lambda i: i, fill=0.5), TileTypeError, "int32 holds"),
        (lambda: jt.shift(V, 0, 1.5), TileTypeError, "distance that is an integer"),
        (lambda: jt.broadcast(1, 2**70), TileShapeError, r"sizes in \[0, 2"),
        (lambda: jt.butterfly(V[:2], 0, 1, fill="x"), TileTypeError, "fill|str"),
        (lambda: jt.butterfly(V, 0, -1), TileValueError, "distance of at least 0"),
        (lambda: jt.flip(X, (0, 0)), TileShapeError, "each axis once"),
        (
            lambda: jt.broadcast(X, (3, 5)),
            TileShapeError,
            "broadcasts to; got \\(3, 5\\)",
        ),
        (lambda: jt.transpose(X, (0, 0)), TileShapeError, "each of 2 axes once"),
    ],
)
def test_refusals(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()
