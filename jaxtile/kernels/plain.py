"""A kernel as plain jax: the body traced once, its parallel instances side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import _edges
from jaxtile._domain import Domain, as_state, trace_body
from jaxtile._graph import graph_of
from jaxtile._jax_private import align_varying
from jaxtile._vectorise import Axis, at_once, at_one, constant_parts
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.kernels.handles import Handle, Part
from jaxtile.kernels.nest import Nest
from jaxtile.kernels.views import TileRef, View
from jaxtile.primitives._functions import attempt, require_pure

_MOST_PARALLEL = 8


class Store(NamedTuple):
    """A tile that the body stored.

    Args:
        place: of which result.
        parts: the part of each axis.
        value: the tile, after one axis for each of `loops`.
        loops: the serial nests around the store, outermost first.
    """

    place: int
    parts: tuple[Part, ...]
    value: Any
    loops: tuple[Handle, ...] = ()


class Plain:
    """Loads, stores and loops as jax operations on whole arrays.

    Args:
        arrays: the operands.
        indices: a scalar for each parallel nest that the body may make.
    """

    vectorises = True

    def lanes(self, size: int) -> int:
        """How large a tile of so many coordinates is: as large."""
        return size

    def __init__(self, arrays: Sequence, indices: Sequence):
        self.arrays, self.indices = arrays, indices
        self.parallel: list[Handle] = []
        self.stores: list[Store] = []
        self.loads: list[tuple[int, tuple[Part, ...]]] = []
        self.depth = 0

    def parallel_handle(self, handle: Handle) -> Handle:
        if len(self.parallel) == len(self.indices):
            raise TileShapeError(
                message(
                    "nest.parallel",
                    expected=f"at most {len(self.indices)} parallel nests",
                    got="one more",
                    way_out="Join two axes into one before the kernel.",
                )
            )
        handle.index = self.indices[len(self.parallel)]
        self.parallel.append(handle)
        if handle.block is not None:
            _edges.add(handle.dim, handle.edge())
        return handle

    def load(self, ref: TileRef) -> Any:
        x, parts = self.arrays[ref.view.place], ref.parts
        self.loads.append((ref.view.place, tuple(p.settled for p in parts)))
        fill = fill_of(ref)
        pads = [
            (0, p.handle.count * p.size - p.extent if p.handle else 0) for p in parts
        ]
        if any(high for _, high in pads):
            x = jnp.pad(x, pads, constant_values=fill)
        # What the parallel nests choose is cut first: it stays when a loop goes on.
        for kinds in (("parallel",), ("serial", "reduce")):
            chosen = [p.handle is not None and p.handle.kind in kinds for p in parts]
            if any(chosen):
                starts = [
                    p.start if c else 0 for p, c in zip(parts, chosen, strict=True)
                ]
                sizes = [
                    p.size if c else n
                    for p, c, n in zip(parts, chosen, x.shape, strict=True)
                ]
                starts = [jnp.asarray(s, jnp.int32) for s in starts]
                x = lax.dynamic_slice(x, starts, sizes)
        for axis, part in enumerate(parts):
            if part.handle is None and not part.whole:
                x = window(x, axis, part, fill)
        points = [axis for axis, p in enumerate(parts) if p.dim is None]
        return lax.squeeze(x, points)

    def check_store(self, op: str, ref: TileRef) -> None:
        check_store(op, ref.parts, self.parallel)

    def store(self, ref: TileRef, value: Any) -> None:
        parts = tuple(p.settled for p in ref.parts)
        self.stores.append(Store(ref.view.place, parts, value))

    def inside(self, fn: Callable, *args: Any) -> Any:
        """`fn` where stores are refused: in a fold that may be regrouped."""
        before, self.depth = len(self.stores), self.depth + 1
        try:
            out = fn(*args)
        finally:
            self.depth -= 1
        if len(self.stores) != before:
            raise TileShapeError(
                message(
                    "nest.reduce",
                    expected="a body without stores",
                    got="one that stores",
                    way_out="Use nest.serial, whose blocks come one after the other.",
                )
            )
        return out

    def loop(self, op: str, handle: Handle, run: Callable, body: Callable, init: Any):
        state = as_state(op, init)
        # In shard_map a state varies where an operand does, from its first value on.
        varying = align_varying([*state.leaves, *self.arrays])
        state = state._replace(leaves=varying[: len(state.leaves)])
        domain = Domain((Axis(handle.count),), lambda places: places[0])
        outer, self.stores = self.stores, []
        self.depth += 1

        def step(index, s):
            del self.stores[:]
            return run(handle, index, body, s)

        try:
            closed = trace_body(op, step, domain, state, self.stored)
            inner = self.stores
        finally:
            self.stores, self.depth = outer, self.depth - 1
        _check_bounded(op, handle, inner)
        graph = graph_of(closed, 1, open_maps=False)
        known = constant_parts(graph)

        # Its derivative computes each block again: nothing of a block is kept.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def advance(carry, index):
            outs = at_one(graph.results, [index], carry, known)
            state = align_varying([*outs[: len(carry)], *carry])[: len(carry)]
            return state, outs[len(carry) :]

        places = jnp.arange(handle.count, dtype=jnp.int32)
        last, stored = lax.scan(advance, state.leaves, places, reverse=handle.backward)
        for s, value in zip(inner, stored, strict=True):
            self.stores.append(s._replace(value=value, loops=(handle, *s.loops)))
        return state.whole(last)

    def stored(self) -> list:
        """The values of all stores, of which shapes and dtypes stay here."""
        values = [s.value for s in self.stores]
        self.stores = [
            s._replace(value=jax.ShapeDtypeStruct(jnp.shape(v), jnp.result_type(v)))
            for s, v in zip(self.stores, values, strict=True)
        ]
        return values

    def leave(self) -> list:
        """The values of all stores, when the body has been traced."""
        for handle in self.parallel:
            handle.leave()
        self.indices = ()
        return self.stored()


def _check_bounded(op: str, handle: Handle, stores: Sequence) -> None:
    if stores and handle.bounds is not None:
        raise TileShapeError(
            message(
                op,
                expected="a body without stores, where start or stop bounds it",
                got="one that stores",
                way_out="Store in a loop over the whole axis, masked by jt.ite: what no "
                "block stores has no value.",
            )
        )


def window(x: Any, axis: int, part: Part, fill: Any) -> Any:
    """A range of an axis that no nest gives."""
    if not part.ragged:
        return lax.slice_in_dim(x, part.start, part.start + part.size, axis=axis)
    # What lies outside is there to be cut: a gather would pick element by element.
    pads = [(part.size * (i == axis),) * 2 for i in range(x.ndim)]
    x = jnp.pad(x, pads, constant_values=fill)
    start = jnp.asarray(part.start, jnp.int32) + part.size
    start = jnp.clip(start, 0, part.extent + part.size)
    return lax.dynamic_slice_in_dim(x, start, part.size, axis)


def fill_of(ref: TileRef) -> Any:
    """What a load gives outside of the array."""
    if ref.bounds == "zero":
        return np.zeros((), ref.view.dtype)
    like = jax.ShapeDtypeStruct((), ref.view.dtype)
    value = ref.bounds.identity
    if callable(value):
        value = value(like)
    if value is None or jax.tree.structure(value) != jax.tree.structure(0):
        raise TileTypeError(
            message(
                f"{ref.view.name}.tile",
                expected="bounds a reducer with an identity of one component",
                got=repr(ref.bounds),
                way_out='Use bounds="zero": reductions skip what lies outside.',
            )
        )
    return jnp.asarray(value, ref.view.dtype)


def check_store(op: str, parts: Sequence[Part], parallel: Sequence[Handle]) -> None:
    """Refuse a store in which two instances could meet.

    Raises:
        TileShapeError: they could.
    """
    used = [p.handle for p in parts if p.handle is not None]
    missing = [h for h in parallel if h.count > 1 and h not in used]
    loose = [
        axis
        for axis, p in enumerate(parts)
        if p.handle is None and not p.whole and (p.dim or not isinstance(p.start, int))
    ]
    got = None
    if missing:
        names = ", ".join(map(repr, missing))
        got = f"a tile that is the same for every instance of {names}: a race"
    elif loose:
        got = f"a window of axis {loose[0]}, which may overlap another's: a race"
    elif len(set(map(id, used))) != len(used):
        got = "one handle for two axes"
    if got is not None:
        raise TileShapeError(
            message(
                op,
                expected="each instance to store elements of its own",
                got=got,
                way_out="Cut the tile by the handle of every parallel nest; combine what "
                "instances share in a second kernel.",
            )
        )


def run(name: str, call: Callable, operands: Sequence, results: Sequence) -> list:
    """The results of a kernel.

    Args:
        name: of the kernel, for messages.
        call: `(nest, *views) -> None`, the body.
        operands: `(array, dims or None)` pairs.
        results: `(ShapeDtypeStruct, dims or None)` pairs.
    """
    engine, graph = trace(name, call, operands, results)
    domain = [Axis(h.count) for h in engine.parallel]
    out: list[Any] = [None] * len(results)
    for store, value in zip(engine.stores, graph.results, strict=True):
        (wide,) = at_once([value], store.value.shape, domain)
        struct = results[store.place][0]
        out[store.place] = _placed(
            store, wide, engine.parallel, struct, out[store.place]
        )
    return out


def trace(name: str, call: Callable, operands: Sequence, results: Sequence):
    """The engine and the graph of a body, at the coordinates of its parallel nests."""
    arrays = [x for x, _ in operands]
    found: list[Plain] = []

    def traced(*indices):
        engine = Plain(arrays, indices)
        found.append(engine)
        views = views_of(operands, results, engine)
        with _edges.scope(derived=True):
            call(Nest(views, engine), *views)
        return engine.leave()

    def tell():
        return (
            "a body that jax can trace on (nest, *operands, *results)",
            "Load tiles, compute with jaxtile's functions, and store tiles.",
        )

    index = jax.ShapeDtypeStruct((), np.int32)
    closed = attempt(name, tell, jax.make_jaxpr(traced), *[index] * _MOST_PARALLEL)
    require_pure(name, "a body", closed)
    engine = found[-1]
    for store in engine.stores:
        check_store(f"result {store.place}", store.parts, engine.parallel)
    never = set(range(len(results))) - {s.place for s in engine.stores}
    if never:
        raise TileShapeError(
            message(
                name,
                expected="a body that stores every result",
                got=f"no store to {', '.join(f'result {i}' for i in sorted(never))}",
                way_out="Store a tile of it in every instance, or leave it out of out=.",
            )
        )
    return engine, graph_of(closed, _MOST_PARALLEL, open_maps=False)


def views_of(operands: Sequence, results: Sequence, engine: Any) -> list[View]:
    """A view for every operand and result."""
    views = [
        View(f"operand {i}", x.shape, x.dtype, dims, "operand", i, engine)
        for i, (x, dims) in enumerate(operands)
    ]
    return views + [
        View(f"result {i}", x.shape, x.dtype, dims, "result", i, engine)
        for i, (x, dims) in enumerate(results)
    ]


def _placed(store: Store, wide: Any, parallel: Sequence[Handle], struct, before: Any):
    """A result with the tiles of all instances in their places."""
    nests = [*parallel, *store.loops]
    used = [p.handle for p in store.parts if p.handle is not None]
    for axis in reversed(range(len(nests))):
        if nests[axis] not in used:  # one instance, or the last of a loop
            last = 0 if nests[axis].backward else -1
            wide = lax.index_in_dim(wide, last, axis, keepdims=False)
    nests = [h for h in nests if h in used]
    order, shape, ends, free = [], [], [], len(nests)
    for part in store.parts:
        count = 1
        if part.handle is not None:
            order.append(nests.index(part.handle))
            count = part.handle.count
        if part.dim is not None:
            order.append(free)
            free += 1
        shape.append(count * part.size)
        ends.append(min(count * part.size, part.extent))
    array = lax.slice(lax.transpose(wide, order).reshape(shape), [0] * len(ends), ends)
    if array.shape == struct.shape:
        return array
    base = jnp.zeros(struct.shape, struct.dtype) if before is None else before
    starts = [p.start if p.handle is None else 0 for p in store.parts]
    return lax.dynamic_update_slice(base, array, starts)
