"""Which implementation runs an op, and why the others do not.

The answers come from the backends' own predicates; nothing here knows a backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxtile._checks import choice
from jaxtile.pallas_lowering import NAMES, _choice, _registry, load_all
from jaxtile.primitives._define import REFERENCE

# jit keys its caches by it, so that one function traced in two blocks is traced twice.
_DEFAULT = jax.make_user_context(None)


def _check(op: str, name: str | None) -> None:
    way_out = "None picks the best that keeps the contract."
    choice(op, "implementation", name, (None, REFERENCE, *NAMES), way_out)


def whole_array_refusal(
    name: str, primitive: Primitive, *avals: Any, **params: Any
) -> str | None:
    """Why a backend does not run a primitive on whole arrays under jit, or None."""
    return _choice.refusal(primitive, name, avals, params)


def decide(
    primitive: Primitive, platform: str, *avals: Any, **params: Any
) -> tuple[str, dict[str, str]]:
    """What runs a primitive on the whole arrays of one device, and why not the others."""
    name = params.pop("implementation", None)
    return _choice.decide(primitive, platform, name, avals, params)


def kernel_refusal(
    name: str, primitive: Primitive, *avals: Any, **params: Any
) -> str | None:
    """Why a backend does not lower a primitive inside its kernels, or None."""
    load_all()
    if name in _registry.FAILED:
        return _registry.FAILED[name]
    return _registry.BACKENDS[name].why_not(primitive, *avals, **params)


def asked(op: str, implementation: str | None) -> str | None:
    """The implementation that a call or the block around it insists on, or None.

    Args:
        op: the op's public name.
        implementation: the call's own argument, which goes first.

    Raises:
        TileValueError: no such implementation.
    """
    _check(op, implementation)
    name = implementation or _DEFAULT.value
    return name


@contextlib.contextmanager
def use_implementation(name: str | None) -> Iterator[None]:
    """Ask for an implementation for every op called in a block.

    A call's own `implementation=` goes first. In kernel bodies the kernel's backend is the
    only one: "reference" changes nothing there. jit traces again in another block.

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
    with _DEFAULT(name):
        yield
