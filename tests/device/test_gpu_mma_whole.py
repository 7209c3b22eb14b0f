"""mma of whole arrays on a GPU, against float64 and against the CPU's reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from fibres import rng_of
from on_device import on_cpu, on_gpu
from oracle import same_bits

pytestmark = pytest.mark.gpu

_SHAPES = [(128, 64, 128), (256, 512, 256), (300, 200, 260), (1000, 77, 130), (1, 1, 1)]
# A thin side, and enough of the other for the plan of such.
_THIN = [(16, 640, 7000), (7011, 264, 3), (1, 129, 6912)]
_OWN = {"implementation": "mosaic_gpu"}


def _drawn(name, shape, dtype):
    return jnp.asarray(rng_of(name, shape).normal(size=shape), dtype)


def _wide(x):
    return np.asarray(x).astype(np.float64)


def _close(got, want, bound):
    """The norm of the error over the norm: one number for a whole product."""
    error = np.linalg.norm(_wide(got) - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= bound, f"relative error {error:.2e} above {bound}"


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [*_SHAPES, *_THIN])
def test_a_seed_and_an_epilogue(shape, dtype, out):
    m, k, n = shape
    a, b = _drawn("a", (m, k), dtype), _drawn("b", (k, n), dtype)
    c = _drawn("c", (m, n), "float32")

    def fn(a, b, c):
        return jt.mma(a, b, c, epilogue=jnp.tanh, out_dtype=out, **_OWN)

    want = np.tanh(_wide(a) @ _wide(b) + _wide(c))
    # The narrowing rounds to half an ulp; the tensor cores' sums err by some 1e-5.
    _close(on_gpu(fn, a, b, c), want, max(2e-5, float(jnp.finfo(out).eps) / 2))


@pytest.mark.parametrize("every", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [*_SHAPES, (256, 8192, 256)])
def test_promoted_sums(shape, dtype, every):
    m, k, n = shape
    a, b = _drawn("a", (m, k), dtype), _drawn("b", (k, n), dtype)
    policy = jt.MmaPolicy(promote_every=every)
    got = on_gpu(lambda a, b: jt.mma(a, b, policy=policy, **_OWN), a, b)
    # The units of the eight-bit formats keep 14 bits of a sum.
    eight = dtype == "float8_e4m3fn" and every == 128
    _close(got, _wide(a) @ _wide(b), 1e-3 if eight else 3e-7)


@pytest.mark.parametrize(("name", "bound"), [("bf16x6", 5e-7), ("bf16x3", 2e-5)])
@pytest.mark.parametrize("shape", _SHAPES)
def test_float32_in_parts(shape, name, bound):
    m, k, n = shape
    a, b = _drawn("a", (m, k), "float32"), _drawn("b", (k, n), "float32")
    policy = jt.MmaPolicy(input_precision=name, promote_every=128)
    got = on_gpu(lambda a, b: jt.mma(a, b, policy=policy, **_OWN), a, b)
    _close(got, _wide(a) @ _wide(b), bound)


def test_parts_keep_infinities_and_nans_where_they_are():
    a, b = (_drawn(x, (256, 256), "float32") for x in "ab")
    a = a.at[3, 5].set(jnp.inf).at[7, 9].set(jnp.nan).at[11, :].set(1e35)
    b = b.at[5, 7].set(0.0)
    policy = jt.MmaPolicy(input_precision="bf16x6", promote_every=128)

    def fn(a, b, **how):
        return jt.mma(a, b, policy=policy, **how)

    got = on_gpu(lambda a, b: fn(a, b, **_OWN), a, b)
    want = on_cpu(
        lambda a, b: fn(a, b, implementation="reference"), *map(np.asarray, (a, b))
    )
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


@pytest.mark.parametrize(
    "spec", ["mk,kn->mn", "km,kn->mn", "mk,nk->nm", "bmk,bkn->bmn", "mbk,kbn->nbm"]
)
def test_axes_in_any_order(spec):
    sizes = {"b": 3, "m": 200, "k": 136, "n": 264}
    left, right = spec.split("->")[0].split(",")
    a = _drawn(spec, [sizes[c] for c in left], "bfloat16")
    b = _drawn(spec + "b", [sizes[c] for c in right], "bfloat16")
    policy = jt.MmaPolicy(promote_every=64)
    got = on_gpu(lambda a, b: jt.einsum(spec, a, b, policy=policy, **_OWN), a, b)
    _close(got, np.einsum(spec, _wide(a), _wide(b)), 3e-7)


def test_gradients_and_batches_use_the_kernel():
    a, b = _drawn("a", (4, 256, 128), "bfloat16"), _drawn("b", (128, 256), "bfloat16")
    policy = jt.MmaPolicy(promote_every=128)

    def loss(a, b):
        z = jax.vmap(lambda a: jt.mma(a, b, policy=policy))(a)
        return jnp.sum(z * z)

    got = on_gpu(jax.grad(loss, (0, 1)), a, b)
    z = _wide(a) @ _wide(b)
    wants = 2 * z @ _wide(b).T, np.einsum("bmk,bmn->kn", _wide(a), 2 * z)
    for g, want in zip(got, wants, strict=True):
        _close(g, want, 5e-3)  # the cotangents are bfloat16, as the operands


def test_the_same_bits_every_time():
    a, b = _drawn("a", (512, 2048), "bfloat16"), _drawn("b", (2048, 512), "bfloat16")
    fn = jax.jit(lambda a, b: jt.mma(a, b, epilogue=jnp.tanh, **_OWN))
    with jax.default_device(jax.devices("gpu")[0]):
        first = np.asarray(fn(a, b))
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(fn(a, b)), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(300, 77, 130), (3, 1000, 5)])
def test_chains_have_the_bits_of_the_cpu(shape, dtype):
    m, k, n = shape
    a, b = _drawn("a", (m, k), dtype), _drawn("b", (k, n), dtype)
    c = _drawn("c", (m, n), "float32")
    policy = jt.MmaPolicy(allow_reassociation=False)

    def fn(a, b, c, how):
        return jt.mma(a, b, c, policy=policy, implementation=how)

    got = on_gpu(lambda *v: fn(*v, "mosaic_gpu"), a, b, c)
    same_bits(got, on_cpu(lambda *v: fn(*v, "reference"), *map(np.asarray, (a, b, c))))
