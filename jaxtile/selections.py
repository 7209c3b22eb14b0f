"""topk_merge: the best k of a stream, as a reducer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile._checks import choice, flag, integer
from jaxtile.catalogue import MONOID
from jaxtile.errors import TileTypeError, TileValueError, message
from jaxtile.ordering import NAN_WAY_OUT, Ranked
from jaxtile.primitives._order import NAN_RULES, Order, ranks_of
from jaxtile.reducers import Reducer

# A state has an array for each place, and a merge is written out.
_MOST = 256


class _Entry(NamedTuple):
    """A candidate: its rank, its index, and its value."""

    rank: Any
    index: Any
    value: Any


def _before(a: _Entry, b: _Entry):
    return (a.rank < b.rank) | ((a.rank == b.rank) & (a.index < b.index))


def _pick(first, a: _Entry, b: _Entry) -> _Entry:
    return _Entry(*(jnp.where(first, x, y) for x, y in zip(a, b, strict=True)))


def _sorted(entries: list) -> list:
    """A bitonic sequence in order."""
    half = len(entries) // 2
    while half:
        for i in range(len(entries)):
            if not i & half:
                a, b = entries[i], entries[i + half]
                swap = _before(b, a)
                entries[i], entries[i + half] = _pick(swap, b, a), _pick(swap, a, b)
        half //= 2
    return entries


def _nowhere(dtype) -> int:
    """The index of an empty place: after every other."""
    return np.iinfo(dtype).max


def _entry(order: Order, value, index) -> _Entry:
    rank = ranks_of(value, order)
    empty = index == _nowhere(index.dtype)
    last = jnp.full_like(rank, np.iinfo(rank.dtype).max)
    return _Entry(jnp.where(empty, last, rank), index, value)


def _merge(order: Order, a: Ranked, b: Ranked) -> Ranked:
    # Batcher, Sorting networks and their applications (1968): the better ones of a and
    # b backwards are the best, and a bitonic sequence.
    k = len(a.values)
    size = 1 << (k - 1).bit_length()
    left, right = (
        [_entry(order, *pair) for pair in zip(s.values, s.indices, strict=True)]
        + [None] * (size - k)
        for s in (a, b)
    )
    both = []
    for x, y in zip(left, reversed(right), strict=True):
        if x is not None and y is not None:
            both.append(_pick(_before(y, x), y, x))
        else:
            both.append(y if x is None else x)
    best = _sorted(both)[:k]
    return Ranked(tuple(e.value for e in best), tuple(e.index for e in best))


def _lift(k: int, value, index) -> Ranked:
    rest = range(k - 1)
    nowhere = jnp.full_like(index, _nowhere(index.dtype))
    return Ranked(
        (value, *(jnp.zeros_like(value) for _ in rest)),
        (index, *(nowhere for _ in rest)),
    )


def _lift_pair(k: int, element) -> Ranked:
    pair = isinstance(element, tuple | list) and len(element) == 2
    if not (pair and jnp.issubdtype(element[1].dtype, jnp.integer)):
        raise TileTypeError(
            message(
                "topk_merge",
                expected="elements (value, index) with an integer index",
                got=str(jax.tree.map(lambda v: v.dtype.name, element)),
                way_out="Carry the source index beside the value, or leave "
                "indexed=False out.",
            )
        )
    return _lift(k, *element)


def _update(order: Order, state: Ranked, *element) -> Ranked:
    """The state with one more element, which moves what comes after it back."""
    new = _entry(order, *(element if len(element) == 2 else element[0]))
    entries = [
        _entry(order, *pair) for pair in zip(state.values, state.indices, strict=True)
    ]
    best, ahead = [], None
    for entry in entries:
        first = _before(new, entry)
        moved = new if ahead is None else _pick(ahead[0], ahead[1], new)
        best.append(_pick(first, moved, entry))
        ahead = first, entry
    return Ranked(tuple(e.value for e in best), tuple(e.index for e in best))


def _update_right(order: Order, *parts) -> Ranked:
    return _update(order, parts[-1], *parts[:-1])


def _identity(state: Ranked) -> Ranked:
    return Ranked(
        tuple(np.zeros((), v.dtype) for v in state.values),
        tuple(np.asarray(_nowhere(i.dtype), i.dtype) for i in state.indices),
    )


def _finish(state: Ranked) -> Ranked:
    indices = (jnp.where(i == _nowhere(i.dtype), -1, i) for i in state.indices)
    return Ranked(state.values, tuple(indices))


def _resume(result: Ranked) -> Ranked:
    def place(index):
        return jnp.where(index < 0, _nowhere(index.dtype), index)

    return Ranked(*result[:1], tuple(map(place, result[1])))


def topk_merge(
    k: int, *, largest: bool = True, nan: str = "last", indexed: bool = True
) -> Reducer:
    """The reducer that keeps the best k values and their source indices.

        merge(a, b) = the first k of a and b together, by value, then by index

    so that a top-k streams over tiles, in any grouping and order. It is meant for small
    k: a merge is a network of k log k comparisons, compiled as such.

    Args:
        k: how many, at least 1.
        largest: large values first; else small ones.
        nan: as in `topk`.
        indexed: the element is a value, and the reduction knows its index. Without, it is
            a pair (value, index) with an index of its own for each element, as inside
            `segmented`, or where a tile is a part of the source.

    Returns:
        A commutative `Reducer`, which finishes to `Ranked` of two tuples of k; places
        beyond the elements have index -1 and value zero.

    Raises:
        TileTypeError: k is no integer known while tracing; when used, an element that is
            no pair where it has to be one.
        TileValueError: k is below 1 or above 256, or there is no such rule for NaN.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> best = jt.reduce(jnp.array([3, 9, 4]), 0, jt.topk_merge(2))
        >>> print(jnp.stack(best.values), jnp.stack(best.indices))
        [9 4] [1 2]
    """
    op = "topk_merge"
    k = integer(op, "an integer k", k, "A state has k places: pass a Python integer.")
    if not 1 <= k <= _MOST:
        raise TileValueError(
            message(
                op,
                expected=f"k in [1, {_MOST}]",
                got=str(k),
                way_out="The best 0 values need no reduction, and many need jaxtile.topk.",
            )
        )
    choice(op, "nan", nan, NAN_RULES, NAN_WAY_OUT)
    order = Order(flag(op, "largest", largest), nan)
    indexed = flag(op, "indexed", indexed)
    return Reducer(
        merge=functools.partial(_merge, order),
        identity=_identity,
        lift=functools.partial(_lift if indexed else _lift_pair, k),
        finish=_finish,
        resume=_resume,
        update=functools.partial(_update, order),
        update_right=functools.partial(_update_right, order),
        laws=MONOID,
        name=f"topk_merge({k})",
        indexed=indexed,
        exact_identity=True,
        native="topk",
        order=order,
    )
