"""Loops of a kernel that go backwards, and that visit some of their blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
import targets
from jaxtile.errors import TileShapeError, TileTypeError

RNG = np.random.default_rng(29)
X = jnp.asarray(RNG.standard_normal((5, 13)), jnp.float32)
NAMES = ("reference", "interpret")


@jt.kernel(out=lambda x: (x, jax.ShapeDtypeStruct(x.shape[:1], x.dtype)))
def suffixes(nest, x, y, first, *, kind="serial", block=4):
    """1 + x[t] + (1 + x[t + 1] + ...) / 2, and the one at t = 0."""
    r = nest.parallel(x.shape[0], x.shape[0])
    loop = getattr(nest, kind)

    @loop(x.shape[1], block, init=nest.zeros(r, jnp.float32), reverse=True)
    def _(t, s):
        halves = jt.scan(
            (nest.full((r, t), 0.5, jnp.float32), x.tile(r, t).load() + 1.0),
            t.dim,
            jt.affine,
            init=(1.0, s),
            direction="reverse",
            return_final=True,
        )
        y.tile(r, t).store(halves[0])
        first.tile(r).store(halves[1][1])
        return halves[1][1]


@pytest.mark.parametrize("kind", ["serial", "pipeline"])
@pytest.mark.parametrize("block", [4, 13, 16])
@pytest.mark.parametrize("name", [*NAMES, "tpu"])
def test_last_to_first(name, kind, block, monkeypatch):
    interpreted = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr("jaxtile.kernels.blocks.pl.pallas_call", interpreted)
    anywhere = "jaxtile.pallas_lowering._choice.elsewhere"
    monkeypatch.setattr(anywhere, lambda name, platform: None)
    want, s = np.zeros(X.shape), np.zeros(5)
    for t in reversed(range(13)):
        s = 1.0 + np.asarray(X, np.float64)[:, t] + 0.5 * s
        want[:, t] = s
    got, first = suffixes(X, kind=kind, block=block, implementation=name)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(first, got[:, 0])


def test_derivative_of_a_loop_backwards():
    weights = jnp.arange(13.0)
    grad = jax.grad(lambda x: jnp.sum(suffixes(x)[0] * weights))(X)
    want = np.zeros(13)
    for t in range(13):
        want[t] = t + (0.5 * want[t - 1] if t else 0.0)
    np.testing.assert_allclose(grad, np.broadcast_to(want, X.shape), rtol=1e-6)


def _bounded(nest, x, low, high, y, seen, *, kind, block, options):
    r = nest.parallel(x.shape[0])
    loop = functools.partial(getattr(nest, kind), **dict(options))
    size = block or 1

    @loop(x.shape[1], block, init=(0.0, 0), start=low.at(r), stop=high.tile(r).load())
    def state(t, s):
        there = x.tile(r, t).load()
        total = jt.reduce(there, t.dim, jt.add) if block else there
        return s[0] + total, s[1] + size

    y.tile(r).store(state[0])
    seen.tile(r).store(state[1])


_ROWS = jax.ShapeDtypeStruct((5,), jnp.float32)
bounded = jt.kernel(out=(_ROWS, jax.ShapeDtypeStruct((5,), jnp.int32)))(_bounded)
LOW = np.array([0, 3, -2, 7, 9], np.int32)
HIGH = np.array([13, 5, 40, 7, 2], np.int32)
_LOOPS = {
    "serial": ("serial", ()),
    "pipeline backwards": ("pipeline", (("reverse", True),)),
    "any order": ("reduce", ()),
    "fold_right": ("reduce", (("policy", "fold_right"),)),
}


@pytest.mark.parametrize("block", [None, 4, 16])
@pytest.mark.parametrize("loop", _LOOPS)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_outside_are_not_visited(name, loop, block):
    kind, options = _LOOPS[loop]
    call = functools.partial(bounded, kind=kind, block=block, options=options)
    got, seen = call(X, LOW, HIGH, implementation=name)
    size, want, count = block or 1, np.zeros(5), np.zeros(5, int)
    for r in range(5):
        for t in range(0, 13, size):
            if any(LOW[r] <= c < HIGH[r] for c in range(t, t + size)):
                want[r] += np.asarray(X, np.float64)[r, t : t + size].sum()
                count[r] += size
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(seen, count)


def test_derivatives_see_the_blocks_that_were_visited():
    call = functools.partial(bounded, kind="serial", block=4, options=())
    grad = jax.grad(lambda x: jnp.sum(call(x, LOW, HIGH)[0]))(X)
    want = np.zeros(X.shape)
    for r in range(5):
        for t in range(0, 13, 4):
            if any(LOW[r] <= c < HIGH[r] for c in range(t, t + 4)):
                want[r, t : t + 4] = 1.0
    np.testing.assert_array_equal(grad, want)


@jt.kernel(out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32))
def triangle(nest, a, b, y, *, policy="unordered_tree", block=16):
    """The product of a lower triangle of blocks."""
    m, n = nest.parallel(a.shape[0], block), nest.parallel(b.shape[1], block)
    start, stop = nest.zeros((m, n), jnp.float32), m.start + block

    @nest.reduce(a.shape[1], block, init=start, policy=policy, stop=stop)
    def acc(k, acc):
        return jt.mma(a.tile(m, k).load(), b.tile(k, n).load(), acc)

    y.tile(m, n).store(acc)


@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree", "fold_left"])
def test_products_up_to_a_diagonal(policy):
    a, b = (jnp.asarray(RNG.standard_normal((48, 48)), jnp.float32) for _ in range(2))
    kept = np.kron(np.tril(np.ones((3, 3))), np.ones((16, 16)))
    want = (np.asarray(a, np.float64) * kept) @ np.asarray(b, np.float64)
    for name in NAMES if policy != "fixed_tree" else NAMES[:1]:
        got = triangle(a, b, policy=policy, implementation=name)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def _trips(kernel, *args, **config):
    """How often the loops of an instance run that the Triton form lowers to."""
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in args]
    call = functools.partial(kernel, implementation="triton", **config)
    with targets.mesh("NVIDIA H200", 132, "gpu"):
        jaxpr = jax.make_jaxpr(call)(*shapes)
        targets.lowered(call, shapes, "cuda")
    text = str(jaxpr)
    return text.count(" while["), text.count(" scan[")


def test_triton_visits_no_other_block():
    a = jnp.zeros((48, 48), jnp.bfloat16)
    assert _trips(triangle, a, a) == (1, 0)
    config = {"block": 4, "kind": "serial"}
    for options in ((), (("reverse", True),)):
        found = _trips(bounded, X, LOW, HIGH, options=options, **config)
        assert found == (1, 0)
    assert _trips(suffixes, X) == (0, 1)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"stop": 2.0},
            TileTypeError,
            "nest.serial: expected start and stop coord.*2.0",
        ),
        ({"start": LOW}, TileTypeError, "integers or traced ones; got"),
        ({"reverse": 1}, TileTypeError, "reverse to be True or False; got 1"),
        (
            {"stop": 3},
            TileShapeError,
            "without stores, where start or stop .*Store in a",
        ),
    ],
)
def test_bounds_that_do_not_fit(options, error, match):
    @jt.kernel(out=lambda x: x)
    def copied(nest, x, y):
        r = nest.parallel(x.shape[0])

        @nest.serial(x.shape[1], 4, **options)
        def _(t):
            y.tile(r, t).store(x.tile(r, t).load())

    with pytest.raises(error, match=match):
        copied(X)


def test_a_bounded_state_that_does_not_fit():
    @jt.kernel(out=_ROWS)
    def wrong(nest, x, y):
        r = nest.parallel(x.shape[0])

        @nest.serial(x.shape[1], init=0.0, stop=3)
        def total(t, s):
            return x.at(r, t), s

        y.tile(r).store(total)

    with pytest.raises(TileTypeError, match="a body that returns a state like init"):
        wrong(X)


@jt.kernel(out=lambda x: jax.ShapeDtypeStruct((), x.dtype))
def halving(nest, x, y, *, start, stop, reverse, reduces=False):
    loop = nest.reduce if reduces else nest.pipeline
    options = {} if reduces else {"reverse": reverse}

    @loop(x.shape[0], 4, init=0.0, start=start, stop=stop, **options)
    def state(i, s):
        return (s if reduces else s * 0.5) + jt.reduce(x.tile(i).load(), i.dim, jt.add)

    y.tile().store(state)


@pytest.mark.parametrize("name", ["reference", "interpret"])
@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_between_known_coordinates(name, reverse):
    x = np.arange(1.0, 11.0, dtype=np.float32)
    for start, stop in ((0, 10), (3, 5), (7, 7), (10, 10), (11, 50), (6, 5), (-3, 1)):
        first, end = np.clip([start, stop], 0, 10)
        seen = [
            k for k in range(0, 10, 4) if any(first <= c < end for c in range(k, k + 4))
        ]
        want = 0.0
        for k in reversed(seen) if reverse else seen:
            want = want * 0.5 + x[k : k + 4].sum()
        options = {"start": start, "stop": stop, "reverse": reverse}
        assert halving(x, implementation=name, **options) == want
        total = halving(x, implementation=name, **options, reduces=True)
        assert total == sum(x[k : k + 4].sum() for k in seen)
