"""Which whole-array kernel runs a primitive, by the backends' own predicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jax.extend.core import Primitive

from jaxtile.errors import UnsupportedOnBackend, message
from jaxtile.pallas_lowering import SERVES, _registry, load_all


def refusal(
    primitive: Primitive, name: str, avals: Sequence, params: dict[str, Any]
) -> str | None:
    """Why a backend refuses these whole arrays on any device, or None."""
    load_all()
    if name in _registry.FAILED:
        return _registry.FAILED[name]
    if not all(isinstance(n, int) for a in avals for n in a.shape):
        return "a kernel is made for one shape; export with a shape of integers"
    return _registry.BACKENDS[name].why_not_whole(primitive, *avals, **params)


def _elsewhere(name: str, platform: str) -> str | None:
    """Why a backend's kernels do not run on a platform, or None."""
    if name in SERVES.get(platform, ()):
        return _registry.BACKENDS[name].hooks.unavailable()
    mine = next(p for p, names in SERVES.items() if name in names)
    return f"it runs on {mine}, not on {platform or 'this platform'}"


def passed_over(
    primitive: Primitive,
    platform: str,
    name: str,
    avals: Sequence,
    params: dict[str, Any],
) -> str | None:
    """Why a backend is not chosen on a platform where nobody insists, or None."""
    reason = refusal(primitive, name, avals, params) or _elsewhere(name, platform)
    if reason is not None:
        return reason
    params = {k: v for k, v in params.items() if k != "implementation"}
    return _registry.BACKENDS[name].wholes[primitive].slower(*avals, **params)


def insist(
    primitive: Primitive, name: str, avals: Sequence, params: dict[str, Any]
) -> None:
    """Let a backend that was asked for by name accept or refuse, when traced.

    Raises:
        UnsupportedOnBackend: it refuses.
    """
    reason = refusal(primitive, name, avals, params)
    if reason is not None:
        _fail(primitive, name, reason)


def _fail(primitive: Primitive, name: str, reason: str) -> NoReturn:
    raise UnsupportedOnBackend(
        message(
            primitive.name.removeprefix("tile_"),
            expected="an implementation that accepts the call",
            got=f"implementation={name!r}: {reason}",
            way_out='Use implementation=None or "reference".',
        )
    )


def kernel(
    primitive: Primitive,
    platform: str,
    name: str | None,
    avals: Sequence,
    params: dict[str, Any],
    misplaced: str | None,
) -> Callable[..., list] | None:
    """The whole-array kernel for a platform; None is the reference.

    Args:
        primitive: what is lowered.
        platform: "cuda", "tpu", "cpu", or "" for any other.
        name: the backend that was asked for, or None.
        avals: the abstract operands of one device.
        params: the primitive's, without `implementation`.
        misplaced: why no kernel can run where the operands are, or None.

    Raises:
        UnsupportedOnBackend: the one that was asked for refuses or is elsewhere.
    """
    if name is not None:
        insist(primitive, name, avals, params)
        reason = _elsewhere(name, platform) or misplaced
        if reason is not None:
            _fail(primitive, name, reason)
        return _registry.BACKENDS[name].wholes[primitive].run
    if misplaced is not None:
        return None
    for each in SERVES.get(platform, ()):
        if passed_over(primitive, platform, each, avals, params) is None:
            return _registry.BACKENDS[each].wholes[primitive].run
    return None
