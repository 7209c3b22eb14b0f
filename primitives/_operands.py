"""The operands that reduce and scan share: elements, seed, mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.errors import InconclusiveDimensionOperation
from jax.extend.core import Primitive

from jaxtile._jax_private import sharding_spec
from jaxtile.errors import ContractError, TileShapeError, TileTypeError, message
from jaxtile.policy import Kind, Policy, Transform
from jaxtile.primitives._spec import Spec
from jaxtile.reducers import Reducer


def unpack(
    spec: Spec, operands: Sequence, seeded: bool, masked: bool
) -> tuple[list, Any, Any]:
    """Positional operands as (elements, init or None, mask or None)."""
    n, k = spec.n_elements, len(spec.states) if seeded else 0
    elements = list(operands[:n])
    init = list(operands[n : n + k]) if seeded else None
    return elements, init, operands[n + k] if masked else None


def require_laws(op: str, reducer: Reducer, policy: Policy) -> None:
    """Refuse a policy that needs a law which the reducer does not state.

    Raises:
        ContractError: it does.
    """
    laws = reducer.laws
    missing = []
    if policy.kind in (Kind.TREE, Kind.FIXED) and not laws.associative:
        missing.append("associative")
    if policy.permits(Transform.PERMUTE) and not laws.commutative:
        missing.append("commutative")
    if missing:
        fold = "fold_left"
        other = f'"ordered_tree" or "{fold}"' if laws.associative else f'"{fold}"'
        needed = "associative=True"
        if policy.permits(Transform.PERMUTE):
            needed += ", commutative=True"
        raise ContractError(
            message(
                op,
                expected=f"a reducer with the laws {', '.join(missing)} under "
                f"policy {policy}",
                got=f"{reducer!r}, which states {laws}",
                way_out=f"Declare laws=jaxtile.Laws({needed}) if they hold, or use "
                f"policy={other}.",
            )
        )


def _check_shape(op: str, what: str, got: Any, want: tuple) -> None:
    if tuple(got) != tuple(want):
        raise TileShapeError(
            message(
                op,
                expected=f"{what} of shape {tuple(want)}",
                got=f"{tuple(got)}",
                way_out="Broadcast it to that shape first.",
            )
        )


def require_whole(op: str, leaf: Any, axes: Sequence[int]) -> None:
    """Refuse an operand that is sharded along one of the axes on an explicit mesh.

    Raises:
        TileShapeError: it is.
    """
    found = sharding_spec(leaf)
    if any(found[d] is not None for d in axes):
        raise TileShapeError(
            message(
                op,
                expected=f"axes {tuple(axes)} not sharded",
                got=f"sharding {tuple(found)}",
                way_out="Reshard that axis first (jax.sharding.reshard), or combine "
                "per-device results in jax.shard_map.",
            )
        )


def check_operands(op, spec, policy, elements, init, mask, kept, axes) -> None:
    """Everything that reduce and scan demand of their operands.

    Raises:
        ContractError: the policy needs a law that the reducer lacks.
        TileShapeError: shapes differ, or a reduced axis is sharded on an explicit mesh.
        TileTypeError: the mask is not bool, or the seed's dtypes are not the state's.
    """
    require_laws(op, spec.reducer, policy)
    shape = elements[0].shape
    for leaf in elements:
        _check_shape(op, "element leaves", leaf.shape, shape)
        require_whole(op, leaf, axes)
    for leaf, dtype in zip(init or (), spec.states, strict=init is not None):
        _check_shape(op, "init leaves", leaf.shape, tuple(shape[d] for d in kept))
        if leaf.dtype != dtype:
            raise TileTypeError(
                message(
                    op,
                    expected=f"init leaves of the state's dtypes "
                    f"{[d.name for d in spec.states]}",
                    got=str(leaf.dtype),
                    way_out="Cast init, or state acc_dtype=.",
                )
            )
    if mask is not None:
        _check_shape(op, "where", mask.shape, shape)
        if mask.dtype != bool:
            raise TileTypeError(
                message(
                    op,
                    expected="a bool mask",
                    got=str(mask.dtype),
                    way_out="Pass where=mask != 0.",
                )
            )


def batch_fibres(primitive: Primitive, key: str = "axis") -> Callable:
    """The batching rule of an op on fibres: the batch goes in front, and is one more axis.

    Args:
        primitive: the op, whose operands all have the batch then.
        key: its parameter that says which axes it works along.
    """

    def rule(args, dims, **params):
        sizes = [a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None]
        wide = [
            jnp.broadcast_to(a, (sizes[0], *a.shape))
            if d is None
            else jnp.moveaxis(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        along = params[key]
        shifted = along + 1 if isinstance(along, int) else tuple(a + 1 for a in along)
        outs = primitive.bind(*wide, **{**params, key: shifted})
        return outs, [0] * len(outs)

    return rule


def check_symbolic(op: str, sizes, policy) -> None:
    """Refuse a symbolic size, of an export, that the reference cannot serve.

    Raises:
        TileShapeError: a size may be 0, or the policy fixes a tree of known size.
    """
    for n in sizes:
        if isinstance(n, int):
            continue
        try:
            some = n >= 1
        except InconclusiveDimensionOperation:
            some = False
        if some and policy.kind is not Kind.FIXED:
            continue
        known = "known sizes" if some else "sizes that are 1 or more"
        raise TileShapeError(
            message(
                op,
                expected=f"{known} along the axes under policy {policy}",
                got=f"the symbolic size {n}",
                way_out="Export with an integer there"
                + (", or by another policy." if some else ", or constrain the size."),
            )
        )
