"""What runs a kernel, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtile import backends
from jaxtile._checks import choice
from jaxtile.kernels import plain
from jaxtile.primitives._define import REFERENCE

INTERPRET = "interpret"


class Call(NamedTuple):
    """A kernel's body with its keyword arguments.

    Args:
        name: of the kernel.
        body: `(nest, *views) -> None`.
        launch: keyword arguments of the launch, those of `api.LAUNCH`.
    """

    name: str
    body: Callable[..., None]
    launch: dict[str, int]


# Pallas is imported by those who ask for it.
def _direct(interpret: bool) -> Callable[..., list]:
    def run(call, *args):
        from jaxtile.kernels import direct

        launch = functools.partial(direct.launch, interpret, call.launch)
        where = None if interpret else "triton"
        return direct.run(launch, call.name, call.body, *args, backend=where)

    return run


def _tpu(call: Call, *args: Any) -> list:
    from jaxtile.kernels import blocks, direct

    return direct.run(blocks.launch, call.name, call.body, *args, backend="tpu")


def _plain(call: Call, *args: Any) -> list:
    return plain.run(call.name, call.body, *args)


def _mosaic(call: Call, *args: Any) -> list:
    from jaxtile.kernels import direct, mosaic

    launch = functools.partial(mosaic.launch, call.launch)
    return direct.run(launch, call.name, call.body, *args, backend="mosaic_gpu")


_REALISATIONS: dict[str, Callable[..., list]] = {
    REFERENCE: _plain,
    "triton": _direct(False),
    "mosaic_gpu": _mosaic,
    "tpu": _tpu,
    INTERPRET: _direct(True),
}


def require_name(op: str, name: Any) -> None:
    """Refuse what a kernel cannot be tuned for.

    Raises:
        TileValueError: there is no such realisation.
    """
    way_out = "It is by implementation: the name, and its keyword arguments."
    choice(op, "tuned for an implementation", name, tuple(_REALISATIONS), way_out)


def asked(op: str, name: str | None) -> str | None:
    """The realisation that a call or the block around it insists on, or None.

    Raises:
        TileValueError: there is no such one.
    """
    if name is None:
        name = backends.asked(op, None)
    way_out = 'None and "reference" run it as plain jax.'
    return choice(op, "implementation", name, (None, *_REALISATIONS), way_out)


def run(
    name: str | None,
    calls: dict[str, Call],
    operands: Sequence,
    results: Sequence,
) -> list:
    """The results of a kernel.

    Args:
        name: the realisation; None is one of each platform.
        calls: of the reference, of the realisation asked for, and of those it is tuned
            for.
        operands, results: as of `plain.run`.
    """
    # Inside a kernel of another kind its backend is the only one there is.
    with backends.use_implementation(name if name == REFERENCE else None):
        if name is not None:
            return _REALISATIONS[name](calls[name], operands, results)
        if len(calls) == 1:
            return _plain(calls[REFERENCE], operands, results)
        from jaxtile.kernels import choice

        return choice.run(_REALISATIONS, calls, operands, results)
