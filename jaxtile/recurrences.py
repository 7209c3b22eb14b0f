"""Reducers whose merge composes affine maps: linear recurrences."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtile._checks import integer
from jaxtile.catalogue import ORDERED, negative_zero, one_like, zero_like
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError, message
from jaxtile.reducers import Reducer


def one_kind(op: str, a: Any, b: Any) -> None:
    """Refuse coefficients of two kinds: a float state cannot carry an integer power."""
    kinds = {_kind(dtype) for dtype in (a, b)}
    if len(kinds) > 1 or "bool" in kinds:
        raise TileTypeError(
            message(
                op,
                expected="a and b both floats, or both integers",
                got=f"a {np.dtype(a).name} and b {np.dtype(b).name}",
                way_out="Convert with jaxtile.cast, which says where it rounds.",
            )
        )


def _kind(dtype) -> str:
    if np.dtype(dtype).kind == "b":
        return "bool"
    return "float" if jnp.issubdtype(dtype, jnp.floating) else "integer"


def _affine_lift(element):
    a, b = element
    one_kind("affine", a.dtype, b.dtype)
    return a, b


def _affine_merge(first, then):
    (a, b), (c, d) = first, then
    return c * a, c * b + d


def _affine_identity(state):
    a, b = state
    return one_like(a), negative_zero(b)


def _second(state):
    return state[1]


def _affine_empty(state):
    a, b = state
    return one_like(a), zero_like(b)


affine = Reducer(
    merge=_affine_merge,
    identity=_affine_identity,
    lift=_affine_lift,
    empty=_affine_empty,
    finish=_second,
    laws=ORDERED,
    name="affine",
    native="affine",
)


def _delayed_lift(element):
    a, b = element
    return one_like(a), b, a


def _delayed_merge(first, then):
    (a, b, held), (c, d, last) = first, then
    c = c * held
    return c * a, c * b + d, last


# h_i = a_(i-1) h_(i-1) + b_i: what transposes `affine`, and what it transposes. A state
# holds the coefficient of the step to come, so that no array of them is moved by one.
delayed = Reducer(
    merge=_delayed_merge,
    lift=_delayed_lift,
    finish=_second,
    laws=ORDERED,
    name="delayed affine",
    native="delayed_affine",
)


def _dot(row, column):
    terms = [r * c for r, c in zip(row, column, strict=True)]
    return functools.reduce(lambda x, y: x + y, terms)


def _matrix_merge(first, then):
    (a, b), (c, d) = first, then
    columns = tuple(zip(*a, strict=True))
    product_ = tuple(tuple(_dot(row, col) for col in columns) for row in c)
    return product_, tuple(_dot(row, b) + e for row, e in zip(c, d, strict=True))


def _matrix_lift(k, element):
    a, b = element
    if [len(row) for row in a] != [k] * k or len(b) != k:
        raise TileShapeError(
            message(
                f"matrix_affine({k})",
                expected=f"elements (A, b) of {k} rows of {k}, and {k} components",
                got=f"rows of {[len(row) for row in a]}, and {len(b)} components",
                way_out="Pass the number of components of the state.",
            )
        )
    return element


def _matrix_identity(state):
    a, b = state
    eye = tuple(
        tuple(one_like(v) if i == j else zero_like(v) for j, v in enumerate(row))
        for i, row in enumerate(a)
    )
    return eye, tuple(map(negative_zero, b))


def matrix_affine(k: int) -> Reducer:
    """The recurrence h' = A h + b for vectors of k components.

    An element is `(A, b)`: k rows of k arrays, and k arrays. It finishes to h.

    Args:
        k: the number of components, at least 1.

    Returns:
        An associative, non-commutative `Reducer`.

    Raises:
        TileTypeError: k is no integer.
        TileValueError: k is below 1.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> one, x = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
        >>> (h,) = jt.scan((((one,),), (x,)), 0, jt.matrix_affine(1))
        >>> print(h)
        [1. 3. 6.]
    """
    way_out = "Pass the number of components of the state."
    k = integer("matrix_affine", "k, a Python integer", k, way_out)
    if k < 1:
        raise TileValueError(
            message(
                "matrix_affine",
                expected="k >= 1",
                got=f"k={k}",
                way_out=way_out,
            )
        )
    return Reducer(
        merge=_matrix_merge,
        identity=_matrix_identity,
        lift=functools.partial(_matrix_lift, k),
        finish=_second,
        laws=ORDERED,
        name=f"matrix_affine({k})",
        native="matrix_affine",
    )
