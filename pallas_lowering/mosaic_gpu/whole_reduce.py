"""reduce on whole arrays, as CUDA kernels written through Mosaic GPU.

All tree policies run as `fixed_tree`: a thread combines its neighbours, lanes pair up,
warps meet in shared memory, and a chunk's partial state goes to the next launch. Only
welford and logaddexp cost more in that order than in any other (`_tiles`). Folds give
each fibre one thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax

from jaxtile.pallas_lowering.mosaic_gpu import _plan
from jaxtile.pallas_lowering.mosaic_gpu._source import Fibres
from jaxtile.pallas_lowering.mosaic_gpu._tiles import algebra_of
from jaxtile.pallas_lowering.mosaic_gpu.reduce_columns import columns
from jaxtile.pallas_lowering.mosaic_gpu.reduce_rows import rows
from jaxtile.policy import Kind, Policy, ordered_tree
from jaxtile.primitives import _fold
from jaxtile.primitives._operands import unpack


def chunk_states(fibres: Fibres, plan: _plan.Rows | _plan.Columns) -> list[jax.Array]:
    """The state of each chunk of each fibre, as (outer, chunks, inner), and existence."""
    found = (
        rows(fibres, None, plan, True)
        if isinstance(plan, _plan.Rows)
        else columns(fibres, None, plan, ordered_tree, True)
    )
    shape = (fibres.shape[0], plan.chunks, fibres.shape[2])
    return [v.reshape(shape) for v in found]


def reduce_fibres(fibres: Fibres, seed, policy: Policy) -> list[jax.Array]:
    """All launches of one reduction.

    Args:
        fibres: the contributions.
        seed: leaves of shape (outer * inner,), or None.
        policy: the order.

    Returns:
        The results, flat over (outer, inner).
    """
    outer, n, inner = fibres.shape
    algebra, leaves = fibres.algebra, fibres.algebra.width
    fold = policy.kind in (Kind.LEFT, Kind.RIGHT)
    if inner == 1 and n > _plan.SHORT_ROW and not fold:
        along = _plan.reduce_rows(outer, n, fibres.vector(n), leaves)
        chunks, found = along.chunks, rows(fibres, seed, along, along.chunks > 1)
    else:
        vector = fibres.vector(inner)
        plan = _plan.reduce_columns(outer * inner, n, vector, leaves, fold)
        chunks = plan.chunks
        found = columns(fibres, seed, plan, policy, chunks > 1)
    if chunks == 1:
        return found
    partial = algebra.of_states()
    shape = (outer, chunks, inner)
    rest = Fibres(partial, tuple(found[:-1]), found[-1], shape)
    return reduce_fibres(rest, seed, policy)


def run(*operands, spec, axes, policy, seeded, masked, finish, out) -> Sequence:
    """`reduce_p` on whole arrays."""
    elements, init, mask = unpack(spec, operands, seeded, masked)
    shape = elements[0].shape
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    if axes and axes == tuple(range(axes[0], axes[-1] + 1)):
        outer = math.prod(shape[: axes[0]])
        inner = math.prod(shape[axes[-1] + 1 :])
    else:
        collapse = functools.partial(_fold.collapse, axes=axes)
        elements = list(map(collapse, elements))
        mask = None if mask is None else collapse(mask)
        outer, inner = math.prod(kept), 1
    n = math.prod([shape[d] for d in axes])
    algebra = algebra_of(spec, policy, out, finish)
    fibres = Fibres(algebra, tuple(elements), mask, (outer, n, inner))
    seed = None if init is None else [v.reshape(-1) for v in init]
    return [v.reshape(kept) for v in reduce_fibres(fibres, seed, policy)]
