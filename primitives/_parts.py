"""The parts of a reducer that its merge does not show: identity, empty value, updates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxtile.errors import TileTypeError, message
from jaxtile.primitives._functions import attempt, spelled, traced


def check_stable(op: str, reducer: Any, what: str, state: Any, out: Any) -> None:
    """Refuse a merge or an update that returns another kind of state.

    Args:
        op, reducer, what: for the message.
        state: the state's pytree of dtypes.
        out: the pytree of `ShapeDtypeStruct`s that the function returns.

    Raises:
        TileTypeError: the structures or the dtypes differ.
    """
    got, wanted = jax.tree.flatten(out), jax.tree.flatten(state)
    if got[1] != wanted[1] or [v.dtype for v in got[0]] != wanted[0]:
        raise TileTypeError(
            message(
                op,
                expected=f"{reducer!r}'s {what} to return a state like its operands, "
                f"{spelled(state)}",
                got=spelled(out),
                way_out=f"Convert the elements first, or cast inside {what}.",
            )
        )


def same_structure(value: Any, other: Any) -> bool:
    """True if two pytrees differ in their leaves at most, a list being a tuple."""
    return jax.tree.structure(_tuples(value)) == jax.tree.structure(_tuples(other))


def _tuples(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return value


def check_parts(op: str, spec: Any) -> None:
    """Refuse parts that do not fit the state.

    Args:
        op: the op that asks, for the message.
        spec: the bound reducer.

    Raises:
        TileTypeError: an identity or empty value is no state, or an update does not take
            or return one.
    """
    reducer = spec.reducer
    state = jax.tree.unflatten(spec.state_tree, spec.states)
    element = [jax.tree.unflatten(spec.tree, spec.elements)]
    if spec.index is not None:
        element.append(np.dtype(spec.index))
    for what, args in (
        ("update", (state, *element)),
        ("update_right", (*element, state)),
    ):
        fn = getattr(reducer, what)
        if fn is not None:
            check_stable(
                op, reducer, what, state, traced(op, reducer, what, fn, *args)[1]
            )
    for what in ("identity", "empty"):
        value = getattr(reducer, what)
        if value is not None and not (what == "empty" and isinstance(value, str)):
            _check_constant(op, f"{reducer!r}'s {what}", value, state)


def _check_constant(op: str, name: str, value: Any, state: Any) -> None:
    fits, got = _holds_each, value
    if callable(value):
        fits, got = _converts_each, _shapes_of(op, name, value, state)
    if not (same_structure(got, state) and fits(state, got)):
        raise TileTypeError(
            message(
                op,
                expected=f"{name} to be a constant state, {spelled(state)}",
                got=repr(got) if got is value else spelled(got),
                way_out=_CONSTANT,
            )
        )


_CONSTANT = "Give one number for each leaf of the state, or a function of a state."


def _shapes_of(op: str, name: str, fn: Any, state: Any) -> Any:
    """What a function of a state returns; traced, since no value exists in shard_map."""
    like = jax.tree.map(lambda d: jax.ShapeDtypeStruct((), d), state)
    expected = f"{name} to be a function of a state's scalars"
    return attempt(op, lambda: (expected, _CONSTANT), jax.eval_shape, fn, like)


def _holds_each(state: Any, value: Any) -> bool:
    return all(map(holds, jax.tree.leaves(state), jax.tree.leaves(value)))


def _converts_each(state: Any, shapes: Any) -> bool:
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True)
    return all(
        v.shape == () and (v.dtype == d or np.can_cast(v.dtype, d, "same_kind"))
        for d, v in pairs
    )


def holds(dtype: np.dtype, value: Any) -> bool:
    """True if a constant is a number that the dtype has; floats round but not overflow."""
    if isinstance(value, Tracer) or isinstance(value, str) or np.ndim(value) != 0:
        return False
    host = np.asarray(jax.device_get(value))
    if host.dtype.kind == "b" or jnp.issubdtype(host.dtype, jnp.integer):
        number = int(host)
    elif jnp.issubdtype(host.dtype, jnp.floating):
        number = float(host)
    else:
        return False
    if jnp.issubdtype(dtype, jnp.floating):
        with np.errstate(over="ignore"):
            narrow = np.asarray(number, np.float64).astype(dtype)
        return bool(np.isfinite(narrow.astype(np.float64)) or not np.isfinite(number))
    low, high = (0, 1) if dtype.kind == "b" else _range(dtype)
    return low <= number <= high and number == int(number)


def _range(dtype: np.dtype) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)
