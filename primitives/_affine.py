"""Coordinates that are affine in others, found in what a function traces to.

Nothing is sampled: an equation is either one that keeps a coordinate affine, or the
coordinate is not known to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from jaxtile.primitives._bits import below
from jaxtile.primitives._scalar import as_closed, inner_jaxpr


@dataclass(frozen=True)
class Affine:
    """offset + sum of coefficients[k] * j[k], over the coordinates j.

    Args:
        offset: an integer, or a symbolic size and the like.
        coefficients: integers.
    """

    offset: int
    coefficients: tuple[int, ...]

    def __add__(self, other: Affine) -> Affine:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Affine(self.offset + other.offset, tuple(a + b for a, b in pairs))

    def __mul__(self, factor: int) -> Affine:
        scaled = tuple(factor * a for a in self.coefficients)
        return Affine(factor * self.offset, scaled)

    @property
    def terms(self) -> tuple[int, ...]:
        """The coordinates that it depends on."""
        return tuple(k for k, a in enumerate(self.coefficients) if a)

    def range(self, shape: Sequence[int]) -> tuple[int, int]:
        """The least and the largest value over the coordinates of a shape without 0."""
        ends = [
            (0, a * (n - 1)) if a >= 0 else (a * (n - 1), 0)
            for a, n in zip(self.coefficients, shape, strict=True)
        ]
        low, high = (self.offset + sum(e[k] for e in ends) for k in (0, 1))
        return low, high

    def inside(self, size: int, shape: Sequence[int]) -> bool:
        """Whether it is known to lie in [0, size) always."""
        low, high = self.range(shape)
        return below(-1, low) and below(high, size)


def variables(count: int) -> list[Affine]:
    """The coordinates themselves."""
    return [Affine(0, tuple(int(i == k) for i in range(count))) for k in range(count)]


_KEEPS = frozenset("copy reshape squeeze broadcast_in_dim stop_gradient".split())


def affine_results(closed: Any, inputs: Sequence[Affine], ndim: int) -> list | None:
    """Each result of a scalar jaxpr as an `Affine` of its inputs' coordinates.

    Args:
        closed: the jaxpr, closed.
        inputs: what its arguments are.
        ndim: how many coordinates there are.

    Returns:
        One `Affine` for each result, or None where one is not known to be affine.
    """
    found = _walk(*as_closed(closed), list(inputs), ndim)
    return None if any(v is None for v in found) else found


def _constant(value: Any, ndim: int) -> Affine | None:
    if isinstance(value, Tracer) or np.ndim(value) != 0:
        return None
    host = np.asarray(value)
    if host.dtype.kind not in "iu":
        return None
    return Affine(int(host), (0,) * ndim)


def _walk(jaxpr, consts, inputs, ndim) -> list:
    env: dict = {
        v: _constant(c, ndim) for v, c in zip(jaxpr.constvars, consts, strict=True)
    }
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom):
        if isinstance(atom, Literal):
            return _constant(atom.val, ndim)
        return env[atom]

    for eqn in jaxpr.eqns:
        values, inner = [read(v) for v in eqn.invars], inner_jaxpr(eqn)
        if inner is not None:
            outs = _walk(*as_closed(inner), values, ndim)
        else:
            outs = [_equation(eqn, values, ndim)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn, values, ndim) -> Affine | None:
    name = eqn.primitive.name
    if name == "dim_as_value":  # a symbolic size, of an export
        return Affine(eqn.params["dim"], (0,) * ndim)
    if any(v is None for v in values):
        return None
    if name in _KEEPS:
        return values[0]
    if name == "convert_element_type":
        integers = np.dtype(eqn.params["new_dtype"]).kind in "iu"
        return values[0] if integers else None
    if name == "add":
        return values[0] + values[1]
    if name == "sub":
        return values[0] + values[1] * -1
    if name == "neg":
        return values[0] * -1
    if name == "mul":
        a, b = values if values[0].terms else values[::-1]
        known = not b.terms and isinstance(b.offset, int)
        return a * b.offset if known else None
    return None
