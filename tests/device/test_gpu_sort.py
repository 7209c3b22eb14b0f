"""sort, argsort and topk of whole arrays on a GPU: the bits of the CPU's reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import order
from fibres import rng_of
from on_device import on_cpu, on_gpu
from oracle import same_bits

pytestmark = pytest.mark.gpu

_SHAPES = [(7, 1), (5, 33), (1000, 1000), (3, 1024), (64, 2048), (130, 517)]


def _bits_of(dtype, shape):
    return order.anything(rng_of(dtype, shape), shape, jnp.dtype(dtype))


def _compare(fn, *args):
    got, want = on_gpu(fn, *args), on_cpu(fn, *args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("nan", ["last", "first", "largest", "smallest"])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("shape", _SHAPES)
def test_rows_of_any_bits(shape, descending, nan):
    x = _bits_of("float32", shape)
    how = {"descending": descending, "nan": nan}

    def keys(x):
        return jt.sort(x, 1, **how)

    def places(x):
        return jt.argsort(x, 1, **how)

    with jt.use_implementation("mosaic_gpu"):
        got = on_gpu(keys, x), on_gpu(places, x) if shape[1] <= 1024 else None
    same_bits(got[0], on_cpu(keys, x))
    if got[1] is not None:
        same_bits(got[1], on_cpu(places, x))


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "int8", "uint8", "int16", "uint32", "int32", "bool"],
)
def test_formats(dtype):
    x = _bits_of(dtype, (600, 300))
    _compare(lambda x: (jt.sort(x, 1), jt.argsort(x, 0), jt.topk(x, 1, 5)), x)


def test_payloads_and_long_rows():
    x, y = _bits_of("float32", (700, 257)), _bits_of("int32", (700, 257))
    _compare(lambda x, y: jt.sort(x, 0, y, descending=True), x, y)
    _compare(
        lambda x: (jt.sort(x, 1), jt.topk(x, 1, 64)), _bits_of("float32", (3, 50000))
    )


def test_exchange_under_xla():
    x = _bits_of("float32", (300, 400))
    index = rng_of("index").integers(-5, 410, (300, 400)).astype(np.int32)
    ids = rng_of("ids").integers(0, 50, 300).astype(np.int32)

    def fn(x, index, ids):
        size = jnp.abs(x)  # sums without subnormals, which the CPU flushes
        small = jnp.where((size < 1e3) & (size > 1e-20), x, 1.0)
        return (
            jt.gather(x, index, 1, fill=jnp.nan, batch="all"),
            jt.segment_reduce(small, ids, 50, jt.add, policy="fixed_tree"),
            jt.segment_reduce(small, ids, 50, jt.maximum),
            jt.shift(x, 1, 3, fill=0.0),
        )

    _compare(fn, x, index, ids)


@pytest.mark.parametrize(("n", "m"), [(4096, 4096), (37, 2100), (50000, 300)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_gather_along_rows(dtype, n, m):
    x = _bits_of(dtype, (600, n))
    index = rng_of(n, m).integers(-5, n + 5, (600, m)).astype(np.int32)

    def fn(x, index):
        return jt.gather(x, index, 1, batch="all")

    with jt.use_implementation("mosaic_gpu"):
        got = on_gpu(fn, x, index)
    same_bits(got, on_cpu(fn, x, index))
