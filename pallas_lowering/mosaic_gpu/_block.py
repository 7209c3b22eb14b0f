"""The operands of one reduce or scan in a kernel: their layouts, and what suits them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND, _inline, _layouts, _stage
from jaxtile.pallas_lowering.mosaic_gpu import _digits as dg
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._lanes import (
    EXCHANGE_BYTES,
    Form,
    Thread,
    scratch_of_warpgroup,
)
from jaxtile.pallas_lowering.mosaic_gpu._refusals import refuse_formats
from jaxtile.pallas_lowering.mosaic_gpu._region import convert
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State, refuse_regions
from jaxtile.policy import Kind, Policy, Transform
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._spec import Spec

# Everything is written out for each register of a thread.
_MOST = 128 * 512


def is_fold(policy: Policy) -> bool:
    """Whether the order is a strict chain."""
    return policy.kind in (Kind.LEFT, Kind.RIGHT)


def refuse(spec: Spec, avals: Sequence, out: Sequence, finish: bool) -> str | None:
    """Why no layout whatever serves these operands, or None."""
    reason = refuse_formats([*(a.dtype for a in avals), *spec.states, *out])
    if reason is not None:
        return reason
    shape = avals[0].shape
    if 0 in shape:
        return "a kernel has no empty values; combine an empty array outside"
    if math.prod(shape) > _MOST:
        return f"{shape} is above {_MOST} elements; combine blocks, then their states"
    return refuse_regions(Algebra(spec, False, out, finish))


class Sizes:
    """What the shared memory of one reduce or scan depends on.

    Args:
        spec, policy: the reducer and its order.
        avals: of the operands.
        axes: along which they are combined.
        seeded, masked: which operands there are.
        shown, totals: dtypes of the results of each place, and of each fibre.
    """

    def __init__(self, spec, policy, avals, axes, seeded, masked, shown, totals):
        self._unpack = functools.partial(unpack, spec, seeded=seeded, masked=masked)
        elements, init, mask = self._unpack(avals)
        self.shape, self.axes = elements[0].shape, tuple(axes)
        self.kept = tuple(a for a in range(len(self.shape)) if a not in axes)
        self.fibres = tuple(self.shape[a] for a in self.kept)
        self.length = math.prod([self.shape[a] for a in axes])
        placed = [*elements, *(() if mask is None else (mask,))]
        self.placed, self.seeds = len(placed), len(init or ())
        self.shown, self.totals = tuple(shown), tuple(totals)
        self.fold = is_fold(policy)
        self._dtypes = (
            [v.dtype for v in placed],
            [v.dtype for v in init or ()],
            self.shown,
            self.totals,
        )

    def ordered(self, operands: Sequence) -> list:
        """The operands of places, then those of fibres."""
        elements, init, mask = self._unpack(operands)
        return [*elements, *(() if mask is None else (mask,)), *(init or ())]

    def stage(self, several: bool) -> _stage.Stage | None:
        """The plan of shared memory, or None where a fibre does not fit."""
        count = math.prod(self.fibres)
        return _stage.plan(self.length, count, self._dtypes, self.fold, several)

    def bytes(self, several: bool) -> int:
        """Shared memory of a warpgroup."""
        stage = self.stage(several)
        return max(EXCHANGE_BYTES, 0 if stage is None else stage.bytes)


class Block:
    """The operands in the layouts that they have or get.

    Args:
        ctx: the rule's context.
        primitive: whose rule it is.
        operands: the rule's.
        sizes: of the same call.
        algebra: the reducer.
        policy: the order.
    """

    def __init__(
        self, ctx, primitive, operands, sizes: Sizes, algebra: Algebra, policy
    ):
        self.ctx, self.primitive, self.sizes = ctx, primitive, sizes
        self.algebra, self.policy = algebra, policy
        self.several = ctx.module_ctx.axis_names.wg is not None
        shape, axes = sizes.shape, sizes.axes
        found = [_layouts.of_value(ctx, v) for v in sizes.ordered(operands)]
        main = next(filter(None, found[: sizes.placed]), None)
        if main is None and shape:
            main = _layouts.default(shape, axes, sizes.fold)
            if main is None:
                BACKEND.fail(
                    primitive,
                    f"{shape} fills no register layout; pad the block and pass where=, "
                    "or load it with a layout= of its own",
                )
        self.main = Form(main, shape)
        self.out = self._of_fibres(found[sizes.placed :])
        self._digits = self.main.digits(axes) if shape else []
        self._wanted = [self.main] * sizes.placed + [self.out] * sizes.seeds
        self.forms = [
            w if f is None else Form(f, w.shape)
            for f, w in zip(found, self._wanted, strict=True)
        ]

    def _of_fibres(self, seeds):
        sizes = self.sizes
        if not sizes.shape:
            return self.main
        layout = _layouts.without(self.main.layout, sizes.shape, sizes.axes)
        if self.main.strided and sizes.fibres:
            layout = next(filter(None, seeds), layout)
        if layout is None:
            BACKEND.fail(
                self.primitive,
                f"the results' shape {sizes.fibres} fills no register layout; load the "
                "block with layout=plgpu.Layout.WGMMA or a TILED one",
            )
        return Form(layout, sizes.fibres)

    @property
    def in_registers(self) -> bool:
        """Whether the digits of the layout give the policy's order."""
        order = self._digits
        if order is None or self.forms != self._wanted:
            return False
        if self.sizes.fold:
            return dg.in_thread(order)
        return self.policy.permits(Transform.REGROUP) or dg.keeps_tree(order)

    @property
    def order(self) -> list:
        """The digits of the axes, minor to major."""
        return self._digits or []

    def places(self, arrays: Sequence[np.ndarray], masked: bool) -> np.ndarray:
        """`[leaves, exists]` of each of a thread's elements."""
        leaves = list(arrays[: self.sizes.placed])
        flags = leaves.pop() if masked else np.full(leaves[0].shape, None, object)
        kind = self.algebra.spec.index
        if kind is not None:
            where = self.main.along(self.sizes.axes)
            leaves.append(dg.each(lambda v: convert(v, np.int32, kind), where))
        return dg.each(lambda flag, *mine: [list(mine), flag], flags, *leaves)

    def of_fibres(self, places: np.ndarray) -> np.ndarray:
        """A place for each of a thread's fibres: extents of 1 along the axes."""
        counts = list(places.shape)
        for digit in self.order:
            counts[digit.dim] = 1
        return np.empty(counts, object)

    def seeds(
        self, arrays: Sequence[np.ndarray], like: np.ndarray
    ) -> np.ndarray | None:
        """The state before each fibre, or None."""
        parts = arrays[self.sizes.placed :]
        if not parts:
            return None
        shaped = [p.reshape(like.shape) for p in parts]
        return dg.each(lambda *leaves: State(tuple(leaves)), *shaped)

    def call(self, registers: Callable, walk: Callable):
        """`values -> results`, to trace.

        Args:
            registers: `(thread, arrays) -> [scalars]` where the digits suffice.
            walk: `(stage, program, fibre)`, one fibre's walk where they do not.

        Returns:
            The function of the operands, in the rule's order.

        Raises:
            UnsupportedOnBackend: neither is possible.
        """
        sizes, stage = self.sizes, self.stage()
        results = [(self.main, d) for d in sizes.shown]
        results += [(self.out, d) for d in sizes.totals]
        each = sizes.bytes(self.several)
        module = self.ctx.module_ctx

        def code(_, *values):
            memory = scratch_of_warpgroup(module, each, self.several)
            thread = Thread(th.Words(memory))
            arrays = [f.explode(v) for f, v in zip(self.forms, values, strict=True)]
            found = self.emitted(stage, memory, thread, arrays, registers, walk)
            return _inline.imploded(found, results)

        call = _inline.inlined(self.ctx, code, self.forms, results)
        return lambda *values: list(call(*sizes.ordered(values)))

    def stage(self) -> _stage.Stage | None:
        """The plan of shared memory, or None where registers suffice.

        Raises:
            UnsupportedOnBackend: neither is possible.
        """
        if self.in_registers:
            return None
        found = self.sizes.stage(self.several)
        if found is None:
            BACKEND.fail(
                self.primitive,
                f"{self.policy} needs each fibre of {self.sizes.length} in one thread, "
                "or in shared memory, which it exceeds; load the block with a layout= "
                "that gives threads whole fibres, or make it shorter",
            )
        return found

    def emitted(self, stage, memory, thread, arrays, registers, walk) -> list:
        """The scalars of the results, by a plan of `stage`."""
        if stage is None:
            return registers(thread, arrays)
        sizes = self.sizes
        fibre = range(len(sizes.fibres))
        where = [
            _stage.Placed(f, sizes.kept, sizes.axes)
            if k < sizes.placed
            else _stage.Placed(f, fibre, ())
            for k, f in enumerate(self.forms)
        ]
        gets = [_stage.Placed(self.main, sizes.kept, sizes.axes) for _ in sizes.shown]
        gets += [_stage.Placed(self.out, fibre, ()) for _ in sizes.totals]
        brings = list(zip(where, arrays, strict=True))
        return _stage.run(
            stage, memory, thread, brings, gets, lambda p, f: walk(stage, p, f)
        )
