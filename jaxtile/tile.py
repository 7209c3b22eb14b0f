"""Tiles: arrays whose axes are named by dims, and how scalar functions lift to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxtile import _edges, formats
from jaxtile._checks import as_array, integer, is_index
from jaxtile._join import distinct, lift_arrays, spell
from jaxtile._operators import Operators
from jaxtile.dims import Dim, IndexSet
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError, message
from jaxtile.formats import Category
from jaxtile.primitives._moves import bind_gather


@jax.tree_util.register_pytree_node_class
class Tile(Operators):
    """One array and the dims of its axes; a pytree with the array as its only leaf.

    Operators lift scalar functions. An operand that lacks a dim broadcasts along it,
    provided one operand's dims contain the others'; the result has that operand's dims.
    Make tiles with `jaxtile.tile`, which validates.

    Args:
        array: the values.
        dims: one dim for each axis.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> rows, cols = jt.dims("rows cols")
        >>> x = jt.tile(jnp.array([[1, 2], [3, 4]]), (rows, cols))
        >>> print((x + jt.tile(jnp.array([10, 20]), cols)).array)
        [[11 22]
         [13 24]]
    """

    __slots__ = ("array", "dims")

    array: Any
    dims: tuple[Dim, ...]

    def __init__(self, array: Any, dims: tuple[Dim, ...]):
        self.array, self.dims = array, dims

    def tree_flatten(self):
        return (self.array,), self.dims

    @classmethod
    def tree_unflatten(cls, dims, children):
        # Transformations put placeholders here, so nothing is validated.
        return cls(children[0], dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """How many dims there are."""
        return len(self.dims)

    def dim(self, i: int) -> Dim:
        """The dim of axis i.

        Args:
            i: an axis; negative ones count from the end.

        Returns:
            The `Dim`.

        Raises:
            TileShapeError: there is no such axis.
            TileTypeError: i is no integer.
        """
        way_out = f"The dims are {spell(self.dims)}."
        i = integer("Tile.dim", "an integer axis", i, way_out)
        if not -self.ndim <= i < self.ndim:
            raise TileShapeError(
                message(
                    "Tile.dim",
                    expected=f"an axis in [{-self.ndim}, {self.ndim})",
                    got=str(i),
                    way_out=way_out,
                )
            )
        return self.dims[i]

    def domain(self, *dims: Dim) -> IndexSet:
        """The set of coordinates of some dims.

        Args:
            *dims: dims of the tile; all of them if none is given.

        Returns:
            An `IndexSet` in the order given.

        Raises:
            TileShapeError: a dim is not one of the tile's, or is given twice.
        """
        dims = dims or self.dims
        shape = tuple(self.shape[self._axis(d, "domain")] for d in dims)
        distinct("Tile.domain", dims)
        for dim in dims:
            edge = _edges.of(dim)
            if edge is not None and edge.ragged:
                raise TileShapeError(
                    message(
                        "Tile.domain",
                        expected="a dim whose block lies inside its axis",
                        got=f"{dim!r}, in ragged blocks of {edge.size} over {edge.extent}",
                        way_out="jaxtile.reduce skips what lies outside; or pick a block "
                        "that divides the axis.",
                    )
                )
        return IndexSet(dims, shape)

    def at(self, coordinate: Mapping[Dim, Any]) -> Tile:
        """The values at one coordinate of some dims, which the result lacks.

        Args:
            coordinate: maps dims to integers or integer scalar arrays, as
                `IndexSet.coordinate` returns. A traced index outside the dim reads the
                nearest end.

        Returns:
            A `Tile` of the remaining dims.

        Raises:
            TileShapeError: a dim is not one of the tile's.
            TileTypeError: coordinate is no mapping, or an index no integer scalar.
            TileValueError: a Python integer lies outside [0, size), or size is 0.

        Example:
            >>> import jax.numpy as jnp, jaxtile as jt
            >>> rows, cols = jt.dims("rows cols")
            >>> x = jt.tile(jnp.array([[1, 2], [3, 4]]), (rows, cols))
            >>> print(x.at({rows: 1}).array)
            [3 4]
        """
        _require_mapping(coordinate)
        array, left = self.array, list(self.dims)
        for dim, index in coordinate.items():
            size = self.shape[self._axis(dim, "at")]
            _check_index(dim, index, size)
            axis = left.index(dim)
            array = _at(array, jnp.asarray(index), axis)
            del left[axis]
        return Tile(array, tuple(left))

    def _axis(self, dim: Dim, method: str) -> int:
        if not isinstance(dim, Dim) or dim not in self.dims:
            raise TileShapeError(
                message(
                    f"Tile.{method}",
                    expected=f"a dim of {spell(self.dims)}",
                    got=f"{dim!r}, which is none of them",
                    way_out="Dims are identities: equal labels do not suffice.",
                )
            )
        return self.dims.index(dim)

    def lift_map(self, fn: Callable[..., Any], *states: Any) -> Any:
        """`fn` of pytrees of tiles and arrays, elementwise; reducers call it.

        Args:
            fn: a function of pytrees of scalars.
            *states: pytrees of tiles, arrays and Python scalars.

        Returns:
            The pytree that fn returns, of tiles.

        Raises:
            TileShapeError: the dims do not join.
            TileTypeError: a leaf is none of these.
        """
        return lift(getattr(fn, "__name__", "map").strip("_"), fn, *states)

    def __repr__(self) -> str:
        return f"Tile({self.array!r}, dims={spell(self.dims)})"

    def __bool__(self) -> bool:
        if self.dims:
            raise TileTypeError(
                message(
                    "bool",
                    expected="a tile without dims",
                    got=f"dims {spell(self.dims)}",
                    way_out="Comparisons are elementwise: reduce with logical_and or "
                    "logical_or.",
                )
            )
        return bool(self.array)


def tile(array: Any, dims: Dim | Sequence[Dim]) -> Tile:
    """An array with its axes named.

    Args:
        array: a jax or NumPy array, or a NumPy scalar, of any format; values of 64
            bits that fit in 32, or with jax_enable_x64.
        dims: one distinct `Dim` for each axis, in axis order; a single one may stand
            alone.

    Returns:
        The `Tile`.

    Raises:
        TileTypeError: array is not an array, has no format or one that jax would narrow,
            or dims are not dims.
        TileShapeError: the number of dims is not the rank, or a dim is given twice.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> rows, cols = jt.dims("rows cols")
        >>> jt.tile(jnp.zeros((2, 3)), (rows, cols)).domain(cols).shape
        (3,)
    """
    array, named = _as_array("tile", array), _as_dims(dims)
    if array.ndim != len(named):
        raise TileShapeError(
            message(
                "tile",
                expected=f"one dim for each axis of shape {array.shape}",
                got=spell(named),
                way_out="Name every axis.",
            )
        )
    distinct("tile", named)
    return Tile(array, named)


def _as_dims(dims: Any) -> tuple[Dim, ...]:
    named = (dims,) if isinstance(dims, Dim) else dims
    sequence = isinstance(named, Sequence) and not isinstance(named, str)
    if not (sequence and all(isinstance(d, Dim) for d in named)):
        raise TileTypeError(
            message(
                "tile",
                expected="dims made by jaxtile.Dim or jaxtile.dims",
                got=repr(dims),
                way_out='Write rows, cols = jaxtile.dims("rows cols").',
            )
        )
    return tuple(named)


def _as_array(op: str, value: Any) -> Any:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TileTypeError(
            message(
                op,
                expected="an array",
                got=type(value).__name__,
                way_out="Convert it with jnp.asarray.",
            )
        )
    return as_array(op, value)


def _at(array: Any, index: Any, axis: int) -> Any:
    if formats.format_of(array.dtype).category is not Category.STORAGE:
        return lax.dynamic_index_in_dim(
            array, index, axis, keepdims=False, allow_negative_indices=False
        )
    # XLA's CPU gives the NaNs of 8 bits one payload as it slices; gather moves bits.
    top = array.shape[axis] - 1
    if top <= jnp.iinfo(index.dtype).max:
        index = jnp.minimum(index, jnp.asarray(top, index.dtype))
    index = jnp.maximum(index, jnp.zeros_like(index))
    return bind_gather(array, index, jnp.zeros((), array.dtype), axis, ())


def _require_mapping(coordinate: Any) -> None:
    if not isinstance(coordinate, Mapping):
        raise TileTypeError(
            message(
                "Tile.at",
                expected="a mapping from dims to integers",
                got=type(coordinate).__name__,
                way_out="Write x.at({rows: 1}).",
            )
        )


def _check_index(dim: Dim, index: Any, size: int) -> None:
    if not is_index(index):
        array = isinstance(index, jax.Array | np.ndarray) and index.ndim > 0
        got = f"an array of shape {index.shape}" if array else repr(index)
        raise TileTypeError(
            message(
                "Tile.at",
                expected="an integer scalar for each dim",
                got=f"{got} for {dim!r}",
                way_out="Index the tile's .array for many coordinates at once.",
            )
        )
    if size == 0 or (isinstance(index, int | np.integer) and not 0 <= index < size):
        raise TileValueError(
            message(
                "Tile.at",
                expected=f"an index in [0, {size}) for {dim!r}",
                got="a traced one" if isinstance(index, Tracer) else str(index),
                way_out="Negative indices do not wrap, and nothing stands for the "
                "outside: jaxtile.gather takes a fill.",
            )
        )


def lift(op: str, fn: Callable[..., Any], *values: Any) -> Any:
    """`fn` of pytrees of tiles, arrays and Python scalars, as one elementwise op."""
    out, dims = lift_arrays(op, fn, *values)
    return out if dims is None else jax.tree.map(lambda v: Tile(v, dims), out)
