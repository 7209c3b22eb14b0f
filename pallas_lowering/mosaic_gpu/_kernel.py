"""Kernels of `jaxtile.kernel`, ready to start over a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._body import opened
from jaxtile.pallas_lowering.mosaic_gpu._emit import Emitter, Plan
from jaxtile.pallas_lowering.mosaic_gpu._joins import join_axes
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch

_SLOT = 8


class Kernel:
    """A body's code, and what it is started with.

    Args:
        name: for messages.
        closed: the jaxpr of the body, of the instance's number along each parallel nest.
        counts: how many instances there are along each.
        shapes: of the operands.
        outs: shapes and dtypes of the results.
        warps: of an instance, or None.

    Raises:
        UnsupportedOnBackend: a body that has no thread code.
    """

    def __init__(self, name: str, closed: Any, counts, shapes, outs, warps=None):
        body = opened(name, closed)
        join_axes(name, body)
        self.closed, self.counts = closed, tuple(counts)
        self.shapes, self.outs = shapes, outs
        self.plan = Plan(name, body, warps)

    def __call__(
        self, batch: int, along: Sequence[bool], arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Start it.

        Args:
            batch: how many times side by side.
            along: which operands have a leading axis of that size.
            arrays: the operands.

        Returns:
            The results, with a leading axis of that size.
        """
        wide = [jax.ShapeDtypeStruct((batch, *s.shape), s.dtype) for s in self.outs]
        sizes = {
            ("operand", k): math.prod(s) if some else 0
            for k, (s, some) in enumerate(zip(self.shapes, along, strict=True))
        }
        sizes |= {("result", k): math.prod(s.shape) for k, s in enumerate(self.outs)}

        def body(program: Program) -> None:
            number, indices = th.block(), []
            for count in reversed(self.counts):
                number, index = th.divided(number, count)
                indices.insert(0, index)
            first = {k: _first(number, n, batch) for k, n in sizes.items()}
            Emitter(self.plan, program, first).run(indices)

        return launch(
            body,
            wide,
            arrays,
            blocks=batch * math.prod(self.counts),
            warps=self.plan.warps,
            slots=-(-self.plan.bytes // _SLOT),
            shows=self.closed,
        )


def _first(number: ir.Value, size: int, batch: int) -> ir.Value:
    """The first element of an array that is an instance's of a batch."""
    if batch == 1 or size == 0:
        return th.i64(0)
    return arith.muli(th.i64(number), th.i64(size))
