"""What the backends' rules for mma share: all but the dot itself.

What a backend's dot does not take is products and their sum by its own `reduce`, which the
policy permits in any order; a chain is the `fold_left` of the products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtile import formats
from jaxtile.catalogue import add
from jaxtile.pallas_lowering._registry import Backend
from jaxtile.policy import fold_left, unordered_tree
from jaxtile.primitives import _contract, _unknown
from jaxtile.primitives._bind import reduce_p
from jaxtile.primitives._contract import Dims
from jaxtile.primitives._scalar import convert
from jaxtile.primitives._spec import make_spec
from jaxtile.primitives.cast import cast_p
from jaxtile.primitives.map import Region, map_p
from jaxtile.primitives.mma import unpack


class Unit(NamedTuple):
    """A backend's own dot.

    Args:
        loose: as `_contract.products` takes it.
        takes: `(a, b, dims, acc)`, abstract values; whether it takes them.
        inputs: names of the formats that it takes beside the backend's own.
        most: the largest number of products that are made one by one.
        promotes: `(run, a, b, dims, every) -> z`, sums of groups; None where K cannot be
            divided in a kernel.
        chain: as `_contract.chain`, where it is not the fold of all products at once.
        turn: its `lax.transpose`.
    """

    loose: Callable
    takes: Callable[..., bool]
    inputs: frozenset[str]
    most: int
    promotes: Callable | None = None
    chain: Callable | None = None
    turn: Callable = lax.transpose


def _times(x, y):
    return x * y


_PRODUCT = Region(_times, "mma")
_LEAF = jax.tree.structure(0)


def by_unit(unit: Unit, a, b, dims: Dims, policy, acc) -> bool:
    """The dot is what the policy permits, and takes the operands."""
    return not _contract.is_chain(policy, acc) and unit.takes(a, b, dims, acc)


def mma_values(unit: Unit, operands: Sequence, params: dict) -> list:
    """The rule: the primitive's operands as values in a kernel, and its parameters."""
    dims, policy, acc = (params[k] for k in ("roles", "policy", "acc"))
    a, b, c, scalars = unpack(operands, params["seeded"])
    if by_unit(unit, a, b, dims, policy, acc):
        run = functools.partial(
            _contract.products, policy=policy, acc=acc, loose=unit.loose
        )
        every = policy.promote_every
        if _divides(dims, a, policy, acc) and unit.promotes is not None:
            z = unit.promotes(run, a, b, dims, every)
        else:
            z = run(a, b, dims)
        if every is not None and jnp.issubdtype(acc, jnp.floating):
            # Else a compiler may make the seed the accumulator of its dot.
            z = _unknown.guard(z)
        z = z if c is None else c + z
    elif unit.chain is not None and _contract.is_chain(policy, acc):
        z = unit.chain(a, b, c, dims, policy, acc)
    else:
        z = _summed(unit, a, b, c, dims, policy, acc)
    if params["region"] is not None:
        wide = [jnp.broadcast_to(s, z.shape) for s in scalars]
        (z,) = map_p.bind(*wide, z, region=params["region"])
    return [convert(z, params["out"])]


def _divides(dims: Dims, a, policy, acc) -> bool:
    """K is longer than the sums that the policy leaves to the hardware."""
    every = policy.promote_every
    if every is None or not jnp.issubdtype(acc, jnp.floating):
        return False
    return math.prod(a.shape[d] for d in dims.contracted) > every


def _layout(dims: Dims, labels: Sequence[int]) -> tuple[list, list]:
    """(the labels of an operand as K and the result have them, their places there)."""
    every = [*dims.contracted, *dims.out]
    order = [d for d in every if d in labels]
    return order, [every.index(d) for d in order]


def _summed(unit: Unit, a, b, c, dims: Dims, policy, acc):
    """The products, K in front, and their sum by the backend's reduce."""
    sizes = dims.sizes(a.shape, b.shape)
    shape = tuple(sizes[d] for d in (*dims.contracted, *dims.out))
    wide = []
    for x, labels in ((a, dims.a), (b, dims.b)):
        order, places = _layout(dims, labels)
        x = _contract.chain_input(x, policy, acc)
        turn = [labels.index(d) for d in order]
        x = x if turn == sorted(turn) else unit.turn(x, turn)
        wide.append(lax.broadcast_in_dim(x, shape, places))
    (z,) = map_p.bind(*wide, region=_PRODUCT)
    if not dims.contracted:
        return z if c is None else c + z
    given = [z, *(() if c is None else (c,))]
    chained = _contract.is_chain(policy, acc)
    return reduce_p.bind(*given, **_sum_params(dims, acc, chained, c))[0]


def refuse_mma(backend: Backend, traits: Any, unit: Unit, avals, params) -> str | None:
    """Why mma is refused in a kernel, or None."""
    dims, policy, acc = (params[k] for k in ("roles", "policy", "acc"))
    a, b, c, scalars = unpack(avals, params["seeded"])
    if 0 in dims.sizes(a.shape, b.shape).values():
        return "a kernel has no empty values; call it on empty arrays outside"
    z = jax.ShapeDtypeStruct(dims.shape(a.shape, b.shape), acc)
    asks: list[Callable[[], str | None]] = [
        *(
            functools.partial(_refuse_input, backend, traits, unit, x, acc)
            for x in (a, b)
        ),
        functools.partial(traits.operand, z),
        functools.partial(_refuse_end, backend, z, scalars, params),
        functools.partial(_refuse_sum, backend, unit, (a, b, c), z, params),
    ]
    return next(filter(None, (ask() for ask in asks)), None)


def _refuse_input(backend, traits, unit, x, acc) -> str | None:
    own = traits.format(x.dtype) is None
    if not own and x.dtype.name not in unit.inputs:
        return traits.format(x.dtype)
    if own and not formats.embeds(x.dtype, acc):
        return backend.why_not(cast_p, x, dtype=acc)
    return traits.shape(x)


def _refuse_end(backend, z, scalars, params) -> str | None:
    region, out = params["region"], params["out"]
    if region is not None:
        wide = [jax.ShapeDtypeStruct(z.shape, s.dtype) for s in scalars]
        reason = backend.why_not(map_p, *wide, z, region=region)
        if reason is not None:
            return reason
        (z,) = map_p.abstract_eval(*wide, z, region=region)[0]
    return None if z.dtype == out else backend.why_not(cast_p, z, dtype=out)


def _refuse_sum(backend, unit, operands, z, params) -> str | None:
    a, b, c = operands
    dims, policy = params["roles"], params["policy"]
    sizes = dims.sizes(a.shape, b.shape)
    if by_unit(unit, a, b, dims, policy, z.dtype):
        if not _divides(dims, a, policy, z.dtype) or unit.promotes is not None:
            return None
        return (
            f"K is longer than promote_every={policy.promote_every}, and a loaded value "
            "is not divided there; load K in blocks of that length"
        )
    chained = _contract.is_chain(policy, z.dtype)
    if chained and unit.chain is not None:
        return None
    count = math.prod(sizes.values())
    if count > unit.most:
        why = (
            "its order"
            if _contract.is_chain(policy, z.dtype)
            else "its shape or format"
        )
        return (
            f"{why} needs the products one by one, and they are {count}, above "
            f"{unit.most}; use smaller blocks"
        )
    shape = tuple(sizes[d] for d in (*dims.contracted, *dims.out))
    wide = jax.ShapeDtypeStruct(shape, z.dtype)
    reason = backend.why_not(map_p, wide, wide, region=_PRODUCT)
    if reason is not None or not dims.contracted:
        return reason
    avals = [wide, *(() if c is None else (c,))]
    return backend.why_not(reduce_p, *avals, **_sum_params(dims, z.dtype, chained, c))


def _sum_params(dims, acc, chained, c) -> dict:
    return dict(
        spec=make_spec(add, _LEAF, (acc,), acc, None, "mma"),
        axes=tuple(range(len(dims.contracted))),
        policy=fold_left if chained else unordered_tree,
        seeded=c is not None,
        masked=False,
        finish=True,
        out=(acc,),
        implementation=None,
    )
