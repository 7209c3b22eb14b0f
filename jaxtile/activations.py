"""Activation functions, each one elementwise op; see `jaxtile.elementwise`."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxtile._checks import flag
from jaxtile._lifted import FLOATS, ORDERED, inexact, lift_operands, lifted, once


@lifted(FLOATS)
def logistic(x):
    """The logistic function 1 / (1 + exp(-x)).

    Example:
        >>> import jaxtile as jt
        >>> print(jt.logistic(0.0))
        0.5
    """
    return jax.lax.logistic(inexact(x))


sigmoid = logistic


@lifted(ORDERED)
def relu(x):
    """max(x, 0): NaN stays; the derivative at 0 is 0.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.relu(-2.0))
        0.0
    """
    return jax.nn.relu(x)


@lifted(FLOATS)
def silu(x):
    """x * logistic(x), also called swish.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.silu(0.0))
        0.0
    """
    return once(jax.nn.silu, x)


@lifted(FLOATS)
def softplus(x):
    """log(1 + exp(x)), without overflow.

    Example:
        >>> import jaxtile as jt
        >>> print(f"{jt.softplus(0.0):.4f}")
        0.6931
    """
    return once(jax.nn.softplus, x)


def gelu(x: Any, approximate: bool = True) -> Any:
    """The Gaussian error linear unit x * P(N(0, 1) <= x).

        x / 2 * (1 + erf(x / sqrt(2))), or its tanh approximation

    Args:
        x: an array, a tile or a Python scalar of an arithmetic format. Integers count
            as the default float.
        approximate: take the tanh approximation, as jax.nn.gelu does by default.

    Returns:
        An array, or a `Tile` where x is one.

    Raises:
        TileTypeError: x is none of these, or has a storage format; approximate is not
            a bool.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.gelu(0.0))
        0.0
    """
    approximate = flag("gelu", "approximate", approximate)
    fn = functools.partial(jax.nn.gelu, approximate=approximate)
    return lift_operands("gelu", functools.partial(once, fn), x)
