"""Handles of nests, and how they and dims say which part of an axis a tile covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtile import _edges
from jaxtile.dims import Dim


@dataclass(eq=False)
class Handle:
    """One nest: which block of an axis its instance works on.

    Args:
        dim: the dim that tiles have along it.
        extent: the size of the axis.
        block: the size of a block; None for single coordinates, which tiles lack.
        index: the number of the block.
        kind: "parallel", "serial" or "reduce".
    """

    dim: Dim
    extent: int
    block: int | None
    index: Any
    kind: str

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return -(-self.extent // (self.block or 1))

    @property
    def start(self) -> Any:
        """The coordinate of the block's first element."""
        return self.index if self.block in (None, 1) else self.index * self.block

    @property
    def ragged(self) -> bool:
        """The last block reaches beyond the axis."""
        return self.block is not None and self.extent % self.block != 0

    def edge(self) -> _edges.Edge:
        """Its block, for ops along its dim."""
        return _edges.Edge(self.block or 1, self.start, self.extent, self.ragged)

    def __repr__(self) -> str:
        return f"{self.kind} {self.dim!r}"


class Window(NamedTuple):
    """An explicit part of an axis: `size` coordinates from `start`, under a dim.

    Args:
        start: an integer, or a traced one, which may lie outside.
        dim: what the tile's axis is called.
        size: how many coordinates.
    """

    start: Any
    dim: Dim
    size: int


class Part(NamedTuple):
    """The part of one axis that a tile covers.

    Args:
        dim: the tile's dim, or None for a single coordinate.
        start: its first coordinate.
        size: how many it has.
        extent: the size of the axis.
        handle: the nest that it comes from, or None.
        ragged: it may reach outside.
    """

    dim: Dim | None
    start: Any
    size: int
    extent: int
    handle: Handle | None
    ragged: bool

    @property
    def whole(self) -> bool:
        """It is the axis, all of it."""
        return self.handle is None and self.dim is not None and self.size == self.extent
