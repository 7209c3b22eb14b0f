"""The order policies over rows: one chain, one tree, one scan, for every reducer.

A row holds one contribution of many fibres, so that every step is elementwise and its
order is the program's. Rows come in blocks, whose extent is a power of two: the rows of
a block are written out, blocks follow each other in a loop or along a kernel's grid.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxtile.primitives import _fold
from jaxtile.primitives._spec import Spec

SUBLANES = 8


def carrier(dtype: Any) -> np.dtype:
    """The 32-bit dtype that holds a value exactly: narrower rows cannot be sliced."""
    dtype = np.dtype(dtype)
    if dtype.itemsize == 4:
        return dtype
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(np.float32 if floating else np.int32)


def encode(value: Any) -> Any:
    """A value in its carrier."""
    return value.astype(carrier(value.dtype))


def decode(value: Any, dtype: Any) -> Any:
    """The value that its carrier holds."""
    if value.dtype == dtype:
        return value
    return value != 0 if np.dtype(dtype) == bool else value.astype(dtype)


def encode_all(values: Sequence) -> list:
    """Each value in its carrier."""
    return [encode(v) for v in values]


def decode_all(values: Sequence, dtypes: Sequence) -> list:
    """The values of these dtypes that carriers hold."""
    return [decode(v, d) for v, d in zip(values, dtypes, strict=True)]


def write_lines(ref: Any, lead: tuple, start: int, lines: Any) -> None:
    """Put lines of lanes in (n, lanes) memory that is laid out as (n / 8, 8, lanes).

    Args:
        ref: the memory.
        lead: the index of the axes before.
        start: the first line.
        lines: a value of (..., count, lanes).
    """
    *_, count, lanes = lines.shape
    done, rest = 0, (slice(None),)
    while done < count:
        group, line = divmod(start + done, SUBLANES)
        whole = (count - done) // SUBLANES
        if line == 0 and whole:
            stop = done + whole * SUBLANES
            part = lines[..., done:stop, :]
            view = part.reshape(*part.shape[:-2], whole, SUBLANES, lanes)
            ref[(*lead, slice(group, group + whole))] = view
        else:
            stop = min(count, done + SUBLANES - line)
            at = (*lead, group, slice(line, line + stop - done), *rest)
            ref[at] = lines[..., done:stop, :]
        done = stop


class Store:
    """References that hold leaves of stated dtypes in their carriers."""

    def __init__(self, refs: Sequence, dtypes: Sequence):
        self.refs, self.dtypes = list(refs), list(dtypes)

    def load(self, place: Any) -> list:
        """The leaves at a place."""
        return decode_all([ref[place] for ref in self.refs], self.dtypes)

    def save(self, place: Any, leaves: Sequence) -> None:
        """Put leaves at a place."""
        for ref, value in zip(self.refs, leaves, strict=True):
            ref[place] = encode(value)


def scratch(shape: Sequence[int], dtypes: Sequence) -> list:
    """The memory of a `Store`."""
    return [pltpu.VMEM(tuple(shape), carrier(d)) for d in dtypes]


class Steps:
    """A reducer's steps on (leaves, valid) pairs, each traced once for a row's shape."""

    def __init__(self, spec: Spec, shape: Sequence[int]):
        self.spec, self.shape = spec, tuple(shape)

        def join(a, b):
            return _fold.join(spec, a[0], a[1], b[0], b[1])

        def advance(state, element, mask, right):
            return _fold.advance(spec, state[0], state[1], element, mask, right)

        self.join = jax.jit(join)
        self._advance = jax.jit(advance, static_argnums=3)
        self._lift = jax.jit(spec.lift)
        self._finish = jax.jit(spec.finish)

    def advance(self, state, row, right=False):
        """The state after one more row."""
        return self._advance(state, *row, right)

    def lift(self, row):
        """The state of one row."""
        return self._lift(row[0]), row[1]

    def start(self, init: Sequence | None, masked: bool):
        """What a chain starts from."""
        return _fold.start(self.spec, self.shape, init, masked)

    def pack(self, state) -> list:
        """The leaves of a state and its flag, where it has one."""
        leaves, valid = state
        return [*leaves, *([] if valid is None else [valid])]

    def settle(self, state) -> list:
        """The leaves, or the empty value where nothing was seen."""
        leaves, valid = state
        if valid is None:
            return leaves
        return _fold.pick(valid, leaves, self.spec.filler(self.shape))

    def finish(self, leaves: Sequence) -> list:
        """The result's leaves."""
        return self._finish(list(leaves))

    def unpack(self, leaves: Sequence):
        """The state that `pack` took apart."""
        k = len(self.spec.states)
        return list(leaves[:k]), leaves[k] if len(leaves) > k else None


@dataclass(frozen=True)
class Rows:
    """Contributions laid out as rows of memory.

    Args:
        store: element leaves, and a mask last where there is one.
        n: how many there are.
        shape: of a row.
        masked: the last leaf is a mask.
        whole: the axis that they lie along, an untiled one; None if it is the one
            before the last.
        split: that axis is laid out as (n / 8, 8): positions that are not static need it.
        backward: they are visited from the last to the first.
        index: the dtype of the source index, where elements have one.
        begin: the source index of the first row.
    """

    store: Store
    n: int
    shape: tuple[int, ...]
    masked: bool = False
    whole: int | None = None
    split: bool = True
    backward: bool = False
    index: Any = None
    begin: Any = 0

    def position(self, base: Any, i: int) -> Any:
        """The row visited `i` after the `base`-th."""
        return self.n - 1 - i - base if self.backward else base + i

    def place(self, base: Any, i: int) -> Any:
        """Where that row is; a base that is not static is a multiple of 8."""
        if self.whole is not None:
            return (*(slice(None),) * self.whole, self.position(base, i))
        lead = (slice(None),) * (len(self.shape) - 2)
        if not self.split:
            at = self.position(base, i)
            return (*lead, slice(at, at + 1), slice(None))
        static, groups = self.position(0, i), base // SUBLANES
        if isinstance(base, int):
            static, groups = self.position(base, i), 0
        group, line = divmod(static, SUBLANES)
        group = group - groups if self.backward else group + groups
        return (*lead, group, slice(line, line + 1), slice(None))

    def __call__(self, base: Any, i: int):
        """The element leaves and the mask of a row."""
        leaves = self.store.load(self.place(base, i))
        mask = leaves.pop() if self.masked else None
        if self.index is not None:
            place = jnp.asarray(self.position(base, i) + self.begin, self.index)
            leaves.append(jnp.broadcast_to(place, self.shape))
        return leaves, mask

    def save_all(self, out: Store, leaves: Sequence) -> None:
        """Put a value of all rows, in memory's order, where they are."""
        for ref, value in zip(out.refs, leaves, strict=True):
            if self.whole is not None:
                ref[0 : self.n] = encode(value)
            else:
                write_lines(ref, (slice(None),) * (value.ndim - 2), 0, encode(value))


class Show:
    """Where a scan's prefixes go, and how: finished, and without the row if exclusive.

    Args:
        steps: of the reducer.
        rows: the contributions, in the order of the scan.
        out: the store of the results, laid out as the rows.
        nothing: the exclusive prefix of nothing at all; None if inclusive.
        finish: show `finish`'s results.
        base: the first row of the block.
    """

    def __init__(self, steps: Steps, rows: Rows, out: Store, nothing, finish: bool):
        self.steps, self.rows, self.out = steps, rows, out
        self.nothing, self.finish, self.base = nothing, finish, 0

    def at(self, base: Any) -> Show:
        """The same for the block that starts at `base`."""
        found = copy.copy(self)
        found.base = base
        return found

    def _save(self, i, leaves):
        result = self.steps.finish(leaves) if self.finish else leaves
        self.out.save(self.rows.place(self.base, i), result)

    def before(self, i: int, state) -> None:
        """What stands before row i of the block; None for nothing."""
        if self.nothing is not None:
            self._save(i, self.nothing if state is None else self.steps.settle(state))

    def after(self, i: int, state) -> None:
        """The prefix that ends with row i of the block."""
        if self.nothing is None:
            self._save(i, self.steps.settle(state))


def chain(steps: Steps, rows: Callable, count: int, state, right=False, show=None):
    """The strict chain over `count` rows of a block; None starts it unseeded."""
    for i in range(count):
        row = rows(i)
        before = steps.start(None, row[1] is not None) if state is None else state
        after = steps.advance(before, row, right)
        if show is not None:
            show.before(i, state)
            show.after(i, after)
        state = after
    return state


def tree(steps: Steps, rows: Callable, first: int, count: int):
    """`fixed_tree` of a block, depth first: few rows live at once, the same pairs."""
    if count == 1:
        return steps.lift(rows(first))
    half = 1 << (count - 1).bit_length() - 1
    left = tree(steps, rows, first, half)
    return steps.join(left, tree(steps, rows, first + half, count - half))


def sweep(steps: Steps, rows: Callable, count: int, before, show, end=None):
    """The prefixes of `fixed_tree` in a block, after what stands before it.

    before(right half) = before(left half) . left half, depth first, and the inclusive
    prefix i is what stands before i + 1.

    Args:
        steps: of the reducer.
        rows: `i -> row`, of the block.
        count: how many rows there are.
        before: the prefix of all blocks before, or None.
        show: its `before` and `after` are called once for each row.
        end: from the tree of a whole block, what stands before the next one.

    Returns:
        The prefix of all rows so far.
    """
    last = [before]

    def shown(i, prefix):
        show.after(i, prefix)
        last[0] = prefix

    def visit(first, size, before):
        if size == 1:
            show.before(first, before)
            return steps.lift(rows(first))
        half = size // 2
        middle = first + half
        left = visit(first, half, before)
        if middle > count:
            return left
        prefix = left if before is None else steps.join(before, left)
        shown(middle - 1, prefix)
        if middle == count:
            return left
        return steps.join(left, visit(middle, half, prefix))

    total = visit(0, 1 << (count - 1).bit_length(), before)
    if count & (count - 1) == 0:
        if end is not None:
            total = end(total)
        elif before is not None:
            total = steps.join(before, total)
        shown(count - 1, total)
    return last[0]
