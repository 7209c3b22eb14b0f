"""The nest that a kernel's body is written with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtile import _edges, regions
from jaxtile._checks import flag, function, integer, is_index
from jaxtile._domain import as_state, bare
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.kernels.handles import Handle
from jaxtile.policy import Policy, as_policy, unordered_tree
from jaxtile.reducers import Reducer
from jaxtile.tile import Tile

_EXTENTS = "Pass the size of an axis, or a Dim of an operand that was given as a tile."


class Nest:
    """Loops of a kernel: parallel instances, and serial loops and folds inside them.

    Args:
        views: of the operands and results, whose dims have sizes.
        engine: what realises the loops.
    """

    def __init__(self, views: Sequence, engine: Any):
        self._engine = engine
        self._sizes: dict[Dim, int] = {}
        for view in views:
            self._sizes.update(zip(view.dims or (), view.shape, strict=False))

    def parallel(self, extent: int | Dim, block: int | None = None) -> Handle:
        """One instance of the body for each block of an axis, in no order.

        Args:
            extent: the size of the axis, or its `Dim`.
            block: the size of a block; None for single coordinates.

        Returns:
            The `Handle` of this instance.

        Raises:
            TileShapeError: an extent or block below 1; inside another nest's body.
            TileTypeError: an extent or block that is no integer.
        """
        if self._engine.depth:
            raise TileShapeError(
                message(
                    "nest.parallel",
                    expected="parallel nests before the loops of the kernel",
                    got="one inside a loop",
                    way_out="Make it at the top of the body, or use nest.serial here.",
                )
            )
        return self._engine.parallel_handle(self._handle("parallel", extent, block))

    def serial(
        self,
        extent: int | Dim,
        block: int | None = None,
        *,
        init: Any = None,
        reverse: bool = False,
        start: Any = None,
        stop: Any = None,
    ) -> Callable[[Callable], Any]:
        """Fold over the blocks of an axis, one by one: a decorator as `jt.fold` is.

        Args:
            extent, block: as of `parallel`.
            init: the state before the first block: any pytree of arrays, tiles and
                numbers. Without it the body takes the handle alone, and only stores.
            reverse: from the last block to the first.
            start, stop: coordinates, traced ones too, of which an instance asks: blocks
                with none of start, ..., stop - 1 are not visited, others are as a whole.
                Such a body does not store. None is the end of the axis.

        Returns:
            A decorator of `(handle, state) -> state`, whose result is the last state.

        Raises:
            TileShapeError, TileTypeError: as `parallel` and `jt.fold`; a bound that is no
                integer; a store with one.

        Example:
            >>> import jax.numpy as jnp, jaxtile as jt
            >>> @jt.kernel(out=lambda x: x)
            ... def sums_from_here(nest, x, y):
            ...     i = nest.parallel(x.shape[0])
            ...     @nest.serial(x.shape[0], init=0.0, reverse=True, start=i.start)
            ...     def total(j, s):
            ...         return s + x.at(j)
            ...     y.tile(i).store(total)
            >>> print(sums_from_here(jnp.array([1.0, 2.0, 3.0])))
            [6. 5. 3.]
        """
        return self._loop("serial", extent, block, init, reverse, (start, stop))

    def pipeline(
        self,
        extent: int | Dim,
        block: int | None = None,
        *,
        init: Any = None,
        reverse: bool = False,
        start: Any = None,
        stop: Any = None,
    ):
        """`serial`, whose loads may run ahead of its blocks.

        Args:
            extent, block, init, reverse, start, stop: as of `serial`.

        Returns:
            As `serial`.

        Raises:
            TileShapeError, TileTypeError: as `serial`.
        """
        return self._loop("pipeline", extent, block, init, reverse, (start, stop))

    def reduce(
        self,
        extent: int | Dim,
        block: int | None = None,
        *,
        init: Any,
        policy: Policy | str = unordered_tree,
        contract: Reducer | None = None,
        start: Any = None,
        stop: Any = None,
    ) -> Callable[[Callable[[Handle, Any], Any]], Any]:
        """`jt.fold` over the blocks of an axis, in the order of a policy.

        Args:
            extent, block: as of `parallel`.
            init, policy, contract: as of `jt.fold`. A block that is not visited
                contributes the identity.
            start, stop: as of `serial`.

        Returns:
            A decorator of `(handle, state) -> state`, whose result is the last state.

        Raises:
            TileError: as `parallel` and `jt.fold`; a body that stores.
        """
        order = as_policy(policy)

        def decorate(body: Callable[[Handle, Any], Any]) -> Any:
            function("nest.reduce", "a body", body, "Decorate def body(handle, state).")
            handle = self._handle("reduce", extent, block)
            handle.bounds = _bounds("nest.reduce", handle, start, stop)

            def at_block(index, state):
                return self._engine.inside(self._run, handle, index, body, state)

            if not self._engine.vectorises:
                out = self._engine.fold(handle, order, at_block, init)
            else:
                fold = {"init": init, "contract": contract, "policy": order}
                out = regions.fold(handle.count, **fold)(at_block)
            handle.leave()
            return out

        return decorate

    def _run(self, handle: Handle, index: Any, body: Callable, state: Any) -> Any:
        """A body at one block, with the block known to what it calls."""
        handle.index = index
        with _edges.scope():
            if handle.block is not None:
                _edges.add(handle.dim, handle.edge())
            out = body(handle, state)
        if handle.bounds is not None and self._engine.vectorises:
            out = _kept(handle, out, state)
        handle.index = None
        return out

    def _loop(
        self, kind: str, extent, block, init, reverse, bounds
    ) -> Callable[[Callable], Any]:
        op = f"nest.{kind}"
        reverse = flag(op, "reverse", reverse)

        def decorate(body: Callable) -> Any:
            function(op, "a body", body, "Decorate def body(handle, state).")
            _require_takes(op, body, init)
            handle = self._handle("serial", extent, block)
            handle.backward, handle.bounds = reverse, _bounds(op, handle, *bounds)
            step = body if init is not None else lambda h, s: (body(h), s)[1]
            state = 0 if init is None else init
            out = self._engine.loop(op, handle, self._run, step, state)
            handle.leave()
            return None if init is None else out

        return decorate

    def _handle(self, kind: str, extent: Any, block: Any) -> Handle:
        op = f"nest.{kind}"
        dim = extent if isinstance(extent, Dim) else Dim(kind)
        if isinstance(extent, Dim):
            if extent not in self._sizes:
                raise TileShapeError(
                    message(
                        op,
                        expected="a Dim of an operand",
                        got=f"{extent!r}, which none has",
                        way_out=_EXTENTS,
                    )
                )
            extent = self._sizes[extent]
        extent = integer(op, "an extent", extent, _EXTENTS)
        if block is not None:
            block = integer(op, "block an integer", block, "Leave it out for 1.")
        if extent < 1 or (block is not None and block < 1):
            raise TileShapeError(
                message(
                    op,
                    expected="an extent and a block of at least 1",
                    got=f"{extent} and {block}",
                    way_out="Answer for empty operands before the kernel.",
                )
            )
        lanes = 1 if block is None else self._engine.lanes(block)
        return Handle(dim, extent, block, 0, kind, lanes)

    def zeros(self, dims: Any, dtype: Any) -> Tile:
        """A tile of zeros.

        Args:
            dims: handles and dims that tiles of this kernel have, or one of them.
            dtype: of the values.

        Returns:
            The `Tile`.

        Raises:
            TileTypeError: a dim whose size is not known here.
        """
        return self.full(dims, 0, dtype)

    def full(self, dims: Any, value: Any, dtype: Any) -> Tile:
        """A tile of one value.

        Args:
            dims: as of `zeros`.
            value: a scalar.
            dtype: of the values.

        Returns:
            The `Tile`.

        Raises:
            TileTypeError: a dim whose size is not known here.
        """
        many: Any = dims if isinstance(dims, tuple | list) else (dims,)
        named: list[Any] = [getattr(d, "dim", d) for d in many]
        shape = tuple(self._edge("nest.full", d).size for d in many)
        array = _edges.apart(jnp.full(shape, value, dtype), named, named)
        return Tile(array, tuple(named))

    def coordinates(self, dim: Handle | Dim) -> Tile:
        """The coordinates along the axis that a tile's elements have.

        Args:
            dim: a handle or a dim that tiles of this kernel have.

        Returns:
            A `Tile` of int32 with that dim.

        Raises:
            TileTypeError: a dim whose size is not known here.
        """
        edge = self._edge("nest.coordinates", dim)
        named: Any = getattr(dim, "dim", dim)
        return Tile(edge.coordinates(), (named,))

    def _edge(self, op: str, dim: Any) -> _edges.Edge:
        if isinstance(dim, Handle) and dim.block is not None:
            return dim.edge()
        edge = _edges.of(dim) if isinstance(dim, Dim) else None
        if edge is None and isinstance(dim, Dim) and dim in self._sizes:
            size = self._sizes[dim]
            lanes = self._engine.lanes(size)
            edge = _edges.Edge(lanes, 0, size, lanes != size)
        if edge is None:
            raise TileTypeError(
                message(
                    op,
                    expected="handles with blocks, and dims of tiles of this kernel",
                    got=repr(dim),
                    way_out="Cut a tile along it first.",
                )
            )
        return edge


def _kept(handle: Handle, out: Any, before: Any) -> Any:
    """The state after a block that is visited, else that before it.

    One that does not fit is left for the trace to refuse.
    """
    state = as_state("nest", before)
    out = bare(out, state)
    leaves, tree = jax.tree.flatten(out)
    pairs = zip(leaves, state.leaves, strict=tree == state.tree)
    if tree == state.tree and all(
        (jnp.shape(a), jnp.result_type(a)) == (b.shape, b.dtype) for a, b in pairs
    ):
        return handle.kept(out, state.whole(state.leaves))
    return out


def _require_takes(op: str, body: Callable, init: Any) -> None:
    """Refuse a body that takes a state without init, or none with it."""
    given = ("handle",) if init is None else ("handle", "state")
    try:
        inspect.signature(body).bind(*given)
    except TypeError as error:
        raise TileTypeError(
            message(
                op,
                expected=f"a body of ({', '.join(given)}), "
                + ("as there is no init" if init is None else "as there is an init"),
                got=f"a body of {inspect.signature(body)}",
                way_out="With init= it takes the state and returns the next one; without, "
                "the handle alone.",
            )
        ) from error


def _bounds(op: str, handle: Handle, start: Any, stop: Any) -> tuple[Any, Any] | None:
    """The coordinates that a loop has to reach, or None for all of them."""
    if start is None and stop is None:
        return None
    found = []
    for value, end in ((start, 0), (stop, handle.extent)):
        value = getattr(value, "array", value) if is_tile(value) else value
        if value is not None and not is_index(value):
            raise TileTypeError(
                message(
                    op,
                    expected="start and stop coordinates, integers or traced ones",
                    got=repr(value),
                    way_out="Pass handle.start of a parallel nest, or operand.at(handle).",
                )
            )
        found.append(end if value is None else value)
    return found[0], found[1]
