"""Whole-array kernels of Mosaic GPU on the machine of `simt`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

import rules
import simt
import targets
from jaxtile.pallas_lowering import _choice

_kernel = plgpu.kernel


def _launched(launches, body, out_type, **params):
    """`plgpu.kernel`, on the machine."""

    def call(*arrays):
        kernel = _kernel(body, out_type=out_type, debug=True, **params)
        inputs = [targets.spec(a.shape, a.dtype) for a in arrays]
        with targets.mesh("NVIDIA H200", 132, "gpu"):
            text = targets.printed(kernel, inputs, "cuda")
        launches.append((*params["grid"], params.get("num_threads", 1)))
        machine = simt.Machine(simt.module_of(text), whole=True)

        def run(*arrays):
            return machine.run(list(map(np.asarray, arrays)), out_type)

        if any(isinstance(a, jax.core.Tracer) for a in arrays):
            return list(jax.pure_callback(run, list(out_type), *arrays))
        return list(map(jnp.asarray, run(*arrays)))

    return call


def kernels_on_machine(monkeypatch):
    """Have kernels that are launched in this test run on the machine; a list of launches."""
    launches = []
    monkeypatch.setattr(plgpu, "kernel", functools.partial(_launched, launches))
    # The machine takes the place of the device that is not here.
    monkeypatch.setattr(_choice, "elsewhere", lambda *_: None)
    return launches


def on_machine(monkeypatch, table):
    """`run(fn, *args)`: the leaves by a table of kernels, and each launch's size.

    A size is (CTAs, warpgroups).
    """
    launches = kernels_on_machine(monkeypatch)

    def run(fn, *args):
        del launches[:]
        found = rules.through(table, fn, *args, jit=False)
        return list(map(np.asarray, found)), list(launches)

    return run
