"""Oracles in plain NumPy and Python loops; nothing here comes from the package.

A state is a tuple of NumPy scalars, so that every operation rounds to its dtype. None
stands for the state of nothing: the identity flag of a skipped contribution.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np


class Op(NamedTuple):
    """A combine function on tuples of scalars, and how an element enters it."""

    merge: Callable
    lift: Callable = lambda element, index: element
    empty: tuple | None = None


def join(op: Op, a, b):
    """merge(a, b) where either side may be nothing."""
    if a is None or b is None:
        return b if a is None else a
    with np.errstate(all="ignore"):
        return op.merge(a, b)


def _states(op: Op, elements, mask, begin=0):
    flags = [True] * len(elements) if mask is None else mask
    with np.errstate(all="ignore"):
        return [
            op.lift(e, begin + i) if there else None
            for i, (e, there) in enumerate(zip(elements, flags, strict=True))
        ]


def _left(op, states, seed):
    for state in states:
        seed = join(op, seed, state)
    return seed


def _right(op, states, seed):
    for state in reversed(states):
        seed = join(op, state, seed)
    return seed


def _tree(op, states):
    """Neighbours level by level: the left part is the largest power of two below n."""
    n = len(states)
    if n == 0:
        return None
    if n == 1:
        return states[0]
    half = 1 << ((n - 1).bit_length() - 1)
    return join(op, _tree(op, states[:half]), _tree(op, states[half:]))


def fold_left(op: Op, elements, seed=None, mask=None):
    """op(op(op(z, x0), x1), x2)."""
    return _left(op, _states(op, elements, mask), seed)


def fold_right(op: Op, elements, seed=None, mask=None):
    """op(x0, op(x1, op(x2, z)))."""
    return _right(op, _states(op, elements, mask), seed)


def fixed_tree(op: Op, elements, seed=None, mask=None):
    """merge(seed, tree)."""
    return join(op, seed, _tree(op, _states(op, elements, mask)))


REDUCTIONS = {
    "fold_left": fold_left,
    "fold_right": fold_right,
    "fixed_tree": fixed_tree,
}


def _blocks(states):
    """The maximal aligned power-of-two blocks that partition a prefix."""
    place, blocks = 0, []
    while place < len(states):
        size = 1 << ((len(states) - place).bit_length() - 1)
        blocks.append(states[place : place + size])
        place += size
    return blocks


def _fixed_prefix(op, states, seed):
    return _left(op, [_tree(op, block) for block in _blocks(states)], seed)


_PREFIX = {"fold_left": _left, "fold_right": _right, "fixed_tree": _fixed_prefix}


def _prefixes(op, states, seed, policy, exclusive):
    ends = range(len(states)) if exclusive else range(1, len(states) + 1)
    return [_PREFIX[policy](op, states[:end], seed) for end in ends]


def scan(
    op, elements, policy, seed=None, mask=None, direction="prefix", exclusive=False
):
    """Every prefix as a computation of its own."""
    states = _states(op, elements, mask)
    if direction == "prefix":
        return _prefixes(op, states, seed, policy, exclusive)
    states.reverse()
    if direction == "suffix":
        # The mirror image: sides swapped, and with them the two folds.
        op = op._replace(merge=lambda a, b, merge=op.merge: merge(b, a))
        mirror = {"fold_left": "fold_right", "fold_right": "fold_left"}
        policy = mirror.get(policy, policy)
    return _prefixes(op, states, seed, policy, exclusive)[::-1]


def final(op, elements, policy, seed=None, mask=None, direction="prefix"):
    """The state over everything that a scan ends with."""
    everything = scan(op, elements, policy, seed, mask, direction)
    return everything[-1 if direction == "prefix" else 0] if everything else seed


def exact_sum(values) -> Fraction:
    """The sum of finite floats without rounding."""
    return sum((Fraction(float(v)) for v in values), Fraction(0))


def exact_prefixes(values) -> list[float]:
    """Correctly rounded float64 prefix sums."""
    return [math.fsum(values[: i + 1]) for i in range(len(values))]


def _leafwise(fn):
    return lambda a, b: tuple(fn(x, y) for x, y in zip(a, b, strict=True))


def _extreme(sign, skip):
    def pick(x, y):
        if x != x or y != y:
            wins_x = (x == x) if skip else (x != x)
            return x if wins_x else y
        if x == y:  # IEEE 754-2019 maximum: +0 above -0
            return x if (math.copysign(1, x) > math.copysign(1, y)) == (sign > 0) else y
        return x if (x > y) == (sign > 0) else y

    return _leafwise(pick)


def _arg(sign, ties, nan):
    def merge(a, b):
        (av, ai), (bv, bi) = a, b
        a_nan, b_nan = av != av, bv != bv
        if a_nan != b_nan:
            a_wins = a_nan if nan == "propagate" else b_nan
        elif a_nan or av == bv:
            a_wins = (ai < bi) if ties == "first" else (ai > bi)
        else:
            a_wins = (av > bv) if sign > 0 else (av < bv)
        return a if a_wins else b

    return Op(merge, lambda element, index: (*element, np.int32(index)))


def _affine(first, then):
    (a, b), (c, d) = first, then
    return c * a, c * b + d


def _welford_lift(element, index):
    (x,) = element
    return type(x)(1), x, type(x)(0), type(x)(0)


def _knuth(a, b):
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _welford(left, right):
    """Chan, Golub and LeVeque's pairwise update with the mean in two parts."""
    (na, ma, sa, la), (nb, mb, sb, lb) = left, right
    n = na + nb
    share = nb / n
    delta = (mb - ma) + (lb - la)
    high, error = _knuth(ma, delta * share)
    mean, low = _knuth(high, la + error)
    low = low if np.isfinite(mean) else type(low)(0)
    return n, mean, (sa + sb) + (delta * delta) * (na * share), low


ADD = Op(_leafwise(lambda x, y: x + y))
MULTIPLY = Op(_leafwise(lambda x, y: x * y))
MAXIMUM = Op(_extreme(+1, skip=False))
MINIMUM = Op(_extreme(-1, skip=False))
MAXIMUM_NUMBER = Op(_extreme(+1, skip=True))
MINIMUM_NUMBER = Op(_extreme(-1, skip=True))
XOR = Op(_leafwise(lambda x, y: x ^ y))
AFFINE = Op(_affine)
WELFORD = Op(_welford, _welford_lift)
LOGADDEXP = Op(_leafwise(np.logaddexp))
SUBTRACT = Op(_leafwise(lambda x, y: x - y))


def argmax(ties="first", nan="propagate") -> Op:
    """The winner's value and index."""
    return _arg(+1, ties, nan)


def argmin(ties="first", nan="propagate") -> Op:
    """The winner's value and index."""
    return _arg(-1, ties, nan)


def rows(arrays) -> list:
    """Equally shaped arrays as a list of fibres, each a list of element tuples."""
    flat = [np.asarray(v).reshape(-1, np.shape(v)[-1]) for v in arrays]
    return [
        [tuple(v[r, i] for v in flat) for i in range(flat[0].shape[1])]
        for r in range(flat[0].shape[0])
    ]


def same_bits(got: Any, want: Any) -> None:
    """Assert equal dtype, shape and bits; NaNs are one class, zeros are two."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{got.shape} is not {want.shape}"
    if got.dtype == bool or got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want)
        return
    both_nan = (got != got) & (want != want)
    word = f"u{got.dtype.itemsize}"
    differs = (got.view(word) != want.view(word)) & ~both_nan
    places = np.argwhere(differs)
    assert not places.size, (
        f"{len(places)} of {got.size} differ, first at {tuple(places[0])}: "
        f"got {got[tuple(places[0])]!r}, want {want[tuple(places[0])]!r}"
    )
