"""Starting thread code over a grid: the only use of `plgpu.kernel`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.primitives._define import new_primitive

_WARPS_OF_GROUP = 4
# 64-bit slots of shared memory that a CTA may have.
MOST_SLOTS = 227 * 1024 // 8


# What code stands for, for those who read a kernel's jaxpr: it does nothing.
# The `sharers` are warpgroups that run the ops together.
shown_p = new_primitive("tile_shown")
shown_p.def_abstract_eval(lambda **_: [])
BACKEND.hooks.register(shown_p, lambda ctx, **_: [])


@dataclass
class Program:
    """What thread code sees.

    Args:
        inputs, outputs: the arrays.
        words: shared memory, or None.
    """

    inputs: list
    outputs: list
    words: Any


def launch(
    body: Callable[[Program], None],
    outs: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    *,
    blocks: int,
    warps: int,
    slots: int = 0,
    shows: Any = None,
) -> list[jax.Array]:
    """Run thread code once in each thread of a grid.

    Args:
        body: writes the code.
        outs: shapes and dtypes of the results.
        operands: arrays of any shape and arithmetic dtype.
        blocks: CTAs in the grid.
        warps: warps of a CTA, a multiple of 4.
        slots: 64-bit slots of shared memory that `body` uses, at most `MOST_SLOTS`.
        shows: a jaxpr of the ops that the code stands for, or None.

    Returns:
        The results.
    """
    dtypes = [np.dtype(v.dtype) for v in (*operands, *outs)]
    n = len(operands)
    groups = warps // _WARPS_OF_GROUP

    def kernel(*refs):
        inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))

        def run(_, *raw):
            arrays = raw[: len(dtypes)]
            buffers = [th.Buffer(r, d) for r, d in zip(arrays, dtypes, strict=True)]
            words = th.Words(raw[-1]) if slots else None
            body(Program(buffers[:n], buffers[n:], words))

        if shows is not None:
            shown_p.bind(jaxpr=shows, sharers=groups)
        code: Any = inline(run)
        code(*refs)

    several: dict[str, Any] = {}
    if groups > 1:
        several = dict(num_threads=groups, thread_name="group")
    scratch = [plgpu.SMEM((2 * slots,), jnp.int32)] if slots else []
    call = plgpu.kernel(
        kernel,
        out_type=[_stored(o) for o in outs],
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **several,
    )
    results = call(*[_flat(v) for v in operands])
    return [
        (r != 0 if o.dtype == bool else r).reshape(o.shape)
        for r, o in zip(results, outs, strict=True)
    ]


def _stored(out):
    dtype = np.dtype(np.int8) if out.dtype == bool else out.dtype
    return jax.ShapeDtypeStruct((math.prod(out.shape),), dtype)


def _flat(x):
    # Kernels address bool as bytes.
    x = x.astype(jnp.int8) if x.dtype == bool else x
    return x.reshape(-1)
