"""What a body does to each component of its state, read off its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxtile import catalogue
from jaxtile._graph import STATE, Graph, Match, Value, graph_of
from jaxtile.reducers import Reducer


class Update(NamedTuple):
    """The update of one component, as a reducer and its contributions.

    Args:
        reducer: how contributions combine with the state.
        contributions: what one coordinate contributes, in the order in which it enters.
        negated: which of them enter with the other sign.
        mask: where the coordinate contributes at all, and whether the mask must hold or
            not; None everywhere.
    """

    reducer: Reducer
    contributions: tuple[Value, ...] = ()
    negated: tuple[bool, ...] = ()
    mask: tuple[Value, bool] | None = None


class Unknown(NamedTuple):
    """Why an update is none that is known, as a phrase for a message."""

    found: str


# An accumulating op takes the state as this operand and adds to it.
ACCUMULATES: dict[str, int] = {"tile_mma": 2}

_CANONICAL = {
    "add": catalogue.add,
    "add_any": catalogue.add,
    "sub": catalogue.add,
    "mul": catalogue.multiply,
    "max": catalogue.maximum,
    "min": catalogue.minimum,
    "and": catalogue.bitwise_and,
    "or": catalogue.bitwise_or,
    "xor": catalogue.bitwise_xor,
}
_SAME = frozenset(("copy", "reshape", "convert_element_type", "broadcast_in_dim"))


def updates(results: Sequence[Value], names: Sequence[str]) -> list[Update | Unknown]:
    """The update of each component of the state; names are for messages."""
    return [_update(v, k, names) for k, v in enumerate(results)]


def _update(result: Value, k: int, names: Sequence[str]) -> Update | Unknown:
    others = [names[i] for i in sorted(result.states - {k})]
    if others:
        return Unknown(f"an update that depends on {', '.join(others)} too")
    if k not in result.states:
        return Unknown("a value that does not depend on the state")
    node = result.node
    if node is not None and node.name == "select_n" and not node.reads[0].states:
        found = _masked(node.reads, k)
        if found is not None:
            return found
    found = _chain(result, k)
    return found if isinstance(found, Update | Unknown) else _by_template(result, k)


def _masked(reads: Sequence[Value], k: int) -> Update | None:
    """`where(mask, update, state)`, either way round."""
    if len(reads) != 3:
        return None
    predicate, *cases = reads
    for holds, (kept, changed) in ((True, cases), (False, cases[::-1])):
        if kept.kind == STATE and kept.place == k:
            found = _chain(changed, k)
            if isinstance(found, Update) and found.mask is None:
                return found._replace(mask=(predicate, holds))
    return None


def _chain(value: Value, k: int) -> Update | Unknown | None:
    """A chain of one canonical operation; None where another template may fit."""
    reducer, contributions, negated = None, [], []
    while not (value.kind == STATE and value.place == k):
        node = value.node
        assert node is not None  # only the state's own input depends on it
        if node.name in _SAME and node.reads[0].aval == value.aval:
            value = node.reads[0]
            continue
        name, touched = node.name, [bool(v.states) for v in node.reads]
        if name in ACCUMULATES and touched == _only(ACCUMULATES[name], touched):
            return Unknown(f"{name}, an accumulation") if reducer else None
        if name not in _CANONICAL or len(touched) != 2:
            return None if reducer is None else Unknown(_mixture(reducer, name))
        if all(touched):
            return Unknown(f"{name} of the state with itself")
        if name == "sub" and touched[1]:
            return Unknown("the state subtracted from a contribution (sub)")
        found = _CANONICAL[name]
        if reducer not in (None, found):
            return Unknown(_mixture(reducer, name))
        reducer = found
        contributions.append(node.reads[touched.index(False)])
        negated.append(name == "sub")
        value = node.reads[touched.index(True)]
    if reducer is None:
        return Update(catalogue.first)
    return Update(reducer, tuple(contributions[::-1]), tuple(negated[::-1]))


def _only(place: int, touched: Sequence[bool]) -> list[bool]:
    return [i == place for i in range(len(touched))]


def _mixture(reducer: Reducer, name: str) -> str:
    return f"{reducer!r} mixed with {name}"


_TEMPLATES = (
    catalogue.logaddexp,
    catalogue.maximum_number,
    catalogue.minimum_number,
    catalogue.logical_and,
    catalogue.logical_or,
)


def _by_template(result: Value, k: int) -> Update | Unknown:
    """A merge of the catalogue, written out in the body."""
    for reducer in _TEMPLATES:
        template = merge_graph(reducer.merge, [result.aval])
        for swapped in (False, True):
            found = matched(template, [result], [k], swapped)
            if found is not None:
                return Update(reducer, (found[0],), (False,))
    node = result.node
    name = "nothing known" if node is None else node.name
    return Unknown(f"an update through {name}")


def accumulates(result: Value, k: int) -> bool:
    """Whether a component is the accumulator of an accumulating op, and of nothing else."""
    node = result.node
    if node is not None and node.name == "select_n" and len(node.reads) == 3:
        # where(mask, sum, state): elsewhere it adds nothing
        predicate, *cases = node.reads
        kept = [v.kind == STATE and v.place == k for v in cases]
        if sum(kept) != 1 or predicate.states:
            return False
        return accumulates(cases[kept.index(False)], k)
    if node is None or node.name not in ACCUMULATES:
        return False
    params = node.eqn.params
    if params.get("region") is not None or params.get("out") != params.get("acc"):
        return False  # what follows the sum is not undone before the next
    place = ACCUMULATES[node.name]
    own = node.reads[place]
    alone = all(not v.states for i, v in enumerate(node.reads) if i != place)
    return alone and own.kind == STATE and own.place == k


def merge_graph(
    merge: Callable, avals: Sequence, tree: Any = None, one_state: bool = False
) -> Graph:
    """The graph of `merge(a, b)` on states of these leaves.

    Args:
        merge: of two pytrees.
        avals: shapes and dtypes of a state's leaves.
        tree: their structure; a single leaf by default.
        one_state: the leaves of b are coordinates, and not states.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    tree = tree or jax.tree.structure(0)
    n = len(shapes)

    def flat(*leaves):
        a, b = leaves[:n], leaves[n:]
        pair = (jax.tree.unflatten(tree, s) for s in ((b, a) if one_state else (a, b)))
        return jax.tree.leaves(merge(*pair))

    closed = jax.make_jaxpr(flat)(*shapes, *shapes)
    return graph_of(closed, n if one_state else 0)


def matched(
    template: Graph, results: Sequence[Value], places: Sequence[int], swapped: bool
) -> list[Value] | None:
    """What a body merges into its state, where its results are that merge literally.

    Args:
        template: of `merge_graph`.
        results: of the body.
        places: which state inputs they continue.
        swapped: the contribution is merge's left operand.

    Returns:
        The contribution's leaves, or None.
    """
    match = Match(places, swapped)
    pairs = zip(template.results, results, strict=True)
    if not all(match.fits(t, v) for t, v in pairs):
        return None
    leaves = [v for v in match.found if v is not None]
    return leaves if len(leaves) == len(places) else None
