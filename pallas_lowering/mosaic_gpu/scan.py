"""scan in Pallas Mosaic GPU kernels: any reducer, in every order, in every direction.

Where the digits of the axis give the order, totals go up and prefixes come down them;
other orders walk each fibre in one thread, through shared memory.
"""

from __future__ import annotations

import numpy as np
from jaxlib.mlir import ir

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND, _block, _plan
from jaxtile.pallas_lowering.mosaic_gpu import _digits as dg
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._before import Before, Seed
from jaxtile.pallas_lowering.mosaic_gpu._refusals import refuse_against
from jaxtile.pallas_lowering.mosaic_gpu._shown import Shown
from jaxtile.pallas_lowering.mosaic_gpu._source import Reader
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra
from jaxtile.pallas_lowering.mosaic_gpu.scan_columns import Walk
from jaxtile.policy import Kind, Transform
from jaxtile.primitives import _prefix
from jaxtile.primitives.scan import scan_p


def _sizes(avals, params) -> _block.Sizes:
    keys = ("spec", "policy", "axis", "seeded", "masked", "out", "final")
    spec, policy, axis, seeded, masked, out, final = (params[k] for k in keys)
    totals = spec.states if final else ()
    return _block.Sizes(spec, policy, avals, (axis,), seeded, masked, out, totals)


def _refuse(*avals, **params):
    reason = refuse_against(params["policy"], params["direction"])
    if reason is not None:
        return reason
    return _block.refuse(params["spec"], avals, params["out"], params["finish"])


def _scratch_bytes(avals, params, several):
    return _sizes(avals, params).bytes(several)


def scan_parts(avals, params) -> tuple[_block.Sizes, Algebra]:
    """What a scan's memory depends on, and its reducer in the order of its places."""
    spec = params["spec"]
    if params["direction"] == "suffix":
        spec = _prefix.swapped(spec)
    algebra = Algebra(spec, False, params["out"], params["finish"])
    return _sizes(avals, params), algebra


class Scan:
    """The two realisations of one scan.

    Args:
        block: its operands.
        params: the primitive's.
    """

    def __init__(self, block: _block.Block, params: dict):
        self.block, self.algebra = block, block.algebra
        self.masked, self.seeded = params["masked"], params["seeded"]
        self.exclusive, self.final = params["exclusive"], params["final"]
        self.flipped = params["direction"] != "prefix"
        self.fixed = params["policy"].kind is Kind.FIXED

    def _shown(self, length: int, fibres: int) -> Shown:
        return Shown(
            self.algebra,
            (1, length, fibres),
            self.exclusive,
            self.final,
            self.seeded,
            False,
            self.flipped,
        )

    def registers(self, thread, arrays):
        """Digit by digit."""
        block = self.block
        places, order = block.places(arrays, self.masked), block.order
        if block.sizes.fold or self._may_chain(order):
            before, after, last = self._folded(arrays, places, order)
        else:
            states = dg.each(lambda p: self.algebra.element(*p), places)
            first = self._first(arrays, block.of_fibres(places))
            before, after, last = dg.scan_digits(
                self.algebra, thread, states, order, first, self.flipped
            )
        return self._results(before, after, last)

    def _may_chain(self, order) -> bool:
        """Whether a tree may be a chain, which has the fewest merges."""
        # Updates start from the identity, and a tree without contributions is empty.
        regroups = self.block.policy.permits(Transform.REGROUP)
        own = self.algebra.spec.has_update
        return regroups and not own and dg.in_thread(order)

    def _first(self, arrays, like: np.ndarray) -> np.ndarray:
        seeds = self.block.seeds(arrays, like)
        if seeds is not None:
            return seeds
        tracked = self.masked or not self.algebra.neutral
        none = self.algebra.nothing() if tracked else self.algebra.identity()
        return dg.each(lambda _: none, like)

    def _folded(self, arrays, places, order):
        rows, back = dg.fibres(places, order)
        seeds = self.block.seeds(arrays, back([None] * len(rows), False))
        starts = [None] * len(rows) if seeds is None else list(seeds.flat)
        turn = slice(None, None, -1 if self.flipped else 1)
        found = [
            dg.chain(self.algebra, row[turn], start, False)
            for row, start in zip(rows, starts, strict=True)
        ]
        sides = [[[pair[k] for pair in row][turn] for row in found] for k in (0, 1)]
        before, after = (back(side, True) for side in sides)
        return before, after, back([row[-1][1] for row in found], False)

    def _results(self, before, after, last):
        block, sizes = self.block, self.block.sizes
        shown = self._shown(sizes.length, 1)
        if self.exclusive and not self.seeded:
            where = dg.each(
                lambda v: dg.position(v, sizes.length, self.flipped),
                block.main.along(sizes.axes),
            )
        else:
            where = np.full(before.shape, None, object)
        values = dg.each(shown.values, where, before, after)
        found = [list(v) for v in zip(*values.flat, strict=True)]
        if self.final:
            raw = dg.each(lambda s: self.algebra.settled(s).leaves, last)
            found += [list(v) for v in zip(*raw.flat, strict=True)]
        return found

    def walk(self, stage, program, fibre: ir.Value) -> None:
        """One fibre in shared memory."""
        n, fold = stage.length, self.block.sizes.fold
        fibres = stage.view(self.algebra, self.masked, self.flipped)
        shown = self._shown(n, stage.pitch)
        block = min(_plan.power_of_two(n), 8)
        length = n if fold else _plan.power_of_two(n)
        plan = _plan.Columns(1, block, length, 1)
        reader = Reader(fibres, program.inputs)
        walk = Walk(program, reader, shown, plan, (th.i64(0), fibre, fibre))
        seeds = Seed(tuple(stage.seeds))
        buffers = program.inputs[len(stage.places) :]
        walk.begin(Before(fibres, seeds, buffers), th.i64(0), fibre)
        if fold:
            walk.chain(False)
        else:
            walk.tree(self.fixed)


@BACKEND.lowers(scan_p, _refuse, scratch_bytes=_scratch_bytes)
def _scan(ctx, *operands, **params):
    sizes, algebra = scan_parts(ctx.avals_in, params)
    block = _block.Block(ctx, scan_p, operands, sizes, algebra, params["policy"])
    found = Scan(block, params)
    body = block.call(found.registers, found.walk)
    return BACKEND.hooks.trace(body)(ctx, *operands)
