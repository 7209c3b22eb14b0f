"""What reaches the TPU: the IR of kernels, and what libtpu makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets
from jaxtile.pallas_lowering.tpu import reduce as rule

try:
    import libtpu
except ImportError:
    libtpu = None


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


@pytest.mark.parametrize("n", [1, 2, 3, 7, 37, 100, 128])
def test_tree_of_rows_has_the_bits_of_fixed_tree(n):
    x = np.random.default_rng(n).normal(size=(n, 128)).astype(np.float32)
    ours = jax.jit(lambda v: rule._fixed_tree(v, (0,)))(x)
    want = jt.reduce(x, 0, jt.add, policy="fixed_tree")
    np.testing.assert_array_equal(
        np.asarray(ours).view(np.uint32), np.asarray(want).view(np.uint32)
    )


def test_tree_of_rows_takes_several_axes_in_source_order():
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
    want = jt.reduce(x, (0, 1), jt.add, policy="fixed_tree")
    np.testing.assert_array_equal(rule._fixed_tree(jnp.asarray(x), (0, 1)), want)


def test_cast_keeps_both_conversions():
    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(jt.cast(x_ref[...], jnp.bfloat16), jnp.float32)

    x = targets.spec((64, 128))
    text = targets.tpu(body, x, x)
    assert text.count("arith.truncf") == 1
    assert text.count("arith.extf") == 1


@pytest.mark.parametrize(
    ("params", "shape", "dtype", "sentence"),
    [
        ({"policy": "fold_left"}, (64, 128), "float32", "sequential chain"),
        ({"policy": "fixed_tree"}, (512, 128), "float32", "more than 256 rows"),
        ({}, (64, 128), "float16", "float16 is not computed with"),
    ],
)
def test_refusals_say_why(params, shape, dtype, sentence):
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        targets.tpu(
            _reduce(0, **params), targets.spec((128,)), targets.spec(shape, dtype)
        )


def test_a_stated_order_along_the_lanes_is_refused():
    with pytest.raises(jt.errors.UnsupportedOnBackend, match="transpose first"):
        targets.tpu(
            _reduce(1, policy="fixed_tree"),
            targets.spec((64,)),
            targets.spec((64, 128)),
        )


@pytest.mark.skipif(libtpu is None, reason="no libtpu for this Python")
@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree"])
def test_libtpu_compiles_a_ragged_masked_seeded_sum(policy):
    row = targets.spec((300,))
    block = targets.spec((100, 300), "bfloat16")
    assert targets.compile_for_tpu(_masked(policy), row, block, row) is not None
