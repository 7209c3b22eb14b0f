"""reduce, scan and cast on meshes of eight CPU devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile as jt
from jaxtile.errors import TileShapeError
from oracle import same_bits

_TALK = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all")
_KINDS = [AxisType.Explicit, AxisType.Auto]
_X = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
_MASK = np.random.default_rng(1).random((16, 24)) < 0.7


def _mesh(kind):
    return jax.make_mesh((4, 2), ("rows", "cols"), axis_types=(kind, kind))


@pytest.fixture(params=_KINDS, ids=["explicit", "auto"])
def mesh(request):
    """A mesh of 4 by 2 devices, in use."""
    mesh = _mesh(request.param)
    with jax.set_mesh(mesh):
        yield mesh


def _put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


_CALLS = {
    "reduce-add": lambda x: jt.reduce(x, 1, jt.add),
    "reduce-fixed": lambda x: jt.reduce(x, 1, jt.add, policy="fixed_tree"),
    "reduce-fold": lambda x: jt.reduce(x, 1, jt.multiply, policy="fold_left"),
    "reduce-argmax": lambda x: jt.reduce(x, 1, jt.argmax),
    "reduce-welford": lambda x: jt.reduce(x, 1, jt.welford, policy="fixed_tree"),
    "scan-add": lambda x: jt.scan(x, 1, jt.add),
    "scan-fixed": lambda x: jt.scan(x, 1, jt.add, policy="fixed_tree"),
    "scan-max": lambda x: jt.scan(x, 1, jt.maximum, direction="suffix"),
    "scan-final": lambda x: jt.scan(x, 1, jt.add, return_final=True),
    "recurrence": lambda x: jt.linear_recurrence(x, x, 1),
    "cast": lambda x: jt.cast(x, jnp.bfloat16),
    "quantize": lambda x: jt.quantize(x, "int8"),
    "decode": lambda x: jt.quantize(x, "float8_e4m3fn", out_dtype=jnp.float32),
    "blocks": lambda x: jt.decode_blocks(*jt.quantize_blocks(x, "float4_e2m1fn", 8)),
    "masked": lambda x: jt.reduce(x, 1, jt.add, where=x > 0, policy="fixed_tree"),
    "sort": lambda x: jt.sort(x, 1, x, return_indices=True),
    "argsort": lambda x: jt.argsort(x, 1),
    "topk": lambda x: jt.topk(x, 1, 2),
    "seeded": lambda x: jt.scan(x, 1, jt.add, init=x[:, 0], policy="fixed_tree"),
}


@functools.cache
def _want(name):
    return jax.tree.map(np.asarray, jax.jit(_CALLS[name])(_X))


@pytest.mark.parametrize("name", _CALLS)
def test_a_sharded_batch_costs_no_communication(mesh, name):
    x = _put(mesh, _X, "rows", None)
    run = jax.jit(_CALLS[name])
    text = run.lower(x).compile().as_text()
    assert not _TALK.search(text), sorted(set(_TALK.findall(text)))
    for got, want in zip(
        jax.tree.leaves(run(x)), jax.tree.leaves(_want(name)), strict=True
    ):
        if name in ("reduce-add", "scan-add", "scan-final", "recurrence"):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        else:
            same_bits(got, want)
        if np.ptp(got) == 0:
            continue  # the compiler may hold a constant, such as a count, everywhere
        assert got.sharding.spec[0] == "rows"
        assert got.sharding.shard_shape(got.shape)[0] == 4


@pytest.mark.parametrize("name", ["reduce-fixed", "scan-fixed", "cast"])
def test_explicit_types_carry_the_sharding(name):
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = _put(mesh, _X, "rows", None)
        shapes = jax.eval_shape(_CALLS[name], x)
        assert shapes.sharding.spec[0] == "rows"
        eager = _CALLS[name](x)
        assert jax.typeof(eager).sharding.spec[0] == "rows"


@pytest.mark.parametrize(
    "name", ["reduce-fixed", "scan-fixed", "recurrence", "sort", "topk"]
)
def test_gradients_carry_the_sharding(mesh, name):
    x = _put(mesh, _X, "rows", None)

    def loss(x):
        return sum(jnp.sum(v * v) for v in jax.tree.leaves(_CALLS[name](x)))

    got = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(got, jax.grad(loss)(_X), rtol=1e-4, atol=1e-4)
    assert got.sharding.spec[0] == "rows"


@pytest.mark.parametrize("name", [n for n in _CALLS if n != "cast"])
def test_a_sharded_axis_on_an_auto_mesh(name):
    mesh = _mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        got = jax.jit(_CALLS[name])(_put(mesh, _X, None, "rows"))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(_want(name)), strict=True):
        if name in ("reduce-add", "scan-add", "scan-final", "recurrence"):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
        else:
            same_bits(g, w)


@pytest.mark.parametrize("op", [jt.reduce, jt.scan])
@pytest.mark.parametrize("jit", [False, True])
def test_a_sharded_axis_on_an_explicit_mesh(op, jit):
    mesh = _mesh(AxisType.Explicit)
    run = lambda x: op(x, 1, jt.add)  # noqa: E731
    with jax.set_mesh(mesh):
        x = _put(mesh, _X, "rows", "cols")
        sentence = f"{op.__name__}: expected axes \\(1,\\) not sharded; got sharding.*"
        with pytest.raises(TileShapeError, match=sentence + "Reshard that axis first"):
            (jax.jit(run) if jit else run)(x)
        run(jax.sharding.reshard(x, P("rows", None)))


@pytest.mark.parametrize("name", _CALLS)
def test_shard_map_checks_varying_axes(mesh, name):
    call = jax.shard_map(
        _CALLS[name], in_specs=P("rows"), out_specs=P("rows"), check_vma=True
    )
    got = jax.jit(call)(_put(mesh, _X, "rows", None))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(_want(name)), strict=True):
        np.testing.assert_allclose(
            g.astype(np.float32), w.astype(np.float32), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", ["reduce-fixed", "scan-max", "recurrence", "masked"])
def test_gradients_inside_shard_map(mesh, name):
    def loss(x):
        return sum(jnp.sum(v * v) for v in jax.tree.leaves(_CALLS[name](x)))

    call = jax.shard_map(
        jax.grad(loss), in_specs=P("rows"), out_specs=P("rows"), check_vma=True
    )
    got = jax.jit(call)(_put(mesh, _X, "rows", None))
    np.testing.assert_allclose(got, jax.grad(loss)(_X), rtol=1e-4, atol=1e-4)


def _squares(i, j):
    return i, (j * j) % 4


def _square_by_a_loop(i, j):
    return i, jax.lax.fori_loop(0, 1, lambda _, c: (c * c) % 4, j)


@pytest.mark.parametrize("f", [_squares, _square_by_a_loop])
@pytest.mark.parametrize("fill", [None, 7.0])
def test_coordinates_that_are_not_affine_inside_shard_map(mesh, f, fill):
    def local(x):
        return jt.reindex(x, x.shape, f, fill)

    call = jax.shard_map(local, in_specs=P("rows"), out_specs=P("rows"))
    got = jax.jit(call)(_put(mesh, _X, "rows", None))
    np.testing.assert_array_equal(got, _X[:, np.arange(_X.shape[1]) ** 2 % 4])


def test_constants_of_a_derivative_vary_as_its_operands(mesh):
    def loss(x):
        m = jt.segment_reduce(x, jnp.arange(x.shape[1]) % 2, 2, jt.welford, axis=1)
        f = jt.segment_reduce(
            x, jnp.arange(x.shape[1]) % 2, 2, jt.welford, axis=1, policy="fold_left"
        )
        return jnp.sum(m.m2 + f.m2)

    call = jax.shard_map(jax.grad(loss), in_specs=P("rows"), out_specs=P("rows"))
    got = jax.jit(call)(_put(mesh, _X, "rows", None))
    want = 0 * _X
    for k in range(2):
        part = _X[:, k::2]
        want[:, k::2] = 4 * (part - part.mean(1, keepdims=True))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_shard_map_of_mixed_varying_operands(mesh):
    def local(x, seed):
        total = jt.reduce(x, 1, jt.add, init=seed, where=_MASK[0])
        return total, jt.scan(x, 1, jt.add, init=seed)

    call = jax.shard_map(
        local, in_specs=(P("rows"), P()), out_specs=P("rows"), check_vma=True
    )
    total, prefixes = jax.jit(call)(_put(mesh, _X, "rows", None), jnp.float32(1))
    np.testing.assert_allclose(
        total, 1 + _X.sum(1, where=_MASK[0]), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(prefixes, 1 + _X.cumsum(1), rtol=1e-5, atol=1e-5)


def test_combining_across_devices_in_shard_map(mesh):
    def local(x):
        parts = jax.lax.all_gather(jt.reduce(x, 1, jt.add), "rows", axis=1)
        return jt.reduce(parts, 1, jt.add, policy="fold_left")

    call = jax.shard_map(
        local, in_specs=P(None, "rows"), out_specs=P(), check_vma=False
    )
    got = jax.jit(call)(_put(mesh, _X, None, "rows"))
    np.testing.assert_allclose(got, _X.sum(1), rtol=1e-5, atol=1e-5)


def test_vmap_over_a_sharded_batch(mesh):
    x = _put(mesh, _X, "rows", None)
    run = jax.jit(jax.vmap(lambda row: jt.scan(row, 0, jt.add, policy="fixed_tree")))
    text = run.lower(x).compile().as_text()
    assert not _TALK.search(text)
    same_bits(run(x), _want("scan-fixed"))
