"""Which axes of a body's values lie alike.

An elementwise op, a broadcast, a reduction or a loop joins axes of its operands and
results, and a dim those of all tiles that have it: they become one `Axis`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxtile.pallas_lowering.mosaic_gpu._body import (
    Axis,
    Body,
    Step,
    Value,
    fibres_of,
    read_p,
    refuse,
    write_p,
)


def join_axes(kernel: str, body: Body) -> None:
    """Join the axes that lie alike.

    Raises:
        UnsupportedOnBackend: two axes of one value would.
    """
    named: dict[Any, Axis] = {}
    for step in body.every():
        _join(kernel, step, named)
    for value in body.values():
        roots = [a for a in value.roots if a.size > 1]
        if len(set(roots)) != len(roots):
            refuse(
                kernel,
                f"a value of shape {value.aval.shape} two of whose axes lie alike, being "
                "joined elsewhere",
                "Give them dims of their own.",
            )


def _pair(kernel: str, first: Sequence[Axis], second: Sequence[Axis], what: str):
    if [a.size for a in first] != [a.size for a in second]:
        refuse(
            kernel,
            f"{what} from axes of {[a.size for a in first]} to "
            f"{[a.size for a in second]}",
            "Load the tile in the shape that you need.",
        )
    for a, b in zip(first, second, strict=True):
        a.join(b)


def _all(*values: Value) -> None:
    """Elementwise: what is no scalar lies alike."""
    ranked = [v for v in values if v.axes]
    for value in ranked[1:]:
        for a, b in zip(ranked[0].axes, value.axes, strict=True):
            a.join(b)


def _join(kernel: str, step: Step, named: dict[Any, Axis]) -> None:
    """Join the axes that a step has lie alike."""
    if step.name in _JOINS:
        _JOINS[step.name](kernel, step)
    elif step.primitive in (read_p, write_p):
        tile = step.gives[0] if step.primitive is read_p else step.reads[1]
        dims = [p.dim for p in step.params["place"].pieces if p.dim is not None]
        for dim, axis in zip(dims, tile.axes, strict=True):
            axis.join(named.setdefault((dim, axis.size), axis))
    elif step.name != "iota":
        _all(*step.reads, *step.gives)


def _broadcast(kernel: str, step: Step) -> None:
    wide = step.gives[0].axes
    for a, d in zip(
        step.reads[0].axes, step.params["broadcast_dimensions"], strict=True
    ):
        if a.size == wide[d].size:
            a.join(wide[d])


def _reshape(kernel: str, step: Step) -> None:
    before, after = (
        [a for a in v.axes if a.size > 1] for v in (*step.reads, *step.gives)
    )
    _pair(kernel, before, after, "a reshape")


def _transpose(kernel: str, step: Step) -> None:
    given = [step.reads[0].axes[p] for p in step.params["permutation"]]
    _pair(kernel, given, step.gives[0].axes, "a transpose")


def _fibres(kernel: str, step: Step) -> None:
    places, fibres, axes = fibres_of(step)
    _all(*places)
    kept = [a for k, a in enumerate(places[0].axes) if k not in axes]
    for value in fibres:
        for a, b in zip(kept, value.axes, strict=True):
            a.join(b)


def _carry(kernel: str, step: Step) -> None:
    body: Any = step.body
    tested, inside, carried = step.loop()
    for outer, inner in (*tested, *inside):
        _all(outer, inner)
    for values in zip(carried, body.results, step.gives, strict=True):
        _all(*values)


_JOINS: dict[str, Callable[[str, Step], None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "tile_reduce": _fibres,
    "tile_scan": _fibres,
    "scan": _carry,
    "while": _carry,
}
