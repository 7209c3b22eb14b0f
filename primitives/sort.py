r"""sort: each fibre's values in order, ties by source index.

    y[j] = x[p(j)],  p the one permutation with (key(x[p(j)]), p(j)) ascending

where the key ranks values in the direction asked for. NaNs are one class whatever their
sign and payload, -0 equals +0, and every value keeps its bits. Payloads follow the same
permutation, which is a result too where it is asked for.

Operands: the keys, then payload leaves of the same shape.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxtile.primitives import _order
from jaxtile.primitives._bits import place_dtype
from jaxtile.primitives._define import Out, define, new_primitive
from jaxtile.primitives._operands import batch_fibres
from jaxtile.primitives._ranked import check_ranked, moved

sort_p = new_primitive("tile_sort")


def bind_sort(
    x,
    payload=(),
    *,
    axis,
    descending=False,
    nan="last",
    indices=False,
    values=True,
    implementation=None,
):
    """Bind `sort_p`.

    Args:
        x: the keys, of an arithmetic format.
        payload: arrays of x's shape, of any format.
        axis: the sorted axis.
        descending: large values first.
        nan: "last", "first", "largest" or "smallest".
        indices: also give the source indices, after the values.
        values: give the values; where nobody wants them a kernel moves less.
        implementation: None picks what runs it; a name insists.

    Returns:
        The values and the indices, if asked for, and the payload leaves.
    """
    return sort_p.bind(
        x,
        *payload,
        axis=axis,
        order=_order.Order(descending, nan),
        indices=indices,
        values=values,
        implementation=implementation,
    )


def _abstract(x, *payload, axis, order, indices, values):
    check_ranked("sort", x, payload, axis, order)
    dims = tuple(range(x.ndim))
    index = place_dtype(x.shape[axis])
    outs = [Out(x.shape, v.dtype, dims) for v in (x, *payload)]
    return wanted([outs[0], Out(x.shape, index, dims), *outs[1:]], indices, values)


def wanted(outs: list, indices: bool, values: bool) -> list:
    """Of the values, the indices and the payload what was asked for."""
    return [*outs[:1] * values, *outs[1:2] * indices, *outs[2:]]


def _reference(x, *payload, axis, order, indices, values, platform=""):
    x, *payload = (jnp.moveaxis(v, axis, -1) for v in (x, *payload))
    if not (indices or payload):
        outs = [_order.ranked(x, order, platform)]
    else:
        index = _order.permutation(_order.keys_of(x, order), platform)
        moved = [_order.take(v, index) for v in (x, *payload)]
        outs = wanted([moved[0], index, *moved[1:]], indices, values)
    return [jnp.moveaxis(v, -1, axis) for v in outs]


def _jvp(primals, tangents, *, indices, values, axis, **params):
    outs = sort_p.bind(*primals, indices=True, values=True, axis=axis, **params)
    sources = [tangents[0], None, *tangents[1:]]
    dy = moved(sources, outs, outs[1], axis)
    return wanted(outs, indices, values), wanted(dy, indices, values)


define(
    sort_p,
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    batch=batch_fibres(sort_p),
    along=lambda *, axis, **_: (axis,),
    local=True,
)
