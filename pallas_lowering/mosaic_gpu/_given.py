"""A reduce or scan of values whose places in registers the kernel itself has chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from jaxtile.pallas_lowering.mosaic_gpu import _block
from jaxtile.pallas_lowering.mosaic_gpu import _digits as dg
from jaxtile.pallas_lowering.mosaic_gpu._lanes import Thread
from jaxtile.pallas_lowering.mosaic_gpu._spread import Grid, both
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra
from jaxtile.policy import Policy, Transform


class Given(_block.Block):
    """The operands in grids, of which what is beyond the sizes does not exist.

    Args:
        primitive: whose call it is.
        sizes: of the call.
        algebra: the reducer.
        policy: the order.
        flipped: it is the last position's first.
        main, out: where a place's scalars lie, and a fibre's, if anything has one each.
    """

    def __init__(
        self,
        primitive: Any,
        sizes: _block.Sizes,
        algebra: Algebra,
        policy: Policy,
        flipped: bool,
        main: Grid,
        out: Grid | None,
    ):
        self.primitive, self.sizes, self.several = primitive, sizes, False
        self.algebra, self.policy, self._flipped = algebra, policy, flipped
        self.grid, self.main, self.out = main, main, out or main
        self._digits = main.digits(sizes.axes)
        self._wanted = [main] * sizes.placed + [self.out] * sizes.seeds
        self.forms = self._wanted

    @property
    def in_registers(self) -> bool:
        """Whether the digits give the policy's order."""
        regroups = self.policy.permits(Transform.REGROUP)
        # Blocks of the tree begin at the first place of the order.
        closed = self.grid.closed(self.sizes.axes, self._flipped)
        return super().in_registers and (regroups or self.sizes.fold or closed)

    def places(self, arrays, masked: bool) -> np.ndarray:
        """`[leaves, exists]` of each of a thread's elements."""
        found = super().places(arrays, masked)
        return dg.each(
            lambda p, there: [p[0], both(p[1], there)], found, self.grid.present
        )

    def found(
        self, work: Any, thread: Thread, memory: ir.Value | None, arrays: list
    ) -> list:
        """The scalars of the results.

        Args:
            work: a reduction or scan of this.
            thread: which thread this is.
            memory: shared memory of `sizes.bytes`.
            arrays: the operands', those of places first.
        """
        stage = self.stage()
        return self.emitted(stage, memory, thread, arrays, work.registers, work.walk)
