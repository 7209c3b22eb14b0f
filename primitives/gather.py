r"""gather: elements picked along one axis by an index, bit for bit.

    y[b, m, r] = x[b, index[b, m], r]     where 0 <= index[b, m] < n
               = fill                     elsewhere

b are the dims that x and index share, m those of the index alone, which replace `axis`,
r the others of x. Nothing wraps: a negative index is outside. A NaN keeps its payload,
and what is not picked is never looked at. How the index lies is in `_moves`.

Operands: x, index, fill. fill has the leading dims of the result, often none.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives._bind import of_tangent
from jaxtile.primitives._bits import from_bits, inside, place_dtype, to_bits
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._moves import (
    add_spec,
    before,
    bind_gather,
    bind_scatter,
    flat_index,
    gather_p,
    index_places,
    pick,
    spread,
    sum_outside,
)
from jaxtile.primitives._operands import require_whole
from jaxtile.primitives._tangent import float_tangent, is_float, is_zero


def _shape(x, index, axis, batch):
    head = before(axis, batch)
    own = index.shape[head : index.ndim - (len(batch) - head)]
    return (*x.shape[:axis], *own, *x.shape[axis + 1 :])


def check_index(op: str, x, index, axis: int, batch) -> None:
    """Refuse an index that is none, or whose shared dims have other sizes.

    Raises:
        TileShapeError, TileTypeError: so.
    """
    if not jnp.issubdtype(index.dtype, jnp.integer) or index.dtype.itemsize < 1:
        raise TileTypeError(
            message(
                op,
                expected="an index of integers",
                got=index.dtype.name,
                way_out="A bool chooses by where: jaxtile.ite; other values need "
                "jaxtile.cast(index, jnp.int32).",
            )
        )
    new = index.ndim - len(batch)
    places = index_places(axis, batch, new) if new >= 0 else ()
    shared = [d for d in batch]
    have = [
        index.shape[k]
        for k, place in enumerate(places)
        if not axis <= place < axis + new
    ]
    want = [x.shape[d] for d in shared]
    if new < 0 or have != want:
        raise TileShapeError(
            message(
                op,
                expected=f"an index with the sizes {want} of the axes {tuple(shared)}, "
                "which it shares",
                got=f"shape {tuple(index.shape)} for {tuple(x.shape)}",
                way_out="Broadcast the index to the axes of batch=, or name fewer.",
            )
        )


def _abstract(x, index, fill, *, axis, batch):
    check_index("gather", x, index, axis, batch)
    require_whole("gather", x, (axis,))
    shape = _shape(x, index, axis, batch)
    if fill.dtype != x.dtype or fill.shape != shape[: fill.ndim]:
        raise TileTypeError(
            message(
                "gather",
                expected=f"fill of {x.dtype.name} and the leading sizes of {shape}",
                got=f"{fill.dtype.name} of shape {fill.shape}",
                way_out="Pass a scalar of x's dtype.",
            )
        )
    new = len(shape) - x.ndim + 1
    dims = (*range(axis), *[-1] * new, *range(axis + 1, x.ndim))
    return [Out(shape, x.dtype, dims)]


def _reference(x, index, fill, *, axis, batch, platform=""):
    shape = _shape(x, index, axis, batch)
    n, bits = x.shape[axis], to_bits(x)
    other = lax.broadcast_in_dim(to_bits(fill), shape, tuple(range(fill.ndim)))
    if n == 0 or 0 in shape:
        return [from_bits(other, x.dtype)]
    ok = inside(index, n)
    place = jnp.where(ok, index, jnp.zeros_like(index)).astype(place_dtype(n))
    found = pick(bits, place, axis, batch)
    found = jnp.where(spread(ok, shape, axis, batch), found, other)
    return [from_bits(found, x.dtype)]


# Linear in x and fill: dy = gather(dx, index, dfill). Its transpose sends a cotangent to
# where its element came from, and what came from outside to the fill.


def _jvp(primals, tangents, *, axis, batch, implementation):
    x, index, fill = primals
    dx, _, dfill = tangents
    y = bind_gather(x, index, fill, axis, batch, implementation)
    if not is_float(x.dtype) or (is_zero(dx) and is_zero(dfill)):
        return [y], [zero_tangent(y)]
    dx, dfill = float_tangent(x, dx), float_tangent(fill, dfill)
    how = of_tangent(implementation)
    return [y], [bind_gather(dx, index, dfill, axis, batch, how)]


def _transpose(cotangents, x, index, fill, *, axis, batch, implementation):
    del implementation
    (ct,) = cotangents
    undefined = [ad.is_undefined_primal(v) for v in (x, fill)]
    if type(ct) is ad.Zero:
        zeros = [ad.Zero(v.aval) for v in (x, fill) if ad.is_undefined_primal(v)]
        return [
            zeros[0] if undefined[0] else None,
            None,
            zeros[-1] if undefined[1] else None,
        ]
    n = (x.aval if undefined[0] else x).shape[axis]
    dx = _to_source(ct, index, n, axis, batch) if undefined[0] else None
    outside = ~inside(index, n)
    dfill = None
    if undefined[1]:
        dfill = sum_outside(
            ct, spread(outside, ct.shape, axis, batch), fill.aval.ndim, "gather"
        )
    return [dx, None, dfill]


def _to_source(ct, index, n, axis, batch):
    new = index.ndim - len(batch)
    index = flat_index(index, axis, batch)
    shape = (*ct.shape[:axis], -1, *ct.shape[axis + new :])
    if ct.size == 0:
        shape = tuple(index.shape[before(axis, batch)] if s == -1 else s for s in shape)
    spec = add_spec(ct.dtype, "gather")
    (dx,) = bind_scatter(
        spec,
        [ct.reshape(shape)],
        index,
        None,
        axis=axis,
        batch=batch,
        size=n,
        out=(ct.dtype,),
    )
    return dx


def _front(value, dim, size):
    if dim is None:
        return jnp.broadcast_to(value, (size, *value.shape))
    return jnp.moveaxis(value, dim, 0)


def _batch(args, dims, *, axis, batch, implementation):
    (x, index, fill), (dx, di, df) = args, dims
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if dx is None and df is None and fill.ndim == 0:
        # One table for every index: the batch is one more dim of the index alone.
        head = before(axis, batch)
        index = jnp.moveaxis(index, di, head)
        return [bind_gather(x, index, fill, axis, batch, implementation)], [axis]
    x = _front(x, dx, size)
    if df is not None or fill.ndim:
        fill = _front(fill, df, size)
    shared = tuple(d + 1 for d in batch)
    if di is not None:
        index, shared = jnp.moveaxis(index, di, 0), (0, *shared)
    return [bind_gather(x, index, fill, axis + 1, shared, implementation)], [0]


def _places(avals, whole, *, axis, batch):
    """The dims of each operand as those of x; the index's own are nobody's."""
    del whole
    x, index, fill = avals
    new = index.ndim - len(batch)
    result = (*range(axis), *[-1] * new, *range(axis + 1, x.ndim))
    mine = [result[place] for place in index_places(axis, batch, new)]
    return [tuple(range(x.ndim)), tuple(mine), result[: fill.ndim]]


define(
    gather_p,
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    along=lambda *, axis, **_: (axis,),
    places=_places,
)
