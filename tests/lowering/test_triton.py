"""What reaches Triton: the IR of kernels, and the sentences of refusals."""

import jax.numpy as jnp
import pytest

import jaxtile as jt
import targets


def _reduce(axis, **params):
    def body(x_ref, o_ref):
        total = jt.reduce(x_ref[...], axis, jt.add, **params)
        o_ref[...] = jnp.broadcast_to(total, o_ref.shape).astype(o_ref.dtype)

    return body


def _map(fn):
    def body(x_ref, o_ref):
        o_ref[...] = jt.map(fn, x_ref[...])

    return body


@pytest.mark.parametrize(
    ("dtype", "state"),
    [("float32", "f32"), ("bfloat16", "f32"), ("float16", "f32"), ("int8", "i32")],
)
def test_unordered_sum_is_one_reduce_in_the_accumulator(dtype, state):
    out = targets.spec((16,), "int32" if state == "i32" else "float32")
    text = targets.triton(_reduce(1), out, targets.spec((16, 64), dtype))
    assert text.count('"tt.reduce"') == 1
    assert f"(tensor<16x64x{state}>) -> tensor<16x{state}>" in text


def test_several_axes_reduce_one_by_one_without_negation():
    text = targets.triton(_reduce((0, 2)), targets.spec((8,)), targets.spec((4, 8, 16)))
    assert text.count('"tt.reduce"') == 2
    assert "arith.subf" not in text


@pytest.mark.parametrize("policy", ["fixed_tree", "ordered_tree"])
def test_stated_order_halves_neighbours(policy):
    text = targets.triton(
        _reduce(1, policy=policy), targets.spec((8,)), targets.spec((8, 16))
    )
    assert text.count('"tt.reduce"') == 4
    for n in (8, 4, 2, 1):
        assert f"tensor<8x{n}x2xf32>" in text


def test_mask_selects_negative_zero_and_the_seed_is_added_once():
    def body(x_ref, z_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jt.reduce(x, 1, jt.add, init=z_ref[...], where=x > 0)

    row = targets.spec((16,))
    text = targets.triton(body, row, targets.spec((16, 64)), row)
    assert "-0.000000e+00" in text
    assert "arith.mulf" not in text
    assert text.count("arith.addf") == 2


def test_cast_keeps_both_conversions():
    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(jt.cast(x_ref[...], jnp.bfloat16), jnp.float32)

    x = targets.spec((16, 64))
    text = targets.triton(body, x, x)
    assert text.count("arith.truncf") == 1
    assert text.count("arith.extf") == 1


def test_float_to_integer_clamps_by_selects():
    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(x_ref[...], jnp.int32)

    text = targets.triton(body, targets.spec((64,), "int32"), targets.spec((64,)))
    assert "arith.fptosi" in text
    assert text.count("arith.select") == 4


def test_bitcast_is_a_bitcast():
    def body(x_ref, o_ref):
        o_ref[...] = jt.bitcast(x_ref[...], jnp.uint32)

    text = targets.triton(body, targets.spec((64,), "uint32"), targets.spec((64,)))
    assert "tt.bitcast" in text


def test_map_rounds_each_op_and_guards_products():
    x = targets.spec((64,), "bfloat16")
    text = targets.triton(_map(lambda v: v * v + v), x, x)
    assert text.count("arith.truncf") == 2


def test_map_negates_zeros_and_keeps_nan():
    x = targets.spec((64,))
    text = targets.triton(_map(lambda v: jnp.maximum(-v, v)), x, x)
    assert "arith.mulf" in text
    assert text.count("arith.cmpf une") == 2


@pytest.mark.parametrize(
    ("body", "shape", "dtype", "sentence"),
    [
        (_reduce(0, policy="fold_left"), (64,), "float32", "sequential chain"),
        (_reduce(0, acc_dtype=jnp.bfloat16), (64,), "bfloat16", "use acc_dtype="),
        (_map(jt.erf), (64,), "float32", "has no rule there; map it outside"),
    ],
)
def test_refusals_say_why(body, shape, dtype, sentence):
    x = targets.spec(shape, dtype)
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        targets.triton(body, x, x)


def test_other_reducers_and_scans_are_refused():
    def maximum(x_ref, o_ref):
        o_ref[...] = jt.reduce(x_ref[...], 1, jt.maximum)

    def scan(x_ref, o_ref):
        o_ref[...] = jt.scan(x_ref[...], 1, jt.add)[:, 0]

    for body, sentence in ((maximum, "only jt.add"), (scan, "run jt.scan outside")):
        with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
            targets.triton(body, targets.spec((16,)), targets.spec((16, 64)))


def test_integers_that_would_round_twice_are_refused():
    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(x_ref[...], jnp.bfloat16)

    with pytest.raises(jt.errors.UnsupportedOnBackend, match="round twice"):
        targets.triton(
            body, targets.spec((64,), "bfloat16"), targets.spec((64,), "int32")
        )
