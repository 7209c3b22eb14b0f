"""Whole-array kernels on meshes of eight CPU devices: each device its own shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile as jt
from fakes import Kernels
from jaxtile.errors import UnsupportedOnBackend
from oracle import same_bits

_TALK = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all")
_X = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
_KINDS = [AxisType.Explicit, AxisType.Auto]
_FIXED = {"policy": "fixed_tree"}
_CALLS = {
    "reduce": lambda x: jt.reduce(x, 1, jt.add, **_FIXED),
    "seeded": lambda x: jt.reduce(x, 1, jt.add, init=x[:, 0], where=x > 0, **_FIXED),
    "argmax": lambda x: jt.reduce(x, 1, jt.argmax),
    "welford": lambda x: jt.reduce(x, 1, jt.welford, **_FIXED),
    "scan": lambda x: jt.scan(x, 1, jt.add, init=x[:, 0], return_final=True, **_FIXED),
    "recurrence": lambda x: jt.linear_recurrence(x, x, 1, **_FIXED),
    "vmap": jax.vmap(lambda row: jt.scan(row, 0, jt.add, **_FIXED)),
    "grad": jax.grad(lambda x: jnp.sum(jt.scan(x, 1, jt.add, **_FIXED) ** 2)),
}


@pytest.fixture
def kernels(monkeypatch):
    """A fake backend that serves the CPU."""
    kernels = Kernels(monkeypatch)
    kernels.serve("cpu", "tpu")
    kernels.add("tpu")
    return kernels


def _mesh(kind):
    return jax.make_mesh((4, 2), ("rows", "cols"), axis_types=(kind, kind))


def _put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def _want(fn, x=_X):
    """What one device computes by the reference."""
    with jax.default_device(jax.devices()[0]), jt.use_implementation("reference"):
        return jax.jit(lambda x: fn(x))(x)


def _compiled(fn, x):
    compiled = jax.jit(lambda x: fn(x)).lower(x).compile()
    return compiled.as_text(), compiled(x)


def _same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("kind", _KINDS, ids=["explicit", "auto"])
@pytest.mark.parametrize("spec", ["rows", ("rows", "cols")], ids=["rows", "both"])
@pytest.mark.parametrize("name", _CALLS)
def test_each_device_runs_its_own_shard(kernels, name, spec, kind):
    mesh = _mesh(kind)
    want = _want(_CALLS[name])
    assert not kernels.ran
    shard = (16 // (4 if spec == "rows" else 8), 24)
    text, got = _compiled(_CALLS[name], _put(mesh, _X, spec))
    assert {shape for _, _, shape in kernels.ran} == {shard}
    assert not _TALK.search(text), sorted(set(_TALK.findall(text)))
    _same(got, want)
    leaves = [v for v in jax.tree.leaves(got) if np.ptp(v)]  # a count may be constant
    assert all(v.sharding.spec[0] == spec for v in leaves)


@pytest.mark.parametrize("kind", _KINDS, ids=["explicit", "auto"])
def test_a_mesh_that_only_the_context_knows(kernels, kind):
    with jax.set_mesh(_mesh(kind)):
        text, got = _compiled(
            lambda x: _CALLS["scan"](jnp.asarray(_X) + x), jnp.float32(0)
        )
    assert kernels.ran
    _same(got, _want(_CALLS["scan"]))


def test_a_batch_that_does_not_divide(kernels):
    mesh = _mesh(AxisType.Auto)

    def run(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("rows")))
        return _CALLS["reduce"](x)

    _, got = _compiled(run, _put(mesh, _X[:15]))
    assert (4, 24) in {shape for _, _, shape in kernels.ran}
    _same(got, _want(_CALLS["reduce"], _X[:15]))


@pytest.mark.parametrize("name", ["scan", "argmax", "welford", "recurrence"])
def test_a_sharded_axis_alone_is_gathered(kernels, name):
    """The batch stays where it is: a device holds its rows whole, not the array."""
    text, got = _compiled(_CALLS[name], _put(_mesh(AxisType.Auto), _X, "rows", "cols"))
    assert {shape for _, _, shape in kernels.ran} == {(4, 24)}
    assert "all-gather" in text
    _same(got, _want(_CALLS[name]))


_SHARED = {
    "tree": (1, {}),
    "ordered": (1, {"policy": "ordered_tree"}),
    "all": (None, {}),
    "seeded": (1, {"init": np.arange(16, dtype=np.int32)}),
    "masked": (1, {"where": np.arange(24) > 20}),  # three of four shards are empty
    "maximum": (1, {"reducer": jt.maximum}),
}


@pytest.mark.parametrize("spec", [(None, "rows"), ("rows", "cols")], ids=str)
@pytest.mark.parametrize("name", _SHARED)
def test_parts_of_a_reduced_axis_merge_their_states(kernels, name, spec):
    axis, params = _SHARED[name]
    params = {"reducer": jt.add, **params}
    x = (_X * 100).astype(np.int32)
    fn = lambda x: jt.reduce(x, axis, **params)  # noqa: E731
    text, got = _compiled(fn, _put(_mesh(AxisType.Auto), x, *spec))
    shard = (16, 6) if spec[0] is None else (4, 12)
    assert {shape for _, _, shape in kernels.ran} == {shard}
    assert not re.search(rf"all-gather[^=]*= s32\[{x.shape[0]},{x.shape[1]}\]", text)
    _same(got, _want(fn, x))


_CONCATENATE = jt.Reducer(  # of digits: not commutative
    lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1]),
    (0, 1),
    laws=jt.Laws(associative=True, commutative=False),
)


def test_states_merge_in_mesh_order_or_not_at_all(kernels):
    mesh = _mesh(AxisType.Auto)
    digits = np.arange(48, dtype=np.int32).reshape(2, 24) % 7 + 1

    def fn(x, axis):
        pair = (x, jnp.full_like(x, 3))
        return jt.reduce(pair, axis, _CONCATENATE, policy="ordered_tree")

    for axis, spec, shard in (
        (1, (None, ("cols", "rows")), (2, 3)),
        ((0, 1), ("cols", None), (1, 24)),
        ((0, 1), (None, "rows"), (2, 24)),  # parts of the last axis interleave
    ):
        del kernels.ran[:]
        run = lambda x, axis=axis: fn(x, axis)  # noqa: E731
        _, got = _compiled(run, _put(mesh, digits, *spec))
        assert {shape for _, _, shape in kernels.ran} == {shard}
        _same(got, _want(run, digits))


def test_a_reduced_axis_that_does_not_divide_is_gathered(kernels):
    mesh = _mesh(AxisType.Auto)

    def run(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "rows")))
        return jt.reduce(x, 1, jt.add)

    x = (_X[:, :22] * 100).astype(np.int32)
    _, got = _compiled(run, _put(mesh, x))
    assert (16, 22) in {shape for _, _, shape in kernels.ran}
    _same(got, _want(run, x))


@pytest.mark.parametrize("kind", _KINDS, ids=["explicit", "auto"])
def test_in_shard_map_the_kernel_runs_as_it_is(kernels, kind):
    mesh = _mesh(kind)
    insist = lambda x: jt.reduce(x, 1, jt.add, implementation="tpu", **_FIXED)  # noqa: E731
    local = jax.shard_map(insist, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    lowered = jax.jit(local).lower(_put(mesh, _X, "rows"))
    assert kernels.ran == [("tpu", "tile_reduce", (4, 24))]
    assert "CustomSPMDPartitioning" not in lowered.as_text()
    _same(lowered.compile()(_put(mesh, _X, "rows")), _want(_CALLS["reduce"]))


def test_one_device_needs_no_partitioning(kernels):
    lowered = jax.jit(lambda x: _CALLS["reduce"](x)).lower(_X)
    assert kernels.ran
    assert "CustomSPMDPartitioning" not in lowered.as_text()


def test_a_shard_that_is_refused_falls_to_the_reference_or_raises(kernels):
    few = lambda *avals, **params: "few" if avals[0].shape[0] < 16 else None  # noqa: E731
    kernels.add("tpu", refuse=few)
    x = _put(_mesh(AxisType.Auto), _X, "rows")
    _, got = _compiled(_CALLS["reduce"], x)
    assert not kernels.ran
    _same(got, _want(_CALLS["reduce"]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="implementation='tpu': few"):
        _compiled(lambda x: jt.reduce(x, 1, jt.add, implementation="tpu"), x)


_MISPLACED = {
    "partly manual": "some mesh axes are manual",
    "no mesh in sight": "the mesh is not known",
    "exported": "exported module",
}


@pytest.mark.parametrize("where", _MISPLACED)
def test_where_no_kernel_can_run(kernels, where):
    mesh = _mesh(AxisType.Auto)
    x = _put(mesh, _X, "rows")

    def run(name):
        fn = lambda x: jt.reduce(x, 1, jt.add, implementation=name, **_FIXED)  # noqa: E731
        if where == "partly manual":
            params = dict(mesh=mesh, axis_names={"rows"})
            local = jax.shard_map(fn, in_specs=P("rows"), out_specs=P("rows"), **params)
            return jax.jit(local)(x)
        if where == "no mesh in sight":
            return jax.jit(fn, in_shardings=x.sharding)(_X)
        return export.export(jax.jit(fn))(x).call(x)

    with kernels.expect():
        _same(run(None), _want(_CALLS["reduce"]))
    with pytest.raises(UnsupportedOnBackend, match=_MISPLACED[where]):
        run("tpu")
