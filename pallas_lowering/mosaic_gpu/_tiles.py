"""Tiles whose state costs less than a tree of merges, where any grouping is permitted.

* logaddexp takes two transcendental functions a merge. A tile's state is the pair (m, s)
  of sum(exp(x_i)) = s exp(m): one exponential an element, one logarithm a fibre.
* welford divides at each merge and keeps its mean in two parts. A tile's mean and sum of
  squares come from two passes over registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from jaxtile.catalogue import add, maximum
from jaxtile.composite import welford
from jaxtile.pallas_lowering.mosaic_gpu import _states as st
from jaxtile.pallas_lowering.mosaic_gpu._ops import constant
from jaxtile.pallas_lowering.mosaic_gpu._region import Region
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, State
from jaxtile.policy import Kind, Policy
from jaxtile.primitives._scalar import elementwise
from jaxtile.primitives._spec import Spec, make_spec


def algebra_of(spec: Spec, policy: Policy, out, finish: bool) -> Algebra:
    """The thread code of a reducer under a policy."""
    kind: type[Algebra] = Algebra
    if policy.kind is Kind.TREE and spec.reducer.native == "logaddexp":
        kind = LogSumExp
    if policy.kind is Kind.TREE and spec.reducer is welford:
        kind = TwoPassMoments
    return kind(spec, False, out, finish)


def _shift(m):
    """What to subtract from exponents: inf - inf would be NaN."""
    return jnp.where(jnp.abs(m) == jnp.inf, jnp.zeros_like(m), m)


def _scaled(m, s, top):
    factor = jnp.exp(_shift(m) - _shift(top))
    return jnp.where(m == -jnp.inf, jnp.zeros_like(s), s * factor)


def _join(m, s, other_m, other_s):
    top = jnp.maximum(m, other_m)
    return [top, _scaled(m, s, top) + _scaled(other_m, other_s, top)]


def _value(m, s):
    total = jnp.log(s)
    # log(1) is 0, and 0 + -0.0 would lose the sign of a lone finite element.
    alone = (jnp.abs(m) == jnp.inf) | (total == 0)
    return [jnp.where(alone, m, total + m)]


def _single(reducer, kind) -> Algebra:
    spec = make_spec(reducer, jax.tree.structure(0), (kind,), kind, None, "reduce")
    return Algebra(spec, True, (kind,), False)


class LogSumExp(Algebra):
    """Pairs (m, s) in the place of logaddexp's one leaf."""

    @property
    def width(self) -> int:
        """One register: the tile works on elements."""
        return 1

    def __init__(self, spec: Spec, lifted: bool, out: Sequence, finish: bool):
        super().__init__(spec, lifted, out, finish)
        (kind,) = spec.states
        self.dtypes, self.symmetric = (kind, kind), True
        self._value = Region(_value, (kind,) * 2)
        self._term = Region(lambda x, m: [jnp.exp(x - _shift(m))], (kind,) * 2)
        self._maximum, self._sum = _single(maximum, kind), _single(add, kind)
        self._whole = Algebra(spec, lifted, out, finish)

    @functools.cached_property
    def _merge(self):
        return Region(_join, (self.dtypes[0],) * 4)

    @functools.cached_property
    def _identity(self):
        kind = self.dtypes[0]
        return Region(lambda: [jnp.array(v, kind) for v in (-jnp.inf, 0)], ())

    @functools.cached_property
    def _lift(self):
        def pair(x):
            return [*self.spec.lift([x], elementwise), jnp.ones((), self.dtypes[0])]

        return Region(pair, self.spec.raw)

    def result(self, state: State, seed: State | None = None) -> list[ir.Value]:
        """What is stored: the pair's value after the seed, finished and narrowed."""
        value = State(tuple(self._value(*state.leaves)), state.exists)
        return self._whole.result(value, seed)

    def tile(self, lane, rows: Sequence, track: bool) -> State:
        """The pair of a warp's tile, or of one thread's block (`lane` is None)."""
        if self.lifted:
            return super().tile(lane, rows, track)
        found = [self.element(*p, track=track) for row in rows for p in row]
        values = [State(s.leaves[:1], s.exists) for s in found]
        top = st.tree(self._maximum, values)
        if lane is not None:
            top = st.over_lanes(self._maximum, lane, top, range(5))
        m = top.leaves[0]
        terms = [State(tuple(self._term(v.leaves[0], m))) for v in values]
        total = st.tree(self._sum, terms)
        if lane is not None:
            total = st.over_lanes(self._sum, lane, total, range(5))
        return State((m, total.leaves[0]), top.exists)


class TwoPassMoments(Algebra):
    """Welford's states, those of whole tiles from two passes."""

    @property
    def width(self) -> int:
        """One register: the tile works on elements."""
        return 1

    def __init__(self, spec: Spec, lifted: bool, out: Sequence, finish: bool):
        super().__init__(spec, lifted, out, finish)
        kind = spec.states[0]
        self._sum = _single(add, kind)
        self._less = Region(lambda x, m: [x - m], (kind,) * 2)
        self._square = Region(lambda x: [x * x], (kind,))
        self._rest = Region(_moments, (kind,) * 4)

    def _total(self, lane, values):
        total = st.tree(self._sum, [State((v,)) for v in values])
        if lane is not None:
            total = st.over_lanes(self._sum, lane, total, range(5))
        return total.leaves[0]

    def tile(self, lane, rows: Sequence, track: bool) -> State:
        """The moments of a tile without gaps; with gaps, the tree of merges."""
        places = [p for row in rows for p in row]
        if self.lifted or any(exists is not None for _, exists in places):
            return super().tile(lane, rows, track)
        kind = self.dtypes[0]
        values = [self.element(leaves).leaves[1] for leaves, _ in places]
        number = len(values) * (1 if lane is None else 32)
        count, share = constant(number, kind), constant(1 / number, kind)
        # Sums of shares: those of values near the largest finite one overflow.
        mean = self._total(lane, [self._scale(v, share)[0] for v in values])
        gaps = [self._less(v, mean)[0] for v in values]
        low = self._total(lane, [self._scale(g, share)[0] for g in gaps])
        squares = self._total(lane, [self._square(g)[0] for g in gaps])
        m2, low = self._rest(mean, low, squares, count)
        return State((count, mean, m2, low))

    @functools.cached_property
    def _scale(self):
        return Region(lambda a, b: [a * b], (self.dtypes[0],) * 2)


def _moments(mean, low, squares, count):
    """The rounding of the mean shows as what the gaps from it leave over."""
    low = jnp.where(jnp.isfinite(mean), low, 0)
    m2 = squares - count * low * low
    return [jnp.where(jnp.isinf(squares), squares, m2), low]
