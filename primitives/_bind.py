"""Binding reduce and scan from their parts, for every rule that emits one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from jaxtile.policy import fold_left, fold_right, ordered_tree
from jaxtile.primitives._define import REFERENCE, new_primitive

reduce_p = new_primitive("tile_reduce")
scan_p = new_primitive("tile_scan")


def flip(values: Sequence, axis: int) -> list:
    """Each array reversed along `axis`."""
    return [lax.rev(v, (axis,)) for v in values]


def of_tangent(implementation: str | None) -> str | None:
    """The implementation of the ops that a derivative rule emits.

    A backend that was asked for has answered for the primal only.
    """
    return REFERENCE if implementation == REFERENCE else None


def bind_reduce(
    spec,
    elements,
    init,
    mask,
    *,
    axes,
    policy,
    finish=True,
    out=None,
    implementation=None,
):
    """Bind `reduce_p` from its parts.

    Args:
        spec: the bound reducer.
        elements: its leaves, equally shaped.
        init: seed leaves of the fibres' shape, or None.
        mask: a bool array of the elements' shape, or None.
        axes: the reduced axes, sorted.
        policy: the order policy.
        finish: give `finish`'s result; else the raw state.
        out: dtypes that the outputs narrow to, once, at the end.
        implementation: None picks what runs it; a name insists.

    Returns:
        The output leaves.
    """
    operands = [*elements, *(init or ()), *(() if mask is None else (mask,))]
    return reduce_p.bind(
        *operands,
        spec=spec,
        axes=tuple(axes),
        policy=policy,
        seeded=init is not None,
        masked=mask is not None,
        finish=finish,
        out=tuple(out or (spec.results if finish else spec.states)),
        implementation=implementation,
    )


def bind_scan(
    spec,
    elements,
    init,
    mask,
    *,
    axis,
    policy,
    direction="prefix",
    exclusive=False,
    final=False,
    finish=True,
    out=None,
    implementation=None,
):
    """Bind `scan_p` from its parts.

    Args:
        spec: the bound reducer.
        elements: its leaves, equally shaped.
        init: seed leaves of the fibres' shape, or None.
        mask: a bool array of the elements' shape, or None.
        axis: the scanned axis.
        policy: the order policy.
        direction: "prefix", "suffix" or "reverse".
        exclusive: leave x_i out of y_i.
        final: also give the raw state over everything.
        finish: give `finish`'s results; else raw states.
        out: dtypes that the prefixes narrow to, once, at the end.
        implementation: None picks what runs it; a name insists.

    Returns:
        The output leaves.
    """
    operands = [*elements, *(init or ()), *(() if mask is None else (mask,))]
    return scan_p.bind(
        *operands,
        spec=spec,
        axis=axis,
        policy=policy,
        direction=direction,
        exclusive=exclusive,
        final=final,
        seeded=init is not None,
        masked=mask is not None,
        finish=finish,
        out=tuple(out or (spec.results if finish else spec.states)),
        implementation=implementation,
    )


def raw_prefixes(spec, elements, init, mask, axis, implementation):
    """Inclusive raw prefix states in source order, as the derivative needs them."""
    elements = list(elements[: spec.n_elements])
    policy = ordered_tree
    if not spec.reducer.laws.associative:
        policy = fold_right if spec.swapped else fold_left
    params: dict[str, Any] = dict(
        axis=axis, policy=policy, finish=False, implementation=implementation
    )
    if not spec.swapped:
        return bind_scan(spec, elements, init, mask, **params)
    # A swapped spec is a flipped suffix: state it as one, so that kernels see it.
    back = flip(elements, axis)
    m = None if mask is None else lax.rev(mask, (axis,))
    plain = replace(spec, swapped=False)
    return flip(bind_scan(plain, back, init, m, direction="suffix", **params), axis)
