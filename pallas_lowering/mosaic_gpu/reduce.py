"""reduce in Pallas Mosaic GPU kernels: any reducer, in every order.

Where the digits of the axes give the order, registers, lanes and warps combine; other
orders walk each fibre in one thread, through shared memory.
"""

from __future__ import annotations

from jaxlib.mlir import ir

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND, _block, _plan
from jaxtile.pallas_lowering.mosaic_gpu import _digits as dg
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._sink import Sink
from jaxtile.pallas_lowering.mosaic_gpu._source import Reader, Stretch
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra
from jaxtile.pallas_lowering.mosaic_gpu.reduce_columns import (
    chain,
    seed_states,
    stretch,
)
from jaxtile.policy import Kind, Transform
from jaxtile.primitives.reduce import reduce_p


def _sizes(avals, params) -> _block.Sizes:
    keys = ("spec", "policy", "axes", "seeded", "masked", "out")
    spec, policy, axes, seeded, masked, out = (params[k] for k in keys)
    return _block.Sizes(spec, policy, avals, axes, seeded, masked, (), out)


def _refuse(*avals, **params):
    return _block.refuse(params["spec"], avals, params["out"], params["finish"])


def _scratch_bytes(avals, params, several):
    return _sizes(avals, params).bytes(several)


def reduction_parts(avals, params) -> tuple[_block.Sizes, Algebra]:
    """What a reduction's memory depends on, and its reducer."""
    spec, out, finish = (params[k] for k in ("spec", "out", "finish"))
    return _sizes(avals, params), Algebra(spec, False, out, finish)


class Reduction:
    """The two realisations of one reduction.

    Args:
        block: its operands.
        params: the primitive's.
    """

    def __init__(self, block: _block.Block, params: dict):
        self.block, self.masked = block, params["masked"]
        self.algebra, self.policy = block.algebra, block.policy
        self.right = block.policy.kind is Kind.RIGHT

    def registers(self, thread, arrays):
        """Digit by digit."""
        block, algebra, order = self.block, self.algebra, self.block.order
        places = block.places(arrays, self.masked)
        if block.sizes.fold:
            return self._folded(arrays, places, order)
        states = dg.each(lambda p: algebra.element(*p), places)
        if self.policy.permits(Transform.REGROUP | Transform.PERMUTE):
            order = dg.registers_first(order)
        states = dg.reduce_digits(algebra, thread, states, order)
        return self._results(states, block.seeds(arrays, states))

    def _folded(self, arrays, places, order):
        rows, back = dg.fibres(places, order)
        seeds = self.block.seeds(arrays, back([None] * len(rows), False))
        starts = [None] * len(rows) if seeds is None else list(seeds.flat)
        lasts = []
        for row, start in zip(rows, starts, strict=True):
            row = row[::-1] if self.right else row
            pairs = dg.chain(self.algebra, row, start, self.right)
            lasts.append(pairs[-1][1])
        return self._results(back(lasts, False), None)

    def _results(self, states, seeds):
        if seeds is None:
            found = dg.each(self.algebra.result, states)
        else:
            found = dg.each(self.algebra.result, states, seeds)
        return [list(v) for v in zip(*found.flat, strict=True)]

    def walk(self, stage, program, fibre: ir.Value) -> None:
        """One fibre in shared memory."""
        algebra, n = self.algebra, stage.length
        fibres = stage.view(algebra, self.masked, self.right)
        reader = Reader(fibres, program.inputs)
        seeds = len(stage.seeds)
        sink = Sink(algebra, stage.each, None, False)
        if self.block.sizes.fold:
            plan = _plan.reduce_columns(1, n, 1, algebra.width, True)
            start = seed_states(program, seeds, fibre, 1)
            source = Stretch(reader, fibre, 1)
            (state,) = chain(reader, plan, self.right, start, source)
        else:
            sink.seed = list(stage.seeds)
            block = min(_plan.power_of_two(n), 8)
            plan = _plan.Columns(1, block, _plan.power_of_two(n), 1)
            (state,) = stretch(reader, plan, th.i64(0), fibre)
        sink.write(program, fibre, state)


@BACKEND.lowers(reduce_p, _refuse, scratch_bytes=_scratch_bytes)
def _reduce(ctx, *operands, **params):
    sizes, algebra = reduction_parts(ctx.avals_in, params)
    block = _block.Block(ctx, reduce_p, operands, sizes, algebra, params["policy"])
    found = Reduction(block, params)
    body = block.call(found.registers, found.walk)
    return BACKEND.hooks.trace(body)(ctx, *operands)
