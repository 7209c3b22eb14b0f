"""Handles of nests, and how they and dims say which part of an axis a tile covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

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
        lanes: how large a tile is along it: the block, or what the target rounds that to.
        backward: its blocks come last to first.
        bounds: the coordinates that its blocks have to reach, as (first, end); None is
            all of them.
    """

    dim: Dim
    extent: int
    block: int | None
    index: Any
    kind: str
    lanes: int = 1
    backward: bool = False
    bounds: tuple[Any, Any] | None = None

    def leave(self) -> None:
        """Forget what was traced: its nest is done."""
        self.index = self.bounds = None

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return -(-self.extent // (self.block or 1))

    @property
    def visits(self) -> tuple[Any, Any]:
        """The first block that is visited, and the one after the last."""
        if self.bounds is None:
            return 0, self.count
        step, (first, end) = jnp.int32(self.block or 1), self._between(self.bounds)
        begin = lax.div(first, step)
        # The coordinates may be none, and yet lie within a block.
        return begin, jnp.where(first < end, lax.div(end + (step - 1), step), begin)

    def _between(self, bounds: tuple[Any, Any]) -> list:
        """The bounds as coordinates of the axis."""
        return [jnp.clip(jnp.asarray(v, jnp.int32), 0, self.extent) for v in bounds]

    def kept(self, after: Any, before: Any) -> Any:
        """A state after this block, where the block is visited; else that before it."""
        if self.bounds is None:
            return after
        size, (first, end) = self.block or 1, self._between(self.bounds)
        inside = (self.index * size < end) & (self.index * size + size > first)
        inside &= first < end
        return jax.tree.map(lambda a, b: jnp.where(inside, a, b), after, before)

    @property
    def start(self) -> Any:
        """The coordinate of the block's first element."""
        return self.index if self.block in (None, 1) else self.index * self.block

    @property
    def ragged(self) -> bool:
        """Some of a tile's elements lie outside of the block."""
        padded = self.extent % (self.block or 1) != 0 or self.lanes != (self.block or 1)
        return self.block is not None and padded

    @property
    def end(self) -> Any:
        """The first coordinate that is not the block's."""
        if self.lanes == (self.block or 1):
            return self.extent
        return jnp.minimum(self.start + self.block, self.extent)

    @property
    def blocks(self) -> BlockNumber:
        """Its block's number, as the coordinate along an axis of one for each block."""
        return BlockNumber(self)

    def edge(self) -> _edges.Edge:
        """Its block, for ops along its dim."""
        return _edges.Edge(self.lanes, self.start, self.end, self.ragged)

    def __repr__(self) -> str:
        return f"{self.kind} {self.dim!r}"


class BlockNumber(NamedTuple):
    """The number of a nest's block: `Handle.blocks` gives it."""

    handle: Handle


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
        end: where its coordinates end, where that is not the end of the axis.
        handle: the nest that it comes from, or None.
        ragged: it may reach outside.
    """

    dim: Dim | None
    start: Any
    size: int
    extent: int
    end: Any
    handle: Handle | None
    ragged: bool

    @property
    def settled(self) -> Part:
        """What of it outlives the trace: None where a coordinate was traced."""

        def known(value):
            return None if isinstance(value, Tracer) else value

        return self._replace(start=known(self.start), end=known(self.end))

    @property
    def whole(self) -> bool:
        """It is the axis, all of it."""
        named = self.handle is None and self.dim is not None
        return (
            named
            and isinstance(self.start, int)
            and self.start == 0
            and (self.size >= self.extent and self.end == self.extent)
        )
