"""Coordinate maps: traced, composed along chains of reindexes, and bound as one op.

What a reindex returns while tracing remembers what it read and how, so that the next one
reads the same source. The skipped op in between is dead code.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxtile._jax_private import align_varying
from jaxtile.errors import TileTypeError, TileValueError, message
from jaxtile.primitives._affine import affine_results, variables
from jaxtile.primitives._bits import below, place_dtype
from jaxtile.primitives._define import compile_time
from jaxtile.primitives._functions import IN_JAX, attempt, require_pure
from jaxtile.primitives._moves import bind_gather
from jaxtile.primitives._operands import require_whole
from jaxtile.primitives._scalar import as_closed, has_control, inlined
from jaxtile.primitives.reindex import bind_reindex


@dataclass(frozen=True, eq=False)
class Link:
    """One reindex of a chain.

    Args:
        closed: the scalar jaxpr from the coordinates of the result to those of the source.
        shape: of the source.
        fill: the scalar that stands for the outside; None where nothing is known to lie
            outside, and the nearest end stands for it if it does.
    """

    closed: Any
    shape: tuple[int, ...]
    fill: Any = None

    def __call__(self, coordinates: Sequence) -> list:
        """The source's coordinates at arrays of coordinates, along one axis."""
        if not self.shape:
            return []
        call = jax.vmap(lambda *j: inlined(self.closed, j))
        if coordinates:
            return [
                jnp.broadcast_to(v, coordinates[0].shape) for v in call(*coordinates)
            ]
        return [jnp.reshape(v, (1,)) for v in inlined(self.closed, ())]


@dataclass(frozen=True, eq=False)
class Chain:
    """A source and the links that lead to it, the outermost first."""

    source: Any
    links: tuple[Link, ...]


# A longer chain starts anew: each link costs a guard.
_LONGEST = 16
_MOVED: dict[int, tuple[weakref.ref, Chain]] = {}


def _remember(result: Any, chain: Chain) -> None:
    if not isinstance(result, Tracer) or len(chain.links) >= _LONGEST:
        return
    key = id(result)
    gone = weakref.ref(result, lambda _: _MOVED.pop(key, None))
    _MOVED[key] = (gone, chain)


def _chain_of(x: Any) -> Chain:
    found = _MOVED.get(id(x))
    if found is not None and found[0]() is x:
        return found[1]
    return Chain(x, ())


def trace_map(op: str, f: Callable, shape: Sequence[int], rank: int, where: str) -> Any:
    """A coordinate map as a scalar jaxpr.

    Args:
        op: the op that asks, for messages.
        f: `(*coordinates) -> [coordinate]`.
        shape: of the result.
        rank: how many coordinates it must give.
        where: how messages spell them.
    """
    dtype = place_dtype(*shape)

    def flat(*coordinates):
        found = f(*coordinates)
        if len(found) != rank:
            raise TileTypeError(
                message(
                    op,
                    expected=f"f to give {rank} coordinates, one for each of {where}",
                    got=str(len(found)),
                    way_out="Return a tuple.",
                )
            )
        return [_coordinate(op, v, dtype) for v in found]

    def tell():
        return (
            f"f to take {len(shape)} coordinates, integer scalars",
            f"It takes one for each axis of the result; {IN_JAX}.",
        )

    scalars = [jax.ShapeDtypeStruct((), dtype)] * len(shape)
    closed = attempt(op, tell, jax.make_jaxpr(flat), *scalars)
    require_pure(op, "f", closed)
    return closed


def _coordinate(op, value, dtype):
    kind = getattr(value, "dtype", None)
    integer = isinstance(value, int) and not isinstance(value, bool)
    if kind is not None:
        integer = jnp.issubdtype(kind, jnp.integer)
    if not integer or np.ndim(value) != 0:
        got = f"{kind}{list(np.shape(value))}" if kind is not None else repr(value)
        raise TileTypeError(
            message(
                op,
                expected="f to give integer scalars",
                got=got,
                way_out="It maps one coordinate of the result to one of x; an index "
                "array is for jaxtile.gather.",
            )
        )
    if not isinstance(value, Tracer):
        # A constant outside of what counts places is outside of x on the same side.
        info = jnp.iinfo(dtype)
        return jnp.asarray(min(max(int(value), int(info.min)), int(info.max)), dtype)
    if np.dtype(kind).itemsize > dtype.itemsize:
        return value
    return jnp.asarray(value, dtype)


def move(op: str, x: Any, closed: Any, shape: Sequence[int], fill: Any) -> Any:
    """The array of a shape that reads x at traced coordinates, through x's own chain.

    Args:
        op: the op that asks, for messages.
        x: the array.
        closed: as `trace_map` gives it.
        shape: of the result.
        fill: as in `Link`.

    Raises:
        TileValueError: a coordinate is known to lie outside, and there is no fill.
        TileShapeError: the map is not affine, and x is sharded on an explicit mesh.
    """
    shape = tuple(shape)
    if fill is None:
        _require_inside(op, closed, x.shape, shape)
    chain = _chain_of(x)
    chain = Chain(chain.source, (Link(closed, x.shape, fill), *chain.links))
    result = _affine(chain, shape)
    if result is None:
        require_whole(op, jax.typeof(chain.source), range(chain.source.ndim))
        result = _general(chain, shape)
    _remember(result, chain)
    return result


def _require_inside(op, closed, source, shape):
    """Refuse coordinates that are known to lie outside of x."""
    if 0 in shape or not source:
        return
    ndim = len(shape)
    found = affine_results(closed, variables(ndim), ndim)
    if found is not None:
        ranges = [c.range(shape) for c in found]
    elif not (below(math.prod(shape), _DECIDED + 1) and _is_known(closed)):
        return
    else:
        with compile_time():
            values = Link(closed, source)(_coordinates(shape))
            ranges = [(int(v.min()), int(v.max())) for v in values]
    for d, ((low, high), n) in enumerate(zip(ranges, source, strict=True)):
        if not (below(-1, low) and below(high, n)):
            raise TileValueError(
                message(
                    op,
                    expected=f"coordinates in [0, {n}) along axis {d} of x",
                    got=f"coordinates from {low} to {high}",
                    way_out="Pass fill=, what stands for the outside, or keep f inside.",
                )
            )


def _is_known(closed: Any) -> bool:
    """Whether a map can be asked while tracing."""
    jaxpr, consts = as_closed(closed)
    if any(isinstance(c, Tracer) for c in consts):
        return False
    # What loops and branches are made of cannot leave the mesh that they were traced on.
    return jax.sharding.get_abstract_mesh().empty or not has_control(jaxpr)


# Up to this many places, a map that is not affine is asked at every one of them.
_DECIDED = 2**16


def _coordinates(shape: Sequence[int]) -> list:
    """Each coordinate at every place of a shape, laid out flat."""
    dtype = place_dtype(*shape)
    return [
        lax.broadcasted_iota(dtype, tuple(shape), d).reshape(-1)
        for d in range(len(shape))
    ]


def _affine(chain: Chain, shape: tuple[int, ...]) -> Any:
    """The chain as one affine reindex, or None where it is not one."""
    ndim, guards, fills = len(shape), [], []
    coordinates = variables(ndim)
    for link in chain.links:
        found = affine_results(link.closed, coordinates, ndim)
        if found is None:
            return None
        coordinates = found
        if link.fill is None:
            continue  # it was decided that nothing lies outside
        guard = tuple(
            (c, n)
            for c, n in zip(found, link.shape, strict=True)
            if 0 in shape or not c.inside(n, shape)
        )
        if fills and _same(fills[-1], link.fill):
            guards[-1] = tuple(dict.fromkeys((*guards[-1], *guard)))
        elif guard:
            guards.append(guard)
            fills.append(link.fill)
    x, *fills = align_varying([chain.source, *fills])
    return bind_reindex(x, fills, coordinates, guards, shape)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer) or np.ndim(a) or np.ndim(b):
        return False
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _general(chain: Chain, shape: tuple[int, ...]) -> Any:
    """The chain as one gather from its source laid out flat."""
    source, count = chain.source, math.prod(shape)
    coordinates, outside = _coordinates(shape), []
    for link in chain.links:
        coordinates = link(coordinates)
        if link.fill is not None:
            out = jnp.zeros(count, bool)
            for c, n in zip(coordinates, link.shape, strict=True):
                out |= (c < 0) | (c >= n)
            outside.append((out, link.fill))
        coordinates = [
            jnp.clip(c, 0, max(n - 1, 0))
            for c, n in zip(coordinates, link.shape, strict=True)
        ]
    place = jnp.zeros(count, place_dtype(source.size))
    for c, n in zip(coordinates, source.shape, strict=True):
        place = place * n + c.astype(place.dtype)
    fill = jnp.zeros((), source.dtype) if not outside else outside[-1][1]
    for out, value in reversed(outside):
        place = jnp.where(out, -1, place)
        if not _same(fill, value):
            # A gather of one element: a select that moves bits and has a derivative.
            index = jnp.where(out.reshape(shape), 0, -1)
            one, index, fill = align_varying([value.reshape(1), index, fill])
            fill = bind_gather(one, index, fill, 0, ())
    flat = [source.reshape(-1), place.reshape(shape), fill]
    source, place, fill = align_varying(flat)
    return bind_gather(source, place, fill, 0, ())
