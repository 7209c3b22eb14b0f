r"""topk: the first k of a stable sort, for a k known while tracing.

    y[j] = x[p(j)],  j < k,  p the permutation of `sort`

so topk(j) is the first j of topk(k). Where a count c is given, places from c on hold no
value: zero, with the index -1, in the payload too. Payloads follow as in `sort`.

Operands: the keys, payload leaves of the same shape, and (if `counted`) a count for
every fibre.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxtile.errors import TileShapeError, TileTypeError, TileValueError, message
from jaxtile.primitives import _best, _order
from jaxtile.primitives._bits import below, place_dtype
from jaxtile.primitives._define import Out, define, new_primitive
from jaxtile.primitives._operands import batch_fibres
from jaxtile.primitives._ranked import check_ranked, moved

topk_p = new_primitive("tile_topk")


def bind_topk(
    x,
    payload=(),
    count=None,
    *,
    axis,
    k,
    largest=True,
    nan="last",
    implementation=None,
):
    """Bind `topk_p`.

    Args:
        x: the keys, of an arithmetic format.
        payload: arrays of x's shape, of any format.
        count: how many of the k are wanted, integers of the fibres' shape, or None.
        axis: the ranked axis.
        k: the size of that axis in the results.
        largest: large values first; else small ones.
        nan: "last", "first", "largest" or "smallest".
        implementation: None picks what runs it; a name insists.

    Returns:
        The values, the source indices, and the payload leaves.
    """
    counts = () if count is None else (count,)
    return topk_p.bind(
        x,
        *payload,
        *counts,
        axis=axis,
        k=k,
        order=_order.Order(largest, nan),
        counted=count is not None,
        implementation=implementation,
    )


def check_k(k, size) -> None:
    """Refuse a k that is not known to be in [0, size].

    Raises:
        TileValueError: so.
    """
    if k >= 0 and below(k, size + 1):
        return
    way_out = "Pass min(k, size)."
    if not isinstance(size, int):
        way_out = f'Export with that known: constraints=["{size} >= {k}"].'
    raise TileValueError(
        message(
            "topk",
            expected=f"k in [0, {size}], the size of the axis",
            got=str(k),
            way_out=way_out,
        )
    )


def _check_count(count, fibres):
    if count.shape != fibres:
        raise TileShapeError(
            message(
                "topk",
                expected=f"a count for every fibre, of shape {fibres}",
                got=str(count.shape),
                way_out="Broadcast it to the shape without the ranked axis.",
            )
        )
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TileTypeError(
            message(
                "topk",
                expected="valid_count an integer",
                got=str(count.dtype),
                way_out="Convert it with .astype(jnp.int32).",
            )
        )


def _abstract(x, *rest, axis, k, order, counted):
    payload = rest[: len(rest) - counted]
    check_ranked("topk", x, payload, axis, order)
    check_k(k, x.shape[axis])
    if counted:
        _check_count(rest[-1], x.shape[:axis] + x.shape[axis + 1 :])
    shape = x.shape[:axis] + (k,) + x.shape[axis + 1 :]
    dims = tuple(-1 if d == axis else d for d in range(x.ndim))
    index = place_dtype(x.shape[axis])
    dtypes = [x.dtype, index, *(v.dtype for v in payload)]
    return [Out(shape, d, dims) for d in dtypes]


def _reference(x, *rest, axis, k, order, counted, platform=""):
    payload = rest[: len(rest) - counted]
    values = [jnp.moveaxis(v, axis, -1) for v in (x, *payload)]
    shape = (*values[0].shape[:-1], k)
    index = jnp.zeros(shape, place_dtype(x.shape[axis]))
    if index.size:
        index = _best.best(values[0], order, k, platform)
    wanted = None
    if counted:
        place = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        wanted = place < rest[-1][..., None]
    outs = [_order.take(v, index, wanted) for v in values]
    outs.insert(1, index if wanted is None else jnp.where(wanted, index, -1))
    return [jnp.moveaxis(v, -1, axis) for v in outs]


def _jvp(primals, tangents, *, axis, counted, **params):
    outs = topk_p.bind(*primals, axis=axis, counted=counted, **params)
    sources = [tangents[0], None, *tangents[1 : len(tangents) - counted]]
    return outs, moved(sources, outs, outs[1], axis)


define(
    topk_p,
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    batch=batch_fibres(topk_p),
    along=lambda *, axis, **_: (axis, -1),
    local=True,
)
