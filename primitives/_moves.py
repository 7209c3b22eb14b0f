"""Binding gather and scatter, each the other's transpose, and how their index lies.

Along `axis` of x, an index picks or names places. It has the dims of x listed in
`batch`, those before `axis` in front and those after it at the end; what lies between
belongs to the index alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtile.catalogue import add as ADD
from jaxtile.policy import unordered_tree
from jaxtile.primitives._bind import bind_reduce
from jaxtile.primitives._define import new_primitive
from jaxtile.primitives._spec import make_spec

gather_p = new_primitive("tile_gather")
scatter_p = new_primitive("tile_scatter")


def bind_gather(
    x: Any,
    index: Any,
    fill: Any,
    axis: int,
    batch: Sequence[int],
    implementation: str | None = None,
) -> Any:
    """Bind `gather_p`."""
    return gather_p.bind(
        x, index, fill, axis=axis, batch=tuple(batch), implementation=implementation
    )[0]


def bind_scatter(
    spec,
    elements,
    index,
    init,
    *,
    axis,
    batch,
    size,
    policy=unordered_tree,
    is_sorted=False,
    finish=True,
    out=None,
):
    """Bind `scatter_p` from its parts.

    Args:
        spec: the bound reducer.
        elements: its leaves, equally shaped.
        index: the target of each element.
        init: seed leaves of the result's shape, or None.
        axis: of the elements, along which the index lies.
        batch: the dims of the elements that the index has too.
        size: how many targets there are.
        policy: the order policy.
        is_sorted: the index never falls along `axis`.
        finish: give `finish`'s result; else the raw state.
        out: dtypes that the outputs narrow to, once, at the end.

    Returns:
        The output leaves.
    """
    return scatter_p.bind(
        *elements,
        index,
        *(init or ()),
        spec=spec,
        axis=axis,
        batch=tuple(batch),
        size=size,
        policy=policy,
        is_sorted=is_sorted,
        seeded=init is not None,
        finish=finish,
        out=tuple(out or (spec.results if finish else spec.states)),
    )


def unpack_scatter(
    spec: Any, operands: Sequence, seeded: bool
) -> tuple[list, Any, Any]:
    """Positional operands as (elements, index, init or None)."""
    n = spec.n_elements
    init = list(operands[n + 1 :]) if seeded else None
    return list(operands[:n]), operands[n], init


def add_spec(dtype: Any, op: str):
    """The reducer that sums cotangents of a dtype, in the accumulator's."""
    return make_spec(ADD, jax.tree.structure(0), (dtype,), None, None, op)


def before(axis: int, batch: Sequence[int]) -> int:
    """How many leading dims of the index are dims of x."""
    return sum(d < axis for d in batch)


def index_places(axis: int, batch: Sequence[int], new: int) -> tuple[int, ...]:
    """For each dim of the index its place in x with `axis` replaced by the new dims."""
    first = [d for d in batch if d < axis]
    last = [d - 1 + new for d in batch if d > axis]
    return (*first, *range(axis, axis + new), *last)


def spread(value: Any, shape: Sequence[int], axis: int, batch: Sequence[int]) -> Any:
    """What an index says of each place, broadcast over the dims that it lacks."""
    new = value.ndim - len(batch)
    return lax.broadcast_in_dim(value, tuple(shape), index_places(axis, batch, new))


def pick(x: Any, index: Any, axis: int, batch: Sequence[int]) -> Any:
    """x along `axis` at an index that lies in it: bits are moved, nothing is checked."""
    new = index.ndim - len(batch)
    places = index_places(axis, batch, new)
    one = {axis, *batch}
    head, tail = before(axis, batch), index.ndim
    after = len(batch) - head
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d in range(x.ndim - 1 + new) if d not in places),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=tuple(batch),
        start_indices_batching_dims=(*range(head), *range(tail - after, tail)),
    )
    sizes = tuple(1 if d in one else s for d, s in enumerate(x.shape))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, index[..., None], numbers, sizes, mode=mode)


def numbers_of_scatter(ndim: int, axis: int, batch: Sequence[int], index_ndim: int):
    """How `lax.scatter` sends updates of `ndim` dims along `axis`."""
    head, after = before(axis, batch), len(batch) - before(axis, batch)
    return lax.ScatterDimensionNumbers(
        update_window_dims=tuple(
            d for d in range(ndim) if d != axis and d not in batch
        ),
        inserted_window_dims=(axis,),
        scatter_dims_to_operand_dims=(axis,),
        operand_batching_dims=tuple(batch),
        scatter_indices_batching_dims=(
            *range(head),
            *range(index_ndim - after, index_ndim),
        ),
    )


def flat_index(index: Any, axis: int, batch: Sequence[int]) -> Any:
    """The index with its own dims as one."""
    head = before(axis, batch)
    after = index.ndim - (len(batch) - head)
    count = math.prod(index.shape[head:after])
    return index.reshape(*index.shape[:head], count, *index.shape[after:])


def sum_outside(ct: Any, outside: Any, ndim: int, op: str) -> Any:
    """The cotangent of a fill of `ndim` leading dims: the sum where it was used."""
    axes = tuple(range(ndim, ct.ndim))
    if not axes:
        return jnp.where(outside, ct, jnp.zeros_like(ct))
    return bind_reduce(
        add_spec(ct.dtype, op),
        [ct],
        None,
        outside,
        axes=axes,
        policy=unordered_tree,
        out=(ct.dtype,),
    )[0]
