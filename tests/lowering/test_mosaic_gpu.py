"""What reaches Mosaic GPU: that kernels lower in both semantics, and refusals."""

import itertools

import jax.numpy as jnp
import pytest
from jax import lax

import jaxtile as jt
import targets
from kernels import REDUCERS, Call

POLICIES = [policy.name for policy in jt.policy.ALL]


def _reduce(axis, **params):
    def body(x_ref, o_ref):
        total = jt.reduce(targets.load_tiled(x_ref), axis, jt.add, **params)
        targets.store_tiled(o_ref, total)

    return body


def _whole(**params):
    def body(x_ref, o_ref):
        total = jt.reduce(x_ref[...], None, jt.add, **params)
        o_ref[...] = jnp.broadcast_to(total, o_ref.shape)

    return body


def _scan(**params):
    def body(x_ref, o_ref):
        y = jt.scan(targets.load_tiled(x_ref), 1, jt.add, **params)
        targets.store_tiled(o_ref, y)

    return body


def _map(fn):
    def body(x_ref, o_ref):
        o_ref[...] = jt.map(fn, x_ref[...])

    return body


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("policy", ["unordered_tree", "ordered_tree", "fixed_tree"])
def test_whole_sum_shuffles_and_crosses_warps_once(lane, dtype, policy):
    state = "int32" if dtype == "int32" else "float32"
    text = targets.mosaic_gpu(
        _whole(policy=policy),
        targets.spec((128,), state),
        targets.spec((1024,), dtype),
        lane=lane,
    )
    if text:
        assert "shfl.sync bfly" in text
        assert "vector.multi_reduction" not in text


def test_registers_combine_first_where_the_order_is_free():
    out, x = targets.spec((128,)), targets.spec((2048,))
    texts = [
        targets.mosaic_gpu(_whole(policy=policy), out, x)
        for policy in ("unordered_tree", "fixed_tree")
    ]
    if all(texts):
        free, fixed = (text.count("shfl.sync bfly") for text in texts)
        assert (free, fixed) == (5, 5 * 4)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(64, 128), (64, 64)], ids=["row a warp", "wgmma"])
@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree"])
def test_one_axis_of_a_matrix(axis, shape, policy):
    targets.mosaic_gpu(
        _reduce(axis, policy=policy),
        targets.spec((shape[1 - axis],)),
        targets.spec(shape, "bfloat16"),
    )


def test_sums_carry_no_contraction_flag():
    def body(x_ref, o_ref):
        x = x_ref[...]
        total = jt.reduce(x * x, None, jt.add, policy="fixed_tree")
        o_ref[...] = jnp.broadcast_to(total, o_ref.shape)

    text = targets.mosaic_gpu(body, targets.spec((128,)), targets.spec((512,)))
    if text:
        sums = [line for line in text.splitlines() if "arith.addf" in line]
        assert sums
        assert not any("fastmath" in line for line in sums)


_SHAPES = [((64, 128), 1), ((64, 128), 0), ((6, 100), 1), ((2, 64, 64), (0, 2))]
_CALLS = [
    Call("reduce", name, shape, axis, policy, masked=masked)
    for k, (name, policy) in enumerate(
        itertools.product(("welford", "affine", "argmax", "farthest"), POLICIES)
    )
    for shape, axis in _SHAPES[k % 2 :: 2]
    for masked in (k % 3 == 0,)
    if policy != "unordered_tree" or REDUCERS[name].laws.commutative
]
_CALLS += [
    Call("scan", name, shape, axis, policy, options={"direction": direction})
    for k, (name, policy) in enumerate(
        itertools.product(("add", "affine", "logaddexp"), POLICIES)
    )
    for shape, axis in _SHAPES[k % 3 : k % 3 + 1]
    for direction in (("suffix",) if policy == "fold_right" else ("prefix", "reverse"))
    if policy != "unordered_tree" or REDUCERS[name].laws.commutative
]
_CALLS += [
    Call("reduce", "maximum", (64, 128), 1, policy, dtype=dtype)
    for dtype in ("int8", "uint16", "float16", "bfloat16", "uint32")
    for policy in ("fixed_tree", "fold_left")
]


@pytest.mark.parametrize("call", _CALLS, ids=str)
def test_calls_lower_in_warpgroup_semantics(call):
    inputs = [targets.spec(v.shape, v.dtype) for v in call.operands()]
    text = targets.mosaic_gpu(call.body, call.outs(), *inputs)
    assert not text or "fastmath" not in text


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_calls_lower_in_lane_semantics(op, policy):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WG_STRIDED((64, 128), vec_size=2)
    params = {"direction": "suffix"} if (op, policy) == ("scan", "fold_right") else {}
    call = Call(op, "add", (64, 128), 1, policy, layout, masked=True, options=params)
    inputs = [targets.spec(v.shape, v.dtype) for v in call.operands()]
    targets.mosaic_gpu(call.body, call.outs(), *inputs, lane=True)


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["reduce", "scan"])
@pytest.mark.parametrize("shape", [(64, 128), (128, 32)])
def test_blocks_that_are_read_from_shared_memory(shape, op, axis, policy):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_ref, o_ref, block_ref, barrier_ref):
        plgpu.copy_gmem_to_smem(x_ref, block_ref, barrier_ref)
        plgpu.barrier_wait(barrier_ref)
        call = jt.reduce if op == "reduce" else jt.scan
        y = call(block_ref[...], axis, jt.add, policy=policy)
        targets.store_tiled(o_ref, y)

    out = shape if op == "scan" else (shape[1 - axis],)
    scratch = [plgpu.SMEM(shape, jnp.float32), plgpu.Barrier()]
    targets.mosaic_gpu(
        body, targets.spec(out), targets.spec(shape), scratch_types=scratch
    )


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
@pytest.mark.parametrize("size", [128, 1024])
def test_vectors_that_are_read_from_global_memory(size, policy):
    def body(x_ref, total_ref, o_ref):
        x = x_ref[...]
        total = jt.reduce(x, None, jt.add, policy=policy)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        o_ref[...] = jt.scan(x, 0, jt.add, policy=policy)

    x = targets.spec((size,))
    targets.mosaic_gpu(body, (targets.spec((128,)), x), x)


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
def test_literals_and_values_that_are_the_same_everywhere(lane):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_ref, o_ref):
        x = targets.load_tiled(x_ref, plgpu.Layout.WG_STRIDED(x_ref.shape, vec_size=1))
        two, all_of_them = jnp.full(x.shape, 2.0), jnp.full(x.shape, True)
        seed = jnp.float32(1), jnp.float32(3)
        params = {"where": all_of_them, "policy": "fold_left"}
        total = jt.reduce((two, x), (0, 1), jt.affine, init=seed, **params)
        o_ref[...] = jnp.broadcast_to(total, o_ref.shape)

    out, x = targets.spec((128,)), targets.spec((16, 64))
    targets.mosaic_gpu(body, out, x, lane=lane)


def test_bool_leaves():
    def body(x_ref, o_ref):
        x = targets.load_tiled(x_ref)
        found = jt.reduce(x > 0, 1, jt.logical_or, policy="fold_left")
        targets.store_tiled(o_ref, found.astype(jnp.int32))

    targets.mosaic_gpu(body, targets.spec((64,), "int32"), targets.spec((64, 128)))


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_wgmma_results_keep_their_layout(op, lane):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_ref, o_ref):
        x = targets.load_tiled(x_ref, plgpu.Layout.WGMMA) * 2.0
        if op == "reduce":
            total = jt.reduce(x, 1, jt.add, policy="fixed_tree")
            x = x - lax.broadcast_in_dim(total, x.shape, (0,))
        else:
            x = x + jt.scan(x, 1, jt.add, policy="fixed_tree")
        targets.store_tiled(o_ref, x)

    x = targets.spec((64, 64))
    targets.mosaic_gpu(body, x, x, lane=lane)


def test_seed_and_mask():
    def body(x_ref, z_ref, o_ref):
        x = targets.load_tiled(x_ref)
        seed = targets.load_tiled(z_ref)
        total = jt.reduce(x, 1, jt.add, init=seed, where=x > 0)
        targets.store_tiled(o_ref, total)

    row = targets.spec((64,))
    text = targets.mosaic_gpu(body, row, targets.spec((64, 128)), row)
    assert not text or "-0.000000e+00" in text


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
def test_several_warpgroups_have_a_scratch_each(lane):
    targets.mosaic_gpu(
        _whole(),
        targets.spec((128,)),
        targets.spec((1024,)),
        lane=lane,
        num_threads=2,
        thread_name="wg",
    )


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
def test_cast_keeps_both_conversions(lane):
    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(jt.cast(x_ref[...], jnp.bfloat16), jnp.float32)

    x = targets.spec((512,))
    text = targets.mosaic_gpu(body, x, x, lane=lane)
    if text and not lane:
        assert "arith.truncf" in text
        assert "arith.extf" in text


@pytest.mark.parametrize(
    "fn",
    [
        jnp.exp,
        lambda v: -v,
        lambda v: v * v + 1.0,
        lambda v: jnp.where(v > 0, v, 0.0),
    ],
    ids=["exp", "negate", "product and sum", "where"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_map(fn, dtype):
    x = targets.spec((512,), dtype)
    targets.mosaic_gpu(_map(fn), x, x)


_BEYOND = {
    "floor": jnp.floor,
    "log1p": jnp.log1p,
    "erf": lax.erf,
    "atan2": lambda v: jnp.arctan2(v, v + 1),
    "several": lambda v: jnp.tan(jnp.ceil(v)) * 2 - v,
}


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
@pytest.mark.parametrize("shape", [(512,), (64, 128)], ids=str)
@pytest.mark.parametrize("name", _BEYOND)
def test_map_of_ops_that_plgpu_lacks(name, shape, lane):
    x = targets.spec(shape, "float32" if name != "floor" else "bfloat16")
    text = targets.mosaic_gpu(_map(_BEYOND[name]), x, x, lane=lane)
    assert not text or "fastmath" not in text


def test_map_of_ops_that_plgpu_lacks_keeps_layouts():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_ref, o_ref):
        x = targets.load_tiled(x_ref, plgpu.Layout.WGMMA)
        total = jt.reduce(jt.floor(x), 1, jt.add, policy="fixed_tree")
        y = jt.floor(x - lax.broadcast_in_dim(total, x.shape, (0,)))
        targets.store_tiled(o_ref, y)

    x = targets.spec((64, 128))
    targets.mosaic_gpu(body, x, x)


@pytest.mark.parametrize(
    ("body", "shape", "out", "sentence"),
    [
        (_whole(), (131072,), (128,), "above 65536 elements"),
        (_whole(policy="fold_left"), (65536,), (128,), "in one thread, or in shared"),
        (_reduce(1), (127, 509), (127,), "fills no register layout"),
        (
            _scan(policy="fold_right"),
            (64, 128),
            (64, 128),
            "separate chain for each",
        ),
        (_map(jnp.sinh), (512,), (512,), "sinh, which has no thread code"),
        (_map(jnp.floor), (127, 509), (127, 509), "fills no register layout"),
    ],
)
def test_refusals_say_why(body, shape, out, sentence):
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        targets.mosaic_gpu(body, targets.spec(out), targets.spec(shape))
