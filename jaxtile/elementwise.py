"""Elementwise functions of arrays and tiles: `map`, `ite`, and the lifted functions.

Each is one op: its result is rounded once to its dtype, in every fusion. Where jax
writes a function as several ops (log2, gelu, silu, softplus), float16 and bfloat16
values pass through float32, so that only the result is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxtile._checks import function, operand
from jaxtile._lifted import FLOATS, ORDERED, inexact, lift_operands, lifted, once
from jaxtile.errors import TileTypeError, message
from jaxtile.tile import lift


def map(fn: Callable[..., Any], *values: Any) -> Any:
    """A function of scalars applied elementwise, as one op.

        y[q] = fn(x0[q], ..., xn[q])

    Every op inside fn is done as written and rounds its result, in every fusion: no
    compiler makes a * b + c one fused step, a / b / c one quotient or (a + c) - c an a.
    Off the CPU a constant zero that is added may leave -0.0 as it is.
    Derivatives of any order come from fn's forward derivative.

    Args:
        fn: a pure function of scalars, or of pytrees of scalars, that returns a scalar
            or a pytree of scalars. It may close over scalars, traced ones too.
        *values: arrays, tiles or Python scalars of arithmetic formats, or pytrees of
            them. Arrays broadcast by NumPy's rules, tiles by their dims. A Python
            scalar is a constant of the compiled op: pass an array for a changing one.

    Returns:
        The pytree that fn returns, of arrays, or of tiles where an operand is one.

    Raises:
        TileTypeError: an operand is none of these, has a storage format, or overflows
            in jax's 32 bits while jax_enable_x64 is off; fn is not a function that jax
            can trace on scalars, has side effects, or returns nothing.
        TileShapeError: the shapes or dims do not broadcast, fn returns arrays, or closes
            over a traced array that is not a scalar.
        NoDerivativeError: on differentiation, where fn has only a `jax.custom_vjp`.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.map(lambda x, y: x * y + 1, jnp.array([1.0, 2.0]), 3.0))
        [4. 7.]
    """
    way_out = "Write jaxtile.map(fn, x, y)."
    function("map", "a function as the first argument", fn, way_out)
    return lift("map", fn, *values)


def ite(condition: Any, a: Any, b: Any) -> Any:
    """If-then-else: a selection between two values that are both computed.

        y[q] = a[q] if condition[q] else b[q]

    It is not lazy and guards nothing. The cotangent goes to the selected side only.

    Args:
        condition: a bool array, tile or scalar.
        a: an array, tile or Python scalar of an arithmetic format.
        b: likewise; the result has the promoted dtype of a and b.

    Returns:
        An array, or a `Tile` where an operand is one.

    Raises:
        TileTypeError: condition is not bool, an operand is none of these, or has a
            storage format.
        TileShapeError: the shapes or dims do not broadcast.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([-1.0, 2.0])
        >>> print(jt.ite(x > 0, x, 0.0))
        [0. 2.]
    """
    condition = operand("ite", condition)
    kind = condition.dtype if hasattr(condition, "dtype") else type(condition)
    if jnp.dtype(kind).kind != "b":
        raise TileTypeError(
            message(
                "ite",
                expected="a bool condition",
                got=f"{getattr(kind, '__name__', kind)}",
                way_out="Compare with zero: ite(x != 0, a, b).",
            )
        )
    return lift_operands("ite", _select, condition, a, b)


def _select(condition, a, b):
    return jnp.where(condition, a, b)


@lifted(FLOATS)
def exp(x):
    """The exponential e^x.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.exp(0.0))
        1.0
    """
    return jnp.exp(x)


@lifted(FLOATS)
def exp2(x):
    """The exponential 2^x.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.exp2(3.0))
        8.0
    """
    return jnp.exp2(x)


@lifted(FLOATS)
def expm1(x):
    """e^x - 1, accurate near 0.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.expm1(0.0))
        0.0
    """
    return jnp.expm1(x)


@lifted(FLOATS)
def log(x):
    """The natural logarithm: -inf at 0, NaN below.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.log(1.0))
        0.0
    """
    return jnp.log(x)


@lifted(FLOATS)
def log1p(x):
    """log(1 + x), accurate near 0.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.log1p(0.0))
        0.0
    """
    return jnp.log1p(x)


@lifted(FLOATS)
def log2(x):
    """The logarithm to base 2: -inf at 0, NaN below.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.log2(8.0))
        3.0
    """
    return once(jnp.log2, x)


@lifted(FLOATS)
def sqrt(x):
    """The square root: NaN below 0.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.sqrt(9.0))
        3.0
    """
    return jnp.sqrt(x)


@lifted(FLOATS)
def rsqrt(x):
    """The reciprocal square root 1 / sqrt(x): inf at 0, NaN below.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.rsqrt(4.0))
        0.5
    """
    return lax.rsqrt(inexact(x))


@lifted(FLOATS)
def sin(x):
    """The sine of x in radians.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.sin(0.0))
        0.0
    """
    return jnp.sin(x)


@lifted(FLOATS)
def cos(x):
    """The cosine of x in radians.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.cos(0.0))
        1.0
    """
    return jnp.cos(x)


@lifted(FLOATS)
def tan(x):
    """The tangent of x in radians.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.tan(0.0))
        0.0
    """
    return jnp.tan(x)


@lifted(FLOATS)
def tanh(x):
    """The hyperbolic tangent.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.tanh(0.0))
        0.0
    """
    return jnp.tanh(x)


@lifted(FLOATS)
def erf(x):
    """The error function 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.erf(0.0))
        0.0
    """
    return lax.erf(inexact(x))


@lifted(ORDERED)
def abs(x):
    """The absolute value; the sign of NaN and of zero is cleared.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.abs(-2))
        2
    """
    return jnp.abs(x)


@lifted(ORDERED)
def sign(x):
    """-1, 0 or 1 as x is below, at or above 0; NaN and signed zeros are kept.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.sign(-2.5))
        -1.0
    """
    return jnp.sign(x)


@lifted(FLOATS)
def floor(x):
    """The largest integral value that is at most x.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.floor(-0.5))
        -1.0
    """
    return lax.floor(inexact(x))


@lifted(FLOATS)
def ceil(x):
    """The smallest integral value that is at least x.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.ceil(1.5))
        2.0
    """
    return lax.ceil(inexact(x))


@lifted(FLOATS)
def round(x):
    """The nearest integral value, ties to even.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.round(2.5))
        2.0
    """
    return lax.round(inexact(x), lax.RoundingMethod.TO_NEAREST_EVEN)


@lifted(ORDERED)
def square(x):
    """x * x.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.square(3.0))
        9.0
    """
    return jnp.square(x)


@lifted(ORDERED)
def power(x, y):
    """x to the power y, in the promoted dtype of both.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.power(2.0, 3))
        8.0
    """
    return jnp.power(x, y)


@lifted(FLOATS)
def isnan(x):
    """True where x is NaN.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.isnan(float("nan")))
        True
    """
    return jnp.isnan(x)


@lifted(FLOATS)
def isfinite(x):
    """True where x is neither NaN nor infinite.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.isfinite(float("inf")))
        False
    """
    return jnp.isfinite(x)
