"""Whole-array kernels of Mosaic GPU on the machine of `simt`."""

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

import rules
import simt
import targets

_kernel = plgpu.kernel


def _launched(launches, body, out_type, **params):
    """`plgpu.kernel`, on the machine."""

    def call(*arrays):
        kernel = _kernel(body, out_type=out_type, debug=True, **params)
        inputs = [targets.spec(a.shape, a.dtype) for a in arrays]
        with targets.mesh("NVIDIA H200", 132, "gpu"):
            text = targets.printed(kernel, inputs, "cuda")
        launches.append((*params["grid"], params.get("num_threads", 1)))
        machine = simt.Machine(simt.module_of(text))
        found = machine.run(list(map(np.asarray, arrays)), out_type)
        return list(map(jnp.asarray, found))

    return call


def on_machine(monkeypatch, table):
    """`run(fn, *args)`: the leaves by a table of kernels, and each launch's size.

    A size is (CTAs, warpgroups).
    """
    launches = []
    monkeypatch.setattr(plgpu, "kernel", functools.partial(_launched, launches))

    def run(fn, *args):
        del launches[:]
        found = rules.through(table, fn, *args, jit=False)
        return list(map(np.asarray, found)), list(launches)

    return run
