"""map_linear: the linear companion of map, which its derivative is made of.

    y_j[q] = sum over terms (j, c, t) of coefficient_c[q] * tangent_t[q]

An integer c names a coefficient operand, a float is the coefficient itself. Products
are formed in the wider of the two formats and rounded to the result's; sums run in the
order of the terms. Operands are the `split` tangents, then the coefficients. Linear in
the tangents; derivative and transpose are map_linear again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxtile import _jax_private
from jaxtile.errors import TileShapeError, message
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._scalar import evaluate
from jaxtile.primitives._unknown import unknown_operands


def map_linear(coefficients, tangents, terms, dtypes) -> list:
    """Bind `map_linear_p`: a result for each dtype, None where no term reaches it."""
    reached = sorted({j for j, _, _ in terms})
    if not reached:
        return [None] * len(dtypes)
    rank = {j: n for n, j in enumerate(reached)}
    outs = map_linear_p.bind(
        *_jax_private.align_varying([*tangents, *coefficients]),
        terms=tuple((rank[j], c, t) for j, c, t in terms),
        dtypes=tuple(np.dtype(dtypes[j]) for j in reached),
        split=len(tangents),
    )
    return [outs[rank[j]] if j in rank else None for j in range(len(dtypes))]


def _abstract(*avals, terms, dtypes, split):
    one_shape(avals, "map_linear")
    return [Out(avals[0].shape, d, tuple(range(avals[0].ndim))) for d in dtypes]


def _sum_terms(terms, dtypes, split, *scalars):
    sums: list[Any] = [None] * len(dtypes)
    for j, c, t in terms:
        tangent = scalars[t]
        wide = jnp.promote_types(dtypes[j], tangent.dtype)
        product = tangent.astype(wide)
        if isinstance(c, int):
            product = scalars[split + c].astype(wide) * product
        elif c != 1.0:
            product = wide.type(c) * product
        product = product.astype(dtypes[j])
        sums[j] = product if sums[j] is None else sums[j] + product
    return sums


def _reference(*arrays, terms, dtypes, split, platform=""):
    fn = functools.partial(_sum_terms, terms, dtypes, split)
    return evaluate(fn, *unknown_operands(arrays))


def _jvp(primals, tangents, *, terms, dtypes, split):
    # d(c t) = c dt + t dc: the product is symmetric, so both halves are linear terms.
    outs = map_linear_p.bind(*primals, terms=terms, dtypes=dtypes, split=split)
    given = [k for k, t in enumerate(tangents) if has_tangent(t)]
    rank = {k: n for n, k in enumerate(given)}
    fresh: list[tuple] = []
    for j, c, t in terms:
        other = split + c if isinstance(c, int) else c
        if t in rank:
            fresh.append((j, other, rank[t]))
        if isinstance(c, int) and other in rank:
            fresh.append((j, t, rank[other]))
    # As coefficients, only the primals that some term names.
    named = sorted({c for _, c, _ in fresh if isinstance(c, int)})
    place = {c: n for n, c in enumerate(named)}
    fresh = [(j, place[c] if isinstance(c, int) else c, t) for j, c, t in fresh]
    linear = map_linear(
        [primals[c] for c in named], [tangents[k] for k in given], fresh, dtypes
    )
    return outs, [
        zero_tangent(y) if dy is None else dy
        for y, dy in zip(outs, linear, strict=True)
    ]


def _transpose(cotangents, *args, terms, dtypes, split):
    given = [j for j, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    unknown = [t for t in range(split) if ad.is_undefined_primal(args[t])]
    rank = {j: n for n, j in enumerate(given)}
    place = {t: n for n, t in enumerate(unknown)}
    flipped = [(place[t], c, rank[j]) for j, c, t in terms if j in rank and t in place]
    out: list[Any] = [None] * len(args)
    results = map_linear(
        args[split:],
        [cotangents[j] for j in given],
        flipped,
        [args[t].aval.dtype for t in unknown],
    )
    for t, ct in zip(unknown, results, strict=True):
        out[t] = ad.Zero(args[t].aval) if ct is None else ct
    return out


def has_tangent(t) -> bool:
    """True for a tangent that is neither a symbolic zero nor float0."""
    return type(t) is not ad.Zero and t.dtype != jax.dtypes.float0


def one_shape(avals, name: str) -> None:
    """Refuse operands of different shapes."""
    if len({v.shape for v in avals}) > 1:
        raise TileShapeError(
            message(
                name,
                expected="operands of one shape",
                got=" and ".join(str(v.shape) for v in avals),
                way_out="Broadcast them first.",
            )
        )


def batch_aligned(primitive, args, dims, **params):
    """The batching rule of an elementwise primitive: one more leading axis."""
    size = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    moved = [
        jnp.broadcast_to(v, (size, *v.shape)) if d is None else jnp.moveaxis(v, d, 0)
        for v, d in zip(args, dims, strict=True)
    ]
    outs = primitive.bind(*moved, **params)
    return outs, [0] * len(outs)


map_linear_p = define(
    "tile_map_linear",
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=lambda args, dims, **params: batch_aligned(
        map_linear_p, args, dims, **params
    ),
)
