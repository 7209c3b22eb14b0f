"""What reaches the TPU: the IR of kernels, and what libtpu makes of it."""

import jax.numpy as jnp
import pytest

import jaxtile as jt
import targets


def _reduce(axis, **params):
    def body(x_ref, o_ref):
        total = jt.reduce(x_ref[...], axis, jt.add, **params)
        o_ref[...] = jnp.broadcast_to(total, o_ref.shape)

    return body


def _masked(policy):
    def body(x_ref, z_ref, o_ref):
        x = x_ref[...]
        seed = z_ref[...]
        o_ref[...] = jt.reduce(x, 0, jt.add, init=seed, where=x > 0, policy=policy)

    return body


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_unordered_sum_is_the_native_one(axis, dtype):
    kind = ("int32", "i32") if dtype == "int32" else ("float32", "f32")
    shape = {0: (128,), 1: (64,)}.get(axis, (8, 128))
    text = targets.tpu(
        _reduce(axis), targets.spec(shape, kind[0]), targets.spec((64, 128), dtype)
    )
    assert "vector.multi_reduction <add>" in text or "vector.reduction" in text
    assert f"vector<64x128x{kind[1]}>" in text


@pytest.mark.parametrize("policy", ["fixed_tree", "ordered_tree"])
def test_stated_order_adds_rows_pair_by_pair(policy):
    text = targets.tpu(
        _reduce(0, policy=policy), targets.spec((128,)), targets.spec((5, 128))
    )
    assert "multi_reduction" not in text
    assert text.count("arith.addf") == 4


def test_mask_selects_negative_zero_and_the_seed_is_added_once():
    row = targets.spec((128,))
    text = targets.tpu(_masked("unordered_tree"), row, targets.spec((64, 128)), row)
    assert "-0.000000e+00" in text
    assert "arith.mulf" not in text
    assert text.count("arith.addf") == 1


def test_cast_keeps_both_conversions():
    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(jt.cast(x_ref[...], jnp.bfloat16), jnp.float32)

    x = targets.spec((64, 128))
    text = targets.tpu(body, x, x)
    assert text.count("arith.truncf") == 1
    assert text.count("arith.extf") == 1


def _scan(x_ref, o_ref):
    o_ref[...] = jt.scan(x_ref[...], 0, jt.add)


@pytest.mark.parametrize(
    ("body", "shape", "dtype", "sentence"),
    [
        (_reduce(0), (64, 128), "float16", "float16 is not computed with"),
        (_reduce(0, policy="fold_left"), (8192, 1024), "float32", "smaller blocks"),
        (_scan, (64, 128), "float16", "float16 is not computed with"),
        (_scan, (4096, 1024), "float32", "32.0 MiB of scratch"),
    ],
)
def test_refusals_say_why(body, shape, dtype, sentence):
    out = targets.spec(shape[1:] if body is not _scan else shape)
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        targets.tpu(body, out, targets.spec(shape, dtype))


def test_the_extreme_of_bools_is_refused_with_the_way_out():
    flags = targets.spec((64, 128), bool)
    answer = jt.supports("reduce", "tpu", flags, 0, jt.maximum)
    assert "jt.logical_or" in answer.reason
    assert jt.supports("reduce", "tpu", flags, 0, jt.logical_or)


def test_a_reducer_is_refused_for_what_its_functions_use():
    wide = jt.Reducer(lambda a, b: a + jnp.float16(1) * b.astype(jnp.float16))
    answer = jt.supports(
        "reduce", "tpu", targets.spec((64, 128)), 0, wide, policy="fold_left"
    )
    assert "float16 is not computed with" in answer.reason


@targets.needs_libtpu
@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree"])
def test_libtpu_compiles_a_ragged_masked_seeded_sum(policy):
    row = targets.spec((300,))
    block = targets.spec((100, 300), "bfloat16")
    assert targets.compile_for_tpu(_masked(policy), row, block, row) is not None
