"""The order policies over rows: one chain, one tree, one scan, for every reducer.

A row holds one contribution of many fibres, so that every step is elementwise and its
order is the program's. Rows come in blocks, whose extent is a power of two: the rows of
a block are written out, blocks follow each other in a loop or along a kernel's grid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from jaxtile.primitives import _fold
from jaxtile.primitives._spec import Spec

SUBLANES = 8
# Rows of a block in a loop, and how many rows are written out without one: beyond, the
# compiler takes many seconds.
BLOCK = 32
WRITTEN_OUT = 128


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
            return _fold.join(spec, *a, *b)

        def advance(state, element, mask, right):
            return _fold.advance(spec, *state, element, mask, right)

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

    def seed(self, init: Sequence | None):
        """What stands before all rows of a tree."""
        if init is not None:
            return list(init), None
        if self.spec.reducer.exact_identity and self.spec.identity(()) is not None:
            return self.spec.identity(self.shape), None
        return self.spec.filler(self.shape), jnp.zeros(self.shape, bool)

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
            before the last, which is viewed as (n / 8, 8).
        backward: they are visited from the last to the first.
        index: the dtype of the source index, where elements have one.
        begin: the source index of the first row.
    """

    store: Store
    n: int
    shape: tuple[int, ...]
    masked: bool = False
    whole: int | None = None
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
        static = self.n - 1 - i if self.backward else i
        groups = base // SUBLANES
        if isinstance(base, int):
            static, groups = self.position(base, i), 0
        group, line = divmod(static, SUBLANES)
        group = group - groups if self.backward else group + groups
        lead = (slice(None),) * (len(self.shape) - 2)
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
            place: Any = slice(0, self.n)
            if self.whole is None:
                *lead, groups, lines, lanes = ref.shape
                ref = ref.reshape(*lead, groups * lines, lanes)
                place = (*(slice(None),) * len(lead), place, slice(None))
            ref[place] = encode(value)


def chain(steps: Steps, rows: Callable, count: int, state, right=False, show=None):
    """The strict chain over `count` rows of a block, and each state to `show`."""
    for i in range(count):
        state = steps.advance(state, rows(i), right)
        if show is not None:
            show(i, state)
    return state


def tree(steps: Steps, rows: Callable, first: int, count: int):
    """`fixed_tree` of a block, depth first: few rows live at once, the same pairs."""
    if count == 1:
        return steps.lift(rows(first))
    half = 1 << (count - 1).bit_length() - 1
    left = tree(steps, rows, first, half)
    return steps.join(left, tree(steps, rows, first + half, count - half))


def sweep(steps: Steps, rows: Callable, count: int, before, show: Callable, end=None):
    """The prefixes of `fixed_tree` in a block, after what stands before it.

    before(right half) = before(left half) . left half, depth first, and the inclusive
    prefix i is what stands before i + 1.

    Args:
        steps: of the reducer.
        rows: `i -> row`, of the block.
        count: how many rows there are.
        before: the prefix of all blocks before, or None.
        show: `(i, prefix)`, called once for each row.
        end: from the tree of a whole block, what stands before the next one.

    Returns:
        The prefix of all rows so far.
    """
    last = [before]

    def shown(i, prefix):
        show(i, prefix)
        last[0] = prefix

    def visit(first, size, before):
        if size == 1:
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


class Counter:
    """Trees of aligned blocks that come one at a time: a binary counter of subtrees.

    Slot k holds the tree of 2^k blocks while bit k of their number is set.
    """

    def __init__(self, steps: Steps, store: Store):
        self.steps, self.store = steps, store

    def get(self, k: Any):
        """What slot k holds."""
        return self.steps.unpack(self.store.load(k))

    def put(self, k: Any, state) -> None:
        """Fill slot k."""
        self.store.save(k, self.steps.pack(state))

    def push(self, j: Any, state):
        """Count the tree of block j; the slot that it fills, and with which tree."""
        dtypes = self.store.dtypes

        def full(loop):
            return (j >> loop[0]) & 1 == 1

        def merge(loop):
            k, leaves = loop
            state = self.steps.unpack(decode_all(leaves, dtypes))
            merged = self.steps.join(self.get(k), state)
            return k + 1, encode_all(self.steps.pack(merged))

        start = jnp.int32(0), encode_all(self.steps.pack(state))
        k, leaves = lax.while_loop(full, merge, start)
        state = self.steps.unpack(decode_all(leaves, dtypes))
        self.put(k, state)
        return k, state

    def total(self, count: int, tail=None):
        """The tree of `count` whole blocks and a shorter last one."""
        for k in range(count.bit_length()):
            if count >> k & 1:
                tail = (
                    self.get(k) if tail is None else self.steps.join(self.get(k), tail)
                )
        return tail


class Prefixes:
    """The prefix of aligned blocks that come one at a time, in `fixed_tree`'s order.

    Beside a counter, slot k holds the prefix of the last multiple of 2^k blocks: before
    the first it is the seed, if there is one.
    """

    def __init__(self, steps: Steps, refs: Sequence, masked: bool, seed):
        self.steps, self.seeded = steps, seed is not None
        mine, those = self._dtypes(steps, masked, seed)
        self.trees = Counter(steps, Store(refs[: len(mine)], mine))
        self.ends = Counter(steps, Store(refs[len(mine) :], those))
        self.seed = seed

    @staticmethod
    def _dtypes(steps, masked, seed):
        # After a seed every prefix exists.
        flag, states = [np.dtype(bool)] * masked, list(steps.spec.states)
        return [*states, *flag], [*states, *(flag if seed is None else [])]

    @classmethod
    def memory(cls, steps: Steps, blocks: int, masked: bool, seed) -> list:
        """The scratch memory for so many blocks."""
        mine, those = cls._dtypes(steps, masked, seed)
        return scratch((levels(blocks), *steps.shape), [*mine, *those])

    def start(self, blocks: int) -> None:
        """Before the first block."""
        if self.seed is not None:
            for k in range(levels(blocks)):
                self.ends.put(k, self.seed)

    def before(self):
        """The prefix of all blocks so far."""
        return self.ends.get(0)

    def push(self, j: Any, tree):
        """Count the tree of block j; the prefix that it completes."""
        k, tree = self.trees.push(j, tree)
        prefix = self.steps.join(self.ends.get(k + 1), tree)
        if not self.seeded:
            # Nothing stands before the first 2^k blocks.
            first = j + 1 == jnp.int32(1) << k
            pairs = zip(self.steps.pack(tree), self.steps.pack(prefix), strict=True)
            prefix = self.steps.unpack(
                decode_all(
                    [jnp.where(first, encode(a), encode(b)) for a, b in pairs],
                    self.ends.store.dtypes,
                )
            )

        @functools.partial(lax.fori_loop, 0, k + 1, init_val=None)
        def _(i, carry):
            self.ends.put(i, prefix)
            return carry

        return prefix


def levels(blocks: int) -> int:
    """How many slots a `Counter` of so many blocks has."""
    return blocks.bit_length() + 1


def looped(carry: Sequence, dtypes: Sequence, count: int, body: Callable) -> list:
    """`fori_loop` over blocks with a carry of leaves that may be narrow."""

    def step(j, packed):
        return encode_all(body(j, decode_all(packed, dtypes)))

    return decode_all(lax.fori_loop(0, count, step, encode_all(carry)), dtypes)
