"""The realisations of a fold: the chain, or contributions and a reduction of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import _contracts, backends, catalogue
from jaxtile._contracts import Contract
from jaxtile._domain import Domain, State
from jaxtile._graph import Graph, Value, graph_of
from jaxtile._jax_private import align_varying
from jaxtile._updates import Unknown, Update, accumulates, updates
from jaxtile._vectorise import at_once, at_one, in_front
from jaxtile.errors import ContractError, message
from jaxtile.policy import Kind, Policy, Transform
from jaxtile.primitives._bind import bind_reduce
from jaxtile.primitives._spec import make_spec
from jaxtile.reducers import Reducer

# Contributions that take more bytes than this, and more than the arrays that they read,
# are not held all at once where the policy permits a chain.
_LARGEST = 2**26


class Region(NamedTuple):
    """A traced body and what is asked of it.

    Args:
        closed: the body's jaxpr, of `trace_body`.
        domain, state, policy: of the fold.
        contract: what the user says of the update, or None.
    """

    closed: Any
    domain: Domain
    state: State
    policy: Policy
    contract: Reducer | None


def run(region: Region) -> list:
    """The leaves of the state after the last coordinate."""
    graph = graph_of(region.closed, len(region.domain.axes))
    fold = region.policy.kind in (Kind.LEFT, Kind.RIGHT)
    found = updates(graph.results, region.state.names)
    known = [u for u in found if isinstance(u, Update)]
    if region.contract is not None:
        contract = _contracts.check(region, graph, found)
        if fold:
            return chain(region)
        if contract is not None:
            return _by_contract(region, graph, contract)
    if len(known) == len(found):
        if _too_large(region, known):
            return chain(region)
        return [_reduced(region, u, k) for k, u in enumerate(known)]
    if fold or _accumulates(region, graph, found):
        return chain(region)
    return _each_or_refuse(region, graph, found)


def _accumulates(region: Region, graph: Graph, found: Sequence) -> bool:
    """A chain realises a tree of sums, some of which accumulating ops add up."""
    if not region.policy.permits(Transform.REGROUP):
        return False
    return all(
        isinstance(u, Update) or accumulates(v, k)
        for k, (u, v) in enumerate(zip(found, graph.results, strict=True))
    )


def _each_or_refuse(region: Region, graph: Graph, found: Sequence) -> list:
    """Under a fixed tree: sums of what accumulating ops add to nothing."""
    out = []
    for k, (u, v) in enumerate(zip(found, graph.results, strict=True)):
        if isinstance(u, Unknown) and not accumulates(v, k):
            raise ContractError(
                message(
                    "fold",
                    expected=f"an update of {region.state.names[k]} that policy "
                    f"{region.policy} may regroup: a sum, product, maximum, minimum, "
                    "logical or bitwise operation with a contribution",
                    got=u.found,
                    way_out="State the merge, contract=jt.Reducer(merge=..., identity=..., "
                    'laws=...), or keep the chain with policy="fold_left".',
                )
            )
        out.append(
            _reduced(region, u, k) if isinstance(u, Update) else _added(region, v, k)
        )
    return out


def chain(region: Region) -> list:
    """The body at one coordinate after the other."""
    domain, n = region.domain, region.domain.size
    graph = graph_of(region.closed, len(domain.axes), open_maps=False)
    right = region.policy.kind is Kind.RIGHT

    def step(t, state):
        place = jnp.asarray(n - 1 - t if right else t, jnp.int32)
        return at_one(graph.results, domain.at(place), state)

    return lax.fori_loop(0, n, step, _aligned(region, region.state.leaves))


def _aligned(region: Region, leaves: Sequence) -> list:
    """Leaves that vary along every mesh axis that what the body reads varies along."""
    consts = [v for v in region.closed.consts if isinstance(v, jax.Array)]
    return align_varying([*leaves, *consts])[: len(leaves)]


def _too_large(region: Region, known: Sequence[Update]) -> bool:
    """Contributions cost more memory than what they are made of, and a chain is allowed."""
    folds = region.policy.kind in (Kind.LEFT, Kind.RIGHT)
    if not (folds or region.policy.permits(Transform.REGROUP)):
        return False
    pairs = zip(known, region.state.leaves, strict=True)
    each = sum(len(u.contributions) * v.nbytes for u, v in pairs if not _is_load(u))
    reads = sum(v.nbytes for v in region.closed.consts if hasattr(v, "nbytes"))
    return region.domain.size * each > max(_LARGEST, 4 * reads)


def _is_load(update: Update) -> bool:
    """Contributions that are elements of an array as they are."""

    def load(value: Value) -> bool:
        node = value.node
        if node is None:
            return True
        return node.name in ("squeeze", "dynamic_slice") and load(node.reads[0])

    return all(map(load, update.contributions)) and not any(update.negated)


def _reduced(region: Region, update: Update, k: int) -> jax.Array:
    """A component by `reduce` of its contributions."""
    seed = region.state.leaves[k]
    if not update.contributions:
        return seed
    domain, rank = region.domain.axes, seed.ndim
    wanted = [*update.contributions, *(update.mask[:1] if update.mask else ())]
    front = in_front(wanted)
    wide = at_once(wanted, seed.shape, domain, front=front)
    mask = None
    if update.mask is not None:
        mask = wide.pop() if update.mask[1] else ~wide.pop()
    signed = [-v if n else v for v, n in zip(wide, update.negated, strict=True)]
    element, axes = signed[0], len(domain)
    first = 0 if front else rank
    if len(signed) > 1:
        # One coordinate contributes several times: an axis after all those of the domain.
        if region.policy.kind is Kind.RIGHT:
            signed = signed[::-1]
        element = jnp.stack(signed, first + axes)
        mask = mask if mask is None else jnp.stack([mask] * len(signed), first + axes)
        axes += 1
    places = range(first, first + axes)
    return _reduce(region, update.reducer, element, seed, mask, places)


def _reduce(region: Region, reducer: Reducer, element, seed, mask, axes):
    dtype = np.dtype(seed.dtype)
    acc = None if dtype.kind == "b" else dtype
    spec = make_spec(reducer, jax.tree.structure(0), (dtype,), acc, None, "fold")
    operands = align_varying([element, seed, *(() if mask is None else (mask,))])
    return bind_reduce(
        spec,
        operands[:1],
        operands[1:2],
        operands[2] if mask is not None else None,
        axes=axes,
        policy=region.policy,
        finish=False,
        implementation=backends.asked("reduce", None),
    )[0]


def _added(region: Region, result: Value, k: int) -> jax.Array:
    """A component that an op accumulates: the sum of what it adds to nothing."""
    seed, domain = region.state.leaves[k], region.domain.axes
    nothing = [jnp.full(v.shape, -0.0, v.dtype) for v in region.state.leaves]
    (element,) = at_once([result], seed.shape, domain, nothing)
    return _reduce(region, catalogue.add, element, seed, None, range(len(domain)))


def _by_contract(region: Region, graph: Graph, contract: Contract) -> list:
    """By the merge that the user states, and contributions to it."""
    leaves = region.state.leaves
    size = region.domain.size * sum(v.nbytes for v in leaves)
    regroups = region.policy.permits(Transform.REGROUP)
    if regroups and (contract.spec is None or size > _LARGEST):
        return chain(region)
    domain = region.domain.axes
    wanted, states = contract.merged or graph.results, contract.identity
    elements = [
        at_once([v], leaf.shape, domain, states)[0]
        for v, leaf in zip(wanted, leaves, strict=True)
    ]
    if contract.spec is None:
        return _tree(region, contract, elements)
    aligned = align_varying([*elements, *leaves])
    return bind_reduce(
        contract.spec,
        aligned[: len(leaves)],
        aligned[len(leaves) :],
        None,
        axes=range(len(domain)),
        policy=region.policy,
        finish=False,
        implementation=backends.asked("reduce", None),
    )


def _tree(region: Region, contract: Contract, elements: Sequence) -> list:
    """`fixed_tree` of states that merge as wholes."""
    n, rank = region.domain.size, len(region.domain.axes)
    runs = [v.reshape(n, *v.shape[rank:]) for v in elements]
    merge = jax.vmap(contract.merge)
    while (n := runs[0].shape[0]) > 1:
        even = n - n % 2
        pair = merge([v[0:even:2] for v in runs], [v[1:even:2] for v in runs])
        runs = [jnp.concatenate([m, v[even:]]) for m, v in zip(pair, runs, strict=True)]
    return contract.merge(region.state.leaves, [v[0] for v in runs])
