"""fold: a body over the coordinates of a domain, in the order of a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtile import _realise
from jaxtile._checks import function
from jaxtile._domain import as_domain, as_state, trace_body
from jaxtile._realise import Region
from jaxtile.errors import TileTypeError, message
from jaxtile.policy import Policy, as_policy, unordered_tree
from jaxtile.reducers import Reducer


def fold(
    domain: Any,
    *,
    init: Any,
    contract: Reducer | None = None,
    policy: Policy | str = unordered_tree,
) -> Callable[[Callable[[Any, Any], Any]], Any]:
    """Fold a body over the coordinates of a domain: a decorator that gives the result.

    state = body(c_n-1, ... body(c_1, body(c_0, init))); `fold_right` visits the
    coordinates from the last to the first. The body keeps its own operand order.

    The body is traced once. Under a tree policy each component of the state must be
    updated by a sum, product, maximum, minimum, logical or bitwise operation or another
    merge of the catalogue with a contribution that no state enters; contributions are
    then computed side by side and combined by `reduce`. `state - c` counts as a sum, and
    `jnp.where(mask, update, state)` as a masked contribution. For any other update give a
    contract or a fold policy.

    Args:
        domain: `x.domain(dim)` of a tile, whose coordinates `x.at` takes; n for the
            integers 0 ... n - 1; a range; or a tuple of sizes for tuples of integers.
        init: the first state, any pytree of arrays, tiles and numbers. Its dtypes are the
            accumulators, to which each step rounds.
        contract: a reducer on such states whose merge the body's update is:
            body(c, s) = merge(s, body(c, identity)). Its lift and finish are not used. Its
            merge is of scalars, or of whole states where those have several shapes.
        policy: one of the five orders, or its name.

    Returns:
        A decorator that takes `(coordinate, state) -> state` and returns the last state;
        init itself where the domain is empty, whose body is never called.

    Raises:
        ContractError: under a tree policy an update that is not recognised, and no
            contract; a contract that lacks a law or an identity, or that the body is seen
            not to follow.
        PolicyError: no such policy.
        TileShapeError: a negative size; a state that changes its shape.
        TileTypeError: a domain, body, contract or state that is none; a state that changes
            its dtype or structure; a body that cannot be traced.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> k = jt.Dim("k")
        >>> x = jt.tile(jnp.array([1.0, 2.0, 3.0]), k)
        >>> @jt.fold(x.domain(k), init=0.0, policy="fold_left")
        ... def left(r, s):
        ...     return s - x.at(r)
        >>> @jt.fold(x.domain(k), init=0.0, policy="fold_right")
        ... def right(r, s):
        ...     return x.at(r) - s
        >>> print(left, right)
        -6.0 2.0
    """
    order = as_policy(policy)
    places = as_domain("fold", domain)
    if not (contract is None or isinstance(contract, Reducer)):
        raise TileTypeError(
            message(
                "fold",
                expected="contract a Reducer, or None",
                got=repr(contract),
                way_out="Pass jt.Reducer(merge=..., identity=..., laws=...).",
            )
        )

    def decorate(body: Callable[[Any, Any], Any]) -> Any:
        way_out = "Write @jt.fold(domain, init=...) above def body(coordinate, state)."
        function("fold", "a body", body, way_out)
        state = as_state("fold", init)
        if places.size == 0:  # nothing could be loaded to trace the body with
            return state.whole(state.leaves)
        closed = trace_body("fold", body, places, state)
        region = Region(closed, places, state, order, contract)
        return state.whole(_realise.run(region))

    return decorate
