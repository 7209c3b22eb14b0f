"""Thread code on values of a kernel, in the layouts that they have or get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtile.pallas_lowering.mosaic_gpu import _layouts
from jaxtile.pallas_lowering.mosaic_gpu._lanes import Form


def inlined(
    ctx: Any,
    code: Callable[..., tuple],
    forms: Sequence[Form],
    results: Sequence[tuple[Form, Any]],
) -> Callable[..., Any]:
    """`values -> results`, to trace.

    Args:
        ctx: the rule's context.
        code: `(launch context, *values) -> values`, in thread code.
        forms: of the operands.
        results: the form and dtype of each.
    """
    inline: Any = plgpu.inline_mgpu(
        arg_types=tuple(map(_public, forms)),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(f.shape, d, _public(f)) for f, d in results
        ),
    )
    call = inline(code)
    return lambda *values: call(*_bound(ctx, values, forms))


def imploded(found: Sequence[Sequence], results: Sequence[tuple[Form, Any]]) -> tuple:
    """The values of which these are a thread's scalars."""
    return tuple(
        form.implode(scalars, utils.is_signed(dtype))
        for scalars, (form, dtype) in zip(found, results, strict=True)
    )


def _public(form: Form) -> Any:
    return _layouts.public(form.layout) if form.shape else plgpu.Layout.WG_SPLAT(())


def _bound(ctx, values, forms):
    """The values, those that are one scalar everywhere in a layout of their own."""
    if ctx.module_ctx.lowering_semantics != plgpu.LoweringSemantics.Lane:
        return values
    return [
        plgpu.layout_cast(v, _public(f)) if f.shape else v
        for v, f in zip(values, forms, strict=True)
    ]
