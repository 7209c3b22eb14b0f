"""Kernels in shard_map, and on sharded operands under jit, on eight CPU devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile as jt
from jaxtile import _kernels, _recurrence

_TALK = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all")
_KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
_NAMES = (None, "reference", "interpret")
RNG = np.random.default_rng(31)
NONE, ROWS = P(), P("rows")


def _f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@jt.kernel(out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype))
def gemm(nest, a, b, c, *, block=4):
    m, n = nest.parallel(a.shape[0], block), nest.parallel(b.shape[1], block)

    @nest.pipeline(a.shape[1], block, init=nest.zeros((m, n), jnp.float32))
    def acc(k, acc):
        return jt.mma(a.tile(m, k).load(), b.tile(k, n).load(), acc)

    c.tile(m, n).store(acc)


@jt.kernel(out=lambda x: (x, jax.ShapeDtypeStruct((x.shape[1], x.shape[0]), jnp.int32)))
def placed(nest, x, y, places):
    r, c = nest.parallel(x.shape[0], 2), nest.parallel(x.shape[1], 4)
    y.tile(r, c).store(x.tile(r, c).load() * 2.0)
    at = nest.coordinates(r) * 100 + nest.full((c, r), 0, jnp.int32)
    places.tile(c, r).store(at + nest.coordinates(c))


def _doubled(x):
    at = np.arange(x.shape[0]) * 100 + np.arange(x.shape[1])[:, None]
    return 2 * x, at.astype(np.int32)


def _decayed(x, decay, gate, rate):
    """The recurrence in NumPy, one step after the other."""
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    log_a = -8 * np.log1p(np.exp(rate)) * sigmoid(decay)
    drive = np.sqrt(1 - np.exp(2 * log_a)) * sigmoid(gate) * x
    h, out = np.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = np.exp(log_a[:, t]) * h + drive[:, t]
        out.append(h)
    return np.stack(out, 1)


# (kernel, its operands, how each is sharded, NumPy's answer)
CALLS = {
    "softmax": (
        lambda x, **kw: _kernels.softmax(x, **kw),
        [_f32(16, 12)],
        [ROWS],
        lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True),
    ),
    "gemm": (
        lambda a, b, **kw: gemm(a, b, **kw),
        [_f32(16, 24), _f32(24, 8)],
        [ROWS, NONE],
        lambda a, b: a @ b,
    ),
    "recurrence": (
        lambda *v, **kw: _recurrence.recurrence(*v, block=4, lanes=4, **kw),
        [_f32(8, 6, 10), _f32(8, 6, 10), _f32(8, 6, 10), _f32(10)],
        [ROWS, ROWS, ROWS, NONE],
        _decayed,
    ),
}

each_name = pytest.mark.parametrize("name", _NAMES)
each_call = pytest.mark.parametrize("call", CALLS)


@pytest.fixture(params=_KINDS)
def mesh(request):
    """A mesh of 4 by 2 devices, in use."""
    kind = _KINDS[request.param]
    mesh = jax.make_mesh((4, 2), ("rows", "cols"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        yield mesh


def _put(mesh, arrays, specs):
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in pairs]


def _close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def _gradient(fn, count):
    def loss(*args):
        return jnp.sum(jnp.sin(fn(*args)))

    return jax.grad(loss, tuple(range(count)))


def _differentiates(call, name):
    """All but the copies of what takes longest to compile."""
    return call != "recurrence" or name is None


@functools.cache
def _slope_alone(call):
    """The gradient on one device."""
    fn, arrays, _, _ = CALLS[call]
    alone = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(alone):
        slope = jax.jit(_gradient(lambda *v: fn(*v), len(arrays)))
        return jax.tree.map(np.asarray, slope(*arrays))


@each_name
@each_call
def test_sharded_operands_under_jit(mesh, call, name):
    fn, arrays, specs, want = CALLS[call]
    args = _put(mesh, arrays, specs)
    run = jax.jit(lambda *v: fn(*v, implementation=name))
    got = run(*args)
    _close(got, want(*arrays))
    if name != "interpret":
        text = run.lower(*args).compile().as_text()
        assert not _TALK.search(text), set(_TALK.findall(text))
        assert got.sharding.spec[0] == "rows"
    if _differentiates(call, name):
        slope = _gradient(lambda *v: fn(*v, implementation=name), len(arrays))
        _close(jax.jit(slope)(*args), _slope_alone(call))


@each_name
@each_call
def test_kernels_in_shard_map(mesh, call, name):
    fn, arrays, specs, want = CALLS[call]
    args = _put(mesh, arrays, specs)
    run = lambda *v: fn(*v, implementation=name)  # noqa: E731
    local = jax.shard_map(run, in_specs=tuple(specs), out_specs=ROWS, check_vma=True)
    found = jax.jit(local)
    _close(found(*args), want(*arrays))
    text = found.lower(*args).compile().as_text()
    assert not _TALK.search(text), set(_TALK.findall(text))
    if not _differentiates(call, name):
        return
    _close(jax.jit(_gradient(local, len(arrays)))(*args), _slope_alone(call))
    inside = jax.shard_map(
        _gradient(run, len(arrays)), in_specs=tuple(specs), out_specs=tuple(specs)
    )
    _close(jax.jit(inside)(*args), _slope_alone(call))


@each_name
def test_coordinates_are_those_of_the_whole_array_under_jit(mesh, name):
    x = _f32(16, 12)
    for spec in (P("rows"), P("rows", "cols"), P(None, "rows"), P(("cols", "rows"))):
        run = jax.jit(lambda v: placed(v, implementation=name))
        got = run(*_put(mesh, [x], [spec]))
        _close(got, _doubled(x))
    if mesh.axis_types[0] is AxisType.Explicit:
        assert got[0].sharding.spec[0] == ("cols", "rows")
        assert got[1].sharding.spec[1] == ("cols", "rows")


@each_name
def test_coordinates_are_those_of_the_shard_in_shard_map(mesh, name):
    x = _f32(16, 12)
    run = lambda v: placed(v, implementation=name)[1]  # noqa: E731
    local = jax.shard_map(run, in_specs=ROWS, out_specs=P(None, "rows"))
    got = jax.jit(local)(*_put(mesh, [x], [ROWS]))
    np.testing.assert_array_equal(got, np.tile(_doubled(x[:4])[1], 4))


@each_name
def test_a_batch_in_shard_map(mesh, name):
    x = _f32(8, 3, 12)
    fn = jax.vmap(lambda v: _kernels.softmax(v, implementation=name))
    local = jax.shard_map(fn, in_specs=ROWS, out_specs=ROWS)
    want = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    _close(jax.jit(local)(*_put(mesh, [x], [ROWS])), want)
    _close(jax.jit(fn)(*_put(mesh, [x], [ROWS])), want)


@each_name
def test_a_derivative_of_the_authors(mesh, name):
    @jt.kernel(out=lambda x, w: x)
    def scaled(nest, x, w, y):
        r, c = nest.parallel(x.shape[0], 2), jt.Dim("c")
        y.tile(r, c).store(x.tile(r, c).load() * w.tile(c).load())

    @jt.kernel(out=lambda x, w, dy: (x, w))
    def back(nest, x, w, dy, dx, dw):
        c, r = nest.parallel(x.shape[1], 4), jt.Dim("r")
        up = dy.tile(r, c).load()
        dx.tile(r, c).store(up * w.tile(c).load())
        dw.tile(c).store(jt.reduce(up * x.tile(r, c).load(), r, jt.add))

    scaled.defvjp(lambda x, w: (scaled(x, w), (x, w)), back)
    x, w = _f32(16, 12), _f32(12)
    run = lambda x, w: scaled(x, w, implementation=name)  # noqa: E731
    want = np.cos(x * w) * w, (np.cos(x * w) * x).sum(0)
    args = _put(mesh, [x, w], [ROWS, NONE])
    _close(jax.jit(_gradient(run, 2))(*args), want)
    local = jax.shard_map(run, in_specs=(ROWS, NONE), out_specs=ROWS)
    _close(jax.jit(_gradient(local, 2))(*args), want)


def test_constants_are_computed_in_shard_map(mesh):
    """The derivative of 2x is known while tracing, where no device computes it."""

    def local(x):
        return jnp.sum(jt.exp(jt.map(lambda v: v + v, x)) + jt.sin(-x))

    run = jax.shard_map(jax.grad(local), in_specs=ROWS, out_specs=ROWS)
    x = _f32(16)
    want = 2 * np.exp(2 * x) - np.cos(x)
    _close(jax.jit(run)(*_put(mesh, [x], [ROWS])), want)


def test_coordinates_are_known_in_shard_map():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    x = _f32(16)
    square = lambda v: jt.reindex(v, (2,), lambda i: (i * i,))  # noqa: E731
    with jax.set_mesh(mesh):
        run = jax.shard_map(square, in_specs=ROWS, out_specs=ROWS)
        got = jax.jit(run)(*_put(mesh, [x], [ROWS]))
    np.testing.assert_array_equal(got, x.reshape(4, 4)[:, :2].ravel())


def test_attention_and_its_derivative_on_a_mesh(mesh):
    arrays = [_f32(4, 2, 6, 4), _f32(4, 1, 9, 4), _f32(4, 1, 9, 4)]

    def plain(q, k, v):
        s = jnp.einsum("bhqd,bgkd->bhqk", q, k) / 2.0
        seen = jnp.tril(jnp.ones(s.shape[2:], bool), 3)
        return jnp.einsum(
            "bhqk,bgkd->bhqd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf)), v
        )

    call = functools.partial(jt.nn.attention, causal=True, block=4)
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))):
        want = jax.jit(_gradient(plain, 3))(*arrays)
        want = jax.tree.map(np.asarray, want)
    args = _put(mesh, arrays, [ROWS] * 3)
    local = jax.shard_map(call, in_specs=(ROWS,) * 3, out_specs=ROWS)
    for run in (call, local):
        _close(jax.jit(_gradient(run, 3))(*args), want)
