"""What runs a kernel, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtile import backends
from jaxtile._checks import choice
from jaxtile.kernel import plain
from jaxtile.primitives._define import REFERENCE

INTERPRET = "interpret"


def _direct(interpret: bool) -> Callable[..., list]:
    # Pallas is imported by those who ask for it.
    def run(*args):
        from jaxtile.kernel import direct

        return direct.run(interpret, *args)

    return run


_REALISATIONS: dict[str, Callable[..., list]] = {
    REFERENCE: plain.run,
    "triton": _direct(False),
    INTERPRET: _direct(True),
}


def asked(op: str, name: str | None) -> str:
    """The realisation that a call or the block around it insists on.

    Raises:
        TileValueError: there is no such one.
    """
    if name not in _REALISATIONS:
        name = backends.asked(op, name)
    way_out = 'None and "reference" run it as plain jax.'
    return choice(op, "implementation", name or REFERENCE, tuple(_REALISATIONS), way_out)


def get(name: str) -> Callable[..., Any]:
    """The realisation of a name."""
    return _REALISATIONS[name]
