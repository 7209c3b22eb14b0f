"""Evaluating a body's values at one coordinate, or at all of a domain at once.

All at once, a value carries one leading axis for each axis of the domain that it varies
along. A coordinate stays a formula, a * i + b, for as long as it can, so that a load of
`x[i]` for all i is x itself and not a gather.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend.core import Jaxpr, Literal

from jaxtile._graph import COORDINATE, STATE, Graph, Node, Value, nodes
from jaxtile._jax_private import varying_axes
from jaxtile.primitives._scalar import equation


class Axis(NamedTuple):
    """One axis of a domain: the coordinates start, start + step, ...

    Args:
        size: how many there are.
        start, step: Python integers.
    """

    size: int
    start: int = 0
    step: int = 1


class Formula(NamedTuple):
    """scale * i + offset, where i is the place along an axis of the domain."""

    axis: int
    scale: int
    offset: int


class Wide(NamedTuple):
    """An array whose leading axes are the domain axes that it varies along, sorted."""

    array: Any
    axes: tuple[int, ...] = ()


def at_once(
    wanted: Sequence[Value],
    shape: Sequence[int],
    domain: Sequence[Axis],
    states: Sequence | None = None,
    front: bool = True,
) -> list[jax.Array]:
    """The values at every coordinate of a domain.

    Args:
        wanted: what to evaluate.
        shape: that each has, or broadcasts to, at one coordinate.
        domain: the coordinates.
        states: what the state inputs hold at all of them; None if nothing needs them.
        front: the domain's axes come before those of `shape`, else after them.
    """

    def given(value: Value):
        if value.kind == COORDINATE:
            axis = domain[value.place]
            return Formula(value.place, axis.step, axis.start)
        if value.kind == STATE:
            assert states is not None
            return Wide(states[value.place])
        return Wide(value.const)

    run = _Run(domain, front)
    found = _evaluate(wanted, given, run.node)
    return [run.broadcast(run.array(v), shape) for v in found]


def in_front(wanted: Sequence[Value]) -> bool:
    """Whether the domain's axes are better in front: they are not where they are read.

    Arrays that are read along their last axis would have to be transposed.
    """
    votes = 0
    for node in nodes(wanted):
        if node.name == "dynamic_slice" and node.reads[0].fixed:
            x, *starts = node.reads
            along = [d for d, s in enumerate(starts) if not s.fixed]
            size = math.prod(x.aval.shape)
            last = x.aval.ndim - 1
            votes += -size if along and along[-1] == last > 0 else size
    return votes >= 0


def at_one(
    wanted: Sequence[Value],
    coordinate: Sequence,
    states: Sequence,
    known: Mapping[int, Any] | None = None,
) -> list:
    """The values at one coordinate.

    Args:
        wanted: what to evaluate.
        coordinate, states: the inputs.
        known: of `constant_parts`.
    """

    def given(value: Value):
        if value.kind == COORDINATE:
            return Wide(coordinate[value.place])
        return Wide(states[value.place] if value.kind == STATE else value.const)

    env = {k: Wide(v) for k, v in (known or {}).items()}
    return [v.array for v in _evaluate(wanted, given, _Run((), True).node, env)]


def constant_parts(graph: Graph) -> dict[int, Any]:
    """What a body computes of constants alone, by `id`: the same at every coordinate."""
    parts = {
        id(v): v
        for node in nodes(graph.results)
        for v in node.reads
        if v.fixed and v.node is not None and not node.gives[0].fixed
    }
    parts |= {id(v): v for v in graph.results if v.fixed and v.node is not None}
    values = list(parts.values())
    return dict(zip(parts, at_one(values, (), ()), strict=True))


def _evaluate(wanted, given: Callable, run: Callable, env: dict | None = None) -> list:
    env = {} if env is None else env

    def read(value: Value):
        if id(value) not in env:
            env[id(value)] = given(value)
        return env[id(value)]

    for node in nodes(wanted, frozenset(env)):
        outs = run(node, [read(v) for v in node.reads])
        env.update(zip(map(id, node.gives), outs, strict=True))
    return [read(v) for v in wanted]


# Where every operand is elementwise, arithmetic is as the contract states it.
ELEMENTWISE = frozenset(
    "add sub mul div rem max min pow integer_pow square neg abs sign exp exp2 log log1p "
    "expm1 tanh logistic sin cos tan asin acos atan sinh cosh asinh acosh atanh sqrt "
    "rsqrt cbrt erf erfc erf_inv atan2 nextafter floor ceil round clamp select_n "
    "convert_element_type".split()
)


def run_node(node: Node, *values) -> list:
    """The results of one node on arrays."""
    eqn = node.eqn
    shape = eqn.outvars[0].aval.shape
    alike = all(np.shape(v) in ((), shape) for v in values)
    if eqn.primitive.name in ELEMENTWISE and alike:
        return equation(eqn, values)
    if eqn.primitive.name == "pvary":  # what comes in may vary already
        have = varying_axes(jax.typeof(values[0]))
        rest = tuple(a for a in eqn.params["axes"] if a not in have)
        return [eqn.primitive.bind(*values, axes=rest)] if rest else list(values)
    if "custom" not in eqn.primitive.name:
        outs = eqn.primitive.bind(*values, **eqn.params)
        return list(outs) if eqn.primitive.multiple_results else [outs]
    # Only jax itself knows how to bind a custom derivative again on every jax line.
    given = {
        var: value
        for var, value in zip(eqn.invars, values, strict=True)
        if not isinstance(var, Literal)
    }
    alone = Jaxpr((), list(given), eqn.outvars, [eqn], eqn.effects, node.debug)
    return core.eval_jaxpr(alone, (), *given.values())


class _Run:
    """Runs nodes on wide values over a domain."""

    def __init__(self, domain: Sequence[Axis], front: bool):
        self.domain, self.front = domain, front

    def _vmap(self, fn: Callable, varies: Sequence[bool]) -> Callable:
        place = 0 if self.front else -1
        return jax.vmap(fn, tuple(place if v else None for v in varies), place)

    def broadcast(self, value: Wide, shape: Sequence[int]) -> jax.Array:
        """A value as an array with every axis of the domain, and `shape`."""
        array = jnp.asarray(value.array)
        if array.ndim == len(value.axes):  # a scalar mask selects whole states
            counts = array.shape
            kept = range(len(counts))
            if self.front:
                array = lax.broadcast_in_dim(array, (*counts, *shape), kept)
            else:
                kept = [len(shape) + k for k in kept]
                array = lax.broadcast_in_dim(array, (*shape, *counts), kept)
        return self._spread(Wide(array, value.axes), range(len(self.domain)), shape)

    def array(self, value: Formula | Wide) -> Wide:
        """The value as an array."""
        if isinstance(value, Wide):
            return value
        place = lax.iota(np.int32, self.domain[value.axis].size)
        return Wide(place * value.scale + value.offset, (value.axis,))

    def node(self, node: Node, values: list) -> list:
        for rule in (self._fold_constants, self._formula, self._slice):
            out = rule(node, values)
            if out is not None:
                return [out]
        return self._mapped(node, [self.array(v) for v in values])

    def _mapped(self, node: Node, values: list[Wide]) -> list[Wide]:
        axes = tuple(sorted({a for v in values for a in v.axes}))
        shape = node.gives[0].aval.shape
        if self._is_flat(node):
            arrays = [self._spread(v, axes, shape) for v in values]
            return [Wide(out, axes) for out in run_node(node, *arrays)]
        if node.name == "squeeze":
            first = len(axes) if self.front else 0
            places = [first + d for d in node.eqn.params["dimensions"]]
            return [Wide(lax.squeeze(values[0].array, places), axes)]
        fn: Callable = functools.partial(run_node, node)
        for axis in reversed(axes) if self.front else axes:
            fn = self._vmap(fn, [axis in v.axes for v in values])
        return [Wide(out, axes) for out in fn(*(v.array for v in values))]

    def _is_flat(self, node: Node) -> bool:
        """Elementwise, so that its axes may lie as they do; vmap might turn them."""
        shape = node.gives[0].aval.shape
        alike = all(v.aval.shape == shape for v in node.reads)
        return alike and (node.name in ELEMENTWISE or node.name == "tile_map")

    def _spread(self, value: Wide, axes: Sequence[int], shape: Sequence[int]):
        """An operand of a flat node with every axis that one of them has."""
        if value.axes == tuple(axes):
            return value.array
        counts = [self.domain[a].size for a in axes]
        have, own = [axes.index(a) for a in value.axes], range(len(shape))
        if self.front:
            kept = [*have, *(len(axes) + d for d in own)]
            return lax.broadcast_in_dim(value.array, (*counts, *shape), kept)
        kept = [*own, *(len(shape) + k for k in have)]
        return lax.broadcast_in_dim(value.array, (*shape, *counts), kept)

    def _fold_constants(self, node: Node, values: list) -> Wide | None:
        known = [
            isinstance(v, Wide) and isinstance(v.array, np.ndarray) for v in values
        ]
        if node.name == "select_n" and known[0] and np.ndim(values[0].array) == 0:
            return values[1 + int(values[0].array)]
        fn = _NUMPY.get(node.name)
        if fn is None or not all(known) or any(np.ndim(v.array) for v in values):
            return None
        dtype = node.gives[0].aval.dtype
        if any(np.dtype(d.array.dtype).kind not in "bi" for d in values):
            return None
        return Wide(np.asarray(fn(*(v.array for v in values)), dtype))

    def _bounds(self, f: Formula) -> tuple[int, int]:
        """The least and the largest value over the whole axis."""
        last = max(self.domain[f.axis].size - 1, 0)
        ends = (f.offset, f.scale * last + f.offset)
        return min(ends), max(ends)

    def _formula(self, node: Node, values: list) -> Any:
        """A formula of a formula, or what is decided for all of its values."""
        formulas = [v for v in values if isinstance(v, Formula)]
        if len(formulas) != 1:
            return None
        (f,) = formulas
        if node.name in ("convert_element_type", "reshape", "squeeze", "copy"):
            aval = node.gives[0].aval
            whole = np.dtype(aval.dtype) in (np.dtype(np.int32), np.dtype(np.int64))
            return f if whole and aval.shape == () else None
        other = next((v for v in values if v is not f), None)
        if len(values) != 2 or not isinstance(other, Wide) or np.ndim(other.array):
            return None
        if not isinstance(other.array, np.ndarray) or other.axes:
            return None
        c, first = int(other.array), values[0] is f
        return self._linear(node.name, f, c, first) or self._decided(
            node.name, f, c, first
        )

    def _linear(self, name: str, f: Formula, c: int, first: bool) -> Formula | None:
        if name == "mul":
            return Formula(f.axis, f.scale * c, f.offset * c)
        if name == "add":
            return f._replace(offset=f.offset + c)
        if name == "sub" and first:
            return f._replace(offset=f.offset - c)
        return None

    def _decided(self, name: str, f: Formula, c: int, first: bool) -> Any:
        low, high = self._bounds(f)
        if name in ("max", "min"):
            if name == "max":
                return f if low >= c else None
            return f if high <= c else None
        fn = _COMPARE.get(name)
        if fn is None:
            return None
        pair = [fn(v, c) if first else fn(c, v) for v in (low, high)]
        return Wide(np.asarray(pair[0])) if pair[0] == pair[1] else None

    def _slice(self, node: Node, values: list) -> Wide | None:
        """A block of an array at every place, as the array cut into blocks."""
        if node.name != "dynamic_slice" or not isinstance(values[0], Wide):
            return None
        x, starts = values[0], values[1:]
        shape = node.reads[0].aval.shape
        sizes = node.eqn.params["slice_sizes"]
        formulas = {d: s for d, s in enumerate(starts) if isinstance(s, Formula)}
        axes = [f.axis for f in formulas.values()]
        if not axes or len(set(axes)) != len(axes) or set(axes) & set(x.axes):
            return None
        for d, f in formulas.items():
            low, high = self._bounds(f)
            whole = sizes[d] == f.scale or (sizes[d] == 1 and f.scale > 0)
            if not whole or low < 0 or high + sizes[d] > shape[d]:
                return None
        rest = [None if d in formulas else s for d, s in enumerate(starts)]
        if any(s is not None and s.axes for s in rest):
            return None
        plain = [0 if s is None else s.array for s in rest]
        cut = functools.partial(self._cut, formulas, sizes, plain)
        for _ in x.axes:
            cut = self._vmap(cut, [True])
        out = cut(x.array)
        places = tuple(f.axis for f in formulas.values())
        # vmap puts its axis outside of those that are new here.
        new = (*x.axes, *places) if self.front else (*places, *x.axes)
        order = sorted(range(len(new)), key=new.__getitem__)
        kept = range(len(new), out.ndim)
        if not self.front:
            kept, rank = range(len(shape)), len(shape)
            return Wide(
                lax.transpose(out, (*kept, *(rank + i for i in order))),
                tuple(sorted(new)),
            )
        return Wide(lax.transpose(out, (*order, *kept)), tuple(sorted(new)))

    def _cut(self, formulas: dict, sizes, plain: Sequence, x):
        """`x` as (place, ..., block): the domain axes in the order of the formulas."""
        for d, start in enumerate(plain):
            if d not in formulas and sizes[d] != x.shape[d]:
                x = lax.dynamic_slice_in_dim(x, start, sizes[d], d)
        for d, f in formulas.items():
            x = self._run_of(x, d, f, sizes[d])
        shape, fronts = [], []
        for d, size in enumerate(sizes):
            if d in formulas:
                fronts.append(len(shape))
                shape += [self.domain[formulas[d].axis].size, size]
            else:
                shape.append(size)
        x = x.reshape(shape)
        rest = [d for d in range(len(shape)) if d not in fronts]
        return lax.transpose(x, (*fronts, *rest) if self.front else (*rest, *fronts))

    def _run_of(self, x, d: int, f: Formula, size: int):
        """The elements along a dimension that the places read."""
        length = (self.domain[f.axis].size - 1) * f.scale + size
        stride = f.scale if size == 1 else 1
        return lax.slice_in_dim(x, f.offset, f.offset + length, stride, d)


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_NUMPY: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "convert_element_type": lambda x: x,
}
