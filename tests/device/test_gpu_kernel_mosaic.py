"""Kernels of `jt.kernel` as Mosaic GPU kernels on a GPU, against plain jax and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bodies
import body_cases
import jaxtile as jt
from body_cases import Case
from jaxtile import _kernels, _recurrence
from on_device import on_cpu, on_gpu

pytestmark = pytest.mark.gpu


def _same(kernel, *args, rtol=2e-6, atol=0.0, **config):
    """The kernel on the GPU against plain jax on the CPU."""
    want = on_cpu(lambda *v: kernel(*v, **config), *args)
    got = on_gpu(lambda *v: kernel(*v, implementation="mosaic_gpu", **config), *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol
        )


def _check(case: Case):
    def run(implementation, on):
        call = lambda *v: case.kernel(  # noqa: E731
            *v, implementation=implementation, **case.config
        )
        return list(map(np.asarray, jax.tree.leaves(on(call, *case.args))))

    case.compare(run("mosaic_gpu", on_gpu), lambda: run("reference", on_cpu))


@pytest.mark.parametrize("name", body_cases.CASES)
def test_small_calls(name):
    _check(body_cases.CASES[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", bodies.FUNCTIONS)
def test_functions(name, dtype):
    _check(body_cases.function(name, jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((4096, 4096), 1),
        ((1000, 4093), 1),
        ((4099, 1024), 4),
        ((513, 768), 8),
        ((300, 16384), 1),
        ((65536, 128), 16),
        ((33, 65536), 1),
    ],
)
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_rows(name, shape, block, dtype):
    rng = np.random.default_rng(5)
    x = jnp.asarray(3 * rng.standard_normal(shape) + 1, dtype)
    w, b = (jnp.asarray(rng.standard_normal(shape[1]), dtype) for _ in range(2))
    kernel, args, config = {
        "softmax": (_kernels.softmax, (x,), {}),
        "layer_norm": (_kernels.layer_norm, (x, w, b), {"eps": 1e-5}),
        "rms_norm": (_kernels.rms_norm, (x, w), {"eps": 1e-6}),
    }[name]
    # One unit in the last place of bfloat16, where a float32 result lies at a tie.
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 8e-3}
    close.setdefault("atol", 1e-6)
    _same(kernel, *args, block=block, **config, **close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(33, 65536), (5, 20001), (70000, 8), (4099, 300)])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_rows_as_tuned(name, shape, dtype):
    rng = np.random.default_rng(6)
    x = jnp.asarray(3 * rng.standard_normal(shape) + 1, dtype)
    w, b = (jnp.asarray(rng.standard_normal(shape[1]), dtype) for _ in range(2))
    args = {"softmax": (x,), "layer_norm": (x, w, b), "rms_norm": (x, w)}[name]
    layer = getattr(jt.nn, name)
    with jax.default_device(jax.devices("gpu")[0]):
        assert "mosaic_gpu" in jax.jit(layer).lower(*args).as_text()
    got, want = on_gpu(layer, *args), on_cpu(layer, *args)
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 8e-3}
    close.setdefault("atol", 1e-6)
    np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), **close)


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left", "fold_right"])
@pytest.mark.parametrize("shape", [(700, 1000), (257, 4096), (64, 8191)])
def test_stated_orders_have_the_bits_of_the_cpu(policy, shape):
    x = bodies.floats(*shape)
    config = {"reducer": "add", "policy": policy, "block": 1}
    _same(bodies.across, x, rtol=0, **config)
    if policy != "fold_right":
        _same(bodies.prefixes, x, rtol=0, policy=policy, block=1)


def test_the_same_bits_in_every_run_and_every_block():
    x = bodies.floats(4096, 1000)
    seen = set()
    for block in (1, 4, 8):
        for _ in range(5):
            call = lambda v, n=block: bodies.across(  # noqa: E731
                v,
                reducer="add",
                policy="fixed_tree",
                block=n,
                implementation="mosaic_gpu",
            )
            seen.add(on_gpu(call, x).tobytes())
    assert len(seen) == 1


def test_a_recurrence():
    x, decay, gate = (bodies.floats(2, 700, 300) / 99 for _ in range(3))
    args = (x, decay - 3, gate, bodies.floats(300) / 99)
    _same(_recurrence.recurrence, *args, rtol=2e-4, atol=2e-5, block=64, lanes=128)

    def pulled(name):
        call = lambda *v: _recurrence.recurrence(*v, implementation=name)  # noqa: E731
        return lambda *v: jax.vjp(call, *v)[1](v[0])

    found = on_gpu(pulled("mosaic_gpu"), *args), on_cpu(pulled("reference"), *args)
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_a_batch_and_a_derivative():
    def call(x):
        return _kernels.softmax(x, implementation="mosaic_gpu")

    x = bodies.floats(7, 33, 100)
    got = on_gpu(jax.vmap(call), x)
    np.testing.assert_allclose(got, on_cpu(jax.nn.softmax, x), rtol=2e-5, atol=1e-7)
    loss = lambda f: jax.grad(lambda v: (f(v) ** 2).sum())  # noqa: E731
    got, want = on_gpu(jax.vmap(loss(call)), x), on_cpu(loss(jax.nn.softmax), x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_layers_run_by_it_in_a_block():
    x = bodies.floats(33, 257)
    with jt.use_implementation("mosaic_gpu"):
        got = on_gpu(lambda v: jt.nn.softmax(v), x)
    np.testing.assert_allclose(got, on_cpu(jax.nn.softmax, x), rtol=2e-5, atol=1e-7)
