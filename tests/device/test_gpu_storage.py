"""Storage formats on a GPU: the bits of the CPU, under XLA and in kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import codes
import jaxtile as jt
import storage
import targets
from on_device import on_cpu, on_gpu

pytestmark = pytest.mark.gpu


def _same(got, want):
    """Equal bits; the NaNs of values are one class."""
    assert got.dtype == want.dtype
    g, w = codes.raw(got), codes.raw(want)
    if got.dtype.name not in codes.ALL:
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        g, w = g[~nan], w[~nan]
    np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("name", codes.ALL)
@pytest.mark.parametrize("rounding", codes.ROUNDINGS)
def test_xla_rounds_as_on_the_cpu(name, rounding):
    x = np.concatenate([codes.boundaries(name), codes.samples(20000)])
    for overflow in codes.MODES[name]:
        f = lambda v, o=overflow: jt.quantize(v, name, rounding=rounding, overflow=o)  # noqa: E731
        _same(on_gpu(f, x), on_cpu(f, x))


@pytest.mark.parametrize("name", codes.ALL)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_16_bit_code(name, source):
    x = np.arange(65536, dtype=np.uint16).view(jnp.dtype(source))
    f = lambda v: jt.quantize(v, name, overflow=codes.MODES[name][-1])  # noqa: E731
    _same(on_gpu(f, x), on_cpu(f, x))


@pytest.mark.parametrize("name", codes.ALL)
def test_decode_and_blocks(name):
    every = codes.every_code(name)
    _same(on_gpu(jt.decode, every), on_cpu(jt.decode, every))
    x = codes.samples(2044)[:4096].reshape(64, 64)
    for scale in ("float32", "float8_e8m0fnu"):

        def f(v, scale=scale):
            q = jt.quantize_blocks(v, name, 32, scale_format=scale)
            return q.codes, q.scales, jt.decode_blocks(*q)

        for got, want in zip(on_gpu(f, x), on_cpu(f, x), strict=True):
            _same(got, want)


@pytest.mark.parametrize("name", storage.CALLS)
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_kernels_have_the_bits_of_the_cpu(name, backend):
    with jax.default_device(jax.devices("cpu")[0]):
        body, out, _, operands, want = storage.kernel(name, backend)
    if backend == "triton":
        from jax.experimental.pallas import triton as plt

        params = plt.CompilerParams()
        run = pl.pallas_call(body, out_shape=out, compiler_params=params)
    else:
        run = targets.mosaic_gpu_kernel(body, (out,))
    (got,) = jax.tree.leaves(on_gpu(run, *operands))
    _same(got, want)
