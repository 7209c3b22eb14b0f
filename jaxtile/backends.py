"""Which implementation runs an op, and why the others do not.

The answers come from the backends' own predicates; nothing here knows a backend.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Primitive

from jaxtile.errors import TileValueError, UnsupportedOnBackend, message
from jaxtile.pallas_lowering import NAMES, _registry, load_all

REFERENCE = "reference"
_DEFAULT: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "implementation", default=None
)


def _check(op: str, name: str | None) -> None:
    if name not in (None, REFERENCE, *NAMES):
        raise TileValueError(
            message(
                op,
                expected=f"implementation in {(None, REFERENCE, *NAMES)}",
                got=repr(name),
                way_out="None picks the best that keeps the contract.",
            )
        )


def whole_array_refusal(op: str, name: str) -> str | None:
    """Why a backend does not run an op on whole arrays under jit, or None."""
    load_all()
    if name in _registry.FAILED:
        return _registry.FAILED[name]
    return (
        f"{name} has no whole-array kernel for {op} yet; the op lowers inside "
        "your own kernel bodies where the support table says so"
    )


def kernel_refusal(
    name: str, primitive: Primitive, *avals: Any, **params: Any
) -> str | None:
    """Why a backend does not lower a primitive inside its kernels, or None."""
    load_all()
    if name in _registry.FAILED:
        return _registry.FAILED[name]
    return _registry.BACKENDS[name].why_not(primitive, *avals, **params)


def choose(op: str, implementation: str | None, **params: Any) -> str:
    """The implementation that a call gets.

    Args:
        op: the op's public name.
        implementation: what the caller asked for, or None.
        **params: what the backends' predicates may ask.

    Returns:
        The name of the implementation.

    Raises:
        TileValueError: no such implementation.
        UnsupportedOnBackend: the one that was asked for refuses.
    """
    name = implementation or _DEFAULT.get()
    _check(op, name)
    if name in (None, REFERENCE):
        return REFERENCE
    reason = whole_array_refusal(op, name)
    if reason is not None:
        raise UnsupportedOnBackend(
            message(
                op,
                expected="an implementation that accepts the call",
                got=f"implementation={name!r}: {reason}",
                way_out='Use implementation=None or "reference".',
            )
        )
    return name


@contextlib.contextmanager
def use_implementation(name: str | None) -> Iterator[None]:
    """Ask for an implementation for every op called in a block.

    Args:
        name: None, "reference", "triton", "mosaic_gpu" or "tpu".

    Raises:
        TileValueError: no such implementation.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> with jt.use_implementation("reference"):
        ...     print(jt.reduce(jnp.arange(4), 0, jt.add))
        6
    """
    _check("use_implementation", name)
    token = _DEFAULT.set(name)
    try:
        yield
    finally:
        _DEFAULT.reset(token)
