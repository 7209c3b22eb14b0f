"""Where the scalars of a kernel's tile lie in its array, and which of them lie in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._body import Place
from jaxtile.pallas_lowering.mosaic_gpu._ops import type_of
from jaxtile.pallas_lowering.mosaic_gpu._region import known
from jaxtile.pallas_lowering.mosaic_gpu._spread import Grid, both, neighbours


def runs_of(
    place: Place, grid: Grid, first: ir.Value, starts: Sequence[np.ndarray]
) -> tuple[list, int]:
    """The runs of a thread's scalars that one load or store may take.

    Args:
        place: of the tile.
        grid: of its values.
        first: the offset of the array's first element.
        starts: the first coordinate along each of the array's axes.

    Returns:
        For each run the index of its first scalar, its offset (that of an element of
        the array in any case), and whether it lies in the array (None: it surely does);
        and how many scalars a run has.
    """
    strides = [
        math.prod([p.extent for p in place.pieces[k + 1 :]])
        for k in range(len(place.pieces))
    ]
    base, sides, lone = first, [], None
    lines, along = list(grid.lines), []
    for piece, array, stride in zip(place.pieces, starts, strides, strict=True):
        start, ragged = array.item(), piece.ragged
        if ragged and _is_one(start, piece):
            whole, ragged = _within(start, piece), False
            # Of one that is outside the first is addressed instead.
            lone, start = both(lone, whole), arith.select(whole, start, th.i32(0))
        base = arith.addi(base, _times(start, stride))
        if piece.dim is None:
            continue
        line = lines.pop(0)
        base = arith.addi(base, _times(line.mine, stride))
        flags = list(line.padding)
        if ragged:
            spots = range(len(flags))
            some = [_within(arith.addi(start, line.at(k)), piece) for k in spots]
            flags = [both(a, b) for a, b in zip(flags, some, strict=True)]
        sides.append(flags)
        along.append(stride)
    inside = grid.all_of(sides)
    count = math.gcd(neighbours(place), grid.counts[-1]) if sides else 1
    found = []
    for index, where in grid.places():
        if index[-1] % count:
            continue
        pairs = zip(grid.lines, where, along, strict=True)
        fixed = sum(v.fixed(w) * s for v, w, s in pairs)
        offset = arith.addi(base, th.i64(fixed)) if fixed else base
        some: Any = inside[index]
        if some is not None:
            offset = arith.select(some, offset, th.i64(0))
        found.append((index, offset, both(lone, some)))
    return found, count


def _is_one(start: ir.Value, piece: Any) -> bool:
    """Whether a piece lies in the array wholly or not at all."""
    if piece.dim is None:
        return True
    return piece.extent % piece.size == 0 and divisor(start) % piece.size == 0


def divisor(value: ir.Value) -> int:
    """What an integer is surely a multiple of; 0 of a zero."""
    found: dict[ir.Value, int] = {}

    def of(value: ir.Value) -> int:
        # What many ops share is asked once, or the walk is exponential.
        if value not in found:
            found[value] = _divisor(value, of)
        return found[value]

    return of(value)


def _divisor(value: ir.Value, of: Callable[[ir.Value], int]) -> int:
    number = known(value)
    if number is not None:
        return abs(int(number))
    op: Any = value.owner
    name = op.name if isinstance(op, ir.Operation | ir.OpView) else ""
    if name in ("arith.addi", "arith.subi", "arith.minsi", "arith.maxsi"):
        return math.gcd(*map(of, op.operands))
    if name == "arith.muli":
        return math.prod(map(of, op.operands))
    return of(op.operands[0]) if name in ("arith.extsi", "arith.trunci") else 1


def _times(value: ir.Value, stride: int) -> ir.Value:
    """A coordinate, which may be negative, times a stride, as 64 bits."""
    return arith.muli(arith.extsi(type_of(np.int64), value), th.i64(stride))


def _within(coordinate: ir.Value, piece: Any) -> ir.Value:
    """Whether a coordinate lies in the array; a negative one is huge without a sign."""
    end = th.i32(piece.extent)
    return arith.cmpi(arith.CmpIPredicate.ult, coordinate, end)
