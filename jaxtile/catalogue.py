"""The catalogue of reducers, ready to pass to `reduce` and `scan`.

Float add's identity is -0.0: the sum of [-0.0] is -0.0 and a masked lane never changes
a sign; the empty sum is +0.0. `maximum` and `minimum` propagate NaN (IEEE 754-2019);
`maximum_number` and `minimum_number` skip it. `logaddexp` of nothing is -inf, and its
derivative at -inf is 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtile.errors import ContractError, TileValueError, message
from jaxtile.reducers import Laws, Provenance, Reducer

_MONOID = Laws(True, True, True, Provenance.BUILTIN)
_ORDERED = Laws(True, False, True, Provenance.BUILTIN)


def _scalar(value, like):
    return jnp.asarray(value, like.dtype)


def _is_float(like) -> bool:
    return jnp.issubdtype(like.dtype, jnp.floating)


def _lowest(like):
    if _is_float(like):
        return _scalar(-jnp.inf, like)
    return _scalar(False if like.dtype == bool else jnp.iinfo(like.dtype).min, like)


def _highest(like):
    if _is_float(like):
        return _scalar(jnp.inf, like)
    return _scalar(True if like.dtype == bool else jnp.iinfo(like.dtype).max, like)


def _zero_add(like):
    return _scalar(-0.0 if _is_float(like) else 0, like)


def _zero(like):
    return _scalar(0, like)


def _one(like):
    return _scalar(1, like)


def _count_bool(x):
    return x.astype(jnp.int32) if x.dtype == bool else x


add = Reducer(
    merge=lax.add,
    identity=_zero_add,
    lift=_count_bool,
    laws=_MONOID,
    name="add",
    exact_identity=True,
    empty=_zero,
    native="add",
)
multiply = Reducer(
    merge=lax.mul,
    identity=_one,
    lift=_count_bool,
    laws=_MONOID,
    name="multiply",
    exact_identity=True,
    native="mul",
)


def _isnan(x):
    return x != x


def _skip_nan(merge, a, b):
    if not _is_float(a):
        return merge(a, b)
    return jnp.where(_isnan(a), b, jnp.where(_isnan(b), a, merge(a, b)))


def _max_number(a, b):
    return _skip_nan(lax.max, a, b)


def _min_number(a, b):
    return _skip_nan(lax.min, a, b)


def _nan_or_lowest(like):
    return _scalar(jnp.nan, like) if _is_float(like) else _lowest(like)


def _nan_or_highest(like):
    return _scalar(jnp.nan, like) if _is_float(like) else _highest(like)


def _first_wins(sign, nan_wins, a, b):
    """The selection's derivative goes to the earlier side on ties, in every order."""
    if not _is_float(a):
        return a
    ahead = (a >= b) if sign > 0 else (a <= b)
    a_nan, b_nan = _isnan(a), _isnan(b)
    keep = (a_nan | (ahead & ~b_nan)) if nan_wins else (b_nan | (ahead & ~a_nan))
    return jnp.where(keep, a, b)


def _arg_merge(sign, ties, nan, a, b):
    (av, ai), (bv, bi) = a, b
    better = (av > bv) if sign > 0 else (av < bv)
    same = av == bv
    if _is_float(av):
        a_nan, b_nan = _isnan(av), _isnan(bv)
        better |= (a_nan & ~b_nan) if nan == "propagate" else (b_nan & ~a_nan)
        same |= a_nan & b_nan
    keep = better | (same & ((ai < bi) if ties == "first" else (ai > bi)))
    return jnp.where(keep, av, bv), jnp.where(keep, ai, bi)


def _with_index(x, index):
    return x, index


def _arg(sign, ties="first", nan="propagate"):
    if ties not in ("first", "last") or nan not in ("propagate", "ignore"):
        raise TileValueError(
            message(
                "argmax" if sign > 0 else "argmin",
                expected='ties="first"|"last", nan="propagate"|"ignore"',
                got=f"ties={ties!r}, nan={nan!r}",
                way_out="Pick one of these.",
            )
        )
    name = "argmax" if sign > 0 else "argmin"
    plain = ties == "first" and nan == "propagate"
    return Reducer(
        merge=functools.partial(_arg_merge, sign, ties, nan),
        lift=_with_index,
        laws=Laws(True, True, False, Provenance.BUILTIN),
        name=name if plain else f"{name}(ties={ties!r}, nan={nan!r})",
        indexed=True,
        empty="error",
        native=name if plain else None,
        variants=functools.partial(_arg, sign),
    )


argmax = _arg(+1)
argmin = _arg(-1)


def _extremum(name, merge, identity, sign, nan, native):
    return Reducer(
        merge=merge,
        identity=identity,
        laws=_MONOID,
        name=name,
        exact_identity=True,
        empty="error",
        tangent_merge=functools.partial(_first_wins, sign, nan == "propagate"),
        winner=_arg(sign, nan=nan),
        native=native,
    )


maximum = _extremum("maximum", lax.max, _lowest, +1, "propagate", "max")
minimum = _extremum("minimum", lax.min, _highest, -1, "propagate", "min")
maximum_number = _extremum(
    "maximum_number", _max_number, _nan_or_lowest, +1, "ignore", None
)
minimum_number = _extremum(
    "minimum_number", _min_number, _nan_or_highest, -1, "ignore", None
)


def _truth(x):
    return x != 0


def _bits(name, merge, identity, lift=None):
    return Reducer(
        merge=merge,
        identity=identity,
        lift=lift,
        laws=_MONOID,
        name=name,
        exact_identity=True,
    )


def _all_ones(like):
    return _scalar(True, like) if like.dtype == bool else ~_zero(like)


logical_and = _bits("logical_and", jnp.logical_and, _one, _truth)
logical_or = _bits("logical_or", jnp.logical_or, _zero, _truth)
bitwise_and = _bits("bitwise_and", jnp.bitwise_and, _all_ones)
bitwise_or = _bits("bitwise_or", jnp.bitwise_or, _zero)
bitwise_xor = _bits("bitwise_xor", jnp.bitwise_xor, _zero)


@jax.custom_jvp
def _logaddexp(a, b):
    high = jnp.where(a > b, a, b)
    # inf - inf would be NaN where both are the same infinity.
    gap = jnp.where(a == b, jnp.zeros_like(a), -jnp.abs(a - b))
    both = high + jnp.log1p(jnp.exp(gap))
    # -inf is neutral, to the bit: -0.0 must not become +0.0.
    both = jnp.where(a == -jnp.inf, b, jnp.where(b == -jnp.inf, a, both))
    return jnp.where(_isnan(a) | _isnan(b), a + b, both)


def softmax_weight(x, total):
    """exp(x - total), 0 where x is -inf, 1 where both are the same +inf."""
    same = x == total
    gap = jnp.where(same | (x == -jnp.inf), jnp.zeros_like(x), x - total)
    weight = jnp.where(same, jnp.ones_like(x), jnp.exp(gap))
    return jnp.where(x == -jnp.inf, jnp.zeros_like(x), weight)


@_logaddexp.defjvp
def _logaddexp_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    out = _logaddexp(a, b)
    return out, softmax_weight(a, out) * da + softmax_weight(b, out) * db


logaddexp = Reducer(
    merge=_logaddexp,
    identity=_lowest,
    laws=_MONOID,
    name="logaddexp",
    exact_identity=True,
    weights=softmax_weight,
    native="logaddexp",
)


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


def _welford_lift(x):
    return Moments(jnp.ones_like(x), x, jnp.zeros_like(x))


def _welford_merge(a, b):
    # Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm (1979).
    count = a.count + b.count
    some = (a.count > 0) & (b.count > 0)
    share = jnp.where(some, b.count, 0) / jnp.where(some, count, 1)
    delta = jnp.where(some, b.mean - a.mean, 0)
    mean = a.mean + delta * share
    m2 = (a.m2 + b.m2) + (delta * delta) * (a.count * share)
    left, right = b.count == 0, a.count == 0

    def pick(x, y, both):
        return jnp.where(left, x, jnp.where(right, y, both))

    return Moments(count, pick(a.mean, b.mean, mean), pick(a.m2, b.m2, m2))


def _each_zero(state):
    return jax.tree.map(_zero, state)


welford = Reducer(
    merge=_welford_merge,
    identity=_each_zero,
    lift=_welford_lift,
    laws=_MONOID,
    name="welford",
    exact_identity=True,
)


def _affine_merge(first, then):
    (a, b), (c, d) = first, then
    return c * a, c * b + d


def _affine_identity(state):
    a, b = state
    return _one(a), _zero_add(b)


def _second(state):
    return state[1]


affine = Reducer(
    merge=_affine_merge,
    identity=_affine_identity,
    finish=_second,
    laws=_ORDERED,
    name="affine",
    native="affine",
)


def _dot(row, column):
    terms = [r * c for r, c in zip(row, column, strict=True)]
    return functools.reduce(lambda x, y: x + y, terms)


def _matrix_merge(first, then):
    (a, b), (c, d) = first, then
    columns = tuple(zip(*a, strict=True))
    product_ = tuple(tuple(_dot(row, col) for col in columns) for row in c)
    return product_, tuple(_dot(row, b) + e for row, e in zip(c, d, strict=True))


def _matrix_identity(state):
    a, b = state
    eye = tuple(
        tuple(_one(v) if i == j else _zero(v) for j, v in enumerate(row))
        for i, row in enumerate(a)
    )
    return eye, tuple(map(_zero_add, b))


def matrix_affine(k: int) -> Reducer:
    """The recurrence h' = A h + b for vectors of k components.

    An element is `(A, b)`: k rows of k arrays, and k arrays. It finishes to h.

    Args:
        k: the number of components, at least 1.

    Returns:
        An associative, non-commutative `Reducer`.

    Raises:
        TileValueError: k is below 1.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> one, x = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
        >>> (h,) = jt.scan((((one,),), (x,)), 0, jt.matrix_affine(1))
        >>> print(h)
        [1. 3. 6.]
    """
    if k < 1:
        raise TileValueError(
            message(
                "matrix_affine",
                expected="k >= 1",
                got=f"k={k}",
                way_out="Pass the number of components of the state.",
            )
        )
    return Reducer(
        merge=_matrix_merge,
        identity=_matrix_identity,
        finish=_second,
        laws=_ORDERED,
        name=f"matrix_affine({k})",
        native="matrix_affine",
    )


def _left(a, b):
    return a


def _right(a, b):
    return b


_SELECT = Laws(True, False, False, Provenance.BUILTIN)
first = Reducer(merge=_left, laws=_SELECT, name="first", empty="error")
last = Reducer(merge=_right, laws=_SELECT, name="last", empty="error")


def _identity_of(reducer, state):
    if callable(reducer.identity):
        return reducer.identity(state)
    return jax.tree.map(lambda v, s: _scalar(v, s), reducer.identity, state)


def product(*reducers: Reducer) -> Reducer:
    """Independent reducers over a tuple of elements, in one pass.

    Args:
        *reducers: one reducer for each component of the element tuple.

    Returns:
        A `Reducer` whose laws are those that every component has.

    Raises:
        ContractError: a component takes the source index (argmax, argmin).

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([3, 1, 2])
        >>> low, high = jt.reduce((x, x), 0, jt.product(jt.minimum, jt.maximum))
        >>> print(low, high)
        1 3
    """
    for r in reducers:
        if r.indexed:
            raise ContractError(
                message(
                    "product",
                    expected="components that do not take the source index",
                    got=repr(r),
                    way_out="Reduce with it in a call of its own.",
                )
            )

    def merge(a, b):
        return tuple(r.merge(x, y) for r, x, y in zip(reducers, a, b, strict=True))

    def lift(element):
        pairs = zip(reducers, element, strict=True)
        return tuple(r.lift(e) if r.lift else e for r, e in pairs)

    def identity(state):
        return tuple(_identity_of(r, s) for r, s in zip(reducers, state, strict=True))

    def finish(state):
        pairs = zip(reducers, state, strict=True)
        return tuple(r.finish(s) if r.finish else s for r, s in pairs)

    return Reducer(
        merge=merge,
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
        empty="error" if any(r.empty == "error" for r in reducers) else None,
    )


def segmented(reducer: Reducer) -> Reducer:
    """The reducer restarted wherever a head flag is set.

    An element is `(head, value)`; the state carries whether any head was seen.

    Args:
        reducer: the reducer of one segment.

    Returns:
        An associative, non-commutative `Reducer` that finishes to the segment's result.

    Raises:
        ContractError: the reducer takes the source index (argmax, argmin).

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> head = jnp.array([True, False, True, False])
        >>> print(jt.scan((head, jnp.arange(4)), 0, jt.segmented(jt.add)))
        [0 1 2 5]
    """
    if reducer.indexed:
        raise ContractError(
            message(
                "segmented",
                expected="a reducer that does not take the source index",
                got=repr(reducer),
                way_out="Carry the index in the element.",
            )
        )

    def merge(a, b):
        (a_head, a_state), (b_head, b_state) = a, b
        joined = reducer.merge(a_state, b_state)
        state = jax.tree.map(lambda s, j: jnp.where(b_head, s, j), b_state, joined)
        return jnp.logical_or(a_head, b_head), state

    def lift(element):
        head, value = element
        return head != 0, reducer.lift(value) if reducer.lift else value

    def identity(state):
        head, inner = state
        return _scalar(False, head), _identity_of(reducer, inner)

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
        empty=reducer.empty if reducer.empty == "error" else None,
    )
