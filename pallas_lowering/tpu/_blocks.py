"""Chains, trees and scans over many rows: block after block, in a loop or along a grid.

The rows of a block are written out. A block's extent is a power of two, so that the tree
of a block is a subtree of `fixed_tree`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxtile.pallas_lowering.tpu._rows import (
    Rows,
    Show,
    Steps,
    Store,
    chain,
    decode_all,
    encode,
    encode_all,
    scratch,
    sweep,
    tree,
)

# Rows of a block in a loop, and how many rows are written out without one: beyond, the
# compiler takes many seconds.
BLOCK = 32
WRITTEN_OUT = 128


class Counter:
    """Trees of aligned blocks that come one at a time: a binary counter of subtrees.

    Slot k holds the tree of 2^k blocks while bit k of their number is set.
    """

    def __init__(self, steps: Steps, store: Store):
        self.steps, self.store = steps, store

    @staticmethod
    def memory(steps: Steps, blocks: int, masked: bool) -> list:
        """The scratch memory for so many blocks."""
        dtypes = [*steps.spec.states, *[np.dtype(bool)] * masked]
        return scratch((levels(blocks), *steps.shape), dtypes)

    @classmethod
    def of(cls, steps: Steps, refs: Sequence, masked: bool) -> Counter:
        """A counter in the memory that `memory` asks for."""
        flag = [np.dtype(bool)] * masked
        return cls(steps, Store(refs, [*steps.spec.states, *flag]))

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

    def __init__(self, steps: Steps, refs: Sequence, blocks: int, masked: bool, seed):
        self.steps, self.seed, self.blocks = steps, seed, blocks
        # After a seed every prefix exists.
        flagged = masked and seed is None
        k = len(steps.spec.states) + masked
        self.trees = Counter.of(steps, refs[:k], masked)
        self.ends = Counter.of(steps, refs[k:], flagged)

    @staticmethod
    def memory(steps: Steps, blocks: int, masked: bool, seed) -> list:
        """The scratch memory for so many blocks."""
        flagged = masked and seed is None
        trees = Counter.memory(steps, blocks, masked)
        return trees + Counter.memory(steps, blocks, flagged)

    def start(self) -> None:
        """Before the first block."""
        if self.seed is not None:
            for k in range(levels(self.blocks)):
                self.ends.put(k, self.seed)

    def before(self):
        """The prefix of all blocks so far."""
        return self.ends.get(0)

    def push(self, j: Any, tree):
        """Count the tree of block j; the prefix that it completes."""
        k, tree = self.trees.push(j, tree)
        prefix = self.steps.join(self.ends.get(k + 1), tree)
        if self.seed is None:
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


def looped(
    first: int, carry: Sequence, dtypes: Sequence, count: int, body: Callable
) -> list:
    """`fori_loop` from `first` to `count` with a carry of leaves that may be narrow."""

    def step(j, packed):
        return encode_all(body(j, decode_all(packed, dtypes)))

    return decode_all(lax.fori_loop(first, count, step, encode_all(carry)), dtypes)


def fold_rows(steps: Steps, rows: Rows, state, right=False, show: Show | None = None):
    """The strict chain over all rows after `state`; None starts it unseeded."""

    def block(base, count, state):
        here = functools.partial(rows, base)
        there = None if show is None else show.at(base)
        return chain(steps, here, count, state, right, there)

    if rows.n <= WRITTEN_OUT:
        return _exists(rows, block(0, rows.n, state))
    first = 0
    if state is None:
        first, state = 1, _exists(rows, block(0, BLOCK, state))
    dtypes = [v.dtype for v in steps.pack(state)]

    def body(j, leaves):
        return steps.pack(block(j * BLOCK, BLOCK, steps.unpack(leaves)))

    whole, rest = divmod(rows.n, BLOCK)
    state = steps.unpack(looped(first, steps.pack(state), dtypes, whole, body))
    return block(rows.n - rest, rest, state) if rest else state


def _exists(rows, state):
    """Without a mask, a state exists as soon as there was a row."""
    return state if rows.masked else (state[0], None)


def count_rows(steps: Steps, rows: Rows, counter: Counter, begin: Any = 0):
    """Push the trees of all whole blocks, from number `begin`; the tree of the rest."""
    whole, rest = divmod(rows.n, BLOCK)

    @functools.partial(lax.fori_loop, 0, whole, init_val=None)
    def _(j, carry):
        here = functools.partial(rows, j * BLOCK)
        counter.push(begin + j, tree(steps, here, 0, BLOCK))
        return carry

    if not rest:
        return None
    return tree(steps, functools.partial(rows, whole * BLOCK), 0, rest)


def tree_rows(steps: Steps, rows: Rows):
    """`fixed_tree` over all rows."""
    if rows.n <= WRITTEN_OUT:
        return tree(steps, functools.partial(rows, 0), 0, rows.n)
    whole = rows.n // BLOCK

    def run(*refs):
        counter = Counter.of(steps, refs, rows.masked)
        return counter.total(whole, count_rows(steps, rows, counter))

    return pl.run_scoped(run, *Counter.memory(steps, whole, rows.masked))


def sweep_rows(
    steps: Steps,
    rows: Rows,
    show: Show,
    prefixes: Prefixes,
    first: bool,
    begin: Any = 0,
):
    """`fixed_tree`'s prefixes, from block number `begin`: 0 if `first`; the last."""
    whole, rest = divmod(rows.n, BLOCK)

    def block(j, count, before):
        here = functools.partial(rows, j * BLOCK)
        end = functools.partial(prefixes.push, begin + j) if count == BLOCK else None
        return sweep(steps, here, count, before, show.at(j * BLOCK), end)

    if first:
        prefixes.start()
        block(0, BLOCK, prefixes.seed)

    @functools.partial(lax.fori_loop, int(first), whole, init_val=None)
    def _(j, carry):
        block(j, BLOCK, prefixes.before())
        return carry

    if rest:
        return block(whole, rest, prefixes.before())
    return prefixes.before()


def scan_rows(steps: Steps, rows: Rows, seed, show: Show):
    """`fixed_tree`'s prefixes of all rows after a seed or None, and the last."""
    if rows.n <= WRITTEN_OUT:
        return sweep(steps, functools.partial(rows, 0), rows.n, seed, show)
    count = -(-rows.n // BLOCK)

    def run(*refs):
        prefixes = Prefixes(steps, refs, count, rows.masked, seed)
        return sweep_rows(steps, rows, show, prefixes, True)

    return pl.run_scoped(run, *Prefixes.memory(steps, count, rows.masked, seed))
