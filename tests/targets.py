"""Lowering kernels for GPU and TPU, and compiling them for TPU, without either."""

import contextlib
import io
import sys
from platform import machine

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

import rules

LINE = tuple(map(int, jax.__version__.split(".")[:2]))


def spec(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))


def mesh(kind: str, cores: int, platform: str):
    """What stands for the device while a kernel is traced and lowered."""
    device = jax.sharding.AbstractDevice(kind, num_cores=cores, platform=platform)
    auto = jax.sharding.AxisType.Auto
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), (auto,), abstract_device=device)
    )


def lowered(kernel, args, platform, **jit):
    traced = jax.jit(kernel, **jit).trace(*args)
    return traced.lower(lowering_platforms=(platform,))


def printed(kernel, args, platform):
    """The module that the kernel's `debug=True` prints while it is lowered."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        lowered(kernel, args, platform)
    return text.getvalue()


def triton(body, out, *args) -> str:
    from jax.experimental.pallas import triton as plt

    params = plt.CompilerParams()
    kernel = pl.pallas_call(body, out_shape=out, compiler_params=params, debug=True)
    with mesh("NVIDIA H200", 132, "gpu"):
        return printed(kernel, args, "cuda")


def tpu(body, out, *args) -> str:
    kernel = pl.pallas_call(body, out_shape=out, debug=True)
    with mesh("TPU v5 lite", 1, "tpu"):
        return printed(kernel, args, "tpu")


def mosaic_gpu_kernel(body, out, lane=False, **kwargs):
    """A kernel in the semantics named."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    semantics = plgpu.LoweringSemantics
    params = plgpu.CompilerParams(
        lowering_semantics=semantics.Lane if lane else semantics.Warpgroup
    )
    return plgpu.kernel(body, out_type=out, compiler_params=params, **kwargs)


def mosaic_gpu(body, out, *args, lane=False, **kwargs) -> str:
    # jax 0.10's kernel has no debug=: there the test is that it lowers at all.
    debug = {"debug": True} if LINE > (0, 10) else {}
    kernel = mosaic_gpu_kernel(body, out, lane, **debug, **kwargs)
    with mesh("NVIDIA H200", 132, "gpu"):
        return printed(kernel, args, "cuda")


def load_tiled(ref, layout=None):
    """A value from global memory in a layout, or in whatever one its user picks."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = (...,) if LINE < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store_tiled(ref, value):
    """To global memory from a tiled layout: before jax 0.12 a plain store does it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


_TPUS = {
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "tpu7x": ("tpu7x:2x2x1", "TPU7x"),
}


# libtpu has wheels for this platform alone; there a missing one is a failure.
needs_libtpu = pytest.mark.skipif(
    (sys.platform, machine()) != ("linux", "x86_64"),
    reason="libtpu has no wheel for this platform",
)


def compile_array_for_tpu(fn, *args, chip="v5e"):
    """Compile a function with libtpu; raises what the compiler raises."""
    from jax.experimental import topologies

    topology, kind = _TPUS[chip]
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device = jax.sharding.SingleDeviceSharding(described.devices[0])
    with mesh(kind, 1, "tpu"):
        found = lowered(fn, args, "tpu", in_shardings=device, out_shardings=device)
    return found.compile()


def compile_for_tpu(body, out, *args, chip="v5e"):
    """Compile a kernel with libtpu; raises what the compiler raises."""
    return compile_array_for_tpu(pl.pallas_call(body, out_shape=out), *args, chip=chip)


def interpreted(fn, table, *args):
    """The leaves of `fn` of values in an interpreted kernel, with rules replaced."""
    run, count = rules.replaced(table, fn), len(args)

    def body(*refs):
        values = run(*(ref[...] for ref in refs[:count]))
        for ref, value in zip(refs[count:], values, strict=True):
            ref[...] = value

    out = [spec(v.shape, v.dtype) for v in jax.tree.leaves(jax.eval_shape(fn, *args))]
    return pl.pallas_call(body, out_shape=out, interpret=True)(*args)
