"""The update graph of a body: its equations with calls opened, as linked values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jaxtile.primitives._scalar import (
    as_closed,
    elementwise,
    inner_jaxpr,
)

STATE, COORDINATE = "state", "coordinate"


@dataclass(eq=False)
class Value:
    """A value of the graph: an input, a constant, or a result of a node.

    Args:
        aval: its shape and dtype.
        node: the node that gives it, or None.
        place: which of the node's results, or of the inputs of its kind, it is.
        kind: `STATE` or `COORDINATE` for an input, else "".
        const: the array of a constant.
        states: which state inputs it depends on.
        fixed: it depends on constants alone.
    """

    aval: Any
    node: Node | None = None
    place: int = 0
    kind: str = ""
    const: Any = None
    states: frozenset[int] = frozenset()
    fixed: bool = False


@dataclass(eq=False)
class Node:
    """An equation, the values that it reads and gives, and where it was traced."""

    eqn: Any
    reads: list[Value]
    debug: Any
    gives: list[Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name


@dataclass(eq=False)
class Graph:
    """A body's values.

    Args:
        coordinates, states: the inputs.
        results: the values that the body returns.
    """

    coordinates: list[Value]
    states: list[Value]
    results: list[Value]


def graph_of(closed: Any, n_coordinates: int, open_maps: bool = True) -> Graph:
    """The graph of a jaxpr whose inputs are coordinates, then states.

    Args:
        closed: the jaxpr.
        n_coordinates: how many of its inputs are coordinates.
        open_maps: show the scalar functions of `map` where a state enters them.
    """
    jaxpr, consts = as_closed(closed)
    avals = [v.aval for v in jaxpr.invars]
    coordinates = [
        Value(a, place=i, kind=COORDINATE) for i, a in enumerate(avals[:n_coordinates])
    ]
    states = [
        Value(a, place=i, kind=STATE, states=frozenset({i}))
        for i, a in enumerate(avals[n_coordinates:])
    ]
    results = _walk(jaxpr, consts, [*coordinates, *states], open_maps)
    return Graph(coordinates, states, results)


def _walk(jaxpr: Jaxpr, consts, args: Sequence[Value], open_maps) -> list[Value]:
    env: dict = {
        v: Value(v.aval, const=c, fixed=True)
        for v, c in zip(jaxpr.constvars, consts, strict=True)
    }
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        if isinstance(atom, Literal):
            value = np.asarray(atom.val, atom.aval.dtype)  # pyright: ignore
            return Value(atom.aval, const=value, fixed=True)
        return env[atom]

    for eqn in jaxpr.eqns:
        reads = [read(v) for v in eqn.invars]
        outs = _equation(eqn, reads, open_maps, jaxpr.debug_info)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn, reads: list[Value], open_maps: bool, debug) -> list[Value]:
    touched = any(v.states for v in reads)
    if eqn.primitive.name == "tile_map" and touched and open_maps:
        opened = _opened(eqn, reads)
        return _walk(*as_closed(opened), reads, open_maps)
    # A custom derivative is part of what the user wrote: it stays closed.
    inner = None if "custom" in eqn.primitive.name else inner_jaxpr(eqn)
    if inner is not None and eqn.primitive.name in _CALLS:
        return _walk(*as_closed(inner), reads, open_maps)
    node = Node(eqn, reads, debug)
    states = frozenset().union(*(v.states for v in reads))
    fixed = all(v.fixed for v in reads)
    node.gives = [
        Value(v.aval, node, i, states=states, fixed=fixed)
        for i, v in enumerate(eqn.outvars)
    ]
    return node.gives


_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call"))


def _opened(eqn, reads: Sequence[Value]) -> Any:
    """A map's scalar function on arrays, as a jaxpr."""
    fn: Callable = eqn.params["region"].fn
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in reads]
    return jax.make_jaxpr(lambda *xs: jax.tree.leaves(elementwise(fn, *xs)))(*shapes)


class Match:
    """Looks for the merge of a reducer, written out in a body.

    Args:
        own: the state input that each leaf of the merge's state continues.
        swapped: the state is merge's second operand, and not its first.
    """

    def __init__(self, own: Sequence[int], swapped: bool):
        self.own, self.swapped = own, swapped
        self.found: list[Value | None] = [None] * len(own)
        self._known: dict[tuple[int, int], bool] = {}

    def fits(self, template: Value, value: Value) -> bool:
        """Whether a value of a body computes what a value of `merge(a, b)` does.

        The leaves of a are the first half of the template's states, those of b the
        second. `found` then holds what is merged into the state.
        """
        key = (id(template), id(value))
        if key not in self._known:
            self._known[key] = self._fits(template, value)
        return self._known[key]

    def _fits(self, template: Value, value: Value) -> bool:
        node, other = template.node, value.node
        if node is not None:
            if other is None or not _alike(node, other):
                return False
            pairs = zip(node.reads, other.reads, strict=True)
            same = template.place == value.place
            return same and all(self.fits(t, v) for t, v in pairs)
        if template.kind != STATE:
            return _same_constant(template, value)
        second, leaf = divmod(template.place, len(self.own))
        if bool(second) == self.swapped:
            return value.kind == STATE and value.place == self.own[leaf]
        if value.states or self.found[leaf] not in (None, value):
            return False
        self.found[leaf] = value
        return True


def _alike(a: Node, b: Node) -> bool:
    if a.eqn.primitive is not b.eqn.primitive or len(a.reads) != len(b.reads):
        return False
    return _spelled(a.eqn.params) == _spelled(b.eqn.params)


def _spelled(params: dict) -> dict[str, str]:
    return {k: str(v) for k, v in params.items() if k != "sharding"}


def _same_constant(a: Value, b: Value) -> bool:
    if isinstance(a.const, np.ndarray) and isinstance(b.const, np.ndarray):
        return a.const.dtype == b.const.dtype and np.array_equal(a.const, b.const, True)
    return a.const is not None and a.const is b.const


def nodes(results: Sequence[Value], known: Container[int] = ()) -> Iterator[Node]:
    """Every node that the values need, in an order in which they can run.

    Args:
        results: the values.
        known: the `id` of values that need no node.
    """

    def needed(values):
        return [(v.node, False) for v in values if v.node and id(v) not in known]

    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = needed(results)
    stack.reverse()
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend(reversed(needed(node.reads)))
