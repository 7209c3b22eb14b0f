"""Register-level code for Mosaic GPU: one value's registers, combined in a stated order.

A logical axis of a fragmented array is a mixed-radix number. Each digit lies in a
thread's registers (and their vectors), in the 32 lanes of a warp, or in the 4 warps of a
warpgroup. Combining neighbours digit by digit, minor to major, is `fixed_tree`, as all
digits but the most major have powers of two for sizes.

The ops here carry no fast-math flag: plgpu's own may contract a * b + c, and its own
reductions across warps use one scratch for all warpgroups, which race.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import layouts, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, nvvm, vector

# How many values of each thread cross warps at once, and the bytes that takes.
_EXCHANGED = 4
SCRATCH_BYTES = _EXCHANGED * 128 * 4


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
    def shape(v):
        return list(v.type.shape) if isinstance(v.type, ir.VectorType) else None

    return shape(operand) is not None and shape(operand) == shape(value)


def explode(x: fa.FragmentedArray) -> tuple[fa.TiledLayout, np.ndarray]:
    """A value's scalars of this thread; lane and warp dimensions have extent 1."""
    layout: Any = x.layout
    regs = x.registers
    if isinstance(layout, fa.WGStridedFragLayout):
        v = layout.vec_size
        tiling = fa.Tiling(((128 * v,), (32 * v,), (v,)))
        layout = fa.TiledLayout(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        regs = regs.reshape(layout.registers_shape((math.prod(x.shape),)))
    n, dim = layout.vector_length, regs.ndim + layout.vector_dim
    out = np.empty((*regs.shape[:dim], n, *regs.shape[dim + 1 :]), object)
    for index, reg in np.ndenumerate(regs):
        for i in range(n):
            place = (*index[:dim], i, *index[dim + 1 :])
            out[place] = vector.extract(reg, [], [i])
    return layout, out


def implode(scalars: np.ndarray, layout, shape, signed) -> fa.FragmentedArray:
    """The value of a tiled layout whose vectors are minor, from a thread's scalars."""
    flat = list(scalars.flat)
    regs = np.empty(layout.registers_shape(tuple(shape)), object)
    n = layout.vector_length
    if len(flat) != regs.size * n:
        raise ValueError(f"{len(flat)} scalars for {regs.size} registers of {n}")
    kind = ir.VectorType.get((n,), flat[0].type)
    for k in range(regs.size):
        reg = llvm.mlir_undef(kind)
        for i in range(n):
            reg = vector.insert(flat[k * n + i], reg, [], [i])
        regs.flat[k] = reg
    return fa.FragmentedArray(_registers=regs, _layout=layout, _is_signed=signed)


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
        if isinstance(d, fa.Replicated):
            stride *= d.times
            continue
        found[ndim + d] = Digit(ndim + d, place, tiled[d], stride)
        stride *= tiled[d]
    return found


def reduce_digits(
    combine: Callable, x: np.ndarray, order: Sequence[Digit], scratch: Any
) -> np.ndarray:
    """Combine along the digits in the given order; their extents become 1."""
    for digit in order:
        if digit.place == "register":
            x = _over_registers(combine, x, digit.dim)
        elif digit.place == "lane":
            x = _over_lanes(combine, x, digit)
        else:
            x = _over_warps(combine, x, scratch)
    return x


def _over_registers(combine, x, dim):
    parts = [np.take(x, [i], axis=dim) for i in range(x.shape[dim])]
    merge = np.frompyfunc(combine, 2, 1)
    while len(parts) > 1:
        pairs = zip(parts[0:-1:2], parts[1::2], strict=True)
        parts = [merge(a, b) for a, b in pairs] + parts[len(parts) // 2 * 2 :]
    return parts[0]


def _over_lanes(combine, x, digit):
    step = 1
    while step < digit.size:
        distance = step * digit.stride

        def both(v, distance=distance):
            # Both lanes of a pair compute the same sum: add commutes, bits included.
            return combine(v, _shuffle(v, distance))

        x = np.frompyfunc(both, 1, 1)(x)
        step *= 2
    return x


def _i32(value):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _shuffle(value, distance):
    word = ir.IntegerType.get_signless(32)
    bits = utils.bitcast(value, word)
    moved = nvvm.shfl_sync(
        _i32(-1), bits, _i32(distance), _i32(0x1F), nvvm.ShflKind.bfly
    )
    return utils.bitcast(moved, value.type)


def _over_warps(combine, x, scratch):
    """Each thread gets its lane's values of all four warps through shared memory."""
    word, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    thread = arith.remui(utils.thread_idx(), _i32(128))
    lane = arith.remui(thread, _i32(32))

    def at(base, slot):
        place = arith.addi(base, _i32(128 * slot))
        return arith.index_cast(index, place)

    flat, out = list(x.flat), []
    for first in range(0, len(flat), _EXCHANGED):
        chunk = flat[first : first + _EXCHANGED]
        utils.warpgroup_barrier()
        for slot, v in enumerate(chunk):
            memref.store(utils.bitcast(v, word), scratch, [at(thread, slot)])
        utils.warpgroup_barrier()
        for slot, v in enumerate(chunk):
            w = [
                memref.load(scratch, [at(arith.addi(lane, _i32(32 * i)), slot)])
                for i in range(4)
            ]
            w = [utils.bitcast(s, v.type) for s in w]
            out.append(combine(combine(w[0], w[1]), combine(w[2], w[3])))
    # The words may serve another op next.
    utils.warpgroup_barrier()
    result = np.empty(x.shape, object)
    result.flat[:] = out
    return result


def scratch_of_warpgroup(offset: int, bytes_each: int, several: bool) -> Any:
    """This warpgroup's words of the shared memory from `offset` on."""
    index = ir.IndexType.get()
    raw = ir.MemRefType.get(
        (utils.DYNAMIC,),
        ir.IntegerType.get_signless(8),
        memory_space=utils.smem(),
    )
    start = arith.constant(index, offset)
    if several:
        group = arith.divui(utils.thread_idx(), _i32(128))
        skip = arith.index_cast(index, arith.muli(group, _i32(bytes_each)))
        start = arith.addi(start, skip)
    words = ir.MemRefType.get(
        (bytes_each // 4,),
        ir.IntegerType.get_signless(32),
        memory_space=utils.smem(),
    )
    return memref.view(words, gpu.dynamic_shared_memory(raw), start, [])
