"""States in registers: a reducer's functions on one thread's values, and their order.

A `State` is a tuple of leaves and a bit that says whether it exists (None: it does). The
tree of `fixed_tree` skips what does not exist, so that ragged ends and masks cost no
second code path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._ops import type_of
from jaxtile.pallas_lowering.mosaic_gpu._region import Region, lacks
from jaxtile.primitives._scalar import convert, elementwise
from jaxtile.primitives._spec import Spec

# Merges whose bits do not depend on which operand comes first.
_SYMMETRIC = frozenset(("add", "mul", "max", "min"))


class State(NamedTuple):
    """The leaves, and whether they exist (None: they do)."""

    leaves: tuple
    exists: Any = None


class Algebra:
    """A reducer's scalar functions as thread code.

    Args:
        spec: the bound reducer.
        lifted: the operands are states already (partial results of another launch).
        out: dtypes of the results.
        finish: give `finish`'s results, else raw states.
    """

    def __init__(self, spec: Spec, lifted: bool, out: Sequence, finish: bool):
        self.spec, self.lifted = spec, lifted
        self.dtypes = spec.states
        self.symmetric = spec.reducer.native in _SYMMETRIC
        self.neutral = spec.reducer.exact_identity and spec.reducer.identity is not None
        self.out, self._finish = tuple(out), finish

    def of_states(self) -> Algebra:
        """The same reducer over partial states."""
        return type(self)(self.spec, True, self.out, self._finish)

    @property
    def width(self) -> int:
        """Registers that an element takes while its tile is combined."""
        return len(self.dtypes)

    def regions(self) -> list[Region]:
        """Everything that may be emitted, to ask what it lacks."""
        parts = [self._merge, self._result, self._filler]
        parts += [] if self.lifted else [self._lift, self._update, self._update_right]
        return parts

    @property
    def _raw(self):
        index = () if self.spec.index is None else (self.spec.index,)
        return (*self.spec.raw, *index)

    @functools.cached_property
    def _merge(self):
        k = len(self.dtypes)

        def merge(*leaves):
            return self.spec.merge(leaves[:k], leaves[k:], elementwise)

        return Region(merge, self.dtypes * 2)

    @functools.cached_property
    def _lift(self):
        return Region(lambda *x: self.spec.lift(x, elementwise), self._raw)

    @functools.cached_property
    def _update(self):
        k = len(self.dtypes)

        def update(*values):
            return self.spec.update(values[:k], values[k:], elementwise)

        return Region(update, (*self.dtypes, *self._raw))

    @functools.cached_property
    def _update_right(self):
        k = len(self._raw)

        def update(*values):
            return self.spec.update_right(values[:k], values[k:], elementwise)

        return Region(update, (*self._raw, *self.dtypes))

    @functools.cached_property
    def _result(self):
        def result(*leaves):
            done = self.spec.finish(leaves, elementwise) if self._finish else leaves
            return [convert(v, d) for v, d in zip(done, self.out, strict=True)]

        return Region(result, self.dtypes)

    @functools.cached_property
    def _filler(self):
        return Region(lambda: self.spec.filler(()), ())

    @functools.cached_property
    def _identity(self):
        return Region(lambda: self.spec.identity(()), ())

    def identity(self) -> State:
        """The exact identity."""
        return State(tuple(self._identity()))

    def start(self) -> State:
        """What a chain without a seed begins with."""
        if self.spec.has_update:
            return self.identity()
        return self.nothing()

    def nothing(self) -> State:
        """A state that does not exist."""
        leaves = self._identity() if self.neutral else self._filler()
        return State(tuple(leaves), arith.constant(ir.IntegerType.get_signless(1), 0))

    def element(self, leaves: Sequence, exists: Any = None, track=True) -> State:
        """The state of one contribution; without `track` the identity if it is none."""
        state = State(tuple(leaves if self.lifted else self._lift(*leaves)), exists)
        if exists is None or not self.neutral:
            return state
        leaves = self.pick(exists, state.leaves, self.identity().leaves)
        return State(leaves, exists if track else None)

    def pick(self, condition: ir.Value, a: Sequence, b: Sequence) -> tuple:
        """Leafwise select."""
        return tuple(th.select(condition, x, y) for x, y in zip(a, b, strict=True))

    def choose(self, condition: ir.Value, a: State, b: State) -> State:
        """One of two states."""
        leaves = self.pick(condition, a.leaves, b.leaves)
        if a.exists is None and b.exists is None:
            return State(leaves)
        flags = [th.true() if s.exists is None else s.exists for s in (a, b)]
        return State(leaves, th.select(condition, *flags))

    def merge(self, a: State, b: State) -> State:
        """Two adjacent runs of contributions, of which either may not exist."""
        both = tuple(self._merge(*a.leaves, *b.leaves))
        if a.exists is None and b.exists is None:
            return State(both)
        if not self.neutral:
            both = both if b.exists is None else self.pick(b.exists, both, a.leaves)
            both = both if a.exists is None else self.pick(a.exists, both, b.leaves)
        if a.exists is None or b.exists is None:
            return State(both)
        return State(both, arith.ori(a.exists, b.exists))

    def step(self, state: State, leaves: Sequence, exists: Any, right: bool) -> State:
        """A fold's next state, as the reference's `advance`."""
        if self.lifted:
            one = self.element(leaves, exists)
            return self.merge(one, state) if right else self.merge(state, one)
        args = (*leaves, *state.leaves) if right else (*state.leaves, *leaves)
        new = tuple((self._update_right if right else self._update)(*args))
        known = state.exists
        if known is not None:
            new = self.pick(known, new, tuple(self._lift(*leaves)))
            known = th.true() if exists is None else arith.ori(known, exists)
            known = None if exists is None else known
        if exists is not None:
            new = self.pick(exists, new, state.leaves)
        return State(new, known)

    def settled(self, state: State) -> State:
        """The empty value where nothing was seen."""
        if state.exists is None:
            return state
        return State(self.pick(state.exists, state.leaves, tuple(self._filler())))

    def result(self, state: State, seed: State | None = None) -> list[ir.Value]:
        """What is stored: after the seed, finished and narrowed."""
        if seed is not None:
            state = self.merge(seed, state)
        return self._result(*self.settled(state).leaves)

    def tile(self, lane, rows: Sequence, track: bool) -> State:
        """The tree over (rows, lanes, places of `[leaves, exists]`).

        Without a lane, of one thread's rows alone.
        """
        states = [tree(self, [self.element(*p, track=track) for p in r]) for r in rows]
        if lane is None:
            return tree(self, states)
        return over_rows_and_lanes(self, lane, states)

    def pack(self, state: State) -> list[ir.Value]:
        """A state as a loop's carry."""
        return [*state.leaves, *(() if state.exists is None else (state.exists,))]

    def kinds(self, like: State) -> list[ir.Type]:
        """The types of a packed state."""
        flag = [] if like.exists is None else [type_of(bool)]
        return [type_of(d) for d in self.dtypes] + flag

    def tracked(self, state: State, like: State) -> State:
        """The state with a bit for its existence where `like` has one."""
        missing = like.exists is not None and state.exists is None
        return State(state.leaves, th.true()) if missing else state

    def unpack(self, values: Sequence, like: State) -> State:
        """The state that a loop carried."""
        k = len(self.dtypes)
        return State(tuple(values[:k]), None if like.exists is None else values[k])

    def moved(self, state: State, move: Callable[[ir.Value], ir.Value]) -> State:
        """A state with every leaf taken from another thread."""
        flag = None if state.exists is None else move(state.exists)
        return State(tuple(map(move, state.leaves)), flag)


def refuse_regions(algebra: Algebra) -> str | None:
    """Why a reducer's functions have no thread code, or None."""
    reasons = (lacks(r.closed) for r in algebra.regions())
    return next(filter(None, reasons), None)


def tree(algebra: Algebra, states: Sequence[State]) -> State:
    """Neighbours level by level; an odd last one moves up unchanged."""
    states = list(states)
    while len(states) > 1:
        pairs = zip(states[0:-1:2], states[1::2], strict=True)
        tail = states[len(states) // 2 * 2 :]
        states = [algebra.merge(a, b) for a, b in pairs] + tail
    return states[0]


def before_each(algebra: Algebra, states: Sequence[State], first: State) -> list[State]:
    """The prefix before each state of an aligned block, `first` before the block.

    Up: the totals of pairs. Down: what is before a pair is before its left half, and
    with the left half's total before its right half.
    """
    if len(states) == 1:
        return [first]
    pairs = zip(states[0:-1:2], states[1::2], strict=True)
    totals = [algebra.merge(a, b) for a, b in pairs] + list(
        states[len(states) // 2 * 2 :]
    )
    out: list[State] = []
    for k, prefix in enumerate(before_each(algebra, totals, first)):
        out.append(prefix)
        if 2 * k + 1 < len(states):
            out.append(algebra.merge(prefix, states[2 * k]))
    return out


def of_index(algebra: Algebra, index: ir.Value, states: Sequence[State]) -> State:
    """The state that a 32-bit number picks."""
    found = states[0]
    for k, state in enumerate(states[1:], 1):
        found = algebra.choose(th.equal(index, th.i32(k)), state, found)
    return found


def before_lane(
    algebra: Algebra, lane, state: State, bits: Sequence[int] = range(5)
) -> tuple[State, Callable[[State], State]]:
    """The tree over a warp, and the way from what is before it to what is before a lane.

    A lane's left neighbours at each level are what it was handed on the way up. Of fewer
    `bits`, minor first, the same for the lanes that differ in them alone.
    """
    handed = []
    for bit in bits:
        other = algebra.moved(state, lambda v, bit=bit: th.shuffle(v, "bfly", 1 << bit))
        right = th.bit_of(lane, bit)
        handed.append((right, other))
        state = algebra.merge(*sides(algebra, right, state, other))

    def down(prefix: State) -> State:
        for right, left in reversed(handed):
            joined = algebra.merge(prefix, left)
            prefix = algebra.choose(right, joined, algebra.tracked(prefix, joined))
        return prefix

    return state, down


def lane_prefixes(algebra: Algebra, lane, state: State) -> tuple[State, State]:
    """The total of a warp, and what is before each lane in it (nothing for the first).

    Half the merges of `before_lane`, in another grouping: Kogge and Stone (1973).
    """
    for bit in range(5):
        distance = 1 << bit
        left = algebra.moved(state, lambda v, d=distance: th.shuffle(v, "up", d))
        reached = arith.cmpi(arith.CmpIPredicate.uge, lane, th.i32(distance))
        state = algebra.choose(reached, algebra.merge(left, state), state)
    total = algebra.moved(state, lambda v: th.shuffle(v, "idx", th.WARP - 1))
    return total, algebra.moved(state, lambda v: th.shuffle(v, "up", 1))


def sides(algebra: Algebra, right: ir.Value, mine: State, other: State):
    """The two operands of a lane pair in source order."""
    if algebra.symmetric and mine.exists is None:
        return mine, other
    left = algebra.choose(right, other, mine)
    return left, algebra.choose(right, mine, other)


def over_lanes(algebra: Algebra, lane, state: State, bits: Iterable[int]) -> State:
    """The tree over lanes that differ in the given bits, minor first; every lane gets it."""
    for bit in bits:
        other = algebra.moved(state, lambda v, bit=bit: th.shuffle(v, "bfly", 1 << bit))
        left, right = sides(algebra, th.bit_of(lane, bit), state, other)
        state = algebra.merge(left, right)
    return state


def over_rows_and_lanes(algebra: Algebra, lane, states: Sequence[State]) -> State:
    """The tree over (states, lanes), lanes minor; every lane gets it.

    A plain tree over lanes would move every state at every level. Instead the lanes of a
    pair share the states: each keeps half of them and hands the other half over.
    """
    states, handed = list(states), 0
    while len(states) > 1 and handed < 5:
        half, bit = len(states) // 2, th.bit_of(lane, handed)
        low, high = states[:half], states[half:]
        kept = []
        for a, b in zip(low, high, strict=True):
            give = algebra.choose(bit, a, b)
            got = algebra.moved(give, lambda v, d=1 << handed: th.shuffle(v, "bfly", d))
            mine = algebra.choose(bit, b, a)
            kept.append(algebra.merge(*sides(algebra, bit, mine, got)))
        states, handed = kept, handed + 1
    rest = [over_lanes(algebra, lane, s, range(handed, 5)) for s in states]
    # Lane bit k tells which half was kept at step k: the major bit of the row first.
    return over_lanes(algebra, lane, tree(algebra, rest), reversed(range(handed)))
