"""Exchange in kernels: the rules in plain jax, what lowers, what is refused."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxtile as jt
import targets
from jaxtile import _coordinates
from jaxtile.errors import TileShapeError, UnsupportedOnBackend
from jaxtile.pallas_lowering import NAMES, _exchange, load_all
from jaxtile.primitives import gather_p, reindex_p, scatter_p
from oracle import same_bits
from rules import through

load_all()
RULES = {
    gather_p: _exchange.gather_values,
    reindex_p: _exchange.reindex_values,
    scatter_p: _exchange.scatter_values,
}
CODES = np.random.default_rng(0).integers(0, 2**32, (8, 16), np.uint32)
X = CODES.view(np.float32)  # every kind of NaN
Y = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)


def _places(*shape):
    return np.random.default_rng(2).integers(-2, 18, shape).astype(np.int32)


CALLS = {
    "gather rows": (lambda x, i: jt.gather(x, i, 0, 7.0), (X, _places(4))),
    "gather lanes": (lambda x, i: jt.gather(x, i, 1), (X, _places(4))),
    "gather all": (lambda x, i: jt.gather(x, i, 1, batch="all"), (X, _places(8, 16))),
    "gather column": (lambda x, i: jt.gather(x, i, 1, batch="all"), (X, _places(8, 1))),
    "gather along 0": (
        lambda x, i: jt.gather(x, i, 0, batch="all"),
        (X, _places(4, 16)),
    ),
    "gather 2-d": (lambda x, i: jt.gather(x, i, 0), (X, _places(2, 2))),
    "transpose": (jt.transpose, (X,)),
    "flip": (jt.flip, (X,)),
    "shift": (lambda x: jt.shift(x, 1, 3, -1.0), (X,)),
    "constant": (lambda x: jt.reindex(x, (4, 16), lambda i, j: (2, j)), (X,)),
    "stride": (lambda x: jt.reindex(x, (4, 8), lambda i, j: (2 * i, 15 - j * 2)), (X,)),
    "broadcast": (lambda x: jt.broadcast(x, (2, 8, 16)), (X,)),
    "chain": (lambda x: jt.shift(jt.flip(jt.shift(x, 0, 1, 2.0)), 1, -2, 3.0), (X,)),
    "scatter": (lambda x, i: jt.scatter(x, i, 0, 4, jt.maximum), (Y, _places(8))),
    "scatter left": (
        lambda x, i, z: jt.scatter(x, i, 1, 4, jt.add, init=z, policy="fold_left"),
        (Y, _places(16), Y[:, :4]),
    ),
    "scatter all": (
        lambda x, i: jt.scatter(
            x, i, 1, 4, jt.multiply, batch="all", policy="fold_right"
        ),
        (Y, _places(8, 16)),
    ),
    "scatter argmax": (lambda x, i: jt.scatter(x, i, 0, 4, jt.argmax), (Y, _places(8))),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_rule_gives_the_references_bits(name):
    call, args = CALLS[name]
    got = through(RULES, call, *args)
    for g, w in zip(got, jax.tree.leaves(jax.jit(call)(*args)), strict=True):
        same_bits(g, w)
        if g.dtype == np.float32 and args[0] is X:
            bits = [np.asarray(v).view(np.uint32) for v in (g, w)]
            np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("name", CALLS)
def test_interpret_mode_gives_the_references_bits(name):
    call, args = CALLS[name]
    got = targets.interpreted(call, {}, *args)
    for g, w in zip(got, jax.tree.leaves(call(*args)), strict=True):
        same_bits(g, w)


def test_explain_counts_what_is_read():
    i = targets.spec((2,), "int32")
    big = targets.spec((1000, 16))
    (entry,) = jt.explain(lambda x, i: jt.gather(x, i, 0))(big, i)
    assert (entry.op, entry.implementation) == ("gather", "reference")
    assert entry.bytes == 2 * (2 * 16 * 4) + 2 * 4 + 4


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "bfloat16", "int32"])
def test_the_rule_moves_every_format(dtype):
    codes = np.random.default_rng(3).integers(0, 2, (4, 8)).astype(np.uint8)
    if dtype != "bool":
        width = 4 * np.dtype(jnp.dtype(dtype)).itemsize
        codes = np.random.default_rng(3).integers(0, 256, (4, 2 * width), np.uint8)
    x = codes.view(jnp.dtype(dtype))
    call = lambda x, i: jt.shift(jt.gather(x, i, 0), 1, 1)  # noqa: E731
    (got,) = through(RULES, call, x, np.array([3, -1, 0]))
    want = np.asarray(call(x, np.array([3, -1, 0])))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


def _body(call, count):
    def body(*refs):
        values = jax.tree.leaves(call(*(r[...] for r in refs[:count])))
        for ref, value in zip(refs[count:], values, strict=True):
            ref[...] = value

    return body


def _specs(values):
    return [targets.spec(v.shape, v.dtype) for v in values]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["triton", "tpu"])
def test_it_lowers(name, backend):
    call, args = CALLS[name]
    outs = _specs(jax.tree.leaves(jax.eval_shape(call, *args)))
    text = getattr(targets, backend)(_body(call, len(args)), outs, *_specs(args))
    assert text


COMPILED = [
    "gather rows",
    "gather column",
    "gather all",
    "shift",
    "chain",
    "scatter left",
]


@targets.needs_libtpu
@pytest.mark.parametrize("name", COMPILED)
def test_libtpu_compiles_it(name):
    call, args = CALLS[name]
    outs = _specs(jax.tree.leaves(jax.eval_shape(call, *args)))
    targets.compile_for_tpu(_body(call, len(args)), outs, *_specs(args))


@targets.needs_libtpu
@pytest.mark.parametrize(
    ("call", "x", "index"),
    [
        (lambda x, i: jt.gather(x, i, 1, batch="all"), (128, 1000), (128, 1)),
        (lambda x, i: jt.gather(x, i, 0), (256, 128), (32,)),
    ],
)
def test_c83_compiles_for_a_tpu(call, x, index):
    args = targets.spec(x), targets.spec(index, "int32")
    out = jax.eval_shape(call, *args)
    targets.compile_for_tpu(_body(call, 2), targets.spec(out.shape), *args)


@pytest.mark.parametrize(
    ("backend", "call", "args", "sentence"),
    [
        ("tpu", jt.flip, [((8, 128), "bfloat16")], "bfloat16 is half a word"),
        ("tpu", jt.flip, [((8, 128), "float16")], "float16 is not computed with"),
        ("triton", jt.flip, [((8, 128), "float8_e5m2")], "float8_e5m2 is not comp"),
        (
            "tpu",
            lambda x: jt.reindex(x, 8, lambda i: (i, i)),
            [((8, 8), "float32")],
            "one coordinate runs along two axes",
        ),
        (
            "tpu",
            lambda x, i: jt.scatter(x, i, 0, 4, jt.add, policy="fixed_tree"),
            [((8, 128), "float32"), ((8,), "int32")],
            "the tree of each target's own elements",
        ),
        ("mosaic_gpu", jt.flip, [((64, 128), "float32")], "registers of many threads"),
    ],
)
def test_refusals_in_kernels(backend, call, args, sentence):
    specs = [targets.spec(shape, jnp.dtype(d)) for shape, d in args]
    out = jax.eval_shape(call, *specs)
    lower = getattr(targets, backend)
    with pytest.raises(UnsupportedOnBackend, match=sentence):
        lower(_body(call, len(specs)), [targets.spec(out.shape, out.dtype)], *specs)


@pytest.mark.parametrize("backend", NAMES)
def test_supports_asks_the_same(backend):
    x = targets.spec((64, 128))
    answer = jt.supports("gather", backend, x, targets.spec((64,), "int32"), 0)
    assert bool(answer) is (backend != "mosaic_gpu")
    to = targets.spec((64,), "int32")
    fixed = jt.supports("scatter", backend, x, to, 0, 4, jt.add, policy="fixed_tree")
    assert not fixed
    for y, i in ((targets.spec((8, 100)), to), (x, targets.spec((3,), "int32"))):
        answer = jt.supports("gather", "triton", y, i, 0)
        assert "is not of powers of two" in answer.reason


def test_chains_are_forgotten_with_their_trace():
    call = lambda x: jt.flip(jt.shift(x, 0, 1))  # noqa: E731
    with jax.checking_leaks():
        jax.jit(call)(Y)
    jax.grad(lambda x: jnp.sum(call(x)))(Y)
    gc.collect()
    assert not _coordinates._MOVED


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(kind,))
    to = _places(16)
    calls = {
        "gather": lambda x: jt.gather(x, to, 1, 2.0),
        "shift": lambda x: jt.shift(x, 1, 3, 1.0),
        "add": lambda x: jt.scatter(x, to, 1, 4, jt.add, policy="fixed_tree"),
        "multiply": lambda x: jt.scatter(x, to, 1, 4, jt.multiply, policy="fold_left"),
    }
    for name, call in calls.items():
        loss = lambda x, call=call: jnp.sum(jnp.sin(call(x)))  # noqa: E731
        want, slope = call(Y), jax.grad(loss)(Y)
        with jax.set_mesh(mesh):
            rows = NamedSharding(mesh, PartitionSpec("a", None))
            x = jax.device_put(Y, rows)
            same_bits(jax.jit(call)(x), want)
            np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), slope, rtol=1e-5)
            columns = NamedSharding(mesh, PartitionSpec(None, "a"))
            x = jax.device_put(Y, columns)
            if kind is AxisType.Auto:
                same_bits(jax.jit(call)(x), want)
            else:
                with pytest.raises(TileShapeError, match="axes .* not sharded"):
                    jax.jit(call)(x)
        inside = jax.shard_map(
            call, mesh=mesh, in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a")
        )
        if kind is AxisType.Auto:
            same_bits(jax.jit(inside)(Y), want)
            got = jax.jit(jax.grad(lambda x, f=inside: jnp.sum(jnp.sin(f(x)))))(Y)
            np.testing.assert_allclose(got, slope, rtol=1e-5)
        assert name


def test_a_map_that_is_not_affine_of_a_sharded_axis():
    """It is a gather inside, but the call that is refused is the user's."""
    square = lambda i: (i * i,)  # noqa: E731
    x = np.arange(16, dtype=np.float32)
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            put = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a")))
            for call in (jt.reindex, jax.jit(jt.reindex, static_argnums=(1, 2))):
                if kind is AxisType.Auto:
                    same_bits(call(put, (4,), square), x[[0, 1, 4, 9]])
                    continue
                sentence = r"reindex: expected axes \(0,\) not sharded; got sharding"
                with pytest.raises(TileShapeError, match=sentence):
                    call(put, (4,), square)
