"""The catalogue of reducers, ready to pass to `reduce` and `scan`.

* `add`, `multiply`; `bitwise_and`, `bitwise_or`, `bitwise_xor`;
* `maximum`, `minimum`, `maximum_number`, `minimum_number`;
* `logical_and`, `logical_or`, which count nonzero as true;
* `argmax`, `argmin`: value and index; `argmax(ties="last", nan="ignore")` is a variant;
* `first`, `last`; `logaddexp`; `welford`: count, mean and squared deviations;
* `affine` and `matrix_affine(k)`: recurrences; elements (a, b), the result is h;
* `product(r1, r2, ...)`: independent reducers; `segmented(r)`: restarts at head flags.

Float add's identity is -0.0: the sum of [-0.0] is -0.0 and a masked lane never changes
a sign; the empty sum is +0.0. `maximum` and `minimum` propagate NaN (IEEE 754-2019);
`maximum_number` and `minimum_number` skip it. `logaddexp` of nothing is -inf, and its
derivative at -inf is 0. `argmax` and `argmin` of a fibre whose elements are all masked
give value 0 and index 0, since no element was chosen; an empty axis is an error.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxtile.errors import TileValueError, message
from jaxtile.reducers import Laws, Provenance, Reducer

MONOID = Laws(True, True, True, Provenance.BUILTIN)
ORDERED = Laws(True, False, True, Provenance.BUILTIN)


def scalar_like(value, like):
    return jnp.asarray(value, like.dtype)


def _is_float(like) -> bool:
    return jnp.issubdtype(like.dtype, jnp.floating)


def _lowest(like):
    if _is_float(like):
        return scalar_like(-jnp.inf, like)
    return scalar_like(False if like.dtype == bool else jnp.iinfo(like.dtype).min, like)


def _highest(like):
    if _is_float(like):
        return scalar_like(jnp.inf, like)
    return scalar_like(True if like.dtype == bool else jnp.iinfo(like.dtype).max, like)


def negative_zero(like):
    return scalar_like(-0.0 if _is_float(like) else 0, like)


def zero_like(like):
    return scalar_like(0, like)


def one_like(like):
    return scalar_like(1, like)


def _count_bool(x):
    return x.astype(jnp.int32) if x.dtype == bool else x


add = Reducer(
    merge=lax.add,
    identity=negative_zero,
    lift=_count_bool,
    laws=MONOID,
    name="add",
    exact_identity=True,
    empty=zero_like,
    native="add",
)
multiply = Reducer(
    merge=lax.mul,
    identity=one_like,
    lift=_count_bool,
    laws=MONOID,
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
    return scalar_like(jnp.nan, like) if _is_float(like) else _lowest(like)


def _nan_or_highest(like):
    return scalar_like(jnp.nan, like) if _is_float(like) else _highest(like)


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
        laws=MONOID,
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
        laws=MONOID,
        name=name,
        exact_identity=True,
    )


def _all_ones(like):
    return scalar_like(True, like) if like.dtype == bool else ~zero_like(like)


logical_and = _bits("logical_and", jnp.logical_and, one_like, _truth)
logical_or = _bits("logical_or", jnp.logical_or, zero_like, _truth)
bitwise_and = _bits("bitwise_and", jnp.bitwise_and, _all_ones)
bitwise_or = _bits("bitwise_or", jnp.bitwise_or, zero_like)
bitwise_xor = _bits("bitwise_xor", jnp.bitwise_xor, zero_like)


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
    laws=MONOID,
    name="logaddexp",
    exact_identity=True,
    weights=softmax_weight,
    native="logaddexp",
)


def _left(a, b):
    return a


def _right(a, b):
    return b


_SELECT = Laws(True, False, False, Provenance.BUILTIN)
first = Reducer(merge=_left, laws=_SELECT, name="first", empty="error")
last = Reducer(merge=_right, laws=_SELECT, name="last", empty="error")
