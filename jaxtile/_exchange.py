"""What gather, scatter and reindex share in taking arguments: index, fill, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import _checks, formats
from jaxtile._arguments import axis_of, by_dims
from jaxtile._checks import as_array
from jaxtile._join import check_rank, is_constant, spell
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.formats import Category
from jaxtile.primitives._parts import holds


def whole(op: str, x: Any) -> tuple[jax.Array, tuple[Dim, ...] | None]:
    """An operand of any format as an array, and its dims (None: an array)."""
    if not is_tile(x):
        return as_array(op, x), None
    check_rank(op, x)
    return as_array(op, x.array), x.dims


def _batch_axes(op: str, batch: Any, axis: int, ndim: int) -> tuple[int, ...]:
    if isinstance(batch, str):
        if batch != "all":
            raise TileTypeError(
                message(
                    op,
                    expected='batch axes, or "all"',
                    got=repr(batch),
                    way_out="Name the axes that x and index share.",
                )
            )
        return tuple(d for d in range(ndim) if d != axis)
    many = batch if isinstance(batch, (tuple, list)) else (batch,)
    axes = tuple(sorted(axis_of(op, a, ndim, None) for a in many))
    if axis in axes or len(set(axes)) != len(axes):
        raise TileShapeError(
            message(
                op,
                expected="batch axes other than the axis, each once",
                got=f"batch={batch!r}, axis={axis}",
                way_out="The axis itself is what the index replaces.",
            )
        )
    return axes


def _forbid_batch(op: str, batch: Any) -> None:
    if not (isinstance(batch, tuple | list) and not batch):
        raise TileTypeError(
            message(
                op,
                expected="batch= with arrays only",
                got=f"batch={batch!r} with a tile",
                way_out="Leave it out: tiles share the dims that both have.",
            )
        )


def _index_array(op: str, index: Any) -> jax.Array:
    array = as_array(op, index, "Point into the axis, whose places are fewer")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TileTypeError(
            message(
                op,
                expected="an index of integers",
                got=array.dtype.name,
                way_out="A mask selects by jaxtile.ite; other numbers need "
                "jaxtile.cast(index, jnp.int32).",
            )
        )
    if formats.format_of(array.dtype).bits < 8:
        array = array.astype(jnp.int32)
    return array


def placed_index(op, index, axis, x, dims, batch, own_axis=False):
    """An index in the layout of the primitives.

    Args:
        op: the op that asks, for messages.
        index: an array, tile or number.
        axis: the axis of x.
        x: the array that it indexes.
        dims: its dims, or None.
        batch: the axes that arrays share.
        own_axis: the index has `axis` and nothing else of its own.

    Returns:
        The index, the shared axes of x, and the dims of the index alone.
    """
    if dims is not None:
        _forbid_batch(op, batch)
    if dims is not None and is_tile(index):
        return _placed_tile(op, index, axis, x, dims, own_axis)
    array = index if is_tile(index) else _index_array(op, index)
    if is_tile(index) or (dims is not None and array.ndim > 0):
        raise TileShapeError(
            message(
                op,
                expected="x and index both arrays, or both tiles",
                got="a tile and an array",
                way_out="Name the axes of the array with jaxtile.tile.",
            )
        )
    shared = _batch_axes(op, batch, axis, x.ndim)
    new = array.ndim - len(shared)
    if new < 0 or (own_axis and new != 1):
        raise TileShapeError(
            message(
                op,
                expected="an index with the axes of batch="
                + (", and one of its own" if own_axis else ""),
                got=f"shape {array.shape} for batch={shared}",
                way_out="An index that is shared by no axis of x has batch=().",
            )
        )
    _require_sizes(op, array, axis, x, shared, own_axis)
    return array, shared, ()


def _require_sizes(op, index, axis, x, shared, own_axis):
    head = sum(d < axis for d in shared)
    new = index.ndim - len(shared)
    have = (*index.shape[:head], *index.shape[head + new :])
    want = tuple(x.shape[d] for d in shared)
    if own_axis:
        have = (*have, index.shape[head])
        want = (*want, x.shape[axis])
    if have != want:
        raise TileShapeError(
            message(
                op,
                expected=f"an index of the sizes of x along the axes {shared}"
                + (f" and {axis}" if own_axis else ""),
                got=f"shape {index.shape} for {x.shape}",
                way_out="Size 1 does not stretch: broadcast the index first.",
            )
        )


def _placed_tile(op, index, axis, x, dims, own_axis):
    check_rank(op, index)
    others = [d for i, d in enumerate(dims) if i != axis]
    shared = tuple(i for i, d in enumerate(dims) if i != axis and d in index.dims)
    own = tuple(d for d in index.dims if d not in others)
    if own_axis and own != (dims[axis],):
        raise TileShapeError(
            message(
                op,
                expected=f"an index with dim {dims[axis]!r} and others of x",
                got=f"dims {spell(index.dims)} for {spell(dims)}",
                way_out="Each place of the axis has one target; dims are identities.",
            )
        )
    first = [dims[i] for i in shared if i < axis]
    last = [dims[i] for i in shared if i > axis]
    order = [index.dims.index(d) for d in (*first, *own, *last)]
    array = lax.transpose(_index_array(op, index.array), order)
    sizes = dict(zip(index.dims, index.shape, strict=True))
    for i, d in enumerate(dims):
        if d in sizes and sizes[d] != x.shape[i]:
            raise TileShapeError(
                message(
                    op,
                    expected=f"one size for dim {d!r}",
                    got=f"{x.shape[i]} and {sizes[d]}",
                    way_out="Make another Dim for the picked places.",
                )
            )
    return array, shared, own


def require_free(op: str, x: Any, index: Any, axis: Any) -> None:
    """Refuse an index that shares a dim with x."""
    if not (is_tile(x) and is_tile(index)):
        return
    shared = [d for d in index.dims if d in x.dims and d is not axis]
    if shared:
        raise TileShapeError(
            message(
                op,
                expected="an index of dims that x does not have",
                got=f"{spell(shared)} in both",
                way_out="jaxtile.gather picks along shared dims.",
            )
        )


def target_of(op: str, size: Any, dims: Any, axis: int) -> tuple[int, Any]:
    """How many targets there are, and the dims of the result."""
    way_out = "It is the size of the result along the axis."
    named = None
    if dims is not None:
        if not (
            isinstance(size, Mapping)
            and len(size) == 1
            and isinstance(next(iter(size)), Dim)
        ):
            raise TileTypeError(
                message(
                    op,
                    expected="size={dim: n}, which names the targets' dim",
                    got=repr(size),
                    way_out="Make it with jaxtile.Dim; the axis of x is another one.",
                )
            )
        ((dim, size),) = size.items()
        others = [d for i, d in enumerate(dims) if i != axis]
        if dim in others:
            raise TileShapeError(
                message(
                    op,
                    expected=f"a dim for the targets that is none of {spell(others)}",
                    got=repr(dim),
                    way_out="Make another with jaxtile.Dim.",
                )
            )
        named = (*dims[:axis], dim, *dims[axis + 1 :])
    count = _checks.size(op, "size, an integer", size, way_out)
    if isinstance(count, int) and not 0 <= count < 2**63:
        raise TileShapeError(
            message(op, expected="size in [0, 2**63)", got=str(count), way_out=way_out)
        )
    return count, named


def scalar_fill(op: str, fill: Any, dtype: Any) -> Any:
    """A scalar in a format; None is the value whose bits are all zero."""
    array = _filled(op, fill, np.dtype(dtype))
    if array.ndim:
        raise TileTypeError(
            message(
                op,
                expected="a fill that is a scalar",
                got=f"shape {array.shape}",
                way_out="jaxtile.gather takes a fill for each place.",
            )
        )
    return array


def _fits(dtype: np.dtype, fill: Any) -> bool:
    """Whether a format holds a number: no overflow, and no rounding to a storage one."""
    stored = formats.format_of(dtype).category is Category.STORAGE
    if not (holds(dtype, fill) and stored and jnp.issubdtype(dtype, jnp.floating)):
        return holds(dtype, fill)
    wide = np.asarray(fill).astype(np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(dtype).astype(np.float64)
    same = narrow == wide and np.signbit(narrow) == np.signbit(wide)
    return bool(same or (np.isnan(narrow) and np.isnan(wide)))


def _filled(op: str, fill: Any, dtype: np.dtype, dims: Any = None) -> Any:
    if fill is None:
        return np.zeros((), dtype)
    if isinstance(fill, np.ndarray) and fill.ndim == 0 and fill.dtype == dtype:
        return fill
    if is_constant(fill) or (isinstance(fill, np.generic) and fill.ndim == 0):
        if not _fits(dtype, fill):
            _refuse_fill(op, fill, dtype)
        return np.asarray(fill).astype(dtype)  # a constant stays one while tracing
    array = by_dims(op, "a fill", fill, dims)
    if array.dtype != dtype:
        weak = array.weak_type and np.can_cast(array.dtype, dtype, "same_kind")
        if not weak:
            _refuse_fill(op, array.dtype.name, dtype)
        array = array.astype(dtype)
    return array


def fill_of(op: str, fill: Any, dtype: Any, shape: Sequence, dims: Any) -> Any:
    """The fill in a format: a scalar, or an array of the result's shape."""
    array = _filled(op, fill, np.dtype(dtype), dims)
    if array.ndim == 0:
        return array
    try:
        return jnp.broadcast_to(array, tuple(shape))
    except ValueError as error:
        raise TileShapeError(
            message(
                op,
                expected=f"a fill that broadcasts to {tuple(shape)}",
                got=str(array.shape),
                way_out="Pass a scalar, or one value for each place of the result.",
            )
        ) from error


def _refuse_fill(op, got, dtype):
    raise TileTypeError(
        message(
            op,
            expected=f"a value that {dtype.name} holds, to stand for what is outside",
            got=str(got),
            way_out="Convert it to x's format first.",
        )
    )
