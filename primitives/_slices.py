"""Affine coordinates as slices, reversals, reshapes, diagonals, transposes, broadcasts.

A `Plan` takes an array apart into steps of one kind after the other, each of which has a
transpose of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxtile.policy import unordered_tree
from jaxtile.primitives._affine import Affine
from jaxtile.primitives._bind import bind_reduce
from jaxtile.primitives._moves import add_spec


@dataclass(frozen=True)
class Axis:
    """What becomes of one axis of x: a strided slice whose places split into digits.

    Args:
        start, stop, stride: the slice.
        digits: `(coordinate, size, reversed)`, the slowest first.
    """

    start: int
    stop: int
    stride: int
    digits: tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True)
class Plan:
    """x at affine coordinates that lie inside it.

    Args:
        source: the shape of x.
        axes: an `Axis` for each axis of x.
        shape: of the result.
    """

    source: tuple[int, ...]
    axes: tuple[Axis, ...]
    shape: tuple[int, ...]

    @property
    def _labels(self) -> list[int]:
        return [k for axis in self.axes for k, _, _ in axis.digits]

    @property
    def _flips(self) -> tuple[int, ...]:
        digits = [d for axis in self.axes for d in axis.digits]
        return tuple(i for i, (_, _, back) in enumerate(digits) if back)

    def run(self, x: Any) -> Any:
        """The result."""
        starts, stops, strides = (
            zip(*((a.start, a.stop, a.stride) for a in self.axes), strict=True)
            if self.axes
            else ((), (), ())
        )
        x = lax.slice(x, starts, stops, strides)
        x = x.reshape([n for a in self.axes for _, n, _ in a.digits])
        x = lax.rev(x, self._flips)
        labels = self._labels
        while (twin := _twins(labels)) is not None:
            x, labels = _diagonal(x, labels, *twin)
        order = sorted(range(len(labels)), key=labels.__getitem__)
        x = lax.transpose(x, order)
        return lax.broadcast_in_dim(x, self.shape, sorted(labels))

    def back(self, ct: Any) -> Any:
        """The transpose of `run`: sums where elements were repeated."""
        labels, twins = self._labels, []
        while (twin := _twins(labels)) is not None:
            twins.append((labels, twin))
            labels = _merged(labels, *twin)
        lacking = tuple(k for k in range(len(self.shape)) if k not in labels)
        if lacking:
            (ct,) = bind_reduce(
                add_spec(ct.dtype, "reindex"),
                [ct],
                None,
                None,
                axes=lacking,
                policy=unordered_tree,
                out=(ct.dtype,),
            )
        places = sorted(labels)
        ct = lax.transpose(ct, [places.index(k) for k in labels])
        for before, twin in reversed(twins):
            ct = _undiagonal(ct, before, *twin)
        ct = lax.rev(ct, self._flips)
        ct = ct.reshape([math.prod(n for _, n, _ in a.digits) for a in self.axes])
        zero = jax.numpy.zeros((), ct.dtype)
        config = []
        for a, n, m in zip(self.axes, self.source, ct.shape, strict=True):
            high = n - (a.start + (m - 1) * a.stride + 1)
            config.append((a.start, high, a.stride - 1))
        return lax.pad(ct, zero, config)


def _twins(labels: Sequence[int]) -> tuple[int, int] | None:
    for i, k in enumerate(labels):
        if k in labels[i + 1 :]:
            return i, labels.index(k, i + 1)
    return None


def _merged(labels, i, j):
    rest = [k for p, k in enumerate(labels) if p not in (i, j)]
    return [*rest, labels[i]]


def _diagonal(x, labels, i, j):
    """Two axes of one coordinate as one: the places j (n + 1) of both together."""
    n = x.shape[i]
    rest = [p for p in range(x.ndim) if p not in (i, j)]
    x = lax.transpose(x, (*rest, i, j))
    x = x.reshape(*x.shape[:-2], n * n)
    x = lax.slice_in_dim(x, 0, n * n, n + 1, x.ndim - 1)
    return x, _merged(labels, i, j)


def _undiagonal(ct, labels, i, j):
    n = ct.shape[-1]
    zero = jax.numpy.zeros((), ct.dtype)
    ct = lax.pad(ct, zero, [(0, 0, 0)] * (ct.ndim - 1) + [(0, 0, n)])
    ct = ct.reshape(*ct.shape[:-1], n, n)
    rest = [p for p in range(len(labels)) if p not in (i, j)]
    order = [*rest, i, j]
    return lax.transpose(ct, [order.index(p) for p in range(len(labels))])


def plan(
    coordinates: Sequence[Affine], source: Sequence[int], shape: Sequence[int]
) -> Plan | None:
    """The plan of coordinates that lie in `source`, or None where there is none.

    Args:
        coordinates: one for each axis of x, of the result's coordinates.
        source: the shape of x.
        shape: of the result, without 0.
    """
    axes = [_axis(c, shape) for c in coordinates]
    if any(a is None for a in axes):
        return None
    return Plan(tuple(source), tuple(a for a in axes if a), tuple(shape))


def _axis(coordinate: Affine, shape: Sequence[int]) -> Axis | None:
    """Coefficients that are the weights of digits, in a mixed radix."""
    terms = [(coordinate.coefficients[k], k) for k in coordinate.terms if shape[k] != 1]
    terms.sort(key=lambda term: abs(term[0]))
    low, high = coordinate.range(shape)
    stride, digits, weight = 1, [], None
    for a, k in terms:
        if weight is None:
            stride = weight = abs(a)
        if abs(a) != weight:
            return None
        digits.append((k, shape[k], a < 0))
        weight *= shape[k]
    return Axis(low, high + 1, stride, tuple(reversed(digits)))
