"""Products of scaled codes on a GPU, as the kernel of Triton and as plain jax."""

import jax
import numpy as np
import pytest

import jaxtile as jt
from on_device import on_gpu
from scaled import GRIDS, case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", ["triton", "reference", None])
@pytest.mark.parametrize("name", GRIDS)
def test_product(name, implementation):
    args, want, size = case(name)
    with jt.use_implementation(implementation):
        got = on_gpu(jt.nn.scaled_matmul, *args)
    np.testing.assert_array_less(np.abs(got - want), 3e-6 * size + 1e-30)


def test_gradient():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(n).astype(np.float32) for n in ((37, 256), (256, 128)))

    def loss(a, b):
        return (jt.nn.quantized_matmul(a, b) ** 2).sum()

    for got, x in zip(on_gpu(jax.grad(loss, (0, 1)), a, b), (a, b), strict=True):
        assert got.shape == x.shape
    plain = 2 * (a @ b) @ b.T
    got = on_gpu(jax.grad(loss), a, b)
    assert np.linalg.norm(got - plain) < 0.1 * np.linalg.norm(plain)
