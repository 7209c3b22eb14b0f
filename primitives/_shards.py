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
            first operand; what the first lacks has a number of its own.
        whole: the dimensions of the first operand that `run` needs whole.
        share: `{dimension: mesh axes} -> fn`, as `run` where those of the whole dimensions
            are divided among devices, in mesh order; or None, and they are gathered.
    """

    run: Callable[..., list]
    dims: tuple[Sequence, Sequence]
    whole: Sequence[int]
    share: Callable[[dict], Callable[..., list] | None]


def dims_of(avals: Sequence, whole: tuple[int, ...], **_: Any) -> list:
    """For each operand its dimensions as those of the first; lower ranks lack `whole`."""
    every = tuple(range(avals[0].ndim))
    kept = tuple(d for d in every if d not in whole)
    return [every if a.ndim == len(every) else kept for a in avals]


def lower(ctx: Any, args: Sequence, mesh: Any, plan: Plan) -> list:
    """Lower an op to its plan, whatever shardings the partitioner chooses."""
    ins, outs = plan.dims

    def partition(mesh, operands, results):
        batch, parts = _joint_spec(operands, results, plan)
        shared = None
        if parts and _divide(operands[0].shape, parts, mesh):
            shared = plan.share(parts)
        inner = {**batch, **parts} if shared else batch

        def local(*shards):
            with _jax_private.no_mesh():
                return tuple((shared or plan.run)(*shards))

        return mesh, local, _place(mesh, batch, outs), _place(mesh, inner, ins)

    def infer(mesh, operands, results):
        return _place(mesh, _joint_spec(operands, (), plan)[0], outs)

    mapped = [
        tuple(ArrayMapping(*map(_factor, each)) for each in side) for side in plan.dims
    ]
    whole = tuple(map(_factor, plan.whole))
    rule = SdyShardingRule(*mapped, need_replication_factors=whole)
    return _jax_private.lower_partitioned(ctx, args, mesh, partition, infer, rule)


def _factor(d: int) -> str:
    return "own" if d < 0 else f"d{d}"


def _place(mesh, spec, side) -> tuple:
    return tuple(NamedSharding(mesh, P(*(spec.get(d) for d in e))) for e in side)


def _names(entry) -> tuple:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _divide(shape, parts, mesh) -> bool:
    """False where the partitioner would pad the shards of a whole dimension."""
    sizes = {d: math.prod(mesh.shape[a] for a in names) for d, names in parts.items()}
    return all(shape[d] % n == 0 for d, n in sizes.items())


def _joint_spec(operands, results, plan) -> tuple[dict, dict]:
    """({dimension: mesh axes} without the whole ones, those of the whole ones).

    They are those of the first operand that has some, else those of a result.
    """
    found, parts, used = {}, {}, set()
    sides = zip((*operands, *results), (*plan.dims[0], *plan.dims[1]), strict=False)
    for array, places in sides:
        for entry, d in zip(array.sharding.spec, places, strict=True):
            axes = _names(entry)
            kept = parts if d in plan.whole else found
            if axes and d not in kept and used.isdisjoint(axes):
                kept[d] = axes if kept is parts else entry
                used.update(axes)
    return found, parts
