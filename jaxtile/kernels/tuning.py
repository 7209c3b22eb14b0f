"""tune: the fastest of some configurations that keep one contract."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxtile import _found
from jaxtile._checks import integer
from jaxtile.errors import ContractError, TileTypeError, TileValueError, message
from jaxtile.kernels.api import Kernel
from jaxtile.primitives._define import REFERENCE

_CHOSEN: dict[Any, dict[str, Any]] = {}

# What an op may compute: its order, its accumulator, its roundings.
_CONTRACT = ("policy", "acc", "out", "finish", "exclusive", "direction", "dtype")


def tune(
    kernel: Kernel,
    args: Sequence,
    space: Mapping[str, Sequence],
    *,
    implementation: str | None = None,
    rounds: int = 5,
) -> dict[str, Any]:
    """The configuration that runs a kernel fastest on this machine's default device.

    All configurations must state one contract, that of the first: the same tile ops under
    the same policies, accumulators and roundings. The choice is remembered in this process
    for the operands' shapes and dtypes, the space and the platform.

    Args:
        kernel: made by `jaxtile.kernel`.
        args: its operands, concrete ones.
        space: the values to try of each keyword argument of its body.
        implementation: as for the call.
        rounds: how often each is timed; the median counts, and they take turns.

    Returns:
        The keyword arguments, as in `kernel(*args, **tune(kernel, args, space))`.

    Raises:
        ContractError: two configurations state different contracts.
        TileTypeError: kernel is none, or the operands are traced or in no tuple.
        TileValueError: nothing to try, or to time.
        TileError: what the kernel raises.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> @jt.kernel(out=lambda x: x)
        ... def double(nest, x, y, *, block):
        ...     r = nest.parallel(x.shape[0], block)
        ...     y.tile(r).store(x.tile(r).load() * 2)
        >>> sorted(jt.tune(double, (jnp.ones(64),), {"block": [8, 16]}))
        ['block']
    """
    _check(kernel, args, space)
    rounds = _rounds(rounds)
    structs = [jax.typeof(v) for v in jax.tree.leaves(args)]
    shapes = tuple((v.shape, str(v.dtype)) for v in structs)
    tried = tuple((k, tuple(v)) for k, v in sorted(space.items()))
    key = (kernel, shapes, tried, implementation, jax.default_backend())
    if key not in _CHOSEN:
        configs = list(_configs(space))
        _same_contract(kernel, args, configs)
        calls = [{"implementation": implementation, **c} for c in configs]
        for call in calls:
            jax.block_until_ready(kernel(*args, **call))
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, seen in zip(calls, times, strict=True):
                begin = time.perf_counter()
                jax.block_until_ready(kernel(*args, **call))
                seen.append(time.perf_counter() - begin)
        medians = [statistics.median(seen) for seen in times]
        _CHOSEN[key] = configs[medians.index(min(medians))]
    return dict(_CHOSEN[key])


def _check(kernel: Any, args: Any, space: Any) -> None:
    if not isinstance(kernel, Kernel):
        raise TileTypeError(
            message(
                "tune",
                expected="a kernel",
                got=repr(kernel),
                way_out="Make one with @jaxtile.kernel(out=...).",
            )
        )
    if not isinstance(args, tuple | list):
        raise TileTypeError(
            message(
                "tune",
                expected="the operands in a tuple",
                got=type(args).__name__,
                way_out="Write tune(kernel, (x,), space) for one operand.",
            )
        )
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(args)):
        raise TileTypeError(
            message(
                "tune",
                expected="operands with values, to time the kernel on",
                got="traced ones",
                way_out="Tune outside of jit, and pass the choice in.",
            )
        )
    if not (isinstance(space, Mapping) and space and all(map(_tries, space.values()))):
        raise TileValueError(
            message(
                "tune",
                expected="space a mapping from keyword arguments to values to try",
                got=repr(space),
                way_out='Write {"block": [8, 16]}: lists of values that hash.',
            )
        )


def _tries(values: Any) -> bool:
    try:
        return isinstance(values, Sequence) and len({*values}) > 0
    except TypeError:
        return False


def _rounds(value: Any) -> int:
    way_out = "Leave it out for 5."
    value = integer("tune", "rounds an integer", value, way_out)
    if value < 1:
        raise TileValueError(
            message(
                "tune", expected="rounds at least 1", got=str(value), way_out=way_out
            )
        )
    return value


def _configs(space: Mapping[str, Sequence]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


def _same_contract(kernel: Kernel, args: Sequence, configs: Sequence[dict]) -> None:
    first = contract_of(kernel, args, configs[0])
    for config in configs[1:]:
        other = contract_of(kernel, args, config)
        if other != first:
            differ = sorted(first ^ other)
            raise ContractError(
                message(
                    "tune",
                    expected=f"configurations of one contract, that of {configs[0]}",
                    got=f"{config}, which differs in {differ[0]}",
                    way_out="Tune what changes no result's contract: block sizes.",
                )
            )


def contract_of(kernel: Kernel, args: Sequence, config: dict) -> frozenset[str]:
    """What the tile ops of a kernel may compute, as one line for each kind of call."""
    jaxpr = jax.make_jaxpr(lambda *v: kernel(*v, implementation=REFERENCE, **config))(
        *args
    ).jaxpr
    return frozenset(map(_line, _found.find(jaxpr)))


def _line(found: _found.Found) -> str:
    params = found.eqn.params
    known = {k: str(params[k]) for k in _CONTRACT if k in params}
    if "spec" in params:
        known["reducer"] = f"{params['spec'].reducer!r} in {params['spec'].states}"
    if "region" in params:
        known["function"] = str(params["region"])
    return f"{found.op}({', '.join(f'{k}={v}' for k, v in sorted(known.items()))})"
