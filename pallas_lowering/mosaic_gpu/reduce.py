"""reduce with `add` in Pallas Mosaic GPU kernels, in the order of `fixed_tree`.

All axes give a scalar; one axis of a matrix gives a vector in the reduced layout. Where
the policy permits it, a thread's registers combine first, which shuffles less.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering._add import reduce_add, refuse_add
from jaxtile.pallas_lowering.mosaic_gpu import BACKEND, TRAITS, _lanes
from jaxtile.policy import Transform
from jaxtile.primitives._operands import unpack
from jaxtile.primitives.reduce import reduce_p

# Everything is written out for each register of a thread.
_MOST = 128 * 512
# A warp owns each of four rows, its lanes four neighbouring columns each.
_ROW_OF_WARP = (fa.Tiling(((4, 128), (4,))), (-3,), (-2,), -1)


def _power_of_two(n):
    return n & (n - 1) == 0


def _refuse(*avals, **params):
    reason = refuse_add(TRAITS, ("float32", "int32", "uint32"), avals, params)
    if reason is not None:
        return reason
    elements, _, _ = unpack(params["spec"], avals, params["seeded"], params["masked"])
    shape, axes = elements[0].shape, params["axes"]
    if math.prod(shape) > _MOST:
        return f"{shape} is above {_MOST} elements; reduce blocks, then their sums"
    if not axes:
        return None
    if len(axes) == len(shape):
        if math.prod(shape) % 128:
            return (
                f"{math.prod(shape)} elements are not a multiple of the warpgroup's "
                "128 threads; pad the block and pass where="
            )
        return None
    if len(shape) != 2:
        return (
            f"axes {axes} of {shape} have no register layout; reduce all axes, or one "
            "axis of a matrix: view the ref as one with .reshape"
        )
    if _matrix_layout(shape) is None:
        return (
            f"{shape} does not fill a register layout: (4a, 128b) or (64a, 8b) do; pad "
            "the block and pass where="
        )
    return None


def _matrix_layout(shape):
    rows, columns = shape
    if rows % 4 == 0 and columns % 128 == 0:
        return plgpu.Layout.TILED(*_ROW_OF_WARP)
    if rows % 64 == 0 and columns % 8 == 0:
        return plgpu.Layout.WGMMA
    return None


def _default_layout(shape, axes):
    if len(axes) < len(shape):
        return _matrix_layout(shape)
    size = math.prod(shape)
    vector = next(v for v in (4, 2, 1) if size % (128 * v) == 0)
    return plgpu.Layout.WG_STRIDED(tuple(shape), vec_size=vector)


def _as_public(layout):
    if isinstance(layout, fa.WGStridedFragLayout):
        return plgpu.Layout.WG_STRIDED(layout.shape, vec_size=layout.vec_size)
    if not isinstance(layout, fa.TiledLayout):
        return None
    parts = layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    return plgpu.Layout.TILED(*parts)


def _layout(ctx, value, shape, axes):
    """The layout that the value has, or the one that it shall get."""
    if ctx.module_ctx.lowering_semantics == plgpu.LoweringSemantics.Lane:
        found = _as_public(getattr(value, "layout", None))
    else:
        found = _as_public(_lanes.known_layout(value))
    return found or _default_layout(shape, axes)


def _check_layout(layout, shape, axes, free):
    """Refuse what depends on the layout, which only the rule sees."""
    concrete = layout.to_mgpu()
    whole = len(axes) == len(shape)
    if isinstance(concrete, fa.WGStridedFragLayout):
        if not whole:
            BACKEND.fail(
                reduce_p,
                f"axes {axes} of a value in the strided layout; load it with "
                "layout=plgpu.Layout.WGMMA or a TILED one",
            )
        return
    tile = concrete.base_tile_shape
    if any(s % t for s, t in zip(shape[::-1], tile[::-1], strict=False)):
        BACKEND.fail(
            reduce_p,
            f"shape {shape} does not fill tiles of {tile}; load it with another layout=",
        )
    minor = [shape[a] for a in axes[1:]]
    if not free and not all(map(_power_of_two, (*tile, *minor))):
        BACKEND.fail(
            reduce_p,
            f"this order over axes of {shape} needs powers of two after the first; "
            'load it with layout=plgpu.Layout.WG_STRIDED, or use "unordered_tree"',
        )


def _combine(dtype):
    return arith.addf if np.issubdtype(dtype, np.floating) else arith.addi


def _total(ctx, layout, free, x, axes):
    shape, dtype = x.shape, x.dtype
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    out_layout = layout.reduce(axes) if kept else plgpu.Layout.WG_SPLAT
    several = ctx.module_ctx.axis_names.wg is not None
    offset = ctx.module_ctx.smem_used_bytes

    def run(_, value):
        tiled, scalars = _lanes.explode(value)
        strided = isinstance(value.layout, fa.WGStridedFragLayout)
        rank = 1 if strided else len(shape)
        order = _lanes.digits(
            tiled, scalars.ndim, scalars.shape, (0,) if strided else axes, rank
        )
        if free:
            order = sorted(
                order, key=lambda d: ("register", "lane", "warp").index(d[1])
            )
        scratch = None
        if any(d.place == "warp" for d in order):
            scratch = _lanes.scratch_of_warpgroup(offset, _lanes.SCRATCH_BYTES, several)
        result = _lanes.reduce_digits(_combine(dtype), scalars, order, scratch)
        signed = value.is_signed
        if not kept:
            return fa.FragmentedArray.splat(result.item(), (), is_signed=signed)
        return _lanes.implode(result, tiled.reduce(axes), kept, signed)

    inline = plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(kept, dtype, out_layout),
    )
    call: Any = inline(run)
    return call(x)


@BACKEND.lowers(reduce_p, _refuse, scratch_bytes=_lanes.SCRATCH_BYTES)
def _reduce(ctx, *operands, **params):
    shape, axes = ctx.avals_in[0].shape, params["axes"]
    free = params["policy"].permits(Transform.REGROUP | Transform.PERMUTE)
    layout = None
    if axes:
        layout = _layout(ctx, operands[0], shape, axes)
        _check_layout(layout, shape, axes, free)
    total = functools.partial(_total, ctx, layout, free)

    def body(*values):
        return reduce_add(values, params, total)

    return BACKEND.hooks.trace(body)(ctx, *operands)
