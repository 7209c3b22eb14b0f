"""Why a reduce or scan has no TPU kernel, on grounds that the two share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxtile.pallas_lowering._elementwise import refuse_cast, refuse_region
from jaxtile.pallas_lowering.tpu import BACKEND, TRAITS
from jaxtile.primitives._scalar import as_closed, elementwise, inner_jaxpr
from jaxtile.primitives._spec import Spec

# Half of the smallest scoped VMEM that the compiler gives: values themselves need some.
MOST_BYTES = 8 << 20


def _scalars(dtypes: Sequence) -> list:
    return [jax.ShapeDtypeStruct((), d) for d in dtypes]


@functools.lru_cache(maxsize=512)
def _functions(spec: Spec) -> str | None:
    """Why one of a reducer's functions is refused, or None."""
    element = _scalars([*spec.raw, *([spec.index] if spec.index else [])])
    state = _scalars(spec.states)
    calls = [
        (lambda e, s: spec.lift(e, elementwise)),
        (lambda e, s: spec.merge(s, s, elementwise)),
        (lambda e, s: spec.update(s, e, elementwise)),
        (lambda e, s: spec.update_right(e, s, elementwise)),
        (lambda e, s: spec.finish(s, elementwise)),
        (lambda e, s: (spec.filler(()), spec.identity(()))),
    ]
    regions = [jax.make_jaxpr(call)(element, state) for call in calls]
    reasons = [refuse_region(BACKEND, TRAITS, region) for region in regions]
    return _first(reasons) or _first(_bool_extreme(r.jaxpr) for r in regions)


def _bool_extreme(jaxpr) -> str | None:
    for eqn in jaxpr.eqns:
        inner, name = inner_jaxpr(eqn), eqn.primitive.name
        if inner is not None:
            reason = _bool_extreme(as_closed(inner)[0])
            if reason is not None:
                return reason
        elif name in ("max", "min") and eqn.outvars[0].aval.dtype == bool:
            return (
                f"{name} of bool has no rule there; use jt.logical_or for the maximum, "
                "jt.logical_and for the minimum"
            )
    return None


def _first(reasons: Iterable[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def refuse_operands(spec: Spec, shape: Sequence[int], params: dict) -> str | None:
    """Why formats, functions or an empty value are refused, or None.

    Args:
        spec: the bound reducer.
        shape: of the elements.
        params: of the primitive.

    Returns:
        A sentence, or None.
    """
    if 0 in shape:
        return "a kernel has no empty values; call it on empty arrays outside"
    index = [spec.index] if spec.index else []
    formats = [*spec.raw, *spec.elements, *spec.states, *spec.results, *index]
    results = spec.results if params["finish"] else spec.states
    casts = [*zip(spec.raw, spec.elements, strict=True)]
    casts += zip(results, params["out"], strict=True)
    reasons: list[Any] = [TRAITS.format(d) for d in formats]
    reasons += [refuse_cast(TRAITS, a, b) for a, b in casts if a != b]
    return _first(reasons) or _functions(spec)


def refuse_bytes(bytes: int) -> str | None:
    """Why scratch memory of that size is refused, or None."""
    if bytes <= MOST_BYTES:
        return None
    return (
        f"its rows need {bytes / 2**20:.1f} MiB of scratch memory, above "
        f"{MOST_BYTES >> 20}; use smaller blocks and combine their results"
    )


def refuse_whole(
    spec: Spec, shape: Sequence[int], axes: Sequence[int], params: dict
) -> str | None:
    """Why whole arrays are refused, or None."""
    if not axes:
        return "there is no axis to combine along; the reference has nothing to add"
    return refuse_operands(spec, shape, params)
