"""Which implementation runs a primitive on whole arrays, by the backends' predicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jax.extend.core import Primitive

from jaxtile.errors import UnsupportedOnBackend, message
from jaxtile.pallas_lowering import NAMES, SERVES, _registry, load_all
from jaxtile.primitives._define import REFERENCE


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


def elsewhere(name: str, platform: str) -> str | None:
    """Why a backend's kernels do not run on a platform's devices, or None."""
    load_all()
    if name in _registry.FAILED:
        return _registry.FAILED[name]
    if name in SERVES.get(platform, ()):
        return _registry.BACKENDS[name].hooks.unavailable()
    mine = next(p for p, names in SERVES.items() if name in names)
    return f"it runs on {mine}, not on {platform or 'this platform'}"


def decide(
    primitive: Primitive,
    platform: str,
    name: str | None,
    avals: Sequence,
    params: dict[str, Any],
    misplaced: str | None = None,
    names: Sequence[str] = NAMES,
) -> tuple[str, dict[str, str]]:
    """(the implementation of a call, why each other backend does not run it).

    A backend that was asked for and refuses is in both.

    Args:
        primitive: what is called.
        platform: "cuda", "tpu", "cpu", or "" for any other.
        name: the implementation that was asked for, or None.
        avals: the abstract operands.
        params: the primitive's, without `implementation`.
        misplaced: why no kernel can run where the operands are, or None.
        names: the backends to ask, the best first.
    """
    chosen, reasons = name, {}
    for each in names:
        reason = refusal(primitive, each, avals, params)
        reason = reason or elsewhere(each, platform) or misplaced
        if reason is None and name is None:
            kernel = _registry.BACKENDS[each].wholes[primitive]
            reason = kernel.slower(*avals, **params)
        if reason is None and chosen not in (None, each):
            reason = f"{chosen} {'goes first' if name is None else 'was asked for'}"
        if reason is None:
            chosen = each
        else:
            reasons[each] = reason
    return chosen or REFERENCE, reasons


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
    """The whole-array kernel that `decide` picks; None is the reference.

    Raises:
        UnsupportedOnBackend: the one that was asked for refuses or is elsewhere.
    """
    if name is None and platform not in SERVES:
        return None  # without kernels nothing of Pallas is loaded
    names = SERVES[platform] if name is None else (name,)
    chosen, reasons = decide(primitive, platform, name, avals, params, misplaced, names)
    if chosen == REFERENCE:
        return None
    if chosen in reasons:
        _fail(primitive, chosen, reasons[chosen])
    return _registry.BACKENDS[chosen].wholes[primitive].run
