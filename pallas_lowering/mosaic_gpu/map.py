"""map in Pallas Mosaic GPU kernels: plain jax, and thread code for what plgpu lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxtile.pallas_lowering._elementwise import map_values, refuse_map
from jaxtile.pallas_lowering.mosaic_gpu import BACKEND, TRAITS, _inline, _layouts
from jaxtile.pallas_lowering.mosaic_gpu import _digits as dg
from jaxtile.pallas_lowering.mosaic_gpu._lanes import Form
from jaxtile.pallas_lowering.mosaic_gpu._region import Region, lacks
from jaxtile.primitives.map import map_p

_refuse_plain = functools.partial(refuse_map, BACKEND, TRAITS)


def region_of(avals: Any, region: Any) -> Region:
    """A map's function as thread code."""
    return Region(lambda *xs: jax.tree.leaves(region.fn(*xs)), [a.dtype for a in avals])


def _refuse(*avals, region):
    reason = next(filter(None, map(TRAITS.operand, avals)), None)
    if reason is not None or _refuse_plain(*avals, region=region) is None:
        return reason
    made = region_of(avals, region)
    dtypes = [v.aval.dtype for v in made.closed.jaxpr.outvars]
    reason = next(filter(None, map(TRAITS.format, dtypes)), None)
    return reason or lacks(made.closed)


@BACKEND.lowers(map_p, _refuse)
def _map(ctx, *values, region):
    if _refuse_plain(*ctx.avals_in, region=region) is None:
        code = functools.partial(map_values, TRAITS, region=region)
    else:
        code = _threaded(ctx, values, region_of(ctx.avals_in, region))
    return BACKEND.hooks.trace(code)(ctx, *values)


def _threaded(ctx: Any, values: Any, region: Region) -> Callable[..., list]:
    shape = ctx.avals_in[0].shape
    known = {f for f in (_layouts.of_value(ctx, v) for v in values) if f is not None}
    if len(known) > 1:
        BACKEND.fail(map_p, "its operands have different layouts; load them in one")
    layout = next(iter(known), None)
    if layout is None and shape:
        layout = _layouts.default(shape, (), False)
        if layout is None:
            BACKEND.fail(
                map_p, f"{shape} fills no register layout; load it with a layout="
            )
    form = Form(layout, shape)
    results = [(form, v.dtype) for v in ctx.avals_out]

    def code(_, *values):
        arrays = [form.explode(v) for v in values]
        found = dg.each(lambda *xs: region(*xs), *arrays)
        return _inline.imploded(list(zip(*found.flat, strict=True)), results)

    call = _inline.inlined(ctx, code, [form] * len(values), results)
    return lambda *values: list(call(*values))
