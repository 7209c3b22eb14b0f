"""Values in a kernel laid out as rows of scratch memory, and back.

Rows of references are cheap where rows of values are not. An axis that lies in the lanes
is transposed first, once for each element leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxtile.pallas_lowering.tpu import _blocks
from jaxtile.pallas_lowering.tpu._rows import (
    SUBLANES,
    Rows,
    Store,
    decode,
    encode,
    scratch,
    write_lines,
)


def as_matrix(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple, tuple]:
    """The shape and axes of a value, of which a line is a block of one row."""
    if len(shape) != 1:
        return tuple(shape), tuple(axes)
    return (1, *shape), tuple(a + 1 for a in axes)


def reshape(value: Any, shape: Sequence[int]) -> Any:
    """A value in another shape; the compiler does not reshape bools."""
    return decode(encode(value).reshape(shape), value.dtype)


@dataclass(frozen=True)
class Layout:
    """How the fibres of a value of at least two dimensions become rows.

    Args:
        shape, axes: of the value, and its axes that the fibres lie along.
        looped: rows are visited in a loop, however few they are.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    looped: bool = False

    @property
    def _tiled(self) -> tuple[bool, bool]:
        rank = len(self.shape)
        return rank - 2 in self.axes, rank - 1 in self.axes

    @property
    def whole(self) -> bool:
        """A row is a block of the last two axes, or of more."""
        return not any(self._tiled)

    @property
    def flat(self) -> bool:
        """Both tiled axes are among the axes: a row holds one value of each block."""
        return all(self._tiled)

    @property
    def transposed(self) -> bool:
        """The lanes are among the axes."""
        return self._tiled[1]

    @property
    def written_out(self) -> bool:
        """The value is one block of few rows."""
        plain = len(self.shape) == 2 and not self.flat and not self.whole
        return plain and not self.split

    @property
    def n(self) -> int:
        """How many rows there are."""
        return math.prod(self.shape[a] for a in self.axes)

    @property
    def split(self) -> bool:
        """Positions are not static, so that rows come in groups of eight."""
        return self.looped or self.n > _blocks.WRITTEN_OUT

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the fibres."""
        return tuple(s for d, s in enumerate(self.shape) if d not in self.axes)

    @property
    def _batch(self) -> tuple[int, ...]:
        lead = [s for d, s in enumerate(self.shape[:-2]) if d not in self.axes]
        count = math.prod(lead)
        return (count,) if count > 1 else ()

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row."""
        if self.whole:
            return self.kept
        sublanes, lanes = self._tiled
        width = 1 if self.flat else self.shape[-2 if lanes else -1]
        return (*self._batch, 1, width)

    @property
    def memory(self) -> tuple[int, ...]:
        """The shape of the scratch memory of one leaf."""
        if self.whole:
            return (self.n, *self.kept)
        if not self.split:
            return (*self._batch, self.n, self.row[-1])
        groups = -(-self.n // SUBLANES)
        return (*self._batch, groups, SUBLANES, self.row[-1])

    def bytes(self, leaves: int) -> int:
        """What the scratch memory of so many leaves takes, in tiles of (8, 128)."""
        *lead, lines, lanes = self.memory
        tiles = math.prod(lead) * -(-lines // SUBLANES) * -(-lanes // 128)
        return leaves * tiles * SUBLANES * 128 * 4

    def _blocks(self, value: Any):
        """The last two axes' blocks: where their rows go, and what they hold."""
        lead = range(len(self.shape) - 2)
        kept = [d for d in lead if d not in self.axes]
        gone = [d for d in lead if d in self.axes]
        for k, a in enumerate(itertools.product(*(range(self.shape[d]) for d in kept))):
            steps = itertools.product(*(range(self.shape[d]) for d in gone))
            for i, b in enumerate(steps):
                index = dict(zip([*kept, *gone], [*a, *b], strict=True))
                yield k, i, value[tuple(index[d] for d in lead)]

    def write(self, ref: Any, value: Any) -> None:
        """Lay a value out in the memory of its leaf."""
        value = encode(value)
        if self.whole:
            for i, index in enumerate(itertools.product(*map(range, self._extents))):
                at = dict(zip(self.axes, index, strict=True))
                places = range(len(self.shape))
                ref[i] = value[tuple(at.get(d, slice(None)) for d in places)]
            return
        for k, i, block in self._blocks(value):
            self._write_block(ref, (k,) if self._batch else (), i, block)

    @property
    def _extents(self):
        return [self.shape[a] for a in self.axes]

    def _write_block(self, ref, lead, i, block):
        sublanes, lanes = self._tiled
        block = block.T if lanes else block
        n, width = block.shape
        if not self.flat:
            self._write_lines(ref, lead, i * n, block)
            return
        for s in range(width):
            self._write_lines(ref, lead, (i * width + s) * n, block[:, s : s + 1])

    def _write_lines(self, ref, lead, start, lines):
        if self.split:
            write_lines(ref, lead, start, lines)
        else:
            ref[(*lead, slice(start, start + lines.shape[0]), slice(None))] = lines

    def read(self, ref: Any, dtype: Any) -> Any:
        """The value of the layout's shape, of one axis, that rows hold in memory."""
        (axis,) = self.axes
        if self.whole:
            rows = decode(ref[...], dtype)
            return rows if axis == 0 else jnp.moveaxis(rows, 0, axis)
        value = ref[...]
        if self.split:
            *lead, groups, lines, lanes = self.memory
            value = value.reshape(*lead, groups * lines, lanes)[..., : self.n, :]
        if axis == len(self.shape) - 1:
            value = jnp.swapaxes(value, -1, -2)
        return decode(value.reshape(self.shape), dtype)

    def to_row(self, value: Any) -> Any:
        """A value of the fibres' shape as a row."""
        if value.ndim == 0:
            return jnp.broadcast_to(value, self.row)
        return reshape(value, self.row)

    def to_fibres(self, row: Any) -> Any:
        """A row as a value of the fibres' shape."""
        return reshape(row, self.kept)


def staged(
    layout: Layout,
    values: Sequence,
    outputs: Sequence,
    body: Callable,
    resident: bool = False,
    **options: Any,
) -> Any:
    """Run `body(rows, out)` on values laid out as rows, within a kernel.

    Args:
        layout: of the values.
        values: element leaves, and a mask last where there is one.
        outputs: dtypes of leaves to leave room for in `out`, laid out as the values.
        body: it gives a pytree of values.
        resident: leave few rows in registers; there are no outputs. Cheaper where rows
            do not wait for each other: memory is filled before the first row is read.
        **options: of `Rows`.
    """
    dtypes = [v.dtype for v in values]
    if resident and layout.written_out:
        lines = [v.T if layout.transposed else v for v in map(encode, values)]
        rows = Rows(Store(lines, dtypes), layout.n, layout.row, split=False, **options)
        return body(rows, Store((), ()))

    def run(*refs):
        for ref, value in zip(refs, values, strict=False):
            layout.write(ref, value)
        count = len(values)
        rows = Rows(
            Store(refs[:count], dtypes),
            layout.n,
            layout.row,
            whole=0 if layout.whole else None,
            split=layout.split,
            **options,
        )
        return body(rows, Store(refs[count:], outputs))

    return pl.run_scoped(run, *scratch(layout.memory, [*dtypes, *outputs]))
