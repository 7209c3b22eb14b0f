"""What only a GPU can show: bits in kernels, and of the reference under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
import targets
from on_device import on_cpu, on_gpu
from oracle import same_bits

pytestmark = pytest.mark.gpu

_mosaic = targets.mosaic_gpu_kernel
POLICIES = [policy.name for policy in jt.policy.ALL]
TREES = ["unordered_tree", "ordered_tree", "fixed_tree"]
DTYPES = ["float32", "bfloat16", "int32"]


def _data(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "int32":
        return rng.integers(-(2**30), 2**30, shape, dtype=np.int32)
    wide = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)
    return wide.astype(jnp.dtype(dtype))


def _acc(dtype):
    return "int32" if dtype == "int32" else "float32"


def _same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same_bits(a, b)


def _check_sum(got, x, axis, policy, **params):
    """Bits for integers and the one tree; the error bound of any tree otherwise."""
    want = on_cpu(
        lambda v: jt.reduce(v, axis, jt.add, policy="fixed_tree", **params), x
    )
    if policy == "fixed_tree" or x.dtype == np.int32:
        _same_bits(got, want)
        return
    size = np.abs(x.astype(np.float64)).sum(axis)
    np.testing.assert_array_less(np.abs(got - want), 1e-6 * size + 1e-30)


def _triton(body, out):
    from jax.experimental.pallas import triton as plt

    return pl.pallas_call(body, out_shape=out, compiler_params=plt.CompilerParams())


def _sum_body(axis, fill, **params):
    def body(x_ref, o_ref):
        total = jt.reduce(x_ref[...], axis, jt.add, **params)
        o_ref[...] = jnp.broadcast_to(total, o_ref.shape) if fill else total

    return body


@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((64, 128), 0),
        ((64, 128), 1),
        ((64, 128), (0, 1)),
        ((4, 8, 64), (0, 2)),
        ((1, 2048), 1),
    ],
)
def test_triton_sum(shape, axis, dtype, policy):
    x = _data(shape, dtype)
    want = np.zeros(shape).sum(axis).shape
    out = targets.spec(want or (32,), _acc(dtype))
    body = _sum_body(axis, not want, policy=policy)
    got = on_gpu(_triton(body, out), x)
    _check_sum(got if want else got[0], x, axis, policy)


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128,), (640,), (4096,), (32, 64)])
def test_mosaic_gpu_whole_sum(shape, dtype, policy, lane):
    x = _data(shape, dtype)
    body = _sum_body(None, True, policy=policy)
    got = on_gpu(_mosaic(body, targets.spec((128,), _acc(dtype)), lane), x)
    np.testing.assert_array_equal(got, got[0])
    _check_sum(got[0], x, None, policy)


@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(64, 128), (128, 256), (12, 128), (64, 64)])
def test_mosaic_gpu_one_axis(shape, axis, dtype, policy):
    x = _data(shape, dtype)

    def body(x_ref, o_ref):
        value = targets.load_tiled(x_ref)
        targets.store_tiled(o_ref, jt.reduce(value, axis, jt.add, policy=policy))

    got = on_gpu(_mosaic(body, targets.spec((shape[1 - axis],), _acc(dtype))), x)
    _check_sum(got, x, axis, policy)


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
def test_mosaic_gpu_warpgroups_do_not_race(lane):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    n, rounds, blocks = 2048, 200, 64

    def body(x_ref, o_ref):
        group, block = jax.lax.axis_index("wg"), jax.lax.axis_index("g")
        layout = plgpu.Layout.WG_STRIDED((n,), vec_size=4)
        index = (...,) if targets.LINE < (0, 11) else ()
        x = plgpu.load(x_ref.at[group], *index, layout=layout, optimized=False)
        want = n * (group.astype(jnp.float32) + 1)

        def step(_, bad):
            total = jt.reduce(x, None, jt.add)
            return bad + jnp.where(total == want, 0, 1)

        o_ref[block, group] = jax.lax.fori_loop(0, rounds, step, jnp.int32(0))

    kernel = _mosaic(
        body,
        targets.spec((blocks, 2), "int32"),
        lane,
        grid=(blocks,),
        grid_names=("g",),
        num_threads=2,
        thread_name="wg",
    )
    x = np.stack([np.full(n, 1, np.float32), np.full(n, 2, np.float32)])
    np.testing.assert_array_equal(on_gpu(kernel, x), 0)


@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree"])
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_seed_and_mask(backend, policy):
    x = _data((64, 128), "float32")
    x[3, 5], x[7] = np.nan, -1.0  # masked whatever it holds; a fibre of nothing
    seed = np.linspace(-3, 3, 64, dtype=np.float32)

    def mask(v):
        return v > 0

    def body(x_ref, z_ref, seeded_ref, plain_ref):
        x, z = targets.load_tiled(x_ref), targets.load_tiled(z_ref)
        params = {"policy": policy, "where": mask(x)}
        targets.store_tiled(seeded_ref, jt.reduce(x, 1, jt.add, init=z, **params))
        targets.store_tiled(plain_ref, jt.reduce(x, 1, jt.add, **params))

    def triton_body(x_ref, z_ref, seeded_ref, plain_ref):
        x, z = x_ref[...], z_ref[...]
        params = {"policy": policy, "where": mask(x)}
        seeded_ref[...] = jt.reduce(x, 1, jt.add, init=z, **params)
        plain_ref[...] = jt.reduce(x, 1, jt.add, **params)

    out = (targets.spec((64,)),) * 2
    kernel = _triton(triton_body, out) if backend == "triton" else _mosaic(body, out)
    got = on_gpu(kernel, x, seed)

    def reference(v, z):
        params = {"policy": "fixed_tree", "where": v > 0}
        seeded = jt.reduce(v, 1, jt.add, init=z, **params)
        return seeded, jt.reduce(v, 1, jt.add, **params)

    want = on_cpu(reference, x, seed)
    if policy == "fixed_tree":
        _same_bits(got, want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)
    assert got[1].view(np.uint32)[7] == 0


@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree"])
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_sum_of_negative_zeros_keeps_the_sign(backend, policy):
    x = np.full((1024,), -0.0, np.float32)
    make = _triton if backend == "triton" else _mosaic
    kernel = make(_sum_body(None, True, policy=policy), targets.spec((128,)))
    assert np.signbit(on_gpu(kernel, x)).all()


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_products_do_not_fuse_with_the_fixed_tree(backend):
    x = _data((1024,), "float32", 3)

    def body(x_ref, o_ref):
        x = x_ref[...]
        total = jt.reduce(x * x, None, jt.add, policy="fixed_tree")
        o_ref[...] = jnp.broadcast_to(total, o_ref.shape)

    make = _triton if backend == "triton" else _mosaic
    got = on_gpu(make(body, targets.spec((128,))), x)[0]
    _check_sum(got, x * x, 0, "fixed_tree")


def _floats():
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 3e9, -3e9]
    special += [
        65504.0,
        65520.0,
        65519.0,
        2.0**-24,
        2.0**-25,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
    ]
    rng = np.random.default_rng(1)
    with np.errstate(invalid="ignore"):
        random = rng.integers(0, 2**32, 8192 - len(special), dtype=np.uint32)
    return np.concatenate([np.float32(special), random.view(np.float32)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("place", ["triton", "mosaic_gpu", "mosaic_gpu lane", "jit"])
def test_cast_rounds_and_survives(place, dtype):
    x = _floats()

    def both(v):
        narrow = jt.cast(v, dtype)
        return narrow, jt.cast(narrow, jnp.float32)

    def body(x_ref, narrow_ref, back_ref):
        narrow_ref[...], back_ref[...] = both(x_ref[...])

    out = (targets.spec(x.shape, jnp.dtype(dtype)), targets.spec(x.shape))
    kernel = {
        "triton": lambda: _triton(body, out),
        "mosaic_gpu": lambda: _mosaic(body, out),
        "mosaic_gpu lane": lambda: _mosaic(body, out, lane=True),
        "jit": lambda: both,
    }[place]()
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(jnp.dtype(dtype))
    narrow, back = on_gpu(kernel, x)
    _same_bits(narrow, want)
    _same_bits(back, want.astype(np.float32))
    assert (back.view(np.uint32) != x.view(np.uint32)).any()


@pytest.mark.parametrize("place", ["triton", "mosaic_gpu", "mosaic_gpu lane", "jit"])
def test_float_to_integer_clamps(place):
    x = _floats()

    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(x_ref[...], jnp.int32)

    out = targets.spec(x.shape, "int32")
    kernel = {
        "triton": lambda: _triton(body, out),
        "mosaic_gpu": lambda: _mosaic(body, out),
        "mosaic_gpu lane": lambda: _mosaic(body, out, lane=True),
        "jit": lambda: lambda v: jt.cast(v, jnp.int32),
    }[place]()
    info = np.iinfo(np.int32)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the patterns
        wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    want = np.clip(wide, info.min, info.max).astype(np.int32)
    np.testing.assert_array_equal(on_gpu(kernel, x), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda v: v * v + v,
        lambda v: -v,
        lambda v: jnp.where(v > 1, v, v * 3),
        lambda v: jnp.maximum(v, -v),
    ],
    ids=["product and sum", "negate", "where", "maximum"],
)
def test_map_has_the_bits_of_the_reference(fn, backend, dtype):
    x = _data((1024,), dtype, 5)
    x[:3] = [0.0, -0.0, np.nan]

    def body(x_ref, o_ref):
        o_ref[...] = jt.map(fn, x_ref[...])

    make = _triton if backend == "triton" else _mosaic
    got = on_gpu(make(body, targets.spec(x.shape, x.dtype)), x)
    _same_bits(got, on_cpu(lambda v: jt.map(fn, v), x))


REDUCERS = {
    "add": (jt.add, 1),
    "maximum": (jt.maximum, 1),
    "argmax": (jt.argmax, 1),
    "welford": (jt.welford, 1),
    "affine": (jt.affine, 2),
}


def _elements(name, shape):
    reducer, count = REDUCERS[name]
    leaves = tuple(_data(shape, "float32", i) for i in range(count))
    if name == "affine":
        leaves = (np.tanh(leaves[0]), leaves[1])
    return reducer, leaves[0] if count == 1 else leaves


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_reference_under_jit_has_the_bits_of_the_cpu(op, name, policy):
    reducer, x = _elements(name, (5, 37))
    if policy == "unordered_tree" and not reducer.laws.commutative:
        pytest.skip(f"{name} does not commute")
    fn = jt.reduce if op == "reduce" else jt.scan

    def run(v):
        return fn(v, 1, reducer, policy=policy)

    got, want = on_gpu(run, x), on_cpu(run, x)
    if jt.policy.as_policy(policy).permits(jt.policy.Transform.REGROUP):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3)
    else:
        _same_bits(got, want)


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_long_affine_chain_does_not_contract(op, policy):
    reducer, x = _elements("affine", (3, 4099))
    fn = jt.reduce if op == "reduce" else jt.scan

    def run(v):
        return fn(v, 1, reducer, policy=policy)

    _same_bits(on_gpu(run, x), on_cpu(run, x))


def test_scan_of_bfloat16_accumulates_in_float32():
    x = _data((7, 1000), "bfloat16")

    def run(v):
        return jt.scan(v, 1, jt.add, policy="fixed_tree", out_dtype=jnp.bfloat16)

    _same_bits(on_gpu(run, x), on_cpu(run, x))
