"""reindex, gather and scatter in kernels that have no such operation on values.

One place after the other is picked out by comparing places: the bits of a line, as
integers, of which all but one are replaced by zero, add up to that one. Nothing is rounded
or looked at, so NaN elsewhere does no harm. The work is that of a pass over x for each
place of the result along the axis; a target of a scatter is a masked reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.pallas_lowering._elementwise import Traits
from jaxtile.pallas_lowering._registry import Backend
from jaxtile.policy import Kind
from jaxtile.primitives._bind import bind_reduce
from jaxtile.primitives._bits import inside
from jaxtile.primitives._moves import (
    before,
    flat_index,
    gather_p,
    index_places,
    scatter_p,
    spread,
    unpack_scatter,
)
from jaxtile.primitives.reduce import reduce_p
from jaxtile.primitives.reindex import passes, reindex_p


def _words(x: Any) -> Any:
    """The bits of values as signed integers of 32 or 64 bits."""
    dtype = np.dtype(x.dtype)
    if dtype.kind == "b":
        return jnp.where(
            x, jnp.full(x.shape, 1, np.int32), jnp.full(x.shape, 0, np.int32)
        )
    wide = np.dtype("int64" if dtype.itemsize == 8 else "int32")
    if dtype.itemsize == wide.itemsize:
        return x if dtype == wide else lax.bitcast_convert_type(x, wide)
    if dtype.kind not in "iu":
        x = lax.bitcast_convert_type(x, np.dtype(f"int{8 * dtype.itemsize}"))
    return x.astype(wide)


def _values(words: Any, dtype: Any) -> Any:
    """The inverse of `_words`."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return words != 0
    if dtype.itemsize == words.dtype.itemsize:
        same = dtype == words.dtype
        return words if same else lax.bitcast_convert_type(words, dtype)
    if dtype.kind in "iu":
        return words.astype(dtype)
    narrow = words.astype(np.dtype(f"int{8 * dtype.itemsize}"))
    return lax.bitcast_convert_type(narrow, dtype)


def _one(words: Any, place: Any, axis: int) -> Any:
    """The element at a place along an axis, which keeps size 1; zero where there is none."""
    here = lax.broadcasted_iota(np.int32, words.shape, axis) == place
    zeros = jnp.full(words.shape, 0, words.dtype)
    total = lax.reduce_sum(jnp.where(here, words, zeros), (axis,))
    return lax.expand_dims(total, (axis,))


def _line(count: int, axis: int, shape: tuple, dtypes: list, pick: Callable) -> list:
    """Words whose places along an axis are `pick(place)`, each of size 1 there."""
    if count == 1:
        return pick(np.int32(0))

    def body(m, lines):
        here = lax.broadcasted_iota(np.int32, shape, axis) == m
        every = tuple(range(len(shape)))
        return [
            jnp.where(here, lax.broadcast_in_dim(v, shape, every), line)
            for v, line in zip(pick(m), lines, strict=True)
        ]

    start = [jnp.full(shape, 0, d) for d in dtypes]
    return lax.fori_loop(0, count, body, start)


def gather_values(x, index, fill, *, axis, batch):
    """The rule of gather, on values."""
    words, n = _words(x), x.shape[axis]
    new, head = index.ndim - len(batch), before(axis, batch)
    whole = (*x.shape[:axis], *index.shape[head : head + new], *x.shape[axis + 1 :])
    other = lax.broadcast_in_dim(_words(fill), whole, tuple(range(fill.ndim)))
    # Compared where it is spread already: bools are not reshaped everywhere.
    ok = inside(spread(index, whole, axis, batch), n)
    index = index.astype(np.int32) if index.dtype.itemsize < 4 else index
    if new == 0:
        wide = spread(index, whole, axis, batch)
        wide = lax.broadcast_in_dim(
            wide, x.shape, tuple(d for d in range(x.ndim) if d != axis)
        )
        found = _one(words, wide, axis).reshape(whole)
        return [_values(jnp.where(ok, found, other), x.dtype)]
    flat = index if new == 1 else flat_index(index, axis, batch)
    count = flat.shape[head]
    places = index_places(axis, batch, 1)

    def pick(m):
        mine = flat if count == 1 else _one(flat, m, head)
        return [_one(words, lax.broadcast_in_dim(mine, x.shape, places), axis)]

    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    (found,) = _line(count, axis, shape, [words.dtype], pick)
    found = found if new == 1 else found.reshape(whole)
    return [_values(jnp.where(ok, found, other), x.dtype)]


def reindex_values(x, *fills, coordinates, guards, shape, turn=lax.transpose):
    """The rule of reindex, on values: one axis after the other."""
    words = _words(x)
    for d, c in enumerate(coordinates):
        k = next(iter(c.terms), None)
        count, step = (1, 0) if k is None else (shape[k], c.coefficients[k])
        if k is not None and (step, c.offset, count) == (1, 0, words.shape[d]):
            continue
        line = (*words.shape[:d], count, *words.shape[d + 1 :])

        def pick(m, words=words, d=d, step=step, offset=c.offset):
            return [_one(words, m * step + offset, d)]

        (words,) = _line(count, d, line, [words.dtype], pick)
    labels = [c.terms[0] for c in coordinates if c.terms]
    if len(labels) < words.ndim:
        words = words.reshape([shape[k] for k in labels])
    if labels != sorted(labels):
        words = turn(words, np.argsort(labels).tolist())
    words = lax.broadcast_in_dim(words, tuple(shape), tuple(sorted(labels)))
    for fill, guard in zip(fills[::-1], guards[::-1], strict=True):
        other = lax.broadcast_in_dim(_words(fill), tuple(shape), range(fill.ndim))
        words = jnp.where(passes(guard, shape), words, other)
    return [_values(words, x.dtype)]


def scatter_values(
    *operands, spec, axis, batch, size, policy, is_sorted, seeded, finish, out
):
    """The rule of scatter, on values: a masked reduce for each target."""
    elements, index, init = unpack_scatter(spec, operands, seeded)
    x = elements[0]
    index = index.astype(np.int32) if index.dtype.itemsize < 4 else index
    wide = spread(index, x.shape, axis, batch)
    seeds = [_words(v) for v in init or ()]

    def pick(t):
        seed = [
            _values(_one(v, t, axis), d).reshape(x.shape[:axis] + x.shape[axis + 1 :])
            for v, d in zip(seeds, spec.states, strict=seeded)
        ]
        leaves = bind_reduce(
            spec,
            elements,
            seed if seeded else None,
            wide == t,
            axes=(axis,),
            policy=policy,
            finish=finish,
            out=out,
        )
        return [lax.expand_dims(_words(v), (axis,)) for v in leaves]

    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    words = [np.dtype("int64" if np.dtype(d).itemsize == 8 else "int32") for d in out]
    lines = _line(size, axis, shape, words, pick)
    return [_values(v, d) for v, d in zip(lines, out, strict=True)]


def _like(shape, dtype):
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _first(reasons) -> str | None:
    return next(filter(None, reasons), None)


def _empty(*shapes) -> str | None:
    if any(0 in shape for shape in shapes):
        return "a kernel has no empty values; call it on empty arrays outside"
    return None


def define_exchange(
    backend: Backend,
    traits: Traits,
    movable: Callable,
    turn: Callable = lax.transpose,
) -> None:
    """Register the rules of reindex, gather and scatter with a backend.

    Args:
        backend, traits: whose.
        movable: why a value of this type is not moved bit for bit there, or None.
        turn: its `lax.transpose`.
    """

    def operands(avals):
        return _first([*map(traits.operand, avals), *map(movable, avals)])

    def refuse_gather(x, index, fill, *, axis, batch):
        head = before(axis, batch)
        own = index.shape[head : head + index.ndim - len(batch)]
        shape = (*x.shape[:axis], *own, *x.shape[axis + 1 :])
        return (
            _empty(x.shape, shape)
            or operands([x, index])
            or traits.shape(_like(shape, x.dtype))
        )

    def refuse_reindex(x, *fills, coordinates, guards, shape):
        labels = [k for c in coordinates for k in c.terms]
        if len(set(labels)) < len(labels) or any(len(c.terms) > 1 for c in coordinates):
            return (
                "one coordinate runs along two axes, or two along one; reindex outside "
                "the kernel"
            )
        return (
            _empty(x.shape, shape)
            or operands([x])
            or traits.shape(_like(shape, x.dtype))
        )

    def refuse_scatter(*avals, spec, axis, batch, size, policy, seeded, **params):
        elements, index, init = unpack_scatter(spec, avals, seeded)
        if policy.kind is Kind.FIXED:
            return (
                "the tree of each target's own elements needs them brought together; "
                "use ordered_tree or fold_left, or scatter outside the kernel"
            )
        x = elements[0]
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        reason = _empty(x.shape, shape) or operands([*elements, index, *(init or ())])
        if reason is None:
            reason = _first(movable(_like(shape, d)) for d in params["out"])
        return (
            reason
            or traits.shape(_like(shape, x.dtype))
            or _reduces(backend, avals, spec, axis, policy, seeded, params)
        )

    backend.traces(gather_p, refuse_gather)(gather_values)
    reindex_rule = functools.partial(reindex_values, turn=turn)
    backend.traces(reindex_p, refuse_reindex)(reindex_rule)
    backend.traces(scatter_p, refuse_scatter)(scatter_values)


def _reduces(backend, avals, spec, axis, policy, seeded, params) -> str | None:
    """Why the reduce of one target is refused, or None."""
    elements, _, init = unpack_scatter(spec, avals, seeded)
    shape = elements[0].shape
    fibre = shape[:axis] + shape[axis + 1 :]
    given = [
        *elements,
        *(_like(fibre, v.dtype) for v in init or ()),
        _like(shape, bool),
    ]
    return backend.why_not(
        reduce_p,
        *given,
        spec=spec,
        axes=(axis,),
        policy=policy,
        seeded=seeded,
        masked=True,
        finish=params["finish"],
        out=params["out"],
    )
