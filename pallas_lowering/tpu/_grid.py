"""Whole-array kernels: fibres as rows of blocks, blocks of rows along a kernel's grid.

An array is [outer, n, inner], and a row is a part of `inner`. Where the axis is the last
one, blocks of [fibres, n] are transposed inside the kernel. The blocks of an axis follow
each other on the grid, and what one hands to the next stays in scratch memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxtile.pallas_lowering.tpu import _blocks
from jaxtile.pallas_lowering.tpu._rows import (
    SUBLANES,
    Rows,
    Steps,
    Store,
    carrier,
    decode,
    decode_all,
    encode,
    scratch,
    write_lines,
)
from jaxtile.primitives._scalar import convert
from jaxtile.primitives._spec import Spec

LANES = 128
# What a block of one leaf holds: copies of it are in flight while another is computed.
_WORDS = 1 << 18
_WIDEST = 2048
# Set by tests, which have no TPU.
INTERPRET = False


@dataclass(frozen=True)
class Plan:
    """How the fibres of an array become blocks.

    Args:
        shape, axes: of the array, and its axes that the fibres lie along.
        leaves: how many leaves go in and out.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    leaves: int

    @property
    def n(self) -> int:
        """The length of a fibre."""
        return math.prod(self.shape[a] for a in self.axes)

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the fibres."""
        return tuple(s for d, s in enumerate(self.shape) if d not in self.axes)

    @property
    def _adjacent(self) -> bool:
        first, last = self.axes[0], self.axes[-1]
        return last - first + 1 == len(self.axes)

    @property
    def _inner(self) -> int:
        return math.prod(self.shape[self.axes[-1] + 1 :])

    @property
    def lanes(self) -> bool:
        """The axis is the last one, and fibres are many enough to fill a row."""
        return self._adjacent and self._inner == 1

    @property
    def moved(self) -> bool:
        """The array is transposed first: its own rows would be short or apart."""
        return not self.lanes and (not self._adjacent or self._inner < LANES)

    @property
    def size(self) -> tuple[int, int, int]:
        """(outer, n, inner); of lanes, (1, n, fibres)."""
        fibres = math.prod(self.kept)
        if self.lanes or self.moved:
            return 1, self.n, fibres
        return fibres // self._inner, self.n, self._inner

    @property
    def block(self) -> tuple[int, int]:
        """How many rows a block has, and how wide a row is."""
        _, n, inner = self.size
        words = _WORDS // max(1, self.leaves // 2)
        aligned = -(-inner // LANES) * LANES
        width = min(aligned, _WIDEST)
        if n <= _blocks.WRITTEN_OUT:
            rows = n
        else:
            rows = _blocks.BLOCK
            while rows * 2 <= n and rows * width < words and rows < 512:
                rows *= 2
            rows = max(rows, LANES) if self.lanes else rows
        while rows * width > 2 * words and width > LANES:
            width //= 2
        return rows, min(width // LANES * LANES, _WIDEST) if width < inner else inner

    @property
    def steps(self) -> int:
        """How many blocks a fibre has."""
        return -(-self.n // self.block[0])

    @property
    def tail(self) -> int:
        """How many rows the last block has."""
        return self.n - (self.steps - 1) * self.block[0]

    @property
    def split(self) -> bool:
        """Positions in a block are not static: its rows come in groups of eight."""
        return self.block[0] > _blocks.WRITTEN_OUT or self.steps > 1

    def flip(self, x: Any) -> Any:
        """An array of one axis, backward along it."""
        return lax.rev(x, self.axes)

    def restore(self, x: Any) -> Any:
        """An array that the kernel wrote, of one axis, in the caller's shape."""
        if not self.moved:
            return x.reshape(self.shape)
        (axis,) = self.axes
        return jnp.moveaxis(x.reshape(self.n, *self.kept), 0, axis)

    def fibres(self, x: Any) -> Any:
        """What each fibre has one of, as the kernel reads it."""
        outer, _, inner = self.size
        return x.reshape(outer, 1, inner)

    @property
    def fibre_spec(self) -> pl.BlockSpec:
        """The blocks of what each fibre has one of."""
        return pl.BlockSpec((None, 1, self.block[1]), lambda o, w, t: (o, 0, w))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Fibres, and last the blocks of a fibre, one after the other."""
        outer, _, inner = self.size
        return outer, -(-inner // self.block[1]), self.steps


@dataclass(frozen=True)
class Leaf:
    """One leaf of the elements or of the results, in blocks.

    A block is read or written row by row where it is, if its rows are 32 bits wide and lie
    along the sublanes; else through scratch memory.

    Args:
        plan: of the array.
        row: the dtype that rows have.
        outside: the dtype that blocks have.
        backward: the blocks are visited from the last to the first.
    """

    plan: Plan
    row: Any
    outside: Any
    backward: bool

    @property
    def _grouped(self) -> bool:
        plan = self.plan
        return self._plain and plan.split and plan.n % SUBLANES == 0

    @property
    def _plain(self) -> bool:
        return carrier(self.row) == self.outside and not self.plan.lanes

    @property
    def direct(self) -> bool:
        """The block itself is read or written by rows."""
        return self._grouped or (self._plain and not self.plan.split)

    def _shape(self, outer: Any, n: int, inner: int) -> tuple:
        if self.plan.lanes:
            return inner, n
        return (
            (outer, n // SUBLANES, SUBLANES, inner)
            if self._grouped
            else (outer, n, inner)
        )

    def arrange(self, x: Any) -> Any:
        """The array as the kernel reads it."""
        if x.dtype == bool:
            x = x.astype(self.outside)
        if self.plan.moved:
            kept = [d for d in range(x.ndim) if d not in self.plan.axes]
            x = x.transpose(*self.plan.axes, *kept)
        return x.reshape(self._shape(*self.plan.size))

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The array as the kernel writes it."""
        return jax.ShapeDtypeStruct(self._shape(*self.plan.size), self.outside)

    @property
    def spec(self) -> pl.BlockSpec:
        """Its blocks."""
        rows, width = self.plan.block
        last = self.plan.steps - 1

        def at(t):
            return last - t if self.backward else t

        block = self._shape(None, rows, width)
        if self.plan.lanes:
            return pl.BlockSpec(block, lambda o, w, t: (w, at(t)))
        if self._grouped:
            return pl.BlockSpec(block, lambda o, w, t: (o, at(t), 0, w))
        return pl.BlockSpec(block, lambda o, w, t: (o, at(t), w))

    @property
    def memory(self) -> list:
        """The scratch memory that it needs."""
        rows, width = self.plan.block
        if self.direct:
            return []
        if not self.plan.split:
            return scratch((rows, width), [self.row])
        return scratch((-(-rows // SUBLANES), SUBLANES, width), [self.row])

    def load(self, block: Any, ref: Any) -> None:
        """Fill the scratch memory from a block."""
        value = encode(block[...])
        value = value.T if self.plan.lanes else value
        if self.plan.split:
            write_lines(ref, (), 0, value)
        else:
            ref[...] = value

    def save(self, block: Any, ref: Any, dtype: Any) -> None:
        """Write the block from the scratch memory, as this dtype."""
        rows, width = self.plan.block
        value = ref[...].reshape(-1, width)[:rows]
        value = value.T if self.plan.lanes else value
        value = convert(decode(value, self.row), dtype)
        block[...] = value.astype(block.dtype)


def outside(dtype: Any) -> np.dtype:
    """The dtype with which a leaf crosses into a kernel, or out of it."""
    dtype = np.dtype(dtype)
    return np.dtype(np.int8) if dtype.kind == "b" else dtype


def written(dtype: Any) -> np.dtype:
    """The dtype with which a result leaves a kernel."""
    dtype = np.dtype(dtype)
    return np.dtype(np.int32) if dtype.kind == "b" else dtype


class Call:
    """One whole-array kernel: its operands, results and scratch memory, by name.

    Args:
        plan: of the arrays.
        spec: the reducer's.
        masked: the last leaf is a mask.
        backward: rows are visited from the last to the first.
        dtypes: of the element leaves; one more than the reducer's is the source index.
    """

    def __init__(
        self, plan: Plan, spec: Spec, dtypes: Sequence, masked: bool, backward: bool
    ):
        self.plan, self.spec, self.masked, self.backward = plan, spec, masked, backward
        self.dtypes = [*dtypes, *[np.dtype(bool)] * masked]
        self.leaves = [Leaf(plan, d, outside(d), backward) for d in self.dtypes]
        self.shape = (1, plan.block[1])
        self.steps = Steps(spec, self.shape)
        self.index = spec.index if len(dtypes) == len(spec.raw) else None

    def rows(self, views: Sequence, count: int, t: Any) -> Rows:
        """The rows of the block that is visited in step t."""
        plan = self.plan
        block = plan.steps - 1 - t if self.backward else t
        return Rows(
            Store(views, self.dtypes),
            count,
            self.shape,
            masked=self.masked,
            split=plan.split,
            backward=self.backward,
            index=self.index,
            begin=block * plan.block[0],
        )

    def run(self, step: Callable, arrays, init, results, fibres, carry) -> list:
        """The results, then what each fibre has one of.

        Args:
            step: `(refs, t, count, first, last)`, of one block.
            arrays: element leaves, and the mask.
            init: seed leaves, or None.
            results: (row dtype, dtype) of results laid out as the elements.
            fibres: dtypes of results that each fibre has one of.
            carry: the scratch memory from one block to the next.
        """
        plan, init = self.plan, init or ()
        outs = [Leaf(plan, row, written(d), self.backward) for row, d in results]
        outer, _, inner = plan.size
        line = [jax.ShapeDtypeStruct((outer, 1, inner), written(d)) for d in fibres]
        parts = [len(self.leaves), len(init), len(outs), len(line)]
        memory = [m for leaf in (*self.leaves, *outs) for m in leaf.memory]

        def body(*refs):
            cut = [0, *itertools.accumulate(parts)]
            named = [list(refs[a:b]) for a, b in itertools.pairwise(cut)]
            spare = iter(refs[cut[-1] :])
            ins, shown = named[0], named[2]
            views = [
                b if leaf.direct else next(spare)
                for leaf, b in zip((*self.leaves, *outs), ins + shown, strict=True)
            ]
            for leaf, block, view in zip(self.leaves, ins, views, strict=False):
                if not leaf.direct:
                    leaf.load(block, view)
            found = Refs(views[: len(ins)], views[len(ins) :], named[1], named[3])
            self._visit(functools.partial(step, found, list(spare)))
            for leaf, block, view, (_, dtype) in zip(
                outs, shown, found.out, results, strict=True
            ):
                if not leaf.direct:
                    leaf.save(block, view, dtype)

        call = pl.pallas_call(
            body,
            out_shape=[*(leaf.aval for leaf in outs), *line],
            grid=plan.grid,
            in_specs=[leaf.spec for leaf in self.leaves]
            + [plan.fibre_spec] * len(init),
            out_specs=[leaf.spec for leaf in outs] + [plan.fibre_spec] * len(line),
            scratch_shapes=[*memory, *carry],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=INTERPRET,
        )
        operands = [
            leaf.arrange(x) for leaf, x in zip(self.leaves, arrays, strict=True)
        ]
        found = call(*operands, *map(plan.fibres, init))
        dtypes = [*(d for _, d in results), *fibres]
        found = decode_all(found, dtypes)
        wide = [plan.restore(v) for v in found[: len(outs)]]
        return wide + [v.reshape(plan.kept) for v in found[len(outs) :]]

    def _visit(self, step: Callable) -> None:
        """The step of this grid point: which is the first or last is static in each."""
        plan, t = self.plan, pl.program_id(2)
        ends = [plan.block[0], plan.tail]
        if plan.steps == 1:
            return step(t, plan.n, True, True)
        first, last = reversed(ends) if self.backward else ends
        pl.when(t == 0)(lambda: step(t, first, True, False))
        pl.when(t == plan.steps - 1)(lambda: step(t, last, False, True))
        if plan.steps > 2:
            middle = (t > 0) & (t < plan.steps - 1)
            pl.when(middle)(lambda: step(t, plan.block[0], False, False))


class Refs(NamedTuple):
    """The references of a kernel: rows in and out, seeds, and results of fibres."""

    rows: list
    out: list
    seeds: list
    fibres: list
