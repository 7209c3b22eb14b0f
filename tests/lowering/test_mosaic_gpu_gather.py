"""gather of whole arrays through Mosaic GPU, on a machine in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets
from fibres import rng_of
from jaxtile import primitives
from jaxtile.errors import UnsupportedOnBackend
from jaxtile.pallas_lowering import load_all

load_all()

from jaxtile.pallas_lowering.mosaic_gpu import whole_gather  # noqa: E402
from machines import on_machine  # noqa: E402

pytestmark = pytest.mark.skipif(
    targets.LINE < (0, 11), reason="this jax prints no module of a kernel"
)


@pytest.mark.parametrize(
    ("dtype", "n", "m", "index"),
    [
        ("float32", 64, 40, "int32"),
        ("float32", 37, 2100, "int32"),
        ("bfloat16", 24, 7, "int8"),
        ("float8_e5m2", 16, 12, "int32"),
        ("uint8", 5, 8, "uint8"),
        ("bool", 9, 3, "int16"),
        ("float32", 30000, 5, "uint32"),
    ],
)
def test_rows_have_the_bits_of_the_reference(monkeypatch, dtype, n, m, index):
    rng = rng_of(dtype, n, m)
    kind = np.dtype(jnp.dtype(dtype))
    raw = rng.integers(0, 256, (3, n * kind.itemsize)).astype(np.uint8)
    x = rng.random((3, n)) < 0.5 if dtype == "bool" else raw.view(kind)
    low = 0 if index.startswith("u") else -3
    places = rng.integers(low, min(n + 4, np.iinfo(index).max), (3, m)).astype(index)

    def fn(x, places):
        return jt.gather(x, places, 1, batch="all")

    run = on_machine(monkeypatch, {primitives.gather_p: whole_gather.run})
    (got,), launches = run(fn, x, places)
    assert launches == [(3, 2)]
    want = np.asarray(jax.jit(fn)(x, places))
    word = np.dtype(f"u{kind.itemsize}")
    np.testing.assert_array_equal(got.view(word), want.view(word))


@pytest.mark.parametrize(
    ("axis", "shape", "batch"), [(0, (4, 8), "all"), (1, (4,), ())], ids=str
)
def test_other_calls_are_refused(axis, shape, batch):
    def fn(x, index):
        how = {"batch": batch, "implementation": "mosaic_gpu"}
        return jt.gather(x, index, axis, **how)

    x, index = targets.spec((4, 8)), targets.spec(shape, "int32")
    with (
        targets.mesh("NVIDIA H200", 132, "gpu"),
        pytest.raises(UnsupportedOnBackend, match="only the last axis"),
    ):
        targets.lowered(fn, [x, index], "cuda")
