"""What reaches Triton: the IR of kernels, and the sentences of refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets
from fibres import REDUCERS, element, legal, rng_of
from jaxtile.primitives import reduce_p, scan_p
from rules import through


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


def test_several_axes_reduce_as_one_without_negation():
    text = targets.triton(_reduce((0, 2)), targets.spec((8,)), targets.spec((4, 8, 16)))
    assert text.count('"tt.reduce"') == 1
    assert "arith.subf" not in text


@pytest.mark.parametrize(
    ("fn", "guards"),
    [
        (lambda x: x * x, 1),
        (lambda x: x * x + x, 1),
        (lambda x: jnp.exp(x * x), 0),
        (lambda x: jnp.tanh(x * x * x) * (x * x > 1), 1),
        (lambda x: jnp.log1p(x * x), 1),  # which adds
    ],
)
def test_a_product_is_guarded_where_an_add_could_take_it(fn, guards):
    text = targets.triton(_map(fn), targets.spec((16,)), targets.spec((16,)))
    assert len(re.findall(r"arith\.cmpf oeq", text)) == guards


@pytest.mark.parametrize("policy", ["fixed_tree", "ordered_tree"])
def test_stated_order_splits_neighbours(policy):
    text = targets.triton(
        _reduce(1, policy=policy), targets.spec((8,)), targets.spec((8, 16))
    )
    assert text.count("tt.split") == 4
    assert text.count("arith.addf") == 4
    assert '"tt.reduce"' not in text


@pytest.mark.parametrize("policy", ["fold_left", "fold_right"])
def test_a_fold_is_a_loop_over_exact_picks(policy):
    text = targets.triton(
        _reduce(1, policy=policy), targets.spec((8,)), targets.spec((8, 64))
    )
    assert text.count("scf.for") == 1
    assert text.count("arith.addf") == 1
    assert "tt.bitcast" in text


def test_mask_selects_negative_zero_and_the_seed_is_added_once():
    def body(x_ref, z_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jt.reduce(x, 1, jt.add, init=z_ref[...], where=x > 0)

    row = targets.spec((16,))
    text = targets.triton(body, row, targets.spec((16, 64)), row)
    assert "-0.000000e+00" in text
    assert "arith.mulf" not in text
    assert text.count("arith.addf") == 2


def test_division_in_a_merge_is_rounded_correctly():
    def body(x_ref, o_ref):
        o_ref[...] = jt.reduce(x_ref[...], 1, jt.welford).mean

    text = targets.triton(body, targets.spec((16,)), targets.spec((16, 64)))
    (division,) = re.findall(r"arith.divf .*", text)
    assert division.split(": ")[1].startswith("f64")


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
        (_reduce(0, out_dtype=jnp.bfloat16), (64,), "int32", "round twice"),
        (_map(jt.erf), (64,), "float32", "has no rule there; map it outside"),
    ],
)
def test_refusals_say_why(body, shape, dtype, sentence):
    x = targets.spec(shape, dtype)
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        targets.triton(body, x, x)


def _scanned(fn, *args):
    outs = jax.tree.leaves(jax.eval_shape(fn, *args))

    def body(*refs):
        made = fn(*(ref[...] for ref in refs[: len(args)]))
        for ref, out in zip(refs[len(args) :], jax.tree.leaves(made), strict=True):
            ref[...] = out

    return targets.triton(body, [targets.spec(v.shape, v.dtype) for v in outs], *args)


@pytest.mark.parametrize("direction", ["prefix", "suffix", "reverse"])
def test_any_grouping_of_prefixes_is_one_scan(direction):
    def fn(x):
        return jt.scan(x, 1, jt.add, direction=direction, return_final=True)

    text = _scanned(fn, targets.spec((16, 64)))
    assert text.count('"tt.scan"') == 1
    assert ("reverse = true" in text) == (direction != "prefix")


# XLA moves the transpose of a tile up through all that made it, once for every use.
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("policy", [p.name for p in jt.policy.ALL])
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_a_tile_is_combined_along_the_axis_where_it_is(op, policy, axis):
    def fn(mask, x):
        return getattr(jt, op)(x, axis, jt.argmax, where=mask, policy=policy)

    shape = (16, 32, 4)
    text = _scanned(fn, targets.spec(shape, "bool"), targets.spec(shape))
    turned = re.findall(r"tt\.trans .*: tensor<(\w+)x\w+> ->", text)
    assert all(len(sizes.split("x")) > len(shape) for sizes in turned)  # pairs alone
    splits = {("reduce", "fixed_tree"), ("reduce", "ordered_tree")}
    assert bool(turned) == ((op, policy) in splits | {("scan", "fixed_tree")})


# Triton scrambles what a reshape to one axis gives, where a `tt.reduce` alone reads it.
@pytest.mark.parametrize("shape", [(4, 16, 8), (64,)])
def test_no_reduction_reads_a_reshape_to_one_axis(shape):
    def fn(mask, x):
        return jt.reduce(x, None, jt.argmax, where=mask, policy="unordered_tree")

    text = _scanned(fn, targets.spec(shape, "bool"), targets.spec(shape))
    size = int(np.prod(shape))
    (read,) = re.findall(r'= "tt\.reduce"\(.*?: \((tensor<[^)]*i32>)\)', text, re.S)[:1]
    assert read.startswith(f"tensor<1x{size}xf32>, tensor<1x{size}xi32>")


def _made(x, steps):
    for _ in range(steps):
        x = jt.map(lambda v: jnp.exp(v * v) + v, x)
    return x


_TURNS = {
    "transpose": (lambda x: jt.transpose(x), (32, 16)),
    "axes apart": (lambda x: jt.reduce(x, (0, 2), jt.add), (4, 8, 4)),
    "dot": (lambda x: jt.mma(x, x, spec="ki,kj->ij"), (32, 32)),
    "products": (lambda x: jt.mma(x, x, spec="bik,bjk->bij"), (4, 4, 4)),
    "chain": (
        lambda x: jt.mma(
            x, x, policy=jt.MmaPolicy(allow_reassociation=False), spec="ki,jk->ij"
        ),
        (16, 16),
    ),
}


@pytest.mark.parametrize("name", _TURNS)
def test_what_is_long_to_make_is_not_made_again_for_a_transpose(name):
    turn, shape = _TURNS[name]
    short, long = (
        _scanned(lambda x, n=n: turn(_made(x, n)), targets.spec(shape)) for n in (1, 20)
    )
    assert "tt.trans" in short
    assert "tt.join" not in short
    assert "tt.trans" in long
    assert "tt.join" in long


def test_fixed_prefixes_sweep_up_and_down():
    def fn(x):
        return jt.scan(x, 1, jt.add, policy="fixed_tree")

    text = _scanned(fn, targets.spec((16, 64)))
    assert '"tt.scan"' not in text
    assert text.count("tt.join") >= 6


@pytest.mark.parametrize("policy", [p.name for p in jt.policy.ALL])
@pytest.mark.parametrize("name", [*REDUCERS, "bool maximum", "bits"])
def test_every_reducer_lowers(name, policy):
    rng = rng_of(name, policy)
    reducer, dtypes = _MORE.get(name) or _of(name, rng)
    if policy == "unordered_tree" and not reducer.laws.commutative:
        pytest.skip("does not commute")
    if not legal(name, "fixed_tree" if "tree" in policy else policy):
        pytest.skip("does not associate")
    args = [targets.spec((8, 16), dtype) for dtype in dtypes]
    direction = ("prefix", "suffix", "reverse")[rng.integers(3)]
    exclusive = reducer.identity is not None and bool(rng.random() < 0.5)

    def fn(mask, *leaves):
        x, params = element(leaves), {"policy": policy, "where": mask}
        return jt.reduce(x, 1, reducer, **params, keepdims=True), jt.scan(
            x, 1, reducer, direction=direction, exclusive=exclusive, **params
        )

    assert "tt.return" in _scanned(fn, targets.spec((8, 16), "bool"), *args)


_MORE = {
    "bool maximum": (jt.maximum, ["bool"]),
    "bits": (jt.bitwise_and, ["uint8"]),
}


def _of(name, rng):
    reducer, _, makers, _ = REDUCERS[name]
    dtypes = [make(rng, ()).dtype for make in makers]
    narrow = ("float32", "bfloat16", "float16")[rng.integers(3)]
    return reducer, [narrow if d == np.float32 else d for d in dtypes]


@pytest.mark.parametrize("policy", [p.name for p in jt.policy.ALL])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((37, 5000), 1), ((500, 300), 0), ((3, 101, 53), 1), ((9000,), 0)],
)
def test_whole_arrays_lower(shape, axis, policy):
    from jaxtile.pallas_lowering.triton import reduce, scan

    rules = {reduce_p: reduce.reduce_arrays, scan_p: scan.scan_arrays}

    def fn(x):
        direction = "suffix" if policy == "fold_right" else "prefix"
        return (
            jt.reduce(x, axis, jt.argmax, policy=policy),
            jt.scan(x, axis, jt.add, policy=policy, direction=direction),
        )

    with targets.mesh("NVIDIA H200", 132, "gpu"):
        lowered = targets.lowered(
            lambda x: through(rules, fn, x), (targets.spec(shape),), "cuda"
        )
    assert "jaxtile_" in lowered.as_text()


def test_integers_that_would_round_twice_are_refused():
    def body(x_ref, o_ref):
        o_ref[...] = jt.cast(x_ref[...], jnp.bfloat16)

    with pytest.raises(jt.errors.UnsupportedOnBackend, match="round twice"):
        targets.triton(
            body, targets.spec((64,), "bfloat16"), targets.spec((64,), "int32")
        )
