"""Rows sorted by a warp each, in registers.

Without indices the keys are total orders of the bits, which come back from them. Zeros of
both signs and NaNs are classes whose members keep their source order: where a row has any,
they are written over again in it, by their ranks. With indices a key carries its place.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as math_dialect

from jaxtile.pallas_lowering.mosaic_gpu import _bitonic
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program, launch
from jaxtile.pallas_lowering.mosaic_gpu._ops import type_of
from jaxtile.pallas_lowering.mosaic_gpu._region import Region, convert
from jaxtile.primitives import _order
from jaxtile.primitives._bits import place_dtype
from jaxtile.primitives._order import Order, unsigned_of

WARPS = 4
_WORD = np.dtype(np.uint32)
_LAST = 2**32 - 1


def _is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _top(word):
    return word.type(1 << (8 * word.itemsize - 1))


def _infinity(dtype):
    return np.array(np.inf, dtype).view(unsigned_of(dtype))[()]


class Keys:
    """Scalar functions of one format and order.

    Args:
        dtype: of the values.
        order: the order asked for.
    """

    def __init__(self, dtype, order: Order):
        self.dtype, self.order = np.dtype(dtype), order
        self.floats = _is_float(dtype)
        self.word = _WORD if self.dtype.kind == "b" else unsigned_of(dtype)
        value = "largest" if order.descending else "smallest"
        self.nan_first = order.nan in ("first", value)

    def _bits(self, x):
        return _order.image(x) if self.dtype.kind != "b" else x.astype(_WORD)

    def total(self, x):
        """A key that the bits follow from, except those of NaNs."""
        bits, word = self._bits(x), self.word
        top, ones = _top(word), ~word.type(0)
        if self.floats:
            key = jnp.where(bits >= top, ~bits, bits | top)
        else:
            key = bits ^ top if self.dtype.kind == "i" else bits
        key = ~key if self.order.descending else key
        if self.floats:
            nan = word.type(0) if self.nan_first else ones
            key = jnp.where((bits & ~top) > _infinity(self.dtype), nan, key)
        return [key.astype(_WORD)]

    def value(self, key):
        """The value of such a key."""
        key, word = key.astype(self.word), self.word
        key = ~key if self.order.descending else key
        top = _top(word)
        if self.floats:
            bits = jnp.where(key >= top, key ^ top, ~key)
        else:
            bits = key ^ top if self.dtype.kind == "i" else key
        return [_order.value_of(bits, self.dtype)]

    def merged(self, x):
        """A key in which each class is one."""
        return [_order.keys_of(x, self.order).astype(_WORD)]

    def zero(self, x):
        """Whether a value is a zero, and whether a NaN."""
        magnitude = self._bits(x) & ~_top(self.word)
        return [magnitude == 0, magnitude > _infinity(self.dtype)]

    def below_zeros(self, key):
        """Whether such a key comes before the zeros."""
        return [key < _WORD.type(~_top(self.word))]


class _Row:
    """A warp's row.

    Args:
        program: the arrays.
        rows, n: the shape.
        keys: the format's functions.
    """

    def __init__(self, program: Program, rows: int, n: int, keys: Keys):
        self.program, self.n, self.keys = program, n, keys
        self.count = max(1, -(-n // th.WARP))
        self.count = 1 << (self.count - 1).bit_length()
        warp, self.lane = th.divided(th.thread_in_block(), th.WARP)
        row = arith.addi(arith.muli(th.i64(th.block()), th.i64(WARPS)), th.i64(warp))
        self.inside = th.less(row, th.i64(rows))
        # A warp beyond the last row repeats that and stores nothing.
        row = arith.minsi(row, th.i64(rows - 1))
        self.base = arith.muli(row, th.i64(n))
        pitch = self.count + 1
        self.area = arith.muli(warp, th.i32(th.WARP * pitch))
        self.pitch = pitch

    def places(self):
        """Each place of this lane in steps of a warp, and whether it is there."""
        for k in range(self.count):
            place = arith.addi(self.lane, th.i32(k * th.WARP))
            yield place, self._there(place, (k + 1) * th.WARP)

    def _there(self, place, end):
        return None if end <= self.n else th.less(place, th.i32(self.n))

    def load(self):
        """The values as they lie, steps of a warp apart."""
        source = self.program.inputs[0]
        found = []
        for place, there in self.places():
            at = place if there is None else arith.select(there, place, th.i32(0))
            found.append(source.load(arith.addi(self.base, th.i64(at)))[0])
        return found

    def padded(self, keys, last: ir.Value):
        """Keys, and the last one where nothing is."""
        return [
            k if there is None else arith.select(there, k, last)
            for k, (_, there) in zip(keys, self.places(), strict=True)
        ]

    def turned(self, values, dtype):
        """Sorted values as they are to lie, through shared memory."""
        shared = self.program.words.array(0, dtype)
        th.warp_barrier()
        mine = arith.addi(self.area, arith.muli(self.lane, th.i32(self.pitch)))
        for k, v in enumerate(values):
            shared.store([v], arith.addi(mine, th.i32(k)))
        th.warp_barrier()
        found = []
        for place, _ in self.places():
            lane, k = th.divided(place, self.count)
            spot = arith.addi(arith.muli(lane, th.i32(self.pitch)), k)
            found.append(shared.load(arith.addi(self.area, spot))[0])
        return found

    def store(self, values, output: int):
        """Values as they lie."""
        with th.when(self.inside):
            for value, (place, there) in zip(values, self.places(), strict=True):
                self.put(value, place, there, output)

    def put(self, value, place, there, output: int):
        """Store a value at a place of the row that is there."""
        at = arith.addi(self.base, th.i64(place))
        if there is None:
            self.program.outputs[output].store([value], at)
            return
        with th.when(there):
            self.program.outputs[output].store([value], at)


def _plain(row: _Row, keys: Keys) -> None:
    """Sort a row's values alone."""
    values = row.load()
    total = Region(keys.total, [keys.dtype])
    found = row.padded([total(v)[0] for v in values], _word(_LAST))
    found = _bitonic.sort(found, row.lane)
    value = Region(keys.value, [_WORD])
    row.store([value(k)[0] for k in row.turned(found, _WORD)], 0)
    if not keys.floats:
        return
    special = Region(keys.zero, [keys.dtype])
    bits = [
        [b if there is None else arith.andi(b, there) for b in special(v)]
        for v, (_, there) in zip(values, row.places(), strict=True)
    ]
    some = functools.reduce(arith.ori, [b for pair in bits for b in pair])
    zero = arith.constant(type_of(_WORD), 0)
    with th.when(arith.cmpi(arith.CmpIPredicate.ne, th.ballot(some), zero)):
        # What other lanes stored comes before what is stored over it.
        th.warp_barrier()
        _rewrite(row, keys, values, bits, found)


def _word(number: int) -> ir.Value:
    return arith.constant(type_of(_WORD), number if number < 2**31 else number - 2**32)


def _rewrite(row: _Row, keys: Keys, values, bits, found) -> None:
    """Zeros and NaNs over again, each class in its source order."""
    below = Region(keys.below_zeros, [_WORD])
    words = [[th.ballot(b) for b in pair] for pair in bits]
    before = th.i32(0)
    for key in found:
        before = arith.addi(before, _count(th.ballot(below(key)[0])))
    nans = th.i32(0)
    for _, word in words:
        nans = arith.addi(nans, _count(word))
    # Where NaNs come first their keys are the least: `before` counts them.
    starts = [before, th.i32(0) if keys.nan_first else arith.subi(th.i32(row.n), nans)]
    ahead = arith.subi(arith.shli(th.i32(1), row.lane), th.i32(1))
    for value, pair, both in zip(values, bits, words, strict=True):
        for c, (bit, word) in enumerate(zip(pair, both, strict=True)):
            rank = _count(arith.andi(word, ahead))
            place = arith.addi(starts[c], rank)
            starts[c] = arith.addi(starts[c], _count(word))
            row.put(value, place, arith.andi(bit, row.inside), 0)


def _count(word):
    return math_dialect.ctpop(word)


def _indexed(row: _Row, keys: Keys, index, wanted: bool) -> None:
    """Sort places by their values, and give them, after the values if wanted."""
    merged, wide = Region(keys.merged, [keys.dtype]), ir.IntegerType.get_signless(64)
    bits = (row.count * th.WARP - 1).bit_length()
    pairs = []
    for v, (place, _) in zip(row.load(), row.places(), strict=True):
        high = arith.shli(arith.extui(wide, merged(v)[0]), th.i64(bits))
        pairs.append(arith.ori(high, arith.extui(wide, place)))
    # What is beyond the row comes after every key, and before the doubles' infinity.
    pairs = _bitonic.sort(row.padded(pairs, th.i64(1 << 62)), row.lane)
    narrow, ones = ir.IntegerType.get_signless(32), th.i32((1 << bits) - 1)
    places = [arith.andi(arith.trunci(narrow, p), ones) for p in pairs]
    places = row.turned(places, np.dtype(np.int32))
    row.store([convert(p, np.int32, index) for p in places], int(wanted))
    if not wanted:
        return
    values = []
    for source, (_, there) in zip(places, row.places(), strict=True):
        at = source if there is None else arith.select(there, source, th.i32(0))
        values += row.program.inputs[0].load(arith.addi(row.base, th.i64(at)))
    row.store(values, 0)


def sort_rows(
    x: jax.Array, order: Order, indices: bool, values: bool = True
) -> list[jax.Array]:
    """Run the launch.

    Args:
        x: (rows, n).
        order: the order asked for.
        indices: give the source indices too.
        values: give the sorted rows, which they alone need not.

    Returns:
        The sorted rows and the indices, if asked for.
    """
    rows, n = x.shape
    keys = Keys(x.dtype, order)
    index = place_dtype(n)
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * values
    outs += [jax.ShapeDtypeStruct(x.shape, index)] * indices

    def body(program: Program):
        row = _Row(program, rows, n, keys)
        if indices:
            _indexed(row, keys, index, values)
        else:
            _plain(row, keys)

    count = 1 << (max(1, -(-n // th.WARP)) - 1).bit_length()
    slots = -(-WARPS * th.WARP * (count + 1) // 2)
    return launch(body, outs, [x], blocks=-(-rows // WARPS), warps=WARPS, slots=slots)
