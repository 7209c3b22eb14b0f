"""A kernel as one Pallas kernel for TPU, whose grid brings blocks of the arrays.

Parallel nests are the grid, so that the next instance's blocks arrive while one computes.
An axis that a serial nest walks is brought whole, and cut inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class Cut(NamedTuple):
    """How an axis is cut into blocks.

    Args:
        axis: of the grid, or -1 where a block has all of it.
        size: of a block; None is a coordinate, which the grid drops.
        point: tiles have one coordinate of it, that a nest chooses.
    """

    axis: int
    size: int | None
    point: bool = False


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
            starts = [jnp.clip(p.start, 0, p.extent - 1) for p in ref.parts]
            value = self._refs[key][tuple(_of_scalars(starts, 0))]
        else:
            value = self._refs[key][self._where(ref, key)]
        mask = direct.mask_of(ref.parts)
        if mask is None:
            return value
        return _where(mask, value, plain.fill_of(ref))

    def store(self, ref: TileRef, value: Any) -> None:
        key = key_of(ref.view.role, ref.view.place, ref.parts, self._parallel)
        self._refs[key][self._where(ref, key)] = value

    def _where(self, ref: TileRef, key: Key) -> Any:
        """The place in the block; the grid has dropped parallel coordinates."""
        where: list[Any] = []
        for axis, part in enumerate(ref.parts):
            if axis == len(ref.parts) - 1 and _set_apart(key[2]):
                where.append(0)
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
            size = part.dim and part.handle.block
            return Cut(parallel.index(part.handle), size, part.dim is None)
        if part.handle is not None or part.whole:
            count = part.handle.count * part.size if part.handle else part.size
            return Cut(-1, max(count, part.extent), part.dim is None)
        if part.dim is None and isinstance(part.start, int):
            return Cut(-1, part.extent)
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
SCALARS = (Cut(-1, 0),)


def _of_scalars(each: Sequence, one: Any) -> list:
    """What is said of each axis of an array in scalar memory, which has two at least.

    Under vmap an axis comes before them, of which each instance has a block: of the last
    two it has to have all.
    """
    return [one] * (2 - len(each)) + list(each)


def _where(mask: Any, value: Any, fill: Any) -> Any:
    """jnp.where(mask, value, fill)."""
    # Mosaic's masks of less than 32 bits need 4 rows: "Not implemented: Sublane broadcast".
    narrow = value.dtype.itemsize < 4 and value.dtype != jnp.bool
    if not narrow or mask.shape[-2:-1] >= (4,):
        return jnp.where(mask, value, jnp.full(mask.shape, fill))
    wide = jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else jnp.int32
    fill = jnp.full(mask.shape, fill, wide)
    return jnp.where(mask, value.astype(wide), fill).astype(value.dtype)


def _set_apart(cuts: Sequence[Cut]) -> bool:
    """Whether the last axis has the tiles of 8 by 128 alone: an axis of one comes before it.

    Of the axis before it a nest chooses single coordinates, which no load of tiles does; or
    there is none, and blocks of a vector would have to be whole tiles of its own, which are
    larger for narrower dtypes.
    """
    if len(cuts) == 1:
        return cuts != SCALARS
    return len(cuts) > 1 and cuts[-2].point


def _apart(key: Key, each: Sequence, one: Any) -> tuple:
    """What is said of each axis, with `one` of the axis of one."""
    return (*each[:-1], one, each[-1]) if _set_apart(key[2]) else tuple(each)


def _spec(key: Key) -> pl.BlockSpec:
    if key[2] == SCALARS:
        from jax.experimental.pallas import tpu as pltpu

        return pl.BlockSpec(memory_space=pltpu.SMEM)

    def index(*grid):
        return _apart(key, [0 if c.axis < 0 else grid[c.axis] for c in key[2]], 0)

    return pl.BlockSpec(_apart(key, [c.size for c in key[2]], 1), index)


def _padded(key: Key, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an array whose walked axes hold whole blocks."""
    if key[2] == SCALARS:
        return tuple(_of_scalars(shape, 1))
    pairs = zip(key[2], shape, strict=True)
    return tuple(max(n, c.size or 1) if c.axis < 0 else n for c, n in pairs)


def _require_tiles(key: Key, shape: Sequence[int]) -> None:
    """Refuse blocks that the chip's tiles of 8 by 128 do not divide."""
    if key[2] == SCALARS:
        return
    least = [1] * max(len(shape) - 2, 0) + [8, 128][-len(shape) :]
    if _set_apart(key[2]):
        least = [*[1] * (len(shape) - 1), 128]
    for (axis, size, _), n, unit in zip(key[2], shape, least, strict=True):
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
    shape = _padded(key, array.shape)
    if key[2] == SCALARS:
        return array.reshape(shape)
    _require_tiles(key, array.shape)
    pads = [(0, m - n) for m, n in zip(shape, array.shape, strict=True)]
    array = jnp.pad(array, pads) if any(high for _, high in pads) else array
    return array.reshape(_apart(key, shape, 1))


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
        jax.ShapeDtypeStruct(_apart(k, _padded(k, s.shape), 1), s.dtype)
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
        v.reshape(_padded(k, s.shape))[tuple(slice(n) for n in s.shape)]
        for v, k, s in zip(found, writes, shapes, strict=True)
    ]
