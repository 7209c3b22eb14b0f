"""Launches over whole arrays: how a Triton grid covers fibres and blocks of their axis.

An array is seen as (outer, n, inner), and n as blocks of `pieces` x `extent` elements.
One program takes one block of `lanes` fibres. Where fibres lie beside each other in
memory (inner > 1) a piece is one element of each fibre and extent is 1; where the axis
itself is contiguous, a block is one tile. Block b counts from where the order starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Interpret mode, for tests of the addressing where there is no GPU.
INTERPRET = False

# A tile of 4096 elements with 16 in each thread reads at the speed of memory; fibres
# side by side take the same in rows of 512.
_TILE, _ROW, _PER_THREAD = 4096, 512, 16
# Loads that one program has in flight where a block is many rows, and the elements that
# one step of a chain takes: two vectors of 16 bytes.
_TREE_ROWS, _SCAN_ROWS, _STEP = 32, 16, 8
_LINE = 128
_MOST_FIBRES = 128


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Tiling:
    """How a grid covers an array.

    Args:
        shape: (outer, n, inner).
        pieces, extent: of a block.
        lanes: fibres a program.
        warps: of a program.
        backward: the order runs from the end of the axis.
        chain: one program takes all blocks of its fibres, one after the other.
    """

    shape: tuple[int, int, int]
    pieces: int
    extent: int
    lanes: int
    warps: int
    backward: bool = False
    chain: bool = False

    @property
    def block(self) -> int:
        """Elements of a block."""
        return self.pieces * self.extent

    @property
    def blocks(self) -> int:
        """Blocks of the axis."""
        return -(-self.shape[1] // self.block)

    @property
    def ragged(self) -> bool:
        """The last block is not full."""
        return self.shape[1] % self.block != 0

    @property
    def wide(self) -> bool:
        """A program's fibres are neighbours in one row."""
        return self.shape[2] >= _LINE

    @property
    def programs(self) -> int:
        """The size of the grid."""
        outer, _, inner = self.shape
        blocks = 1 if self.chain else self.blocks
        if self.wide:
            return outer * blocks * -(-inner // self.lanes)
        return -(-outer * blocks * inner // self.lanes)


def tile_for(shape, backward=False, scan=False) -> Tiling:
    """The tiling of a tree policy."""
    outer, n, inner = shape
    length = power_of_two(n)
    if inner == 1:
        pieces, extent = 1, min(length, _TILE)
        lanes = min(power_of_two(outer), max(1, _TILE // 2 // extent))
    else:
        pieces, extent = min(length, _SCAN_ROWS if scan else _TREE_ROWS), 1
        lanes = min(power_of_two(outer * -(-n // pieces) * inner), _ROW)
        lanes = min(lanes, power_of_two(inner)) if inner >= _LINE else lanes
    per_thread = _PER_THREAD if inner == 1 else 4
    warps = min(8, max(1, lanes * extent // (32 * per_thread)))
    return Tiling(shape, pieces, extent, lanes, warps, backward)


def chain_for(shape, backward=False) -> Tiling:
    """The tiling of a fold policy: a thread a fibre."""
    outer, n, inner = shape
    step = min(power_of_two(n), _STEP)
    pieces, extent = (1, step) if inner == 1 else (step, 1)
    fibres = inner if inner >= _LINE else outer * inner
    lanes = min(power_of_two(fibres), _MOST_FIBRES)
    return Tiling(shape, pieces, extent, lanes, max(1, lanes // 32), backward, True)


def why_too_large(shape, itemsizes) -> str | None:
    """Why an array is beyond the addresses of a launch, or None."""
    if max(shape) >= 2**31 or tile_for(shape).programs >= 2**31:
        return f"an axis or a grid of 2^31 or more, from {shape}; split the array"
    # Offsets are signed 32-bit numbers of elements up to 2^32 bytes, 64-bit beyond.
    size = math.prod(shape)
    if any(size >= 2**31 and size * k <= 2**32 for k in itemsizes):
        return f"2^31 one-byte elements in {shape}; split the array"
    return None


@dataclass(frozen=True)
class Place:
    """Where a program stands: its fibres (o, j), its block b, and which lanes exist.

    Each index is a scalar or a column of one number a lane.
    """

    tiling: Tiling
    o: Any
    b: Any
    j: Any
    live: Any

    @classmethod
    def here(cls, tiling: Tiling) -> Place:
        """The place of the running program."""
        _, _, inner = tiling.shape
        blocks = 1 if tiling.chain else tiling.blocks
        lane = lax.broadcasted_iota(np.int32, (tiling.lanes, 1), 0)
        pid = pl.program_id(0)
        if tiling.wide:
            tiles = np.int32(-(-inner // tiling.lanes))
            j = lax.rem(pid, tiles) * np.int32(tiling.lanes) + lane
            rest, live = lax.div(pid, tiles), j < inner
        else:
            f = pid * np.int32(tiling.lanes) + lane
            j, rest = _split(f, inner)
            live = f < tiling.shape[0] * blocks * inner
        b, o = _split(rest, blocks)
        return cls(tiling, o, b, j, live)

    def block(self, b) -> list:
        """For each piece of block b: its places on the axis, and which exist or None."""
        t = self.tiling
        start, n = b * np.int32(t.block), np.int32(t.shape[1])
        if t.backward:
            start = n - np.int32(t.block) - start
        found = []
        for k in range(t.pieces):
            p = start + np.int32(k * t.extent)
            if t.extent > 1:
                p = p + lax.broadcasted_iota(np.int32, (1, t.extent), 1)
            found.append((p, self.on_axis(p) if t.ragged else None))
        return found

    def on_axis(self, p):
        """Whether p is a place of the axis."""
        return (p >= 0) & (p < self.tiling.shape[1])

    def _at(self, ref, p, there):
        like = self.live if there is None else self.live & there
        extent = max(v.shape[-1] if v.ndim else 1 for v in (jnp.asarray(p), like))
        shape = (self.tiling.lanes, extent)
        wide = [jnp.broadcast_to(jnp.asarray(v, np.int32), shape) for v in (self.o, p)]
        j = jnp.broadcast_to(jnp.asarray(self.j, np.int32), shape)
        return ref.at[wide[0], wide[1], j], jnp.broadcast_to(like, shape)

    def load(self, ref, p, there=None):
        """Elements of this program's fibres at places p; zeros that do not exist."""
        at, mask = self._at(ref, p, there)
        zero = jnp.zeros(mask.shape, ref.dtype)
        return plt.load(at, mask=mask, other=zero)

    def store(self, ref, p, value, there=None) -> None:
        """Write elements of this program's fibres at places p that exist."""
        if INTERPRET and there is not None:
            # It writes old values back where the mask is false: not over new ones.
            p = jnp.where(there, p, ref.shape[1])
        at, mask = self._at(ref, p, there)
        plt.store(at, jnp.broadcast_to(value, mask.shape), mask=mask)


def _split(f, size):
    if size == 1:
        return np.int32(0), f
    return lax.rem(f, np.int32(size)), lax.div(f, np.int32(size))


def launch(tiling: Tiling, body: Callable, inputs: dict, outs: dict, name: str) -> dict:
    """Run `body(place, refs)` on every program.

    Args:
        tiling: the grid.
        body: writes its outputs by `place.store`.
        inputs: lists of arrays of rank 3, by name.
        outs: lists of (shape, dtype), by name.
        name: of the kernel, for profiles.

    Returns:
        The outputs, by name.
    """
    flat, tree = jax.tree.flatten(inputs)
    shapes = {k: [jax.ShapeDtypeStruct(s, d) for s, d in v] for k, v in outs.items()}
    out_flat, out_tree = jax.tree.flatten(shapes)

    def kernel(*refs):
        given = jax.tree.unflatten(tree, refs[: len(flat)])
        made = jax.tree.unflatten(out_tree, refs[len(flat) :])
        body(Place.here(tiling), {**given, **made})

    call = pl.pallas_call(
        kernel,
        grid=(tiling.programs,),
        out_shape=out_flat,
        compiler_params=plt.CompilerParams(num_warps=tiling.warps),
        interpret=INTERPRET,
        name=name,
    )
    return jax.tree.unflatten(out_tree, call(*flat))


def viewed(leaf, axes):
    """An array as (outer, n, inner), where n is the named axes in source order."""
    shape, first = leaf.shape, axes[0]
    if tuple(axes) != tuple(range(first, first + len(axes))):
        kept = [d for d in range(leaf.ndim) if d not in axes]
        leaf = lax.transpose(leaf, (*kept, *axes))
        shape, first = leaf.shape, len(kept)
    sizes = shape[:first], shape[first : first + len(axes)], shape[first + len(axes) :]
    return leaf.reshape(tuple(map(math.prod, sizes)))
