"""scan on whole arrays, as CUDA kernels written through Mosaic GPU.

Within a tile totals go up and prefixes come down, under `fixed_tree` by its own blocks.
From tile to tile a warp carries the prefix, or under `fixed_tree` the partial trees that
make it up. Few long fibres are cut: totals of chunks, their prefixes, then the chunks.
Folds, and recurrences under a tree policy, give each fibre one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from jaxtile.pallas_lowering.mosaic_gpu import _plan, _ring, whole_reduce
from jaxtile.pallas_lowering.mosaic_gpu._before import Seed
from jaxtile.pallas_lowering.mosaic_gpu._shown import Shown
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra
from jaxtile.pallas_lowering.mosaic_gpu.scan_columns import columns
from jaxtile.pallas_lowering.mosaic_gpu.scan_rows import rows
from jaxtile.policy import Kind, Policy
from jaxtile.primitives import _prefix
from jaxtile.primitives._operands import unpack

_RECURRENCES = ("affine", "matrix_affine", "delayed_affine")


def _scan(fibres: Fibres, seed: Seed, shown: Shown, policy: Policy) -> list[jax.Array]:
    """All launches of one scan."""
    outer, n, inner = fibres.shape
    leaves = len(fibres.algebra.dtypes)
    chain = policy.kind in (Kind.LEFT, Kind.RIGHT)
    fixed = policy.kind is Kind.FIXED
    if inner == 1 and n > _plan.SHORT_ROW and not chain:
        along = _plan.scan_rows(outer, n, fibres.vector(n), leaves)
        if along.chunks > 1:
            seed = _chunk_seeds(fibres, seed, along, policy)
        return rows(fibres, seed, shown, along, fixed)
    vector = fibres.vector(inner)
    plan = _plan.scan_columns(outer * inner, n, vector, leaves, chain)
    if plan.chunks > 1:
        seed = _chunk_seeds(fibres, seed, plan, policy)
    elif (
        policy.kind is Kind.TREE and fibres.algebra.spec.reducer.native in _RECURRENCES
    ):
        # A recurrence as it is written: one multiply and one add a step.
        chain = True
    if chain and inner > 1 and _ring.serves(fibres, plan.vector):
        plan = _plan.ringed(plan, outer * inner, _ring.bytes_each(fibres))
    return columns(fibres, seed, shown, plan, chain, fixed)


def _chunk_seeds(fibres: Fibres, seed: Seed, plan, policy: Policy) -> Seed:
    """What is after each chunk: the totals of chunks, then their prefixes."""
    outer, n, inner = fibres.shape
    *totals, exists = whole_reduce.chunk_states(fibres, plan)
    shape = (outer, plan.chunks, inner)
    algebra = fibres.algebra.of_states()
    states = Fibres(algebra, tuple(totals), exists, shape)
    shown = Shown(algebra, shape, False, False, bool(seed.leaves), True, False)
    *leaves, exists = _scan(states, seed, shown, policy)
    return Seed(seed.leaves, tuple(leaves), exists)


def run(
    *operands,
    spec,
    axis,
    policy,
    direction,
    exclusive,
    final,
    seeded,
    masked,
    finish,
    out,
) -> Sequence:
    """`scan_p` on whole arrays."""
    elements, init, mask = unpack(spec, operands, seeded, masked)
    shape = elements[0].shape
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if direction == "suffix":
        spec = _prefix.swapped(spec)
    algebra = Algebra(spec, False, out, finish)
    view = (outer, shape[axis], inner)
    flipped = direction != "prefix"
    fibres = Fibres(algebra, tuple(elements), mask, view, flipped)
    seed = Seed() if init is None else Seed(tuple(v.reshape(-1) for v in init))
    shown = Shown(algebra, view, exclusive, final, seeded, False, flipped)
    outs = _scan(fibres, seed, shown, policy)
    kept = (*shape[:axis], *shape[axis + 1 :])
    k = len(outs) - len(spec.states) * final
    return [v.reshape(shape) for v in outs[:k]] + [v.reshape(kept) for v in outs[k:]]
