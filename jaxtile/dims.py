"""Dims: identities of logical axes, and the sets of coordinates that they span."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxtile._checks import is_index
from jaxtile.errors import TileShapeError, TileTypeError, message


class Dim:
    """The identity of a logical axis: two dims of one label are different dims.

    Args:
        label: for messages only; it never decides anything.

    Raises:
        TileTypeError: the label is not a string.

    Example:
        >>> import jaxtile as jt
        >>> jt.Dim("rows") == jt.Dim("rows")
        False
    """

    __slots__ = ("label",)

    def __init__(self, label: str = "dim"):
        if not isinstance(label, str):
            raise TileTypeError(
                message(
                    "Dim",
                    expected="a label that is a string",
                    got=repr(label),
                    way_out='Write jaxtile.Dim("rows"); sizes come from the arrays.',
                )
            )
        self.label = label

    def __repr__(self) -> str:
        return self.label

    def __deepcopy__(self, memo: dict) -> Dim:
        return self  # a copy would be another axis


def dims(labels: str) -> tuple[Dim, ...]:
    """One new dim for each label.

    Args:
        labels: labels separated by spaces or commas.

    Returns:
        A tuple of dims, also for a single label.

    Raises:
        TileTypeError: the labels are not a string.
        TileShapeError: there is no label.

    Example:
        >>> import jaxtile as jt
        >>> rows, cols = jt.dims("rows cols")
        >>> cols
        cols
    """
    way_out = 'Write rows, cols = jaxtile.dims("rows cols").'
    if not isinstance(labels, str):
        raise TileTypeError(
            message(
                "dims",
                expected="a string of labels",
                got=repr(labels),
                way_out=way_out,
            )
        )
    found = labels.replace(",", " ").split()
    if not found:
        raise TileShapeError(
            message(
                "dims",
                expected="at least one label",
                got=repr(labels),
                way_out=way_out,
            )
        )
    return tuple(map(Dim, found))


@dataclass(frozen=True)
class IndexSet:
    """The coordinates of some dims, in lexicographic order of `dims`.

    Args:
        dims: the dims, slowest first.
        shape: the size of each.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> rows, cols = jt.dims("rows cols")
        >>> domain = jt.tile(jnp.zeros((2, 3)), (rows, cols)).domain(cols)
        >>> domain.size, domain.coordinate(1)
        (3, {cols: 1})
    """

    dims: tuple[Dim, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return math.prod(self.shape)

    def coordinate(self, index: Any) -> Mapping[Dim, Any]:
        """The coordinate at a place of the order.

        Args:
            index: an integer, or an integer scalar array, in [0, size).

        Returns:
            A mapping from each dim to its index, which `Tile.at` takes.

        Raises:
            TileShapeError: a Python integer outside [0, size).
            TileTypeError: the index is no integer.
        """
        if not is_index(index):
            raise TileTypeError(
                message(
                    "IndexSet.coordinate",
                    expected="an integer, or an integer scalar array",
                    got=repr(index),
                    way_out=f"Places count from 0 to {self.size - 1}.",
                )
            )
        if isinstance(index, int) and not 0 <= index < self.size:
            raise TileShapeError(
                message(
                    "IndexSet.coordinate",
                    expected=f"an index in [0, {self.size})",
                    got=str(index),
                    way_out="Negative indices do not wrap.",
                )
            )
        found = {}
        rest = index if isinstance(index, int) else jnp.asarray(index)
        for dim, size in zip(reversed(self.dims), reversed(self.shape), strict=True):
            found[dim] = rest % size
            rest = rest // size
        return {dim: found[dim] for dim in self.dims}
