"""A kernel as one Pallas kernel that loads and stores blocks of global memory.

This is the form of Triton, and of Pallas' interpreter, which shows on any machine what
the kernel computes. Tiles have sizes of powers of two there: the rest lies outside.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtile import _edges, backends
from jaxtile._domain import as_state, bare
from jaxtile._jax_private import align_varying
from jaxtile.errors import UnsupportedOnBackend, message
from jaxtile.kernels import launches, plain
from jaxtile.kernels.handles import Handle, Part
from jaxtile.kernels.nest import Nest
from jaxtile.kernels.views import TileRef
from jaxtile.policy import Kind, Policy, Transform


class Loops:
    """Loops of a Pallas kernel's instance, one block after the other."""

    vectorises = False

    def __init__(self):
        self.depth, self.outside = 0, False
        # Values that every loop carries along, such as an order of stores.
        self.carried: list = []

    def check_store(self, op: str, ref: TileRef) -> None:
        """Nothing: the trace that counted the instances has checked it."""

    def inside(self, fn: Callable, *args: Any) -> Any:
        """`fn`: the trace that counted the instances has refused stores in it."""
        return fn(*args)

    def loop(self, op: str, handle: Handle, run: Callable, body: Callable, init: Any):
        run = functools.partial(run, handle)
        return self._chain(op, handle, run, body, init, handle.backward)

    def fold(self, handle: Handle, order: Policy, body: Callable, init: Any) -> Any:
        if order.kind not in (Kind.LEFT, Kind.RIGHT):
            if not order.permits(Transform.REGROUP):
                raise UnsupportedOnBackend(
                    message(
                        "nest.reduce",
                        expected="a policy that a loop over blocks keeps",
                        got=f"policy={order}",
                        way_out='Use "fold_left", or implementation="reference".',
                    )
                )

        def run(index, fn, state):
            return fn(index, state)

        right = order.kind is Kind.RIGHT
        return self._chain("nest.reduce", handle, run, body, init, right)

    def _chain(self, op: str, handle: Handle, run: Callable, body, init, backward):
        state = as_state(op, init)
        first, end = handle.visits

        def step(index, values):
            leaves, self.carried = values
            index = first + end - 1 - index if backward else index
            out = run(index, body, state.whole(leaves))
            return jax.tree.leaves(bare(out, state)), self.carried

        held = self.held(op, handle)
        before, after = (held, 0) if backward else (0, held)
        values = list(state.leaves), self.carried
        values = self._alone(range(before), step, values)
        if held < handle.count:
            self.depth += 1
            values = lax.fori_loop(first + before, end - after, step, values)
            self.depth -= 1
        values = self._alone(range(handle.count - after, handle.count), step, values)
        last, self.carried = values
        return state.whole(last)

    def held(self, op: str, handle: Handle) -> int:
        """How many of a loop's last blocks are outside of it, so that loads outlive it."""
        return 0

    def _alone(self, blocks: range, step: Callable, values: Any) -> Any:
        around, self.outside = self.outside, True
        for index in blocks:
            values = step(index, values)
        self.outside = around
        return values


class Direct(Loops):
    """Loads, stores and loops of one instance, on references to whole arrays.

    Args:
        operands, results: references.
        counts: how many instances there are along each parallel nest.
        interpret: in Pallas' interpreter.
    """

    def __init__(
        self,
        operands: Sequence,
        results: Sequence,
        counts: Sequence[int],
        interpret: bool,
    ):
        super().__init__()
        self._interpret = interpret
        self._refs = {"operand": operands, "result": results}
        self._counts, self._made = counts, 0

    def lanes(self, size: int) -> int:
        """How large a tile of so many coordinates is."""
        return 1 << (size - 1).bit_length()

    def parallel_handle(self, handle: Handle) -> Handle:
        later = self._counts[self._made + 1 :]
        place = pl.program_id(0) // math.prod(later)
        handle.index = place % self._counts[self._made] if self._made else place
        self._made += 1
        if handle.block is not None:
            _edges.add(handle.dim, handle.edge())
        return handle

    def load(self, ref: TileRef) -> Any:
        from jax.experimental.pallas import triton as plt

        if self._interpret and any(map(_loose, ref.parts)):
            return self._cut(ref)
        view, mask = self._at(ref), mask_of(ref.parts)
        if mask is None:
            return plt.load(view)
        other = jnp.full(mask.shape, plain.fill_of(ref))
        if not ref.shape:
            return jnp.where(mask, plt.load(view), other)
        return plt.load(view, mask=mask, other=other)

    def _cut(self, ref: TileRef) -> Any:
        """A load of windows: the interpreter would move one that begins outside."""
        parts = [
            p._replace(start=0, size=p.extent, ragged=False) if _loose(p) else p
            for p in ref.parts
        ]
        value = self.load(TileRef(ref.view, parts, ref.bounds, self))
        named = [p for p in ref.parts if p.dim is not None]
        for axis, part in enumerate(named):
            if _loose(part):
                value = plain.window(value, axis, part, plain.fill_of(ref))
        return value

    def store(self, ref: TileRef, value: Any) -> None:
        from jax.experimental.pallas import triton as plt

        plt.store(self._at(ref), value, mask=mask_of(ref.parts))

    def _at(self, ref: TileRef) -> Any:
        array = self._refs[ref.view.role][ref.view.place]
        where = tuple(
            jnp.clip(p.start, 0, p.extent - 1)
            if p.dim is None
            # A traced start: jax refuses a known one that reaches outside, masked or not.
            else pl.ds(jnp.asarray(p.start, jnp.int32), p.size)
            for p in ref.parts
        )
        # An array: jax discharges no Python number as an index.
        return array.at[where or (jnp.asarray(0, jnp.int32),)]


def _loose(part: Part) -> bool:
    """A window that may lie outside at either end."""
    window = part.dim is not None and part.handle is None
    return window and part.ragged and not part.whole


def mask_of(parts: Sequence[Part]) -> Any:
    """Which elements of a tile lie inside; None where all surely do."""
    shape = tuple(p.size for p in parts if p.dim is not None)
    found: Any = None
    axis = 0
    for part in parts:
        if part.ragged:
            place = jnp.asarray(part.start, jnp.int32)
            if part.dim is None:
                place = jnp.broadcast_to(place, shape)
            else:  # in the shape of the tile: not every backend reshapes a mask
                place = place + lax.broadcasted_iota(jnp.int32, shape, axis)
            inside = (place >= 0) & (place < jnp.minimum(part.end, part.extent))
            found = inside if found is None else found & inside
        axis += part.dim is not None
    return found


def run(
    launch: Callable,
    name: str,
    call: Callable,
    operands: Sequence,
    results: Sequence,
    backend: str | None = None,
) -> list:
    """The results of a kernel, as `plain.run` has them; so are its derivatives.

    Args:
        launch: `(name, call, operands, results, engine, arrays) -> [array]`, where the
            engine has traced the body once.
        name, call, operands, results: as of `plain.run`.
        backend: which runs it; None is one of any platform.
    """
    dims = [d for _, d in operands]

    def launched(*arrays):
        pairs = list(zip(arrays, dims, strict=True))
        engine, _ = plain.trace(name, call, pairs, results)
        if backend in _UNORDERED:
            _require_one_cut(name, backend, engine)
        with _own_arrays(name):
            return launch(name, call, pairs, results, engine, arrays)

    def fast(*arrays):
        return launches.bind(launched, arrays, name, backend)

    def again(*arrays):
        pairs = list(zip(arrays, dims, strict=True))
        return plain.run(name, call, pairs, results)

    return differentiable(fast, again)(*(x for x, _ in operands))


@contextlib.contextmanager
def _own_arrays(name: str) -> Iterator[None]:
    """A block in which Pallas' refusal of what a body closes over is told as ours."""
    try:
        yield
    except ValueError as error:
        if "captures constants" not in str(error):
            raise
        raise UnsupportedOnBackend(
            message(
                f"kernel {name}",
                expected="a body of what it loads, numbers and nest.coordinates",
                got="one that closes over an array",
                way_out="Make the array an operand, and load it; only "
                'implementation="reference" takes it as it is.',
            )
        ) from error


# Where threads of an instance store, and none waits for another.
_UNORDERED = ("triton", "mosaic_gpu")


def _require_one_cut(name: str, backend: str | None, engine: plain.Plain) -> None:
    """Refuse stores of one result by tiles that lie in threads in different ways."""
    cuts: dict[int, set] = {}
    for store in engine.stores:
        cut = tuple((p.handle, p.size) for p in store.parts if p.dim is not None)
        cuts.setdefault(store.place, set()).add(cut)
    if any(len(found) > 1 for found in cuts.values()):
        raise UnsupportedOnBackend(
            message(
                f"kernel {name} on {backend}",
                expected="each result stored by tiles of one cut",
                got="a result that is cut in two ways, whose stores could race",
                way_out='Store it by the same nests, or use implementation="reference".',
            )
        )


def differentiable(fast: Callable, again: Callable) -> Callable:
    """`fast` with the derivatives of `again`."""
    kernel = jax.custom_jvp(fast)

    def tangent(primals, tangents):
        # jit calls this after the kernel's own block, in whatever block is around it.
        with backends.use_implementation(None):
            tangents_out = jax.jvp(again, primals, tangents)[1]
            found = kernel(*primals)
        return found, align_varying([*tangents_out, *primals])[: len(tangents_out)]

    kernel.defjvp(tangent)
    return kernel


def _params(engine: plain.Plain, asked: dict[str, int]) -> Any:
    from jax.experimental.pallas import triton as plt

    mine = {k: v for k, v in asked.items() if k != "num_held"}
    return plt.CompilerParams(**{**_sized(engine), **mine})


def _sized(engine: plain.Plain) -> dict[str, int]:
    """How many warps share an instance: a lane has 64 bytes of the largest tile."""
    tiles = [(engine.arrays[k], parts) for k, parts in engine.loads]
    sizes = [x.dtype.itemsize * math.prod(p.size for p in parts) for x, parts in tiles]
    warps = max(sizes, default=1) // (64 * 32)
    return {"num_warps": min(16, max(4, 1 << warps.bit_length() >> 1))}


def launch(
    interpret: bool, asked: dict, name, call, operands, results, engine, arrays
) -> list:
    """The results of a kernel."""
    counts = [h.count for h in engine.parallel]
    flat = [x.reshape(1) if x.ndim == 0 else x for x in arrays]
    shapes = [s for s, _ in results]
    outs = [jax.ShapeDtypeStruct(s.shape or (1,), s.dtype) for s in shapes]

    def body(*refs):
        inner = Direct(refs[: len(flat)], refs[len(flat) :], counts, interpret)
        views = plain.views_of(operands, results, inner)
        with _edges.scope(derived=False):
            call(Nest(views, inner), *views)

    found = pl.pallas_call(
        body,
        grid=(math.prod(counts),),
        out_shape=outs,
        compiler_params=_params(engine, asked),
        interpret=interpret,
        name=name,
    )(*flat)
    return [v.reshape(s.shape) for v, s in zip(found, shapes, strict=True)]
