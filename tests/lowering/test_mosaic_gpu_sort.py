"""sort of whole arrays through Mosaic GPU, on a machine in NumPy."""

import jax
import jax.numpy as jnp
import pytest

import jaxtile as jt
import order
import targets
from jaxtile import primitives
from jaxtile.pallas_lowering import load_all

load_all()

from fibres import rng_of  # noqa: E402
from jaxtile.pallas_lowering.mosaic_gpu import whole_sort  # noqa: E402
from machines import on_machine  # noqa: E402

pytestmark = pytest.mark.skipif(
    targets.LINE < (0, 11), reason="this jax prints no module of a kernel"
)


def _bits_of(dtype, shape):
    return order.anything(rng_of(dtype, shape), shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "shape", "nan", "descending"),
    [
        ("float32", (5, 33), "last", False),
        ("float32", (3, 1000), "first", True),
        ("float32", (1, 7), "largest", True),
        ("float32", (2, 128), "smallest", False),
        ("bfloat16", (4, 40), "largest", False),
        ("float16", (4, 64), "last", True),
        ("int8", (3, 70), "last", True),
        ("uint16", (3, 1), "last", False),
        ("int32", (2, 100), "last", True),
        ("bool", (2, 50), "last", False),
    ],
)
@pytest.mark.parametrize("indices", [False, True])
def test_rows_have_the_bits_of_the_reference(
    monkeypatch, dtype, shape, nan, descending, indices
):
    x = _bits_of(dtype, shape)
    fn = jt.sort if not indices else jt.argsort
    call = lambda x: fn(x, 1, descending=descending, nan=nan)  # noqa: E731
    run = on_machine(monkeypatch, {primitives.sort_p: whole_sort.run})
    (got,), launches = run(call, x)
    assert launches == [(-(-shape[0] // 4), 1)]
    order.same(got, jax.jit(call)(x))


def test_payloads_follow(monkeypatch):
    x, y = _bits_of("float32", (40, 3)), _bits_of("int32", (40, 3))
    call = lambda x, y: jt.sort(x, 0, y)  # noqa: E731
    run = on_machine(monkeypatch, {primitives.sort_p: whole_sort.run})
    got, _ = run(call, x, y)
    for g, w in zip(got, jax.tree.leaves(jax.jit(call)(x, y)), strict=True):
        order.same(g, w)
