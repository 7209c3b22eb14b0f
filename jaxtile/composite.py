"""Reducers with composite states: moments, products and segments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtile.catalogue import (
    MONOID,
    scalar_like,
    zero_like,
)
from jaxtile.errors import (
    ContractError,
    TileTypeError,
    message,
)
from jaxtile.reducers import Laws, Provenance, Reducer


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations, as Welford's method carries them."""

    count: Any
    mean: Any
    m2: Any

    def variance(self, ddof: int = 0):
        """m2 / (count - ddof): never negative, NaN where nothing is left to divide by.

        Args:
            ddof: the degrees of freedom to subtract.

        Returns:
            The variance, in the state's dtype.

        Example:
            >>> import jax.numpy as jnp, jaxtile as jt
            >>> m = jt.reduce(jnp.array([1.0, 2.0, 4.0]), 0, jt.welford)
            >>> print(f"{m.variance(ddof=1):.4f}")
            2.3333
        """
        left = self.count - ddof
        return jnp.where(left > 0, self.m2 / jnp.where(left > 0, left, 1), jnp.nan)


class WelfordState(NamedTuple):
    """The state behind `Moments`: the mean in two parts, high and low.

    A mean of large values rounded to one float is off by as much as small deviations
    from it; the low part keeps what the rounding of each merge left over.
    """

    count: Any
    mean: Any
    m2: Any
    low: Any


def _welford_lift(x):
    return WelfordState(jnp.ones_like(x), x, jnp.zeros_like(x), jnp.zeros_like(x))


def _two_sum(a, b):
    """a + b and the exact error of the sum (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _welford_merge(a, b):
    # Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm (1979).
    count = a.count + b.count
    some = (a.count > 0) & (b.count > 0)
    share = jnp.where(some, b.count, 0) / jnp.where(some, count, 1)
    delta = jnp.where(some, (b.mean - a.mean) + (b.low - a.low), 0)
    high, left_over = _two_sum(a.mean, delta * share)
    mean, low = _two_sum(high, a.low + left_over)
    # An infinite or NaN mean has no low part; inf - inf would make one.
    low = jnp.where(jnp.isfinite(mean), low, 0)
    m2 = (a.m2 + b.m2) + (delta * delta) * (a.count * share)
    no_b, no_a = b.count == 0, a.count == 0

    def pick(x, y, both):
        return jnp.where(no_b, x, jnp.where(no_a, y, both))

    return WelfordState(
        count,
        pick(a.mean, b.mean, mean),
        pick(a.m2, b.m2, m2),
        pick(a.low, b.low, low),
    )


def _welford_finish(state):
    return Moments(state.count, state.mean, state.m2)


def _welford_resume(result):
    count, mean, m2 = result
    return WelfordState(count, mean, m2, jax.tree.map(jnp.zeros_like, mean))


def _each_zero(state):
    return jax.tree.map(zero_like, state)


welford = Reducer(
    merge=_welford_merge,
    identity=_each_zero,
    lift=_welford_lift,
    finish=_welford_finish,
    resume=_welford_resume,
    laws=MONOID,
    name="welford",
    exact_identity=True,
)


def _identity_of(reducer, state):
    return _value_of(reducer.identity, state)


def _empty_of(reducer, state):
    return _value_of(
        reducer.identity if reducer.empty is None else reducer.empty, state
    )


def _value_of(value, state):
    if callable(value):
        return value(state)
    return jax.tree.map(lambda v, s: scalar_like(v, s), value, state)


def _tangent_of(reducer):
    return reducer.tangent_merge or reducer.merge


def _each(functions, *states):
    """Each function on its own component of the states."""
    rows = zip(functions, *states, strict=True)
    return tuple(fn(*components) for fn, *components in rows)


def _forbid_index(op: str, *reducers: Reducer) -> None:
    for r in reducers:
        if not isinstance(r, Reducer):
            raise TileTypeError(
                message(
                    op,
                    expected="reducers",
                    got=repr(r),
                    way_out="Pass jaxtile.add, jaxtile.maximum, ...",
                )
            )
        if r.indexed:
            raise ContractError(
                message(
                    op,
                    expected="a reducer that does not take the source index",
                    got=repr(r),
                    way_out="Reduce with it in a call of its own, or carry the index in "
                    "the element.",
                )
            )


def _bound(fn, reducers):
    return tuple(functools.partial(fn, r) for r in reducers)


def product(*reducers: Reducer) -> Reducer:
    """Independent reducers over a tuple of elements, in one pass.

    Args:
        *reducers: one reducer for each component of the element tuple.

    Returns:
        A `Reducer` whose laws are those that every component has.

    Raises:
        ContractError: a component takes the source index (argmax, argmin).
        TileTypeError: a component is no `Reducer`, or there is none.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([3, 1, 2])
        >>> low, high = jt.reduce((x, x), 0, jt.product(jt.minimum, jt.maximum))
        >>> print(low, high)
        1 3
    """
    _forbid_index("product", *reducers)
    if not reducers:
        raise TileTypeError(
            message(
                "product",
                expected="at least one reducer",
                got="none",
                way_out="Pass one for each component of the element tuple.",
            )
        )

    def lift(element):
        pairs = zip(reducers, element, strict=True)
        return tuple(r.lift(e) if r.lift else e for r, e in pairs)

    def finish(state):
        pairs = zip(reducers, state, strict=True)
        return tuple(r.finish(s) if r.finish else s for r, s in pairs)

    identity = functools.partial(_each, _bound(_identity_of, reducers))
    empty = functools.partial(_each, _bound(_empty_of, reducers))
    return Reducer(
        merge=functools.partial(_each, tuple(r.merge for r in reducers)),
        identity=identity if all(r.identity is not None for r in reducers) else None,
        lift=lift,
        finish=finish,
        laws=Laws(
            all(r.laws.associative for r in reducers),
            all(r.laws.commutative for r in reducers),
            all(r.laws.identity for r in reducers),
            Provenance.DERIVED,
        ),
        name=f"product({', '.join(map(repr, reducers))})",
        exact_identity=all(r.exact_identity for r in reducers),
        empty="error" if any(r.empty == "error" for r in reducers) else empty,
        tangent_merge=functools.partial(_each, tuple(map(_tangent_of, reducers))),
    )


def _require_head(head) -> None:
    if head.dtype != bool:
        raise TileTypeError(
            message(
                "segmented",
                expected="elements (head, value) with a bool head",
                got=f"a head of {head.dtype}",
                way_out="The head flag comes first; pass head != 0.",
            )
        )


def segmented(reducer: Reducer) -> Reducer:
    """The reducer restarted wherever a head flag is set.

    An element is `(head, value)` with a bool head; the state carries whether any head was
    seen.

    Args:
        reducer: the reducer of one segment.

    Returns:
        An associative, non-commutative `Reducer` that finishes to the segment's result.

    Raises:
        ContractError: the reducer takes the source index (argmax, argmin).
        TileTypeError: reducer is no `Reducer`; when used, a head that is not bool.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> head = jnp.array([True, False, True, False])
        >>> print(jt.scan((head, jnp.arange(4)), 0, jt.segmented(jt.add)))
        [0 1 2 5]
    """
    _forbid_index("segmented", reducer)

    def merge(a, b, inner=reducer.merge):
        (a_head, a_state), (b_head, b_state) = a, b
        joined = inner(a_state, b_state)
        state = jax.tree.map(lambda s, j: jnp.where(b_head, s, j), b_state, joined)
        return jnp.logical_or(a_head, b_head), state

    def empty(state):
        head, inner = state
        return scalar_like(False, head), _empty_of(reducer, inner)

    def lift(element):
        head, value = element
        _require_head(head)
        return head, reducer.lift(value) if reducer.lift else value

    def identity(state):
        head, inner = state
        return scalar_like(False, head), _identity_of(reducer, inner)

    def finish(state):
        return reducer.finish(state[1]) if reducer.finish else state[1]

    return Reducer(
        merge=merge,
        identity=identity if reducer.identity is not None else None,
        lift=lift,
        finish=finish,
        laws=Laws(
            reducer.laws.associative, False, reducer.laws.identity, Provenance.DERIVED
        ),
        name=f"segmented({reducer!r})",
        exact_identity=reducer.exact_identity,
        empty="error" if reducer.empty == "error" else empty,
        tangent_merge=functools.partial(merge, inner=_tangent_of(reducer)),
    )
