"""How an op runs on a mesh: every device on its own shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtile import _jax_private


class Plan(NamedTuple):
    """What the partitioner needs to know of an op.

    Args:
        run: on the shards of one device, `(*shards) -> [array]`.
        dims: for every operand, then for every result, its dimensions as those of the
            first operand.
        whole: the dimensions of the first operand that `run` needs whole.
        share: `{dimension: mesh axes} -> fn`, as `run` where those of the whole dimensions
            are divided among devices, in mesh order; or None, and they are gathered.
    """

    run: Callable[..., list]
    dims: tuple[Sequence, Sequence]
    whole: Sequence[int]
    share: Callable[[dict], Callable[..., list] | None]


def dims_of(avals: Sequence, whole: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For each operand its dimensions as those of the first; lower ranks lack `whole`."""
    every = tuple(range(avals[0].ndim))
    kept = tuple(d for d in every if d not in whole)
    return [every if a.ndim == len(every) else kept for a in avals]


def lower(ctx: Any, args: Sequence, mesh: Any, plan: Plan) -> list:
    """Lower an op to its plan, whatever shardings the partitioner chooses."""
    ins, outs = plan.dims

    def partition(mesh, operands, results):
        batch, parts = _joint_spec(operands[0], results, plan)
        shared = None
        if parts and _divide(operands[0].shape, parts, mesh):
            shared = plan.share(parts)
        inner = [parts.get(d, e) for d, e in enumerate(batch)] if shared else batch

        def local(*shards):
            with _jax_private.no_mesh():
                return tuple((shared or plan.run)(*shards))

        return mesh, local, _place(mesh, batch, outs), _place(mesh, inner, ins)

    def infer(mesh, operands, results):
        return _place(mesh, _joint_spec(operands[0], (), plan)[0], outs)

    mapped = [
        tuple(ArrayMapping(*(f"d{d}" for d in each)) for each in side)
        for side in plan.dims
    ]
    whole = tuple(f"d{d}" for d in plan.whole)
    rule = SdyShardingRule(*mapped, need_replication_factors=whole)
    return _jax_private.lower_partitioned(ctx, args, mesh, partition, infer, rule)


def _place(mesh, spec, side) -> tuple:
    return tuple(NamedSharding(mesh, P(*(spec[d] for d in each))) for each in side)


def _names(entry) -> tuple:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _divide(shape, parts, mesh) -> bool:
    """False where the partitioner would pad the shards of a whole dimension."""
    sizes = {d: math.prod(mesh.shape[a] for a in names) for d, names in parts.items()}
    return all(shape[d] % n == 0 for d, n in sizes.items())


def _joint_spec(operand, results, plan) -> tuple[list, dict]:
    """(each dimension's mesh axes without the whole ones, those of the whole ones).

    They are the operand's, else those of a result.
    """
    found = list(operand.sharding.spec)
    used = {a for e in found for a in _names(e)}
    parts = {d: _names(found[d]) for d in plan.whole if found[d] is not None}
    found = [None if d in plan.whole else e for d, e in enumerate(found)]
    for result, places in zip(results, plan.dims[1], strict=False):
        for entry, d in zip(result.sharding.spec, places, strict=True):
            free = not used.intersection(_names(entry))
            if found[d] is None and d not in plan.whole and free:
                found[d] = entry
                used.update(_names(entry))
    return found, parts
