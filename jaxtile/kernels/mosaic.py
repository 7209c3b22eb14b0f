"""A kernel as one Mosaic GPU kernel: one to four warpgroups for each instance.

The body is traced once to a list of steps, and every thread runs them on the elements
that it has in registers, loaded straight from global memory. Tiles have the sizes that
the nests say; what registers hold beyond them stands for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import _edges
from jaxtile.kernels import direct, plain
from jaxtile.kernels.handles import Handle, Part
from jaxtile.kernels.nest import Nest
from jaxtile.kernels.views import TileRef
from jaxtile.pallas_lowering import load_all


class Threads(direct.Loops):
    """Loads, stores and loops of one instance, as steps of its threads.

    Args:
        indices: a scalar for each parallel nest.
        held: of a pipeline's last blocks, how many stay in registers for the next one.
    """

    def __init__(self, indices: Sequence, held: int):
        super().__init__()
        self._indices, self._made = indices, 0
        self._held, self._loaded = held, {}
        # A token that goes through stores and loops keeps both, and their order.
        self.carried = [jnp.zeros((), jnp.int32)]

    def lanes(self, size: int) -> int:
        """How large a tile of so many coordinates is: as large."""
        return size

    def parallel_handle(self, handle: Handle) -> Handle:
        handle.index = self._indices[self._made]
        self._made += 1
        if handle.block is not None:
            _edges.add(handle.dim, handle.edge())
        return handle

    def held(self, op: str, handle: Handle) -> int:
        ours = op == "nest.pipeline" and handle.bounds is None and not self.depth
        return min(self._held, handle.count) if ours else 0

    def load(self, ref: TileRef) -> Any:
        if not self.outside or self.depth:
            return _read(ref)
        # No instance stores an operand: a tile that was loaded before is what it was.
        key = (ref.view.place, ref.bounds, *map(_known, ref.parts))
        if key not in self._loaded:
            # With the reference, whose traced starts the key knows by their addresses.
            self._loaded[key] = ref, _read(ref)
        return self._loaded[key][1]

    def store(self, ref: TileRef, value: Any) -> None:
        from jaxtile.pallas_lowering.mosaic_gpu._body import write_p

        where = _starts(ref)
        self.carried = write_p.bind(*self.carried, value, *where, place=_place(ref))


def _known(part: Part) -> tuple:
    """What is equal of two parts only where they are the same coordinates."""
    start = part.start if part.handle is None else part.handle.index
    block = 1 if part.handle is None else part.handle.block
    where = start if isinstance(start, int) else id(start)
    return part.dim is None, part.size, block, isinstance(start, int), where


def _read(ref: TileRef) -> Any:
    from jaxtile.pallas_lowering.mosaic_gpu._body import read_p

    fill = jnp.asarray(plain.fill_of(ref))
    return read_p.bind(fill, *_starts(ref), place=_place(ref))[0]


def _starts(ref: TileRef) -> list[Any]:
    return [jnp.asarray(p.start, jnp.int32) for p in ref.parts]


def _place(ref: TileRef) -> Any:
    from jaxtile.pallas_lowering.mosaic_gpu._body import Piece, Place

    def piece(part: Part):
        step = part.start if isinstance(part.start, int) else 1
        if part.handle is not None:
            step = part.handle.block or 1
        return Piece(part.dim, part.size, part.extent, part.ragged, abs(step))

    pieces = tuple(map(piece, ref.parts))
    return Place(ref.view.role, ref.view.place, pieces, ref.view.dtype)


def launch(
    asked: dict, name: str, call: Callable, operands, results, engine, arrays
) -> list:
    """The results of a kernel."""
    load_all()
    from jaxtile.pallas_lowering.mosaic_gpu import _kernel

    counts = tuple(h.count for h in engine.parallel)

    def traced(*indices):
        inner = Threads(indices, asked.get("num_held", 0))
        views = plain.views_of(operands, results, inner)
        with _edges.scope(derived=False):
            call(Nest(views, inner), *views)
        return inner.carried

    index = jax.ShapeDtypeStruct((), np.int32)
    closed = jax.make_jaxpr(traced)(*[index] * len(counts))
    shapes = [s for s, _ in results]
    sizes = [x.shape for x in arrays]
    warps = asked.get("num_warps")
    ready = _kernel.Kernel(name, closed, counts, sizes, shapes, warps)
    run = _batched(ready, (), (False,) * len(arrays))
    return run(*arrays)


def _batched(kernel: Any, batch: tuple[int, ...], along: tuple[bool, ...]) -> Callable:
    """A kernel of arrays, of which those `along` have leading axes of a batch.

    A batch is more instances: under vmap a kernel stays one launch.
    """

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        flat = [
            x.reshape(-1, *x.shape[len(batch) :]) if some else x
            for x, some in zip(arrays, along, strict=True)
        ]
        found = kernel(math.prod(batch), along, flat)
        return [v.reshape(*batch, *v.shape[1:]) for v in found]

    @run.def_vmap
    def _(size, batched, *arrays):
        joined = tuple(a or b for a, b in zip(along, batched, strict=True))
        wide = []
        for x, before, now in zip(arrays, along, batched, strict=True):
            if before and not now:
                x = jnp.broadcast_to(x, (size, *x.shape))
            elif now and not before:
                rest = x.shape[1:]
                x = x.reshape(size, *(1,) * len(batch), *rest)
                x = jnp.broadcast_to(x, (size, *batch, *rest))
            wide.append(x)
        found = _batched(kernel, (size, *batch), joined)(*wide)
        return found, [True] * len(found)

    return run
