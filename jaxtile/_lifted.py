"""The decorator that lifts a function of scalars to arrays and tiles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxtile._checks import arguments, operand
from jaxtile.tile import lift

_SHARED = """
Args:
    {args}: arrays, tiles or Python scalars of arithmetic formats. Arrays broadcast by
        NumPy's rules, tiles by their dims.{kinds}

Returns:
    An array, or a `Tile` where an operand is one.

Raises:
    TileTypeError: an operand is none of these, has a format that the function does not
        take, or overflows in the 32 bits that jax gives it while jax_enable_x64 is off.
    TileShapeError: the shapes or dims do not broadcast.

Example:"""

FLOATS = " Integers count as the default float."
ORDERED = " Any real format."


def lift_operands(op: str, fn: Callable[..., Any], *values: Any) -> Any:
    """`fn` of operands that are no pytrees, as one elementwise op."""
    return lift(op, fn, *(operand(op, value) for value in values))


def _documented(doc: str, args: str, kinds: str) -> str:
    shared = _SHARED.format(args=args, kinds=kinds)
    return inspect.cleandoc(doc).replace("\nExample:", shared)


def lifted(kinds: str = "") -> Callable[[Callable], Callable]:
    """A decorator: the function of scalars, lifted, with the paragraphs all share."""

    def decorate(fn):
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def wrapper(*args, **named):
            values = arguments(fn.__name__, fn, args, named)
            return lift_operands(fn.__name__, fn, *values)

        wrapper.__doc__ = _documented(
            fn.__doc__, ", ".join(signature.parameters), kinds
        )
        return wrapper

    return decorate


def inexact(x):
    """x, or an integer as the default float."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x.astype(jnp.result_type(float))


def once(fn, x):
    """fn of a narrow float through float32, so that one rounding remains."""
    x = inexact(x)
    if x.dtype.itemsize < 4:
        return fn(x.astype(jnp.float32)).astype(x.dtype)
    return fn(x)
