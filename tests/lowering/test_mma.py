"""mma in kernels: what reaches Triton and the TPU, and the sentences of refusals."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets

KEPT = jt.MmaPolicy(allow_reassociation=False)
FP8 = ("float8_e4m3fn", "float8_e5m2")
DOTS = [
    ("float32", "float32", "float32", "f32"),
    ("bfloat16", "bfloat16", "float32", "bf16"),
    ("bfloat16", "int8", "float32", "bf16"),
    ("float32", "bfloat16", "float32", "f32"),
    (*FP8, "float32", "bf16"),
    ("float8_e5m2", "bfloat16", "float32", "bf16"),
    ("int8", "int8", "int32", "i8"),
]
GPU_DOTS = [
    *(dot for dot in DOTS if dot[:2] != FP8),
    (*FP8, "float32", "f16"),  # e5m2 loses inf and NaN on Triton's way to bfloat16
    ("float16", "float16", "float32", "f16"),
    ("float16", "uint8", "float32", "f16"),
    ("bfloat16", "float16", "float32", "f32"),
]


def _body(policy=None, **params):
    def body(a, b, c, o):
        o[...] = jt.mma(a[...], b[...], c[...], policy, **params)

    return body


def _specs(a="float32", b="float32", c="float32", m=64, k=64, n=128):
    return [targets.spec(s, d) for s, d in (((m, k), a), ((k, n), b), ((m, n), c))]


def _run(target, policy=None, out=None, sizes=None, formats=(), **params):
    specs = _specs(*formats, **(sizes or {}))
    out = targets.spec(specs[2].shape, out or specs[2].dtype)
    return target(_body(policy, **params), out, *specs)


def _line(text, word):
    (found,) = [line for line in text.splitlines() if word in line]
    return found


@pytest.mark.parametrize(("a", "b", "acc", "unit"), GPU_DOTS)
def test_a_triton_dot_keeps_its_inputs(a, b, acc, unit):
    dot = _line(_run(targets.triton, formats=(a, b, acc)), "tt.dot ")
    kind = {"float32": "f32", "int32": "i32"}[acc]
    assert (
        f"tensor<64x64x{unit}> * tensor<64x128x{unit}> -> tensor<64x128x{kind}>" in dot
    )
    assert "inputPrecision" not in dot


@pytest.mark.parametrize(("a", "b", "acc", "unit"), DOTS)
def test_a_tpu_matmul_keeps_its_inputs(a, b, acc, unit):
    dot = _line(_run(targets.tpu, formats=(a, b, acc)), "tpu.matmul")
    kind = {"float32": "f32", "int32": "i32"}[acc]
    types = f"vector<64x64x{unit}>, vector<64x128x{unit}>, vector<64x128x{kind}>"
    assert types in dot
    assert ("contract_precision<fp32>" in dot) == (unit == "f32")


@pytest.mark.parametrize("target", [targets.triton, targets.tpu], ids=["triton", "tpu"])
def test_the_epilogue_and_one_narrowing_are_in_the_kernel(target):
    text = _run(
        target, out="bfloat16", formats=("bfloat16", "bfloat16"), epilogue=jt.gelu,
        out_dtype=jnp.bfloat16,
    )  # fmt: skip
    assert text.count("arith.truncf") == 1
    assert "math.tanh" in text or "tanh" in text


@pytest.mark.parametrize("spec", ["mk,nk->mn", "km,kn->mn", "mk,kn->nm"])
def test_transposed_operands(spec):
    def body(a, b, o):
        o[...] = jt.mma(a[...], b[...], spec=spec)

    square = targets.spec((128, 128), "bfloat16")
    out = targets.spec((128, 128))
    assert targets.triton(body, out, square, square).count("tt.dot ") == 1
    assert targets.tpu(body, out, square, square).count("tpu.matmul") == 1


@targets.needs_libtpu
@pytest.mark.parametrize(
    "spec", ["mk,nk->mn", "km,kn->mn", "mk,kn->nm", "bmk,bkn->bmn", "bmk,bnk->bnm"]
)
def test_libtpu_compiles_transposed_operands(spec):
    def body(a, b, o):
        o[...] = jt.mma(a[...], b[...], spec=spec)

    batch = (4,) * ("b" in spec)
    x = targets.spec((*batch, 128, 128), "bfloat16")
    out = targets.spec((*batch, 128, 128))
    assert targets.compile_for_tpu(body, out, x, x) is not None


def test_a_triton_chain_is_a_loop_of_picks_without_a_dot():
    text = _run(targets.triton, KEPT)
    assert "tt.dot" not in text
    assert text.count("scf.for") == 1
    assert text.count("arith.mulf") == 1
    assert text.count("arith.addf") == 1
    assert text.count("arith.cmpf une") + text.count("arith.cmpf oeq") >= 1  # the guard


def test_a_tpu_chain_has_no_matrix_unit():
    text = _run(targets.tpu, KEPT, sizes=dict(m=16, k=16, n=128))
    assert "tpu.matmul" not in text
    assert "multi_reduction" not in text


@pytest.mark.parametrize("kind", ["uint8", "int32"])
def test_other_integers_are_products_and_a_sum(kind):
    formats = (kind, kind, "int32" if kind == "int32" else "uint32")
    text = _run(targets.triton, formats=formats, sizes=dict(m=16, k=16, n=16))
    assert "tt.dot" not in text
    assert text.count('"tt.reduce"') == 1


def test_small_blocks_are_products_and_a_sum():
    text = _run(targets.triton, sizes=dict(m=4, k=32, n=8))
    assert "tt.dot" not in text
    assert text.count('"tt.reduce"') == 1


def test_promoted_sums():
    policy = jt.MmaPolicy(promote_every=64)
    text = _run(targets.triton, policy, formats=("bfloat16", "bfloat16"))
    assert text.count("tt.dot ") == 1
    assert text.count("arith.select") >= 1  # between the dot and the seed
    short = jt.MmaPolicy(promote_every=16)
    assert _run(targets.tpu, short).count("tpu.matmul") == 4
    with pytest.raises(
        jt.errors.UnsupportedOnBackend, match="load K in blocks of that"
    ):
        _run(targets.triton, short)


_BATCHED = [
    ("bmk,bkn->bmn", (4, 16, 64), (4, 64, 128), 1),
    ("bmk,bnk->bnm", (4, 128, 64), (4, 128, 64), 1),
    ("mbk,bkn->mbn", (16, 4, 64), (4, 64, 128), 0),
    ("mk,k->m", (16, 128), (128,), 0),
]


@pytest.mark.parametrize(("spec", "a", "b", "units"), _BATCHED)
def test_a_leading_batch_axis_goes_through_the_tpu_unit(spec, a, b, units):
    def body(a, b, o):
        o[...] = jt.mma(a[...], b[...], spec=spec)

    sizes = dict(zip(spec.replace(",", "").split("->")[0], (*a, *b), strict=True))
    out = targets.spec([sizes[d] for d in spec.split("->")[1]])
    operands = [targets.spec(s, "bfloat16") for s in (a, b)]
    assert targets.tpu(body, out, *operands).count("tpu.matmul") == units


REFUSALS = [
    (targets.tpu, dict(formats=("float16", "float16")), "float16 is not computed with"),
    (targets.tpu, dict(formats=("uint8", "uint8", "uint32")), "uint8 is not computed"),
    (targets.triton, dict(formats=("float8_e4m3fnuz", "float32")), "cast it outside"),
    (targets.triton, dict(formats=("uint8", "uint8", "uint32")), "524288, above 32768"),
    (targets.tpu, dict(policy=KEPT, sizes=dict(m=256, k=256, n=256)), "above 2097152"),
]


@pytest.mark.parametrize(("target", "params", "sentence"), REFUSALS)
def test_refusals_say_why(target, params, sentence):
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        _run(target, **params)


def test_mosaic_gpu_refuses_with_the_way_out():
    x = targets.spec((64, 64), "bfloat16")
    answer = jt.supports("mma", "mosaic_gpu", x, x)
    assert "plgpu.wgmma on the refs, or call mma on whole arrays" in answer.reason
    assert not answer
    assert jt.supports("matmul", "triton", x, x)


@targets.needs_libtpu
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
def test_libtpu_compiles_every_format(chip):
    compiled = functools.partial(targets.compile_for_tpu, chip=chip)
    for a, b, acc, _ in DOTS:
        specs = _specs(a, b, acc)
        assert compiled(_body(), specs[2], *specs) is not None
    for policy in (KEPT, jt.MmaPolicy(input_precision="tf32x3", promote_every=32)):
        specs = _specs(m=16, k=48, n=128)
        assert compiled(_body(policy), specs[2], *specs) is not None


@pytest.mark.parametrize("name", ["bf16x3", "bf16x6", "tf32x3"])
@pytest.mark.parametrize("platform", ["triton", "tpu"])
def test_values_of_the_rules_on_the_cpu(name, platform):
    """What a kernel traces, run as plain jax: within the bound of the reference."""
    from jaxtile.pallas_lowering import load_all

    load_all()
    from jaxtile.pallas_lowering import _mma
    from jaxtile.pallas_lowering.tpu import mma as tpu
    from jaxtile.pallas_lowering.triton import mma as triton

    unit = {"triton": triton, "tpu": tpu}[platform].UNIT
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((32, 32)).astype(np.float32) for _ in "ab")
    from jaxtile.primitives._contract import numbered

    for policy in (jt.MmaPolicy(input_precision=name), KEPT):
        params = dict(
            roles=numbered("mk", "kn", "mn"), policy=policy, acc=np.dtype("float32"),
            seeded=False, region=None, out=np.dtype("float32"),
        )  # fmt: skip
        (got,) = _mma.mma_values(unit, [jnp.asarray(a), jnp.asarray(b)], params)
        want = jt.mma(a, b, policy=policy)
        if policy is KEPT:
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
