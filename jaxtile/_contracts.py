"""Contracts that a user states for a fold, and what can be decided of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxtile._domain import Domain, State
from jaxtile._graph import Graph, Value, graph_of, nodes
from jaxtile._updates import Update, matched, merge_graph, updates
from jaxtile._vectorise import ELEMENTWISE, at_one
from jaxtile.errors import ContractError, TileError, TileTypeError, message
from jaxtile.policy import Kind
from jaxtile.primitives._functions import attempt
from jaxtile.primitives._operands import require_laws
from jaxtile.primitives._spec import Spec
from jaxtile.reducers import Reducer

# Roundings that the two sides of a contract may differ by at one step.
_ROUNDINGS = 2**10


class Contract(NamedTuple):
    """A contract that is bound to a state.

    Args:
        merge: of two lists of leaves.
        identity: the identity's leaves; None where `merged` says what is contributed.
        merged: what the body merges into its state, where that is visible in it.
        spec: of the reducer, where merge is elementwise on leaves of one shape.
    """

    merge: Callable[[Sequence, Sequence], list]
    identity: list | None
    merged: list[Value] | None
    spec: Spec | None


def check(region: Any, graph: Graph, found: Sequence) -> Contract | None:
    """The region's contract, bound to its state.

    Returns:
        None where the body itself shows all that is needed.

    Raises:
        ContractError: it lacks a law or an identity, or the body contradicts it.
        TileTypeError: its merge does not take two states, or gives none.
    """
    reducer, state = region.contract, region.state
    tree, template = _template(reducer, state)
    if region.policy.kind not in (Kind.LEFT, Kind.RIGHT):
        require_laws("fold", reducer, region.policy)
    if _decided(region, found, tree):
        return None

    def merge(a: Sequence, b: Sequence) -> list:
        pair = (jax.tree.unflatten(tree, list(side)) for side in (a, b))
        return jax.tree.leaves(reducer.merge(*pair))

    places = range(len(state.leaves))
    for swapped in (False, True):
        merged = matched(template, graph.results, places, swapped)
        if merged is not None:
            spec = _spec(reducer, state, template, swapped)
            return Contract(_turned(merge) if swapped else merge, None, merged, spec)
    identity = _identity(region, tree)
    _compare(region, merge, identity)
    return Contract(merge, identity, None, _spec(reducer, state, template, False))


def _turned(merge: Callable) -> Callable:
    return lambda a, b: merge(b, a)


def _template(reducer: Reducer, state: State) -> tuple[Any, Graph]:
    """The structure that merge takes, and its graph."""
    avals = [jax.typeof(v) for v in state.leaves]

    def tell():
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return (
            f"{reducer!r}'s merge to take two states like init, {state.whole(shapes)}",
            "Give it the structure of init: merge(state, state) -> state.",
        )

    def graph_with(tree):
        return attempt("fold", tell, merge_graph, reducer.merge, avals, tree)

    # Tiles broadcast by dims, where their arrays might by position. A merge of arrays
    # takes no tiles.
    tree = state.tree
    try:
        graph = graph_with(tree)
    except TileError:
        if tree == state.plain:
            raise
        tree = state.plain
        graph = graph_with(tree)
    got = [(v.aval.shape, v.aval.dtype) for v in graph.results]
    if got != [(a.shape, a.dtype) for a in avals]:
        raise TileTypeError(
            message("fold", expected=tell()[0], got=f"results {got}", way_out=tell()[1])
        )
    return tree, graph


def _decided(region: Any, found: Sequence, tree: Any) -> bool:
    """Whether body and merge are both known, and the same.

    Raises:
        ContractError: they are known, and differ.
    """
    n = len(region.state.leaves)
    theirs = updates(_stated(region, tree), [""] * n)
    same = True
    for name, ours, stated in zip(region.state.names, found, theirs, strict=True):
        if not (isinstance(ours, Update) and isinstance(stated, Update)):
            same = False
        elif ours.contributions and ours.reducer != stated.reducer:
            raise ContractError(
                message(
                    "fold",
                    expected=f"a body that updates {name} as {region.contract!r} merges "
                    f"it, by {stated.reducer!r}",
                    got=f"an update by {ours.reducer!r}",
                    way_out="Leave contract= out, or state the one of this body.",
                )
            )
    return same


def _stated(region: Any, tree: Any) -> list[Value]:
    """The results of merge, whose second operand is a contribution."""
    avals = [jax.typeof(v) for v in region.state.leaves]
    return merge_graph(region.contract.merge, avals, tree, one_state=True).results


def _spec(
    reducer: Reducer, state: State, template: Graph, swapped: bool
) -> Spec | None:
    """The spec of a merge that is elementwise on leaves of one shape, else None."""
    shapes = {v.shape for v in state.leaves}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    for node in nodes(template.results):
        flat = node.name in ELEMENTWISE or node.name.startswith("custom_jvp")
        flat = flat or node.name in _COMPARES or _fills(node)
        if not flat or any(v.aval.shape not in ((), shape) for v in node.gives):
            return None
    dtypes = tuple(np.dtype(v.dtype) for v in state.leaves)
    plain = state.plain
    bare = Reducer(
        merge=reducer.merge,
        identity=reducer.identity,
        laws=reducer.laws,
        name=reducer.name,
        exact_identity=reducer.exact_identity,
    )
    return Spec(
        bare, plain, dtypes, dtypes, plain, dtypes, plain, dtypes, None, swapped
    )


_COMPARES = frozenset("eq ne lt le gt ge is_finite and or xor not copy".split())


def _fills(node) -> bool:
    return node.name == "broadcast_in_dim" and node.reads[0].aval.shape == ()


def _identity(region: Any, tree) -> list:
    """The identity at the state's shapes."""
    reducer, leaves = region.contract, region.state.leaves
    value = reducer.identity
    if value is None:
        raise ContractError(
            message(
                "fold",
                expected="a contract with an identity: what a coordinate contributes is "
                "body(coordinate, identity)",
                got=f"{reducer!r} without one",
                way_out='State identity=, or keep the chain with policy="fold_left".',
            )
        )
    if callable(value):
        scalars = [jnp.zeros((), v.dtype) for v in leaves]
        value = value(jax.tree.unflatten(region.state.plain, scalars))
    given = jax.tree.leaves(value)
    if len(given) != len(leaves):
        raise TileTypeError(
            message(
                "fold",
                expected=f"{reducer!r}'s identity like init, {len(leaves)} leaves",
                got=f"{len(given)} leaves",
                way_out="Give one number for each leaf of the state.",
            )
        )
    return [
        jnp.broadcast_to(jnp.asarray(v, leaf.dtype), leaf.shape)
        for v, leaf in zip(given, leaves, strict=True)
    ]


def _compare(region: Any, merge: Callable, identity: Sequence) -> None:
    """Try the contract on the fold's own first states, where their values are known.

    Raises:
        ContractError: body(c, s) is not merge(s, body(c, identity)).
    """
    known = [*region.closed.consts, *region.state.leaves]
    if any(isinstance(v, Tracer) for v in known):
        return
    domain: Domain = region.domain
    graph = graph_of(region.closed, len(domain.axes), open_maps=False)

    def body(place, state):
        coordinate = [np.int32(c) for c in domain.at(place)]
        return at_one(graph.results, coordinate, state)

    state = body(0, region.state.leaves)
    last = domain.size - 1
    wanted, got = body(last, state), merge(state, body(last, identity))
    for name, x, y in zip(region.state.names, wanted, got, strict=True):
        if not _near(np.asarray(x), np.asarray(y)):
            raise ContractError(
                message(
                    "fold",
                    expected=f"a body that follows {region.contract!r}: "
                    "body(c, s) = merge(s, body(c, identity))",
                    got=f"other values of {name} at the last coordinate",
                    way_out="Correct the contract's merge or identity, or keep the chain "
                    'with policy="fold_left".',
                )
            )


def _near(x: np.ndarray, y: np.ndarray) -> bool:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.array_equal(x, y)
    eps = float(jnp.finfo(x.dtype).eps)
    a, b = x.astype(np.float64), y.astype(np.float64)
    odd = ~(np.isfinite(a) & np.isfinite(b))
    scale = np.max(np.abs(np.where(odd, 0, a)), initial=0)
    with np.errstate(invalid="ignore"):
        close = np.abs(a - b) <= _ROUNDINGS * eps * max(scale, 1e-30)
    return bool(np.all(close | odd))
