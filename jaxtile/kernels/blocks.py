"""A kernel as one Pallas kernel for TPU, whose grid brings blocks of the arrays.

Parallel nests are the grid, so that the next instance's blocks arrive while one computes.
An axis that a serial nest walks is brought whole, and cut inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxtile import _edges
from jaxtile.errors import UnsupportedOnBackend, message
from jaxtile.kernels import direct, plain
from jaxtile.kernels.handles import Handle, Part
from jaxtile.kernels.nest import Nest
from jaxtile.kernels.views import TileRef

Key = tuple[str, int, tuple]


class Blocks(direct.Loops):
    """Loads, stores and loops of one instance, on references to its blocks.

    Args:
        refs: the reference of each array and way to cut it, by `key_of`.
    """

    def __init__(self, refs: dict[Key, Any]):
        super().__init__()
        self._refs = refs
        self._parallel: list[Handle] = []

    def lanes(self, size: int) -> int:
        """How large a tile of so many coordinates is: as large."""
        return size

    def parallel_handle(self, handle: Handle) -> Handle:
        handle.index = pl.program_id(len(self._parallel))
        self._parallel.append(handle)
        if handle.block is not None:
            _edges.add(handle.dim, handle.edge())
        return handle

    def load(self, ref: TileRef) -> Any:
        key = key_of(ref.view.role, ref.view.place, ref.parts, self._parallel)
        if key[2] == SCALARS:
            starts = tuple(jnp.clip(p.start, 0, p.extent - 1) for p in ref.parts)
            value = self._refs[key][starts or (0,)]
        else:
            value = self._refs[key][self._where(ref)]
        mask = direct.mask_of(ref.parts)
        if mask is None:
            return value
        return jnp.where(mask, value, jnp.full(mask.shape, plain.fill_of(ref)))

    def store(self, ref: TileRef, value: Any) -> None:
        self._at(ref)[self._where(ref)] = value

    def _at(self, ref: TileRef) -> Any:
        key = key_of(ref.view.role, ref.view.place, ref.parts, self._parallel)
        return self._refs[key]

    def _where(self, ref: TileRef) -> Any:
        """The place in the block; the grid has dropped parallel coordinates."""
        where = []
        for part in ref.parts:
            if part.handle in self._parallel:
                where += [] if part.dim is None else [slice(None)]
            elif part.dim is None:
                where.append(part.start)
            elif part.handle is None:
                where.append(slice(None))
            else:
                where.append(pl.ds(part.start, part.size))
        return tuple(where) or ...


def key_of(
    role: str, place: int, parts: Sequence[Part], parallel: Sequence[Handle]
) -> Key:
    """How an array is cut into blocks for a tile: the same for tiles that share them."""

    def cut(part: Part):
        if part.handle is not None and part.handle in parallel:
            return parallel.index(part.handle), part.dim and part.handle.block
        if part.handle is not None or part.whole:
            count = part.handle.count * part.size if part.handle else part.size
            return -1, max(count, part.extent)
        if part.dim is None and isinstance(part.start, int):
            return -1, part.extent
        raise UnsupportedOnBackend(
            message(
                "kernel on tpu",
                expected="tiles cut by handles, whole dims and constant coordinates",
                got="a window, or a traced coordinate",
                way_out='Use implementation="reference".',
            )
        )

    if role == "operand" and all(p.dim is None for p in parts):
        return role, place, SCALARS
    return role, place, tuple(map(cut, parts))


# Instead of how each axis is cut: single elements, from scalar memory.
SCALARS = ((-1, 0),)


def _spec(key: Key) -> pl.BlockSpec:
    if key[2] == SCALARS:
        from jax.experimental.pallas import tpu as pltpu

        return pl.BlockSpec(memory_space=pltpu.SMEM)
    shape = [None if size is None else size for _, size in key[2]]

    def index(*grid):
        return tuple(0 if axis < 0 else grid[axis] for axis, _ in key[2])

    return pl.BlockSpec(tuple(shape), index)


def _padded(key: Key, shape: Sequence[int]) -> list[int]:
    """The shape of an array whose walked axes hold whole blocks."""
    if key[2] == SCALARS:
        return list(shape) or [1]
    pairs = zip(key[2], shape, strict=True)
    return [max(n, size) if axis < 0 else n for (axis, size), n in pairs]


def _require_tiles(key: Key, shape: Sequence[int]) -> None:
    """Refuse blocks that the chip's tiles of 8 by 128 do not divide."""
    if key[2] == SCALARS:
        return
    least = [1] * max(len(shape) - 2, 0) + [8, 128][-len(shape) :]
    for (axis, size), n, unit in zip(key[2], shape, least, strict=True):
        if axis >= 0 and n > 1 and (size or 1) % unit and size != n:
            raise UnsupportedOnBackend(
                message(
                    "kernel on tpu",
                    expected=f"blocks of a multiple of {unit} there, or the whole axis",
                    got=f"blocks of {size or 1} of {n}",
                    way_out="Pick such a block; the last two axes lie in tiles of 8 by "
                    "128.",
                )
            )


def _brought(key: Key, array: Any) -> Any:
    """An operand as its blocks are cut from it."""
    if array.ndim == 0:
        array = array.reshape(1)
    _require_tiles(key, array.shape)
    shape = _padded(key, array.shape)
    pads = [(0, m - n) for m, n in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, pads) if any(high for _, high in pads) else array


def launch(name: str, call: Callable, operands, results, engine, arrays) -> list:
    """The results of a kernel."""
    key = functools.partial(key_of, parallel=engine.parallel)
    reads = list(dict.fromkeys(key("operand", p, parts) for p, parts in engine.loads))
    writes = list(dict.fromkeys(key("result", s.place, s.parts) for s in engine.stores))
    writes.sort(key=lambda k: k[1])
    if len(writes) != len(results):
        raise UnsupportedOnBackend(
            message(
                name,
                expected="each result stored in one way",
                got="a result that is cut in two ways",
                way_out='Store it by the same nests, or use implementation="reference".',
            )
        )
    given = [_brought(k, arrays[k[1]]) for k in reads]
    shapes = [s for s, _ in results]
    for k in writes:
        _require_tiles(k, shapes[k[1]].shape)
    outs = [
        jax.ShapeDtypeStruct(tuple(_padded(k, s.shape)), s.dtype)
        for k, s in zip(writes, shapes, strict=True)
    ]

    def body(*refs):
        inner = Blocks(dict(zip([*reads, *writes], refs, strict=True)))
        views = plain.views_of(operands, results, inner)
        with _edges.scope(derived=False):
            call(Nest(views, inner), *views)

    found = pl.pallas_call(
        body,
        grid=tuple(h.count for h in engine.parallel),
        in_specs=list(map(_spec, reads)),
        out_specs=list(map(_spec, writes)),
        out_shape=outs,
        name=name,
    )(*given)
    return [
        v[tuple(slice(n) for n in s.shape)] for v, s in zip(found, shapes, strict=True)
    ]
