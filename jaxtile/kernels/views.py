"""Views of a kernel's operands and results, and the tiles that are cut from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtile import _edges
from jaxtile._checks import is_index
from jaxtile._join import distinct, spell
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError, message
from jaxtile.kernels.handles import BlockNumber, Handle, Part, Window
from jaxtile.reducers import Reducer
from jaxtile.tile import Tile

_WAYS = (
    "Give each axis a handle of a nest, its .blocks, a Dim for all of it, an integer for "
    "one coordinate, or a jt.Window."
)


class View:
    """An operand or a result of a kernel, of which tiles are loaded and stored.

    Args:
        name: for messages.
        shape, dtype: of the array.
        dims: the dims of its axes where it was given as a tile, else None.
        role: "operand" or "result".
        place: which of them it is.
        engine: what loads and stores.
    """

    def __init__(self, name, shape, dtype, dims, role, place, engine):
        self.name, self.shape, self.dtype = name, tuple(shape), np.dtype(dtype)
        self.dims, self.role, self.place, self._engine = dims, role, place, engine

    def tile(self, *where: Any, bounds: Any = "zero") -> TileRef:
        """The tile at some part of each axis.

        Args:
            *where: for each axis in order a handle (its block; its coordinate where it has
                no block), `handle.blocks` (the coordinate of its block along an axis
                that has one for each), a `Dim` (all of the axis), an integer (that
                coordinate: -1 lies outside) or a `jt.Window` (an explicit range).
            bounds: what `load` gives outside of the array: "zero", a reducer for its
                identity, or "error", which refuses a tile that may reach outside.
                Reductions along a ragged block skip what lies outside in any case.

        Returns:
            A `TileRef`, to load or store.

        Raises:
            TileShapeError: not one part for each axis; a handle of another extent or dim;
                with bounds="error" a part that may reach outside.
            TileTypeError: a part that is none of these.
        """
        if len(where) != len(self.shape):
            raise TileShapeError(
                message(
                    f"{self.name}.tile",
                    expected=f"a part of each axis of shape {self.shape}",
                    got=f"{len(where)} parts",
                    way_out=_WAYS,
                )
            )
        parts = [self._part(axis, w) for axis, w in enumerate(where)]
        distinct(f"{self.name}.tile", [p.dim for p in parts if p.dim is not None])
        for part in parts:
            if part.dim is not None and part.handle is None:
                end = jnp.minimum(part.end, part.extent) if part.ragged else part.extent
                edge = _edges.Edge(part.size, part.start, end, part.ragged)
                _edges.add(part.dim, edge)
        return TileRef(self, parts, _bounds(self, parts, bounds), self._engine)

    def at(self, *coordinate: Any) -> Any:
        """The scalar at one coordinate.

        Args:
            *coordinate: an integer, or a handle without a block, for each axis.

        Returns:
            A scalar array.
        """
        return self.tile(*coordinate).load().array

    def _part(self, axis: int, where: Any) -> Part:
        extent = self.shape[axis]
        if isinstance(where, Handle):
            self._check_handle(axis, where)
            dim = None if where.block is None else where.dim
            size = 1 if where.block is None else where.lanes
            return Part(dim, where.start, size, extent, where.end, where, where.ragged)
        if isinstance(where, BlockNumber):
            handle = where.handle
            self._check_size(axis, f"the blocks of {handle!r}", handle.count)
            return Part(None, handle.index, 1, extent, extent, handle, False)
        lanes = self._engine.lanes
        if isinstance(where, Window):
            start, size = where.start, lanes(where.size)
            end = start + where.size
            fits = isinstance(start, int) and 0 <= start <= extent - size
            return Part(where.dim, start, size, extent, end, None, not fits)
        if isinstance(where, Dim):
            size = lanes(extent)
            return Part(where, 0, size, extent, extent, None, size != extent)
        if is_index(where):
            where = int(where) if isinstance(where, np.integer) else where
            known = isinstance(where, int) and 0 <= where < extent
            return Part(None, where, 1, extent, extent, None, not known)
        raise TileTypeError(
            message(
                f"{self.name}.tile",
                expected=f"a part of axis {axis}",
                got=repr(where),
                way_out=_WAYS,
            )
        )

    def _check_size(self, axis: int, what: str, size: int) -> None:
        extent = self.shape[axis]
        if size != extent:
            raise TileShapeError(
                message(
                    f"{self.name}.tile",
                    expected=f"a handle over axis {axis}, of size {extent}",
                    got=f"{what} over {size}",
                    way_out="Make a nest over this axis, or cut a jt.Window.",
                )
            )

    def _check_handle(self, axis: int, handle: Handle) -> None:
        self._check_size(axis, repr(handle), handle.extent)
        if self.dims is not None and handle.dim not in (self.dims[axis],):
            named = handle.dim in self.dims
            if named:
                raise TileShapeError(
                    message(
                        f"{self.name}.tile",
                        expected=f"a handle over {self.dims[axis]!r} for axis {axis}",
                        got=repr(handle),
                        way_out=f"The axes are {spell(self.dims)}, in this order.",
                    )
                )


def _bounds(view: View, parts: Sequence[Part], bounds: Any) -> Any:
    if isinstance(bounds, Reducer) or bounds == "zero":
        return bounds
    if bounds != "error":
        raise TileValueError(
            message(
                f"{view.name}.tile",
                expected='bounds "zero", "error" or a reducer',
                got=repr(bounds),
                way_out="A reducer stands for its identity, as jt.maximum for -inf.",
            )
        )
    for axis, part in enumerate(parts):
        if part.ragged:
            raise TileShapeError(
                message(
                    f"{view.name}.tile",
                    expected=f"a part that surely lies inside axis {axis}, of size "
                    f"{part.extent}",
                    got=f"blocks of {part.size}",
                    way_out='Pick a block that divides it, or bounds="zero".',
                )
            )
    return "zero"


class TileRef:
    """A tile of a view, before it is loaded.

    Args:
        view: of which array.
        parts: the part of each axis.
        bounds: "zero" or a reducer.
        engine: what loads and stores.
    """

    def __init__(self, view: View, parts: Sequence[Part], bounds: Any, engine: Any):
        self.view, self.parts, self.bounds = view, tuple(parts), bounds
        self._engine = engine

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims of the tile."""
        return tuple(p.dim for p in self.parts if p.dim is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""
        return tuple(p.size for p in self.parts if p.dim is not None)

    def load(self) -> Tile:
        """The values, as a tile with the dims of the parts.

        Raises:
            TileValueError: the view is a result, which other instances may be writing.
        """
        if self.view.role == "result":
            raise TileValueError(
                message(
                    f"{self.view.name}.load",
                    expected="an operand",
                    got="a result, whose elements another instance may store: that would "
                    "need a barrier",
                    way_out="Keep what you stored in a local, or return it from one kernel "
                    "and load it in a second.",
                )
            )
        return Tile(self._engine.load(self), self.dims)

    def store(self, value: Any) -> None:
        """Store a tile of these dims; what a block has outside of the array is dropped.

        Args:
            value: a tile of the same dims in any order, an array of the tile's shape, or
                a number.

        Raises:
            TileShapeError: other dims or another shape; two instances of a parallel nest
                would store to the same elements; a `jt.Window`, which may overlap; an
                integer outside of the array.
            TileTypeError: another dtype than the view's.
            TileValueError: the view is an operand.
        """
        op = f"{self.view.name}.store"
        if self.view.role == "operand":
            raise TileValueError(
                message(
                    op,
                    expected="a result",
                    got="an operand, which other instances may be loading",
                    way_out="Name another result in out=.",
                )
            )
        self._require_inside(op)
        self._engine.check_store(op, self)
        self._engine.store(self, self._array(op, value))

    def _require_inside(self, op: str) -> None:
        for axis, part in enumerate(self.parts):
            known = part.dim is None and part.handle is None
            if known and isinstance(part.start, int) and part.ragged:
                raise TileShapeError(
                    message(
                        op,
                        expected=f"a coordinate in [0, {part.extent}) of axis {axis}",
                        got=str(part.start),
                        way_out="Coordinates count from 0; none is counted from the end.",
                    )
                )

    def _array(self, op: str, value: Any) -> Any:
        if isinstance(value, bool | int | float):
            return jnp.full(self.shape, value, self.view.dtype)
        if is_tile(value):
            if set(value.dims) != set(self.dims):
                raise TileShapeError(
                    message(
                        op,
                        expected=f"a tile of dims {spell(self.dims)}",
                        got=spell(value.dims),
                        way_out="Reduce or broadcast it to these dims first.",
                    )
                )
            order = [value.dims.index(d) for d in self.dims]
            value = jnp.transpose(value.array, order)
        value = jnp.asarray(value)
        if value.shape != self.shape:
            raise TileShapeError(
                message(
                    op,
                    expected=f"a tile of shape {self.shape}",
                    got=str(value.shape),
                    way_out="Store what the parts of the tile cover.",
                )
            )
        if value.dtype != self.view.dtype:
            raise TileTypeError(
                message(
                    op,
                    expected=f"values of {self.view.dtype.name}, the result's dtype",
                    got=value.dtype.name,
                    way_out="Say where it rounds: jaxtile.cast(value, y.dtype), y the "
                    "result.",
                )
            )
        return value
