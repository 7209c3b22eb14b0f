"""mma on a GPU: as the reference under XLA, and inside Triton kernels."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
from on_device import on_cpu, on_gpu
from oracle import same_bits
from products import STRICT, chain, make

pytestmark = pytest.mark.gpu

FP8 = ("float8_e4m3fn", "float8_e5m2")
PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "int8"),
    ("float32", "bfloat16"),
    FP8,
    ("float8_e5m2", "bfloat16"),
    ("int8", "int8"),
    ("uint8", "uint8"),
    ("int32", "int32"),
]
PRECISIONS = ["f32", "tf32", "tf32x3", "bf16", "bf16x3", "bf16x6"]


def _kernel(body, *operands, out):
    """The body as a Triton kernel of one program on whole blocks."""
    from jax.experimental.pallas import triton as plt

    params = plt.CompilerParams(num_warps=4)
    return pl.pallas_call(body, out_shape=out, compiler_params=params)(*operands)


def _in_kernel(a, b, c, policy=None, **params):
    def body(a_ref, b_ref, c_ref, o_ref):
        o_ref[...] = jt.mma(a_ref[...], b_ref[...], c_ref[...], policy, **params)

    out = jax.eval_shape(lambda *v: jt.mma(*v, policy, **params), a, b, c)
    return _kernel(body, a, b, c, out=out)


def _outside(a, b, c, policy=None, **params):
    return jt.mma(a, b, c, policy, **params)


RUNS = {"xla": _outside, "triton": _in_kernel}


def _close(got, a, b, c=0.0):
    """Within the bound of any order of sums that the hardware truncates."""
    a, b = (np.asarray(v, np.float64) for v in (a, b))
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    error = np.abs(np.asarray(got, np.float64) - (a @ b + c))
    assert np.max(error / size) < (a.shape[1] + 2) * 2.0**-22


def _operands(da, db, sizes=(64, 64, 32)):
    m, k, n = sizes
    a, b = make((m, k), da), make((k, n), db, 1)
    acc = jax.eval_shape(jt.mma, a, b).dtype
    return a, b, make((m, n), "float32", 2).astype(acc)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("da", "db"), PAIRS, ids=str)
def test_formats(run, da, db):
    # Triton's dot has neither of these: there it is products, of small blocks.
    small = da in ("uint8", "int32")
    a, b, c = _operands(da, db, (16, 32, 16) if small else (64, 64, 32))
    got = on_gpu(RUNS[run], a, b, c)
    if got.dtype.kind == "f":
        _close(got, a, b, c.astype(np.float64))
    else:
        same_bits(got, on_cpu(_outside, a, b, c))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("da", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_chain_has_the_bits_of_the_cpu(run, da):
    a, b, c = _operands(da, da, (32, 64, 16))
    got = on_gpu(functools.partial(RUNS[run], policy=STRICT), a, b, c)
    same_bits(got, chain(a, b, c))
    whole = on_gpu(functools.partial(jt.mma, policy=STRICT), a, b)
    same_bits(on_gpu(functools.partial(jt.mma, policy=STRICT), a[3:4], b)[0], whole[3])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", PRECISIONS)
def test_named_precisions_mean_what_they_mean_on_the_cpu(run, name):
    a, b, c = _operands("float32", "float32")
    policy = jt.MmaPolicy(input_precision=name)
    got = on_gpu(functools.partial(RUNS[run], policy=policy), a, b, c)
    want = on_cpu(functools.partial(_outside, policy=policy), a, b, c)
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    assert np.max(np.abs(got - want) / size) < 66 * 2.0**-22
    if name in ("tf32", "bf16"):
        kept = jt.MmaPolicy(False, name)
        got = on_gpu(functools.partial(RUNS[run], policy=kept), a, b, c)
        same_bits(got, on_cpu(functools.partial(_outside, policy=kept), a, b, c))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", FP8)
def test_every_code_of_a_storage_format_enters_exactly(run, kind):
    codes = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, kind))
    a = np.zeros((256, 16), codes.dtype)
    a[:, 0] = codes
    b = np.zeros((16, 16), jnp.bfloat16)
    b[0] = 1
    got = on_gpu(RUNS[run], a, b, np.zeros((256, 16), np.float32))
    want = np.broadcast_to(codes.astype(np.float32)[:, None], (256, 16))
    np.testing.assert_array_equal(got, want)  # NaN equals NaN here


def test_float32_is_no_tf32():
    a, b = make((512, 4096), "float32"), make((4096, 512), "float32", 1)
    exact = a.astype(np.float64) @ b
    error = np.linalg.norm(on_gpu(jt.matmul, a, b) - exact) / np.linalg.norm(exact)
    assert error < 1e-6


def test_promoted_sums_are_more_exact():
    a, b = (make(s, "bfloat16", i) for i, s in enumerate([(256, 8192), (8192, 256)]))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    policy = jt.MmaPolicy(promote_every=128)
    got = on_gpu(functools.partial(jt.matmul, policy=policy), a, b)
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 3e-7


@pytest.mark.parametrize("run", RUNS)
def test_an_epilogue_and_one_narrowing(run):
    a, b, c = _operands("bfloat16", "bfloat16")
    call = functools.partial(
        RUNS[run], epilogue=lambda z: jnp.tanh(z) * 2, out_dtype=jnp.bfloat16
    )
    got = on_gpu(call, a, b, c)
    want = 2 * np.tanh(a.astype(np.float64) @ b.astype(np.float64) + c)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2.0**-7, atol=1e-4)


def test_gradients():
    a, b, _ = _operands("bfloat16", "bfloat16")

    def loss(a, b):
        return jt.matmul(a, b, epilogue=jnp.sin).sum()

    got = on_gpu(jax.grad(loss, (0, 1)), a, b)
    for g, w in zip(got, on_cpu(jax.grad(loss, (0, 1)), a, b), strict=True):
        g, w = g.astype(np.float32), w.astype(np.float32)
        np.testing.assert_allclose(g, w, rtol=2.0**-6, atol=2.0**-6)
