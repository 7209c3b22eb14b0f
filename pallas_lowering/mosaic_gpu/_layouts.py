"""Register layouts for values in kernels: those that they have, and those to give them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jaxtile.pallas_lowering.mosaic_gpu._lanes import known_layout

# A warp owns each of four rows, its lanes four neighbouring columns each.
ROW_OF_WARP = fa.TiledLayout(fa.Tiling(((4, 128), (4,))), (-3,), (-2,), -1)
# Registers of one operand in a thread; more are spilled.
MOST_EACH = 512
# Where each thread shall have whole fibres, beyond this shared memory serves better.
_MOST_FIBRE = 128


def public(layout: Any) -> Any:
    """A layout as `plgpu` takes it."""
    if isinstance(layout, fa.WGSplatFragLayout):
        return plgpu.Layout.WG_SPLAT(layout.shape)
    if isinstance(layout, fa.WGStridedFragLayout):
        return plgpu.Layout.WG_STRIDED(layout.shape, vec_size=layout.vec_size)
    parts = layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    return plgpu.Layout.TILED(*parts)


def of_value(ctx: Any, value: Any) -> Any:
    """The strided or tiled layout to which a value is bound, or None."""
    if ctx.module_ctx.lowering_semantics == plgpu.LoweringSemantics.Lane:
        found = getattr(value, "layout", None)
    else:
        # A literal is no value of the module yet.
        found = known_layout(value) if isinstance(value, ir.Value) else None
    known = isinstance(found, fa.WGStridedFragLayout | fa.TiledLayout)
    return found if known else None


def _strided(shape):
    size = math.prod(shape)
    vector = next(v for v in (4, 2, 1) if size % (128 * v) == 0)
    return fa.WGStridedFragLayout(tuple(shape), vector)


def _share(n: int, most: int) -> int:
    """The largest power of two that divides n, up to the power of two `most`."""
    return math.gcd(n, most)


def spread(shape: Sequence[int], axes: Sequence[int]) -> fa.TiledLayout:
    """Lanes, then warps, along the given axes, minor first; what is left repeats."""
    rank = len(shape)
    lanes, warps, left = [1] * rank, [1] * rank, [32, 4]
    for k, sizes in enumerate((lanes, warps)):
        for a in sorted(axes, reverse=True):
            sizes[a] = _share(shape[a] // lanes[a], left[k])
            left[k] //= sizes[a]
    block = tuple(w * t for w, t in zip(warps, lanes, strict=True))
    tiling = fa.Tiling((block, tuple(lanes), (1,) * rank))

    def dims(sizes, first, rest):
        found = [first + a for a in range(rank) if sizes[a] > 1]
        repeated = [fa.Replicated(rest)] if rest > 1 else []
        return tuple(repeated + found)

    return fa.TiledLayout(
        tiling,
        dims(warps, -3 * rank, left[1]),
        dims(lanes, -2 * rank, left[0]),
        -1,
        _check_canonical=False,
    ).canonicalize()


def _each(layout, shape) -> int:
    return math.prod(layout.registers_shape(tuple(shape))) * layout.vector_length


def _of_rank(layout: fa.TiledLayout, rank: int) -> fa.TiledLayout:
    """The layout with a tile of full rank: jax 0.10 infers no others past comparisons."""
    first, *rest = layout.tiling.tiles
    tiling = fa.Tiling(((1,) * (rank - len(first)) + first, *rest))
    parts = layout.warp_dims, layout.lane_dims, layout.vector_dim
    return fa.TiledLayout(tiling, *parts)


def default(shape: Sequence[int], axes: Sequence[int], fold: bool) -> Any:
    """A layout for a value that has none yet, or None where it would not fit registers.

    Args:
        shape: of the value, not ().
        axes: along which it is combined.
        fold: strictly, so that whole fibres in threads are best.
    """
    rank, size = len(shape), math.prod(shape)
    # Whole rows in threads would read memory far apart, which plain loads refuse.
    if fold and axes and rank - 1 not in axes and shape[-1] % 32 == 0:
        own = spread(shape, [a for a in range(rank) if a not in axes])
        if _each(own, shape) <= _MOST_FIBRE:
            return own
    if 0 < len(axes) < rank:
        rows, columns = shape[-2:]
        if rows % 4 == 0 and columns % 128 == 0:
            return _of_rank(ROW_OF_WARP, rank)
        if rows % 64 == 0 and columns % 8 == 0:
            return _of_rank(fa.WGMMA_LAYOUT, rank)
    if size % 128 == 0 and not 0 < len(axes) < rank:
        return _strided(shape)
    found = spread(shape, range(rank))
    return found if _each(found, shape) <= MOST_EACH else None


def without(layout: Any, shape: Sequence[int], axes: Sequence[int]) -> Any:
    """The layout of what is left of a value when axes go, or None if there is none.

    Threads that differed along those axes have the same elements then.
    """
    kept = tuple(s for a, s in enumerate(shape) if a not in axes)
    if not axes or not kept:
        return layout if not axes else fa.WGSplatFragLayout(())
    if isinstance(layout, fa.WGStridedFragLayout):
        return default(kept, (), False)
    lead = len(shape) - len(layout.base_tile_shape)
    return layout.reduce([a - lead for a in axes if a >= lead])
