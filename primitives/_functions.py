"""Tracing the functions that a user writes, with a refusal of what they may not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxtile.errors import TileError, TileTypeError, message
from jaxtile.primitives._scalar import as_closed, inner_jaxprs, trace

# What jax and Python raise for a function that does not fit; others are the user's own.
_MISFITS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


IN_JAX = (
    "inside it use jax.numpy, not NumPy or math, and jnp.where or jnp.maximum, not if"
)


def attempt(
    op: str, tell: Callable[[], tuple[str, str]], call: Callable, *args: Any
) -> Any:
    """`call(*args)`, its failure told as a refusal.

    Args:
        op: the op that asks, for the message.
        tell: gives what was expected, and the way out; asked on failure only.
        call, *args: what to call.

    Returns:
        What it returns.

    Raises:
        TileTypeError: the call raised what jax or Python raise for a misfit.
    """
    try:
        return call(*args)
    except TileError:
        raise
    except _MISFITS as error:
        lines = str(error).splitlines() or [""]
        got = f"{type(error).__name__}: {lines[0].rstrip('.')}"
        expected, way_out = tell()
        raise TileTypeError(
            message(op, expected=expected, got=got, way_out=way_out)
        ) from error


def traced(
    op: str, reducer: Any, what: str, fn: Callable, *args: Any
) -> tuple[ClosedJaxpr, Any]:
    """One of a reducer's functions as `trace` gives it, once it is known to fit.

    Args:
        op: the op that asks, for the message.
        reducer, what: the reducer, and the name of its function.
        fn: the function.
        *args: pytrees with dtypes for scalars.

    Returns:
        Its scalar jaxpr, and its output pytree of `ShapeDtypeStruct`s.

    Raises:
        TileTypeError: it does not take the arguments, has side effects, closes over a
            traced value, or returns something other than scalars.
    """
    dtypes, tree = jax.tree.flatten(args)
    name = f"{reducer!r}'s {what}"

    def tell():
        return (
            f"{name} to take ({', '.join(map(spelled, args))})",
            f"Give the elements the structure that {what} takes; {IN_JAX}.",
        )

    closed, out = attempt(op, tell, trace, fn, tree, tuple(dtypes))
    require_pure(op, name, closed)
    _require_scalars(op, name, out)
    _require_constants(op, name, closed)
    return closed, out


def spelled(tree: Any) -> str:
    """A pytree of dtypes or `ShapeDtypeStruct`s, as messages show it."""
    names = jax.tree.map(lambda v: str(getattr(v, "dtype", v)), tree)
    return str(names).replace("'", "")


def require_pure(op: str, what: str, closed: Any) -> None:
    """Refuse a function that prints, calls back or writes.

    Raises:
        TileTypeError: it does.
    """
    found = _impure(as_closed(closed)[0])
    if found is not None:
        raise TileTypeError(
            message(
                op,
                expected=f"{what} without side effects",
                got=f"{found} in it",
                way_out="It is traced once and replayed wherever derivatives and "
                "batching need it: print and call back outside.",
            )
        )


def _impure(jaxpr: Jaxpr) -> str | None:
    """The primitive that calls back or has an effect, or None."""
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            found = _impure(inner)
            if found is not None:
                return found
        if eqn.effects or "callback" in eqn.primitive.name:
            return eqn.primitive.name
    return None


def _require_scalars(op: str, what: str, out: Any) -> None:
    shapes = [v.shape for v in jax.tree.leaves(out)]
    if any(shapes) or not shapes:
        got = f"shapes {shapes}" if shapes else "nothing"
        raise TileTypeError(
            message(
                op,
                expected=f"{what} to return scalars: it sees one element",
                got=got,
                way_out="Give each component a leaf of its own.",
            )
        )


def _require_constants(op: str, what: str, closed: Any) -> None:
    if any(isinstance(v, Tracer) for v in as_closed(closed)[1]):
        raise TileTypeError(
            message(
                op,
                expected=f"{what} to close over constants only",
                got="a traced value",
                way_out="Pass it as a leaf of the element, broadcast to its shape.",
            )
        )
