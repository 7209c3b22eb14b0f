r"""mma: one fused update, products of two arrays summed onto a third.

    y[o] = epilogue(c[o] + sum over k of a[o, k] * b[o, k])

Axes are named by labels (`_contract.Dims`): those of both operands that the result lacks
are K, those of all three are batch, the others free. The inputs convert to the accumulator's
type; the policy says what a sum may do (see `jaxtile.policy.MmaPolicy`). The seed enters
once; the epilogue's result, or the accumulator, narrows once.

Operands: a, b, then c (if `seeded`, in the accumulator's dtype), then the scalars that the
epilogue closes over.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtile import formats
from jaxtile._jax_private import align_varying
from jaxtile.errors import NoDerivativeError, TileShapeError, message
from jaxtile.policy import MmaPolicy
from jaxtile.primitives import _contract
from jaxtile.primitives._bind import of_tangent
from jaxtile.primitives._contract import numbered
from jaxtile.primitives._contract_checks import (
    accumulator_of,
    check_labels,
    check_policy,
    check_sizes,
    spec_of,
)
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._scalar import convert, evaluate
from jaxtile.primitives._storage import nearest
from jaxtile.primitives._tangent import float_tangent
from jaxtile.primitives._unknown import unknown_operands, unknown_seed
from jaxtile.primitives.map import Region, _results, map_p
from jaxtile.primitives.map_linear import has_tangent


def bind_mma(
    a,
    b,
    c,
    labels: Sequence[Sequence],
    *,
    policy: MmaPolicy,
    acc,
    out=None,
    region: Region | None = None,
    captured: Sequence = (),
    across: bool = False,
    implementation: str | None = None,
):
    """Bind `mma_p` from its parts.

    Args:
        a, b: the operands.
        c: the seed, of the result's shape and in the accumulator's dtype, or None.
        labels: of a's axes, of b's, and of the result's: any hashable values.
        policy: the `MmaPolicy`.
        acc: the accumulator's dtype.
        out: the dtype that the result narrows to, once, at the end.
        region: the epilogue, or None.
        captured: its leading operands, scalars.
        across: as in `Dims`.
        implementation: None picks what runs it; a name insists.

    Returns:
        The array.
    """
    operands = [a, b, *(() if c is None else (c,)), *captured]
    return mma_p.bind(
        *align_varying(operands),
        roles=numbered(*labels, across=across),
        policy=policy,
        acc=np.dtype(acc),
        seeded=c is not None,
        region=region,
        out=np.dtype(out or acc),
        implementation=implementation,
    )[0]


def unpack(operands: Sequence, seeded: bool) -> tuple[Any, Any, Any, list]:
    """Positional operands as (a, b, c or None, scalars)."""
    c = operands[2] if seeded else None
    return operands[0], operands[1], c, list(operands[2 + seeded :])


def _abstract(*avals, roles, policy, acc, seeded, region, out):
    a, b, c, scalars = unpack(avals, seeded)
    check_labels(a, b, roles)
    check_sizes("mma", a.shape, b.shape, roles)
    accumulator_of((a.dtype, b.dtype), acc, "mma")
    check_policy(policy, acc, [a.shape[d] for d in roles.contracted])
    shape = roles.shape(a.shape, b.shape)
    if c is not None and (c.shape != shape or c.dtype != acc):
        raise TileShapeError(
            message(
                "mma",
                expected=f"c of shape {shape} and the accumulator's dtype {acc}",
                got=f"{c.shape} and {c.dtype}",
                way_out="Broadcast and cast it first.",
            )
        )
    if region is not None:
        z = jax.ShapeDtypeStruct((), acc)
        _, results = _results(region, (*scalars, z))
        formats.require_arithmetic(results[0].dtype, "mma")
    formats.require_arithmetic(out, "mma")
    return [Out(shape, out, roles.out, spec_of((a, b), roles))]


def _reference(*operands, roles, policy, acc, seeded, region, out, platform=""):
    a, b, c, scalars = unpack(operands, seeded)
    if c is not None:
        (c,) = unknown_seed([c])
    z = _contract.contract(a, b, c, roles, policy, acc, platform)
    if region is not None:
        scalars = [jnp.broadcast_to(s, z.shape) for s in scalars]
        (z,) = jax.tree.leaves(evaluate(region.fn, *unknown_operands([*scalars, z])))
    return [convert(z, out)]


def _finish(z, scalars, region, out):
    """The epilogue as an op of its own, for rules that need the raw accumulator."""
    if region is not None:
        wide = [jnp.broadcast_to(s, z.shape) for s in scalars]
        (z,) = map_p.bind(*align_varying([*wide, z]), region=region)
    return convert(z, out)


# With z = c + sum ab,  dz = (dc + sum da b) + sum a db: two mma of the same policy and
# accumulator, the first one's result seeding the second. Each is linear in its tangents,
# and z is a residual only where an epilogue needs it.


def _jvp(primals, tangents, *, roles, policy, acc, seeded, region, out, implementation):
    a, b, c, scalars = unpack(primals, seeded)
    da, db, dc, ds = unpack(tangents, seeded)
    narrow = acc if region is not None else out
    rule = functools.partial(
        bind_mma, labels=roles, policy=policy, acc=acc, across=roles.across
    )
    y = rule(a, b, c, out=narrow, implementation=implementation)
    moving = [t for t in tangents if t is not None and has_tangent(t)]
    if not moving or not jnp.issubdtype(out, jnp.floating):
        y = _finish(y, scalars, region, out)
        return [y], [zero_tangent(y)]
    rule = functools.partial(rule, implementation=of_tangent(implementation))
    dy = dc if seeded and has_tangent(dc) else None
    terms = [(x, w) for x, w, t in ((da, b, da), (a, db, db)) if has_tangent(t)]
    for n, (x, w) in enumerate(terms, 1):
        dy = rule(x, w, dy, out=narrow if n == len(terms) else acc)
    if region is None:
        return [y], [convert(dy, out)]
    end = functools.partial(_finish, region=region, out=out)
    dy = float_tangent(y, zero_tangent(y) if dy is None else dy)
    ds = [float_tangent(s, t) for s, t in zip(scalars, ds, strict=True)]
    y, dy = jax.jvp(end, (y, scalars), (dy, ds))
    return [y], [dy]


# The transpose of z = c + sum ab: the cotangent itself for c, and for a (b likewise) the
# sum of ct b over the labels of the result that a lacks, which are free ones of b.


def _transpose(cts, *operands, roles, policy, acc, seeded, region, out, implementation):
    a, b, c, scalars = unpack(operands, seeded)
    undefined = [ad.is_undefined_primal(v) for v in operands]
    if region is not None or (undefined[0] and undefined[1]):
        raise NoDerivativeError(
            message(
                "mma",
                expected="a call that is linear in what is transposed",
                got="an epilogue" if region is not None else "both operands unknown",
                way_out="Use jax.vjp.",
            )
        )
    (ct,) = cts
    if type(ct) is ad.Zero:
        zeros = zip(operands, undefined, strict=True)
        return [ad.Zero(v.aval) if u else None for v, u in zeros]
    name = of_tangent(implementation)
    rule = functools.partial(_cotangent, policy=policy, acc=acc, implementation=name)
    outs: list = [None] * len(operands)
    if undefined[0]:
        outs[0] = rule(ct, b, (roles.out, roles.b, roles.a), a.aval.dtype)
    if undefined[1]:
        outs[1] = rule(a, ct, (roles.a, roles.out, roles.b), b.aval.dtype)
    if seeded and undefined[2]:
        outs[2] = convert(ct, acc)
    return outs


def _cotangent(a, b, labels, dtype, *, policy, acc, implementation):
    """An operand's cotangent in its dtype; in a storage format by quantize, saturated."""
    fmt = formats.format_of(dtype)
    run = functools.partial(
        bind_mma,
        *(a, b, None, labels),
        policy=policy,
        acc=acc,
        across=True,
        implementation=implementation,
    )
    if fmt.category is formats.Category.ARITHMETIC:
        return run(out=dtype)
    return nearest(run(), fmt.name)[0]


def _front(value, place, size):
    """The batch in front; a value that lacks it repeats."""
    if place is None:
        return jnp.broadcast_to(value, (size, *value.shape))
    return jnp.moveaxis(value, place, 0)


def _labels(labels, place):
    return labels if place is None else (*labels[:place], _NEW, *labels[place:])


_NEW = "batch"


def _batch(args, places, *, roles, policy, acc, seeded, region, out, implementation):
    size = next(v.shape[p] for v, p in zip(args, places, strict=True) if p is not None)
    a, b, c, scalars = unpack(args, seeded)
    pa, pb, pc, ps = unpack(places, seeded)
    rule = functools.partial(
        bind_mma,
        policy=policy,
        acc=acc,
        across=roles.across,
        implementation=implementation,
    )
    if pa is pb is None and pc is not None and _contract.is_chain(policy, acc):
        # A chain starts from its seed, so each seed has a product of its own.
        a, pa = _front(a, None, size), 0
    if pa is pb is None:
        z = _front(rule(a, b, None if pc is not None else c, roles), None, size)
        z = z if pc is None else jnp.moveaxis(c, pc, 0) + z
    else:
        labels = _labels(roles.a, pa), _labels(roles.b, pb), (_NEW, *roles.out)
        seed = None if c is None else _front(c, pc, size)
        rule = functools.partial(rule, a, b, seed, labels)
        if all(p is None for p in ps):
            return [rule(region=region, captured=scalars, out=out)], [0]
        z = rule()
    # The epilogue's scalars are batched: it becomes an op of its own.
    column = (size,) + (1,) * (z.ndim - 1)
    scalars = [
        s if p is None else s.reshape(column) for s, p in zip(scalars, ps, strict=True)
    ]
    return [_finish(z, scalars, region, out)], [0]


def _share(parts, *, roles, policy, acc, seeded, region, out, implementation):
    """Each device multiplies its part of K; the sums are added, and then the seed."""
    if _contract.is_chain(policy, acc):
        return None
    names = tuple(name for d in sorted(parts) for name in parts[d])

    def run(*shards, platform):
        a, b, c, scalars = unpack(shards, seeded)
        z = bind_mma(
            a, b, None, roles, policy=policy, acc=acc, implementation=implementation
        )
        z = lax.psum(z, names)
        z = z if c is None else unknown_seed([c])[0] + z
        return [_finish(z, scalars, region, out)]

    return run


def _places(avals, whole, *, roles, seeded, **_):
    known = [roles.a, roles.b, *([roles.out] if seeded else ())]
    return known + [()] * (len(avals) - len(known))


mma_p = define(
    "tile_mma",
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    along=lambda *, roles, **_: roles.contracted,
    share=_share,
    places=_places,
)
