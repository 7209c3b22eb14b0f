"""Where a reduction's launches store their states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State


class Sink:
    """Where a launch's states go: results at the end, else partial states.

    Args:
        algebra: the reducer.
        units: how many states.
        seed: leaves of each unit's seed, or None.
        partial: write raw states and whether they exist.
    """

    def __init__(self, algebra: Algebra, units: int, seed, partial: bool):
        self.algebra, self.partial = algebra, partial
        self.seed = [] if seed is None or partial else list(seed)
        dtypes = [*algebra.dtypes, jnp.bool_] if partial else algebra.out
        self.outs = [jax.ShapeDtypeStruct((units,), d) for d in dtypes]

    def write(self, program: Program, unit: ir.Value, state: State) -> None:
        """Store the state of one unit; `unit` is a 64-bit offset."""
        if self.partial:
            exists = th.true() if state.exists is None else state.exists
            values = [*state.leaves, exists]
        else:
            buffers = program.inputs[len(program.inputs) - len(self.seed) :]
            seed = None
            if self.seed:
                seed = State(tuple(b.load(unit)[0] for b in buffers))
            values = self.algebra.result(state, seed)
        for buffer, value in zip(program.outputs, values, strict=True):
            buffer.store([value], unit)
