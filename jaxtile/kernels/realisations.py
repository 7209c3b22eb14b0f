"""What runs a kernel, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxtile import backends
from jaxtile._checks import choice
from jaxtile.kernels import plain
from jaxtile.primitives._define import REFERENCE

INTERPRET = "interpret"


# Pallas is imported by those who ask for it.
def _direct(interpret: bool) -> Callable[..., list]:
    def run(*args):
        from jaxtile.kernels import direct

        return direct.run(functools.partial(direct.launch, interpret), *args)

    return run


def _tpu(*args: Any) -> list:
    from jaxtile.kernels import blocks, direct

    return direct.run(blocks.launch, *args)


_REALISATIONS: dict[str, Callable[..., list]] = {
    REFERENCE: plain.run,
    "triton": _direct(False),
    "tpu": _tpu,
    INTERPRET: _direct(True),
}


def asked(op: str, name: str | None) -> str | None:
    """The realisation that a call or the block around it insists on, or None.

    Raises:
        TileValueError: there is no such one.
    """
    if name not in _REALISATIONS:
        name = backends.asked(op, name)
    way_out = 'None and "reference" run it as plain jax.'
    return choice(op, "implementation", name, (None, *_REALISATIONS), way_out)


def run(name: str | None, *args: Any) -> list:
    """The results by a realisation; None is plain jax whose ops choose for themselves."""
    realise = _REALISATIONS[name or REFERENCE]
    # Inside a kernel of another kind its backend is the only one there is.
    with backends.use_implementation(name if name == REFERENCE else None):
        return realise(*args)
