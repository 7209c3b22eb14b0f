"""A value of a kernel as one of its threads holds it: scalars, and where they lie.

A logical axis of a fragmented array is a mixed-radix number. Each digit lies in a
thread's registers (and their vectors), in the 32 lanes of a warp, or in the 4 warps of a
warpgroup. What crosses warps goes through shared memory of this warpgroup's own: plgpu's
reductions use one scratch for all warpgroups, which race.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import layouts, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from jaxtile._jax_private import MOST_WARPGROUPS
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th


class Digit(NamedTuple):
    """A digit of a logical axis: its dimension in the exploded array, and its place."""

    dim: int
    place: str
    size: int
    stride: int


def known_layout(value: Any) -> Any:
    """The layout to which a Warpgroup value is pinned, or None.

    Walks back through elementwise producers to one that states a layout.
    """
    seen, work = [], [value]
    while work:
        current = work.pop()
        op = current.owner
        if not isinstance(op, ir.Operation | ir.OpView) or any(op == s for s in seen):
            continue
        seen.append(op)  # kept alive, as ids of dead ones come back
        found = _stated_layout(op, current)
        if found is not None:
            return found
        if all(_same_shape(o, value) for o in op.operands):
            work += list(op.operands)
    return None


def _stated_layout(op, value):
    if op.name == "mosaic_gpu.layout_cast":
        return layouts.from_layout_attr(getattr(op, "opview", op).new_layout)
    if op.name != "mosaic_gpu.custom_primitive":
        return None
    vectors = [r for r in op.results if isinstance(r.type, ir.VectorType)]
    place = next((i for i, r in enumerate(vectors) if r == value), None)
    if place is None:
        return None
    return layouts.from_layout_attr(op.attributes["out_layouts"][place])


def _same_shape(operand, value):
    kinds = (operand.type, value.type)
    if not all(isinstance(k, ir.VectorType) for k in kinds):
        return False
    return list(operand.type.shape) == list(value.type.shape)


class Form:
    """A layout applied to a shape: which elements a thread has, one scalar each.

    Args:
        layout: of Mosaic GPU; any where the shape is ().
        shape: of the value.
    """

    def __init__(self, layout: Any, shape: Sequence[int]):
        self.layout, self.shape = layout, tuple(shape)
        self.strided = isinstance(layout, fa.WGStridedFragLayout)
        if self.strided:
            # One axis of all elements: vectors, then threads, then registers.
            v = layout.vec_size
            tiling = fa.Tiling(((128 * v,), (32 * v,), (v,)))
            self.tiled = fa.TiledLayout(
                tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
            )
            self.view: tuple[int, ...] = (math.prod(self.shape),)
        else:
            self.tiled, self.view = layout, self.shape

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Form) or self.shape != other.shape:
            return False
        return not self.shape or self.layout == other.layout

    def __hash__(self) -> int:
        return hash(self.shape)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The shape of a thread's scalars."""
        if not self.shape:
            return (1,)
        counts = list(self.tiled.registers_shape(self.view))
        counts[self.tiled.vector_dim] = self.tiled.vector_length
        return tuple(counts)

    def _registers(self):
        """(register, place in its vector) of each scalar, in the order of `counts`."""
        dim = len(self.counts) + self.tiled.vector_dim
        for place in np.ndindex(*self.counts):
            yield (*place[:dim], 0, *place[dim + 1 :]), place[dim]

    def explode(self, value: fa.FragmentedArray) -> np.ndarray:
        """A thread's scalars of a value."""
        out = np.empty(self.counts, object)
        if not self.shape:
            out[0] = value.registers.item()
            return out
        regs = value.registers.reshape(self.tiled.registers_shape(self.view))
        flat = [vector.extract(regs[r], [], [i]) for r, i in self._registers()]
        out.flat[:] = flat
        return out

    def implode(self, scalars: Sequence, signed) -> fa.FragmentedArray:
        """The value of which these are a thread's scalars."""
        flat = list(scalars)
        if len(flat) != math.prod(self.counts):
            raise ValueError(f"{len(flat)} scalars for {self.counts}")
        if not self.shape:
            return fa.FragmentedArray.splat(flat[0], (), is_signed=signed)
        regs = np.empty(self.tiled.registers_shape(self.view), object)
        kind = ir.VectorType.get((self.tiled.vector_length,), flat[0].type)
        for scalar, (register, i) in zip(flat, self._registers(), strict=True):
            before = llvm.mlir_undef(kind) if i == 0 else regs[register]
            regs[register] = vector.insert(scalar, before, [], [i])
        regs = regs.reshape(self.layout.registers_shape(self.shape))
        return fa.FragmentedArray(
            _registers=regs, _layout=self.layout, _is_signed=signed
        )

    @property
    def present(self) -> np.ndarray:
        """Whether each scalar is one of the value's; None: it surely is."""
        return np.full(self.counts, None, object)

    def digits(self, axes: Sequence[int]) -> list[Digit] | None:
        """The digits of the axes, taken as one, minor to major; None if they have none."""
        if self.strided:
            if axes and len(axes) < len(self.shape):
                return None
            axes = (0,) if axes else ()
        return digits(self.tiled, len(self.counts), self.counts, axes, len(self.view))

    def along(self, axes: Sequence[int]) -> np.ndarray:
        """The position of each scalar along the axes, taken as one, as 32 bits."""
        strides, step = [0] * len(self.shape), 1
        for a in reversed(axes):
            strides[a], step = step, step * self.shape[a]
        out = np.empty(self.counts, object)
        if not self.shape:
            out[0] = th.i32(0)
        elif self.strided:
            flat = self._linear((1,))
            out.flat[:] = [self._of_flat(v, strides) for v in flat.flat]
        else:
            out = self._linear(tuple(strides))
        return out

    def _linear(self, strides):
        """The sum of each scalar's coordinates in `view`, times strides."""
        tiled = self.tiled.tiling.tile_strides(strides)
        mine = th.i32(0)
        parts = (self.tiled.warp_indices(), self.tiled.lane_indices())
        for index in parts:
            for i, s in zip(index, tiled[-len(index) :], strict=True):
                if s:
                    mine = arith.addi(mine, arith.muli(i, th.i32(s)))
        out = np.empty(self.counts, object)
        for place in np.ndindex(*self.counts):
            fixed = sum(i * s for i, s in zip(place, tiled, strict=True))
            out[place] = arith.addi(mine, th.i32(fixed)) if fixed else mine
        return out

    def _of_flat(self, flat, strides):
        total = th.i32(0)
        for size, stride in zip(self.shape[::-1], strides[::-1], strict=True):
            flat, coordinate = th.divided(flat, size)
            if stride:
                total = arith.addi(total, arith.muli(coordinate, th.i32(stride)))
        return total


def digits(layout: fa.TiledLayout, ndim: int, sizes, axes, rank) -> list[Digit]:
    """The digits of the axes, taken as one, minor to major."""
    lead = rank - len(layout.base_tile_shape)
    tiled = layout.tiled_tiling_shape
    owner = {d: d for d in range(lead)}
    for a in range(len(layout.base_tile_shape)):
        for k, mine in enumerate(layout.tiling.tile_dimension(a)):
            if mine:
                owner[lead + k] = lead + a
    places = _places(layout.lane_dims, "lane", tiled, ndim)
    places |= _places(layout.warp_dims, "warp", tiled, ndim)
    found = []
    for axis in reversed(axes):
        for d in reversed([d for d in range(ndim) if owner.get(d) == axis]):
            digit = places.get(d, Digit(d, "register", sizes[d], 0))
            if digit.size > 1:
                found.append(digit)
    return found


def _places(dims, place, tiled, ndim):
    found, stride = {}, 1
    for d in reversed(dims):
        if not isinstance(d, int):
            stride *= d.times
            continue
        found[ndim + d] = Digit(ndim + d, place, tiled[d], stride)
        stride *= tiled[d]
    return found


class Thread:
    """This thread's place among those that work on the same values.

    Args:
        words: 64-bit slots of shared memory that are theirs alone.
        count: how many they are: a warpgroup, or all of a CTA.
    """

    def __init__(self, words: Any, count: int = th.WARPGROUP):
        self.count = count
        self.number = th.divided(th.thread_in_block(), count)[1]
        self.warp, self.lane = th.divided(self.number, th.WARP)
        self.words = words

    def barrier(self) -> None:
        """Wait for all of them."""
        if self.count == th.WARPGROUP:
            th.warpgroup_barrier()
        else:
            th.barrier()

    def digit(self, digit: Digit) -> ir.Value:
        """This thread's value of a digit of lanes or warps."""
        index = self.lane if digit.place == "lane" else self.warp
        return th.divided(th.divided(index, digit.stride)[0], digit.size)[1]

    def of_warps(self, values: Sequence[ir.Value], digit: Digit) -> list[list]:
        """What the threads that differ in a digit of warps alone have, by its value."""
        mine = arith.muli(self.digit(digit), th.i32(digit.stride * th.WARP))
        first, out = arith.subi(self.number, mine), []
        for k in range(0, len(values), EXCHANGED):
            out += self._exchange(values[k : k + EXCHANGED], first, digit)
        return [list(v) for v in zip(*out, strict=True)]

    def _exchange(self, values, first, digit):
        def at(thread, slot):
            return arith.addi(thread, th.i32(self.count * slot))

        # What an earlier op left there may be read still.
        self.barrier()
        for slot, v in enumerate(values):
            self.words.write(at(self.number, slot), v)
        self.barrier()
        step = digit.stride * th.WARP
        found = [
            [
                self.words.read(at(arith.addi(first, th.i32(step * d)), slot), v.type)
                for d in range(digit.size)
            ]
            for slot, v in enumerate(values)
        ]
        # The words may serve another op next.
        self.barrier()
        return found


# How many values of each thread cross warps at once, and the bytes that takes.
EXCHANGED = 4
_ALIGNED = 16
EXCHANGE_BYTES = EXCHANGED * th.WARPGROUP * 8


def scratch_of_warpgroup(module: Any, bytes_each: int, several: bool) -> ir.Value:
    """This warpgroup's part of the kernel's free shared memory, as a memref.

    Args:
        module: the kernel's module context.
        bytes_each: of a warpgroup.
        several: there are other warpgroups.
    """
    index = ir.IndexType.get()
    raw = ir.MemRefType.get(
        (utils.DYNAMIC,),
        ir.IntegerType.get_signless(8),
        memory_space=utils.smem(),
    )
    start = arith.constant(index, module.smem_used_bytes)
    if several:
        # One pitch for all ops of the kernel, however much each needs: a warpgroup in
        # one op must not reach what another, an op behind, still reads.
        free = module.smem_requested_bytes - module.smem_used_bytes
        pitch = free // MOST_WARPGROUPS // _ALIGNED * _ALIGNED
        group = th.divided(th.thread_in_block(), 128)[0]
        skip = arith.index_cast(index, arith.muli(group, th.i32(pitch)))
        start = arith.addi(start, skip)
    words = ir.MemRefType.get(
        (bytes_each // 4,),
        ir.IntegerType.get_signless(32),
        memory_space=utils.smem(),
    )
    return memref.view(words, gpu.dynamic_shared_memory(raw), start, [])
