"""The fence: the only module that may import `jax._src`.

It hides what jax keeps private and what differs between 0.10.2, 0.11 and 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import mlir as _mlir
from jax.interpreters import mlir


def sharding_spec(aval: Any) -> tuple:
    """The explicit mesh axes of each dimension; all None off an explicit mesh."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return (None,) * aval.ndim
    spec = tuple(sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes along which a value varies inside `shard_map`."""
    mat = getattr(aval, "mat", None)
    return mat.varying if mat is not None else frozenset()


def out_aval(shape: Sequence[int], dtype: Any, spec: Sequence, operands: Sequence):
    """An abstract output: sharded by `spec`, varying where any operand varies."""
    like = operands[0]
    sharding = getattr(like, "sharding", None)
    if sharding is not None and sharding.mesh.empty:
        sharding = None
    if sharding is not None:
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    varying = frozenset().union(*map(varying_axes, operands))
    if not varying:
        return _core.ShapedArray(tuple(shape), dtype, sharding=sharding)
    mat = _core.ManualAxisType(varying=varying)  # pyright: ignore
    return _core.ShapedArray(
        tuple(shape), dtype, sharding=sharding, manual_axis_type=mat
    )


def align_varying(values: Sequence[Any]) -> list[Any]:
    """Cast every value to vary along the union of the manual axes of all of them."""
    axes = [varying_axes(_core.typeof(v)) for v in values]
    union = frozenset().union(*axes)
    return [
        _core.pvary(v, tuple(sorted(union - have, key=str))) if union - have else v
        for v, have in zip(values, axes, strict=True)
    ]


def lower_reference(reference: Callable[..., list]) -> Callable:
    """A lowering rule that traces `reference` as plain jax.

    The reference's loops and reshapes know nothing of meshes, so it is traced without
    the operands' shardings; the outputs then carry those of the abstract evaluation.
    """
    rule = mlir.lower_fun(reference, multiple_results=True)

    def plain(aval):
        return _core.ShapedArray(aval.shape, aval.dtype)

    def lower(ctx, *args, **params):
        bare = ctx.replace(
            avals_in=tuple(map(plain, ctx.avals_in)),
            avals_out=tuple(map(plain, ctx.avals_out)),
        )
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            outs = rule(bare, *args, **params)
        return [
            _constrain(ctx, out, aval)
            for out, aval in zip(outs, ctx.avals_out, strict=True)
        ]

    return lower


def _constrain(ctx, out, aval):
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or aval.ndim == 0:
        return out
    value = out[0] if isinstance(out, (tuple, list)) else out
    return _mlir.lower_with_sharding_in_types(ctx, value, aval)
