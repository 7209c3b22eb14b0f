"""What reaches Mosaic GPU: that kernels lower in both semantics, and refusals."""

import jax.numpy as jnp
import pytest

import jaxtile as jt
import targets


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


@pytest.mark.parametrize(
    ("body", "shape", "out", "sentence"),
    [
        (_whole(policy="fold_right"), (512,), (128,), "sequential chain"),
        (_whole(), (96,), (128,), "128 threads"),
        (_whole(), (131072,), (128,), "above 65536 elements"),
        (_reduce(1), (2, 64, 128), (2, 128), "view the ref as one"),
        (_reduce(1), (6, 100), (6,), "does not fill a register layout"),
        (_map(jnp.floor), (512,), (512,), "floor, which has no rule there"),
        (_map(jt.erf), (512,), (512,), "has no layout rule"),
    ],
)
def test_refusals_say_why(body, shape, out, sentence):
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        targets.mosaic_gpu(body, targets.spec(out), targets.spec(shape))


def test_lane_semantics_refuses_one_axis_of_the_strided_layout():
    def body(x_ref, o_ref):
        o_ref[...] = jt.reduce(x_ref[...], 1, jt.add)

    with pytest.raises(jt.errors.UnsupportedOnBackend, match="strided layout"):
        targets.mosaic_gpu(
            body, targets.spec((64,)), targets.spec((64, 128)), lane=True
        )
