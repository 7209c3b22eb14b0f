"""Running a function on one device, for the tests that need a GPU."""

import jax
import numpy as np


def on_cpu(fn, *args):
    """The results of `fn` under jit on the CPU, as NumPy arrays."""
    return _on("cpu", fn, args)


def on_gpu(fn, *args):
    """The results of `fn` under jit on the GPU, as NumPy arrays."""
    return _on("gpu", fn, args)


def _on(platform, fn, args):
    with jax.default_device(jax.devices(platform)[0]):
        return jax.tree.map(np.asarray, jax.jit(fn)(*args))
