"""reindex and its special cases: transpose, shift, butterfly, broadcast, flip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import _edges
from jaxtile._arguments import axes_of, axis_of, retile
from jaxtile._checks import function, integer, is_index, size
from jaxtile._coordinates import move, trace_map
from jaxtile._exchange import scalar_fill, whole
from jaxtile._join import distinct, spell
from jaxtile.dims import Dim, IndexSet
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError, message
from jaxtile.primitives._bits import place_dtype

_ONE = jax.tree.structure(0)


def reindex(x: Any, out: Any, f: Callable[..., Any], fill: Any = None) -> Any:
    """The array of a shape whose elements are those of x at mapped coordinates.

    y[j] = x[f(j)] where f(j) lies in x, else fill

    f is traced once. Affine coordinates (transposes, shifts, flips, strides, diagonals,
    splits, repetitions) become slices and their like, any others a gather. A reindex of
    what another one gave reads that one's source: a chain is one operation.

    Args:
        x: an array or tile of any format.
        out: the shape of the result; of tiles a mapping from each `Dim` to its size, an
            `IndexSet`, or dims that x has.
        f: takes a coordinate, an integer scalar, for each axis of `out`, and gives one for
            each axis of x: an integer, or a tuple; of tiles also a mapping from dims of x,
            in which dims that `out` has too may be left out. It may close over integer
            scalars that are known only when it runs.
        fill: a scalar of x's format that stands for the outside. None states that nothing
            lies outside; where that shows only when it runs, the nearest end stands for
            it.

    Returns:
        An array of x's dtype, or a `Tile`. Bits are copied.

    Raises:
        TileTypeError: x is no array, tile or number; f cannot be traced, has side effects,
            or does not give integers, one for each axis; fill is no scalar of x's format.
        TileShapeError: a size is negative, or dims do not fit.
        TileValueError: a coordinate is known to lie outside of x, or may where a size is
            symbolic, and there is no fill.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.arange(6).reshape(2, 3)
        >>> print(jt.reindex(x, (3, 2), lambda i, j: (j, i)))
        [[0 3]
         [1 4]
         [2 5]]
        >>> print(jt.reindex(x[0], 4, lambda i: i - 1, fill=9))
        [9 0 1 2]
    """
    function("reindex", "f, a function of coordinates", f, "Write lambda i, j: (j, i).")
    array, dims = whole("reindex", x)
    _edges.require_whole("reindex", dims, range(array.ndim), array.shape)
    shape, named = _target("reindex", out, array.shape, dims)

    def coordinates(*j):
        return _as_tuple(f(*j), j, dims, named)

    where = str(array.shape) if dims is None else spell(dims)
    return _moved("reindex", array, dims, shape, named, coordinates, fill, where)


def _moved(op, array, dims, shape, named, f, fill, where=""):
    closed = trace_map(op, f, shape, array.ndim, where)
    fill = None if fill is None else scalar_fill(op, fill, array.dtype)
    found = move(op, array, closed, shape, fill)
    found = _edges.apart(found, named, set(named or ()) - set(dims or ()))
    return retile(_ONE, [found], named)


def _as_tuple(found, coordinates, dims, named):
    if isinstance(found, Mapping) and dims is not None:
        unknown = [d for d in found if d not in dims]
        known = dict(zip(named, coordinates, strict=True))
        lacking = [d for d in dims if d not in found and d not in known]
        if unknown or lacking:
            raise TileShapeError(
                message(
                    "reindex",
                    expected=f"f to give a coordinate for each of {spell(dims)}",
                    got=f"one for {unknown[0]!r}" if unknown else f"none for {lacking}",
                    way_out="Its keys are dims of x.",
                )
            )
        return tuple(found[d] if d in found else known[d] for d in dims)
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _target(op, out, have, dims) -> tuple[tuple[int, ...], tuple[Dim, ...] | None]:
    """The shape of the result, and its dims where x has some."""
    named = None
    if dims is not None:
        sizes = dict(zip(dims, have, strict=True))
        if isinstance(out, IndexSet):
            out = dict(zip(out.dims, out.shape, strict=True))
        if isinstance(out, Dim):
            out = (out,)
        if isinstance(out, Sequence) and all(isinstance(d, Dim) for d in out):
            out = tuple(out)
        if isinstance(out, tuple) and all(d in sizes for d in out):
            distinct(op, out)
            out = {d: sizes[d] for d in out}
        if not isinstance(out, Mapping) or not all(isinstance(d, Dim) for d in out):
            raise TileTypeError(
                message(
                    op,
                    expected="out={dim: size, ...}, an IndexSet, or dims of x",
                    got=repr(out),
                    way_out=f"x has the dims {spell(dims)}.",
                )
            )
        named, out = tuple(out), tuple(out.values())
    if not isinstance(out, tuple | list):
        out = (out,)
    way_out = "Pass the shape of the result, known while tracing."
    shape = tuple(size(op, "sizes that are integers", n, way_out) for n in out)
    if any(isinstance(n, int) and not 0 <= n < 2**63 for n in shape):
        raise TileShapeError(
            message(op, expected="sizes in [0, 2**63)", got=str(shape), way_out=way_out)
        )
    return shape, named


def transpose(x: Any, axes: Any = None) -> Any:
    """The axes in another order.

    y[j_axes[0], j_axes[1], ...] = x[j_0, j_1, ...]

    Args:
        x: an array or tile of any format.
        axes: all axes, integers or dims, in the order of the result; None reverses it.

    Returns:
        An array or `Tile`, the bits copied.

    Raises:
        TileShapeError: not every axis once, or no such axis.
        TileTypeError: x is no array, tile or number, or an axis is none.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.transpose(jnp.array([[1, 2], [3, 4]])))
        [[1 3]
         [2 4]]
    """
    array, dims = whole("transpose", x)
    given = tuple(range(array.ndim))[::-1] if axes is None else axes
    many = given if isinstance(given, tuple | list) else (given,)
    order = [axis_of("transpose", a, array.ndim, dims) for a in many]
    if sorted(order) != list(range(array.ndim)):
        raise TileShapeError(
            message(
                "transpose",
                expected=f"each of {array.ndim} axes once",
                got=str(many),
                way_out="To drop or repeat an axis, use jaxtile.reindex.",
            )
        )
    shape = tuple(array.shape[d] for d in order)
    named = None if dims is None else tuple(dims[d] for d in order)
    back = [order.index(d) for d in range(array.ndim)]
    f = lambda *j: tuple(j[p] for p in back)  # noqa: E731
    return _moved("transpose", array, dims, shape, named, f, None)


def flip(x: Any, axis: Any = None) -> Any:
    """The elements along the axes in reverse.

    y[j] = x[n - 1 - j]

    Args:
        x: an array or tile of any format.
        axis: an integer axis or `Dim`, several, or None for all.

    Returns:
        An array or `Tile`, the bits copied.

    Raises:
        TileShapeError: no such axis, or one twice.
        TileTypeError: x is no array, tile or number, or an axis is none.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.flip(jnp.array([1, 2, 3])))
        [3 2 1]
    """
    array, dims = whole("flip", x)
    axes, shape = axes_of("flip", axis, array.ndim, dims), array.shape
    _edges.require_whole("flip", dims, axes, shape)

    def f(*j):
        return tuple(shape[d] - 1 - k if d in axes else k for d, k in enumerate(j))

    return _moved("flip", array, dims, shape, dims, f, None)


def shift(x: Any, axis: int | Dim, distance: Any, fill: Any = None) -> Any:
    """The elements along an axis moved towards its end; what moves in is the fill.

    y[j] = x[j - distance] where that lies in [0, n), else fill

    Args:
        x: an array or tile of any format.
        axis: the axis.
        distance: an integer, negative towards the beginning; or an integer scalar array,
            known only when it runs.
        fill: a scalar of x's format; None is the value whose bits are all zero.

    Returns:
        An array or `Tile` of x's shape, the bits copied.

    Raises:
        TileShapeError: no such axis.
        TileTypeError: x is no array, tile or number; distance is no integer scalar; fill
            is no scalar of x's format.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.shift(jnp.array([1, 2, 3]), 0, 1, fill=9))
        [9 1 2]
        >>> print(jt.shift(jnp.array([1, 2, 3]), 0, -2))
        [3 0 0]
    """
    op = "shift"
    array, dims = whole(op, x)
    place = axis_of(op, axis, array.ndim, dims)
    _edges.require_whole(op, dims, (place,), array.shape)
    if not is_index(distance) and not isinstance(distance, np.integer):
        raise TileTypeError(
            message(
                op,
                expected="a distance that is an integer scalar",
                got=repr(distance),
                way_out="Distances that differ from place to place are for gather.",
            )
        )
    # Past the end everything is fill, however far; a sum must not wrap before.
    n = array.shape[place]
    if not isinstance(n, int):  # symbolic: half of what counts its places
        n = int(jnp.iinfo(place_dtype(n)).max) // 2
    if isinstance(distance, int | np.integer):
        step = max(-n, min(n, int(distance)))
    else:
        wide = distance if distance.dtype.itemsize >= 4 else distance.astype(jnp.int32)
        top = min(n, int(jnp.iinfo(wide.dtype).max))
        low = 0 if jnp.issubdtype(wide.dtype, jnp.unsignedinteger) else -top
        step = jnp.clip(wide, low, top).astype(jnp.int32)

    def f(*j):
        return tuple(k - step if d == place else k for d, k in enumerate(j))

    fill = scalar_fill(op, fill, array.dtype)
    return _moved(op, array, dims, array.shape, dims, f, fill)


def butterfly(x: Any, axis: int | Dim, distance: int, fill: Any = None) -> Any:
    """Each element's partner at a distance of bits along an axis.

    y[j] = x[j xor distance] where that lies in [0, n), else fill

    Args:
        x: an array or tile of any format.
        axis: the axis.
        distance: an integer of at least 0.
        fill: a scalar of x's format. None states that every partner lies in x, as it does
            where n is a multiple of the least power of two above distance.

    Returns:
        An array or `Tile` of x's shape, the bits copied.

    Raises:
        TileShapeError: no such axis.
        TileTypeError: x is no array, tile or number; distance is no integer; fill is no
            scalar of x's format.
        TileValueError: distance is negative, or a partner lies outside without a fill.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.butterfly(jnp.arange(8), 0, 2))
        [2 3 0 1 6 7 4 5]
    """
    op = "butterfly"
    array, dims = whole(op, x)
    place = axis_of(op, axis, array.ndim, dims)
    _edges.require_whole(op, dims, (place,), array.shape)
    way_out = "Partners are static; jaxtile.gather takes an index."
    distance = integer(op, "distance, an integer", distance, way_out)
    if distance < 0:
        raise TileValueError(
            message(
                op,
                expected="a distance of at least 0",
                got=str(distance),
                way_out="Partners differ in the bits of the distance.",
            )
        )
    fill = None if fill is None else scalar_fill(op, fill, array.dtype)
    n = array.shape[place]
    if (
        isinstance(n, int) and n
    ):  # farther than the axis is long, every partner is outside
        distance = min(distance, 1 << (n - 1).bit_length())
    bits = distance.bit_length()
    if n % (1 << bits) == 0:
        return _flip_bits(array, dims, place, distance, bits)

    def f(*j):
        return tuple(k ^ distance if d == place else k for d, k in enumerate(j))

    return _moved(op, array, dims, array.shape, dims, f, fill)


def _flip_bits(array, dims, place, distance, bits):
    """The bits of a place as axes of their own, those of the distance reversed."""
    shape = array.shape
    split = (*shape[:place], -1, *[2] * bits, *shape[place + 1 :])
    if array.size == 0:
        return retile(_ONE, [array], dims)
    wide = array.reshape(split)
    axes = tuple(place + 1 + b for b in range(bits) if distance >> (bits - 1 - b) & 1)
    return retile(_ONE, [flip(wide, axes).reshape(shape)], dims)


def broadcast(x: Any, out: Any) -> Any:
    """The elements repeated along axes that x lacks.

    Args:
        x: an array or tile of any format.
        out: the shape of the result, by NumPy's rules: axes are matched from the last one,
            and those of size 1 stretch. Of tiles a mapping from each `Dim` to its size, or
            an `IndexSet`: dims of x keep their size, and new ones repeat it.

    Returns:
        An array of that shape, or a `Tile` of those dims in their order.

    Raises:
        TileShapeError: x does not broadcast to it.
        TileTypeError: x is no array, tile or number, or out is no shape.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.broadcast(jnp.array([1, 2]), (2, 2)))
        [[1 2]
         [1 2]]
    """
    op = "broadcast"
    array, dims = whole(op, x)
    shape, named = _target(op, out, array.shape, dims)
    if dims is not None and named is not None:
        places = [named.index(d) if d in named else -1 for d in dims]
        sizes = zip(places, array.shape, strict=True)
        fits = all(p >= 0 and shape[p] == n for p, n in sizes)
        kept = list(places)
    else:
        ahead = len(shape) - array.ndim
        kept = [ahead + d for d in range(array.ndim)]
        fits = ahead >= 0 and all(
            n in (1, shape[p]) for p, n in zip(kept, array.shape, strict=True)
        )
    if not fits:
        have = (
            array.shape if dims is None else dict(zip(dims, array.shape, strict=True))
        )
        raise TileShapeError(
            message(
                op,
                expected="a shape that x broadcasts to",
                got=f"{shape if named is None else dict(zip(named, shape, strict=True))} "
                f"for {have}",
                way_out="Every axis of x stays, in size too; jaxtile.reindex drops one.",
            )
        )

    def f(*j):
        stretch = dims is None
        return tuple(
            0 if stretch and n == 1 else j[p]
            for p, n in zip(kept, array.shape, strict=True)
        )

    return _moved(op, array, dims, shape, named, f, None)
