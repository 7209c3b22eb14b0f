"""The checks of arguments that the public functions share."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxtile import formats
from jaxtile._operators import is_operand, is_tile
from jaxtile.errors import TileTypeError, TileValueError, message

_ENABLE = 'set jax.config.update("jax_enable_x64", True)'


def operand(
    op: str, value: Any, *, wide: bool = False, way_out: str | None = None
) -> Any:
    """The value, if the op can take it as it is: a tile, an array or a number.

    Python numbers and NumPy values take the precision that jax gives them, but none may
    overflow on the way in.

    Args:
        op: the op that asks, for the message.
        value: what the user passed.
        wide: the op takes 64 bits exactly, whatever jax_enable_x64 says.
        way_out: what helps where jax would narrow it; None is another dtype.

    Returns:
        The value; array-likes, such as a `pandas.Series`, as their array.

    Raises:
        TileTypeError: it is none of these, has a mask or no format, or jax would narrow it.
    """
    if is_tile(value):
        return value
    if not is_operand(value):
        value = _array_of(op, value)
    if isinstance(value, np.ma.MaskedArray):
        raise TileTypeError(
            message(
                op,
                expected="an array without a mask of its own",
                got="a NumPy masked array",
                way_out="Pass x.data, and where=~x.mask to reduce or scan; elsewhere "
                "x.filled(value).",
            )
        )
    if hasattr(value, "dtype"):
        formats.format_of(value.dtype, op)
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))  # jax takes no other
    if not (wide or formats.x64_enabled()):
        _require_32_bits(op, value, way_out)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TileTypeError(
            message(
                op,
                expected="an integer of at most 64 bits",
                got=str(value),
                way_out="Write it as a float.",
            )
        )
    return value


def as_array(op: str, value: Any, way_out: str | None = None) -> jax.Array:
    """An operand that is no tile, as a jax array.

    Raises:
        TileTypeError: as `operand`; it is a tile.
    """
    if is_tile(value):
        raise TileTypeError(
            message(
                op,
                expected="an array or a number",
                got=f"a tile of shape {tuple(value.shape)}",
                way_out="Pass its .array.",
            )
        )
    return jnp.asarray(operand(op, value, way_out=way_out))


def _array_of(op: str, value: Any) -> Any:
    """The array that an array-like gives; what is none is refused."""
    if isinstance(value, Tracer):  # in a kernel: not what a Ref holds, but the Ref
        got, way_out = str(jax.typeof(value)), "Read it first: ref[...]."
    elif hasattr(value, "__jax_array__"):
        return value.__jax_array__()
    elif hasattr(value, "__array__"):
        return np.asarray(value)
    else:
        got, way_out = type(value).__name__, "Convert it with jnp.asarray."
    raise TileTypeError(
        message(op, expected="arrays, tiles or numbers", got=got, way_out=way_out)
    )


def _require_32_bits(op: str, value: Any, instead: str | None) -> None:
    got = way_out = None
    if isinstance(value, np.ndarray):
        if value.dtype.itemsize == 8 and not _fits(value):
            got = f"an array of {value.dtype.name} with larger values"
            way_out = f"Narrow it by {_cast_of(value.dtype)}"
    elif isinstance(value, jax.Array):
        if value.dtype.itemsize == 8:
            got = f"an array of {value.dtype.name}"
            way_out = f"Narrow it by {_cast_of(value.dtype)}"
    elif isinstance(value, int | np.integer):
        top = 32 if isinstance(value, np.unsignedinteger) else 31
        if not -(2**31) <= value < 2**top:
            got, way_out = f"the integer {value}", "Write it as a float"
    elif isinstance(value, float) and np.isfinite(value):
        if abs(value) > float(np.finfo(np.float32).max):
            got = f"{value!r}, which float32 does not represent"
            way_out = "Write jnp.inf, or narrow it by jaxtile.cast, where that is meant"
    if got is not None:
        raise TileTypeError(
            message(
                op,
                expected="values of at most 32 bits while jax_enable_x64 is off",
                got=got,
                way_out=f"{instead or way_out}, or {_ENABLE}.",
            )
        )


def _fits(value: np.ndarray) -> bool:
    """Whether jax's 32-bit form of a 64-bit NumPy array overflows nowhere."""
    if value.dtype.kind == "f":
        top = np.finfo(np.float32).max
        return not np.any(np.isfinite(value) & (np.abs(value) > top))
    if value.size == 0:
        return True
    info = np.iinfo(value.dtype.name.replace("64", "32"))
    return bool(info.min <= value.min() and value.max() <= info.max)


def _cast_of(dtype: np.dtype) -> str:
    return f'jaxtile.cast(x, "{dtype.name.replace("64", "32")}")'


def flag(op: str, name: str, value: Any) -> bool:
    """A flag that is True or False, known while tracing.

    Raises:
        TileTypeError: it is anything else.
    """
    if not isinstance(value, bool | np.bool_):
        raise TileTypeError(
            message(
                op,
                expected=f"{name} to be True or False",
                got="a traced value" if isinstance(value, Tracer) else repr(value),
                way_out="Pass a Python bool, static under jit.",
            )
        )
    return bool(value)


def choice(op: str, name: str, value: Any, known: Sequence, way_out: str) -> Any:
    """One of some names; None where that is among them.

    Raises:
        TileValueError: it is none of them.
    """
    named = value is None or isinstance(value, str)
    if not (named and value in known):
        raise TileValueError(
            message(
                op,
                expected=f"{name} in {tuple(known)}",
                got=repr(value),
                way_out=way_out,
            )
        )
    return value


def integer(op: str, what: str, value: Any, way_out: str) -> int:
    """A Python or NumPy integer, known while tracing; a bool is none.

    Raises:
        TileTypeError: it is anything else.
    """
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise TileTypeError(
        message(
            op,
            expected=what,
            got="a traced value" if isinstance(value, Tracer) else repr(value),
            way_out=way_out,
        )
    )


def size(op: str, what: str, value: Any, way_out: str) -> Any:
    """An integer as of `integer`, or a symbolic size, of an export.

    Raises:
        TileTypeError: it is anything else.
    """
    if jax.export.is_symbolic_dim(value):
        return value
    return integer(op, what, value, way_out)


def number(op: str, what: str, value: Any, way_out: str) -> float:
    """A real number, known while tracing; a bool is none.

    Raises:
        TileTypeError: it is anything else.
    """
    traced = isinstance(value, Tracer)
    if isinstance(value, str | bool | np.bool_) or traced or np.ndim(value):
        found = None
    else:
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = None
    if found is None:
        raise TileTypeError(
            message(
                op,
                expected=what,
                got="a traced value" if traced else repr(value),
                way_out=way_out,
            )
        )
    return found


def floats(op: str, name: str, value: Any) -> jax.Array:
    """An operand that is no tile, as a jax array of floats.

    Raises:
        TileTypeError: as `as_array`; it holds something else.
    """
    value = as_array(op, value)
    formats.require_arithmetic(value.dtype, op)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TileTypeError(
            message(
                op,
                expected=f"{name} of floats",
                got=value.dtype.name,
                way_out="Cast it to float32 first.",
            )
        )
    return value


def arguments(op: str, fn: Callable, args: Sequence, named: dict) -> tuple:
    """The arguments of a call by position, if they fit the signature of `fn`.

    Raises:
        TileTypeError: they do not.
    """
    signature = inspect.signature(fn)
    try:
        return signature.bind(*args, **named).args
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise TileTypeError(
            message(
                op,
                expected=f"the arguments of {getattr(fn, '__name__', 'fn')}({names})",
                got=str(error).removeprefix("got "),
                way_out=f"Pass {names}.",
            )
        ) from error


def is_index(value: Any) -> bool:
    """True for an integer and for an integer scalar array, traced or not."""
    if hasattr(value, "dtype"):
        return jnp.issubdtype(value.dtype, jnp.integer) and np.ndim(value) == 0
    return isinstance(value, int) and not isinstance(value, bool)


def function(op: str, what: str, value: Any, way_out: str) -> Any:
    """Something that can be called.

    Raises:
        TileTypeError: it cannot.
    """
    if not callable(value):
        raise TileTypeError(
            message(op, expected=what, got=repr(value), way_out=way_out)
        )
    return value
