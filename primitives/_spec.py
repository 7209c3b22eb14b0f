"""A reducer bound to its element: flat lists of leaves, dtypes settled, checks done.

The accumulator rule is read off the reducer itself: an element leaf that its `lift` or
`merge` does arithmetic with is widened (floats below 32 bits to float32, integers below
32 bits to (u)int32); a leaf that is only selected or compared keeps its dtype. So a
user's own sum of bfloat16 carries float32, and a user's own "last valid index" in int16
stays int16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxtile import formats
from jaxtile.errors import TileTypeError, message
from jaxtile.primitives._functions import traced
from jaxtile.primitives._parts import check_parts, check_stable
from jaxtile.primitives._scalar import (
    SELECTIONS,
    as_closed,
    computes,
    convert,
    elementwise,
    evaluate,
    fixed_results,
    inner_jaxpr,
    trace,
)
from jaxtile.primitives._unknown import unknown
from jaxtile.reducers import Provenance, Reducer

# Bits that are looked at are no longer the value: no arithmetic of it follows.
_COMPARE = frozenset("eq ne lt le gt ge is_finite bitcast_convert_type".split())
_FLOW = SELECTIONS | {"convert_element_type"}


def _flow(jaxpr, args: list[frozenset], used: set[int]) -> list[frozenset]:
    """Which inputs reach each output as a value; `used` collects those in arithmetic."""
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return frozenset() if isinstance(atom, Literal) else env.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        inner, name = inner_jaxpr(eqn), eqn.primitive.name
        if inner is not None:
            outs = _flow(as_closed(inner)[0], values, used)
        elif name in _COMPARE:
            outs = [frozenset()]
        else:
            carried = values[1:] if name == "select_n" else values
            joined = frozenset().union(*carried)
            if name not in _FLOW:
                used |= joined
            outs = [joined] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _inputs_in_arithmetic(closed) -> tuple[set[int], list[frozenset]]:
    jaxpr, used = as_closed(closed)[0], set()
    flows = _flow(jaxpr, [frozenset({i}) for i in range(len(jaxpr.invars))], used)
    return used, flows


@dataclass(frozen=True)
class Spec:
    """A reducer for one element type.

    Args:
        reducer: the reducer.
        tree: the pytree structure of an element.
        raw, elements: dtypes of the element's leaves in memory, and as `lift` sees them.
        state_tree, states: of the state.
        result_tree, results: of what `finish` gives.
        index: the dtype of the source index, for indexed reducers.
        swapped: merge with the later contribution on the left (a flipped suffix scan).
    """

    reducer: Reducer
    tree: Any
    raw: tuple
    elements: tuple
    state_tree: Any
    states: tuple
    result_tree: Any
    results: tuple
    index: Any = None
    swapped: bool = False

    @property
    def n_elements(self) -> int:
        """How many operands an element has; the source index is made inside."""
        return len(self.raw)

    @functools.cached_property
    def _computes(self) -> bool:
        """What elements meet is arithmetic of floats."""
        state = self._state(range(len(self.states)))
        pair = jax.tree.structure((state, state))
        closed, _ = trace(self.reducer.merge, pair, self.states * 2)
        return self.has_update or computes(as_closed(closed)[0])

    @functools.cached_property
    def _constants(self) -> tuple[bool, ...]:
        """Which leaves of a lifted state XLA may know.

        The catalogue's merges mean the same to XLA's algebra where it knows what their
        lifts add to the element, and it folds a count that it knows.
        """
        if self.reducer.laws.provenance is not Provenance.BUILTIN:
            return (False,) * len(self.states)
        element = jax.tree.unflatten(self.tree, self.elements)
        args = (element,) if self.index is None else (element, np.dtype(self.index))
        leaves, tree = jax.tree.flatten(args)
        closed, _ = trace(_lift_of(self.reducer), tree, tuple(leaves))
        return tuple(fixed_results(as_closed(closed)[0]))

    def hidden(self, leaves: Sequence) -> list:
        """Elements that are about to meet others, of which XLA knows nothing."""
        return unknown(leaves) if self._computes else list(leaves)

    def hidden_state(self, state: Sequence) -> list:
        """A lifted state that is about to meet others, of which XLA knows nothing."""
        fresh = iter(
            self.hidden(
                [v for v, k in zip(state, self._constants, strict=True) if not k]
            )
        )
        return [
            v if k else next(fresh) for v, k in zip(state, self._constants, strict=True)
        ]

    def _element(self, leaves: Sequence) -> tuple:
        """`lift`'s arguments from raw leaves, the index last where there is one."""
        wide = [
            convert(v, d)
            for v, d in zip(leaves[: len(self.raw)], self.elements, strict=True)
        ]
        element = jax.tree.unflatten(self.tree, wide)
        return (element,) if self.index is None else (element, leaves[-1])

    def _state(self, leaves: Sequence) -> Any:
        return jax.tree.unflatten(self.state_tree, list(leaves))

    def _flat(self, state: Any) -> list:
        leaves = jax.tree.leaves(state)
        return [convert(v, d) for v, d in zip(leaves, self.states, strict=True)]

    def lift(self, leaves: Sequence, run: Callable = evaluate) -> list:
        """The state of one contribution."""
        if run is evaluate and any(self._constants):
            run = functools.partial(evaluate, settles=False)
        return self._flat(run(_lift_of(self.reducer), *self._element(leaves)))

    def merge(self, a: Sequence, b: Sequence, run: Callable = evaluate) -> list:
        """The state of two adjacent runs of contributions."""
        a, b = (b, a) if self.swapped else (a, b)
        if self.reducer.native == "mul" and self.states[0].itemsize >= 4:
            run = elementwise  # products that meet only products: nothing to contract
        return self._flat(run(self.reducer.merge, self._state(a), self._state(b)))

    def update(self, state: Sequence, leaves: Sequence, run: Callable = evaluate):
        """The state after one more contribution on the far side of the fold."""
        if self.swapped:
            return replace(self, swapped=False).update_right(leaves, state, run)
        if self.reducer.update is None:
            return self.merge(state, self.lift(leaves, run), run)
        element = self._element(leaves)
        return self._flat(run(self.reducer.update, self._state(state), *element))

    def update_right(self, leaves: Sequence, state: Sequence, run: Callable = evaluate):
        """The state after one more contribution on its left."""
        if self.swapped:
            return replace(self, swapped=False).update(state, leaves, run)
        if self.reducer.update_right is None:
            return self.merge(self.lift(leaves, run), state, run)
        element = self._element(leaves)
        return self._flat(run(self.reducer.update_right, *element, self._state(state)))

    def finish(self, state: Sequence, run: Callable = evaluate) -> list:
        """The result's leaves."""
        if self.reducer.finish is None:
            return list(state)
        return jax.tree.leaves(run(self.reducer.finish, self._state(state)))

    @property
    def has_update(self) -> bool:
        """The fold has steps of its own, and an identity to start them from."""
        own = self.reducer.update is not None or self.reducer.update_right is not None
        return own and self.reducer.identity is not None

    @property
    def starts_from_identity(self) -> bool:
        """An unseeded fold may start from the identity and keep every bit."""
        exact = self.reducer.exact_identity and self.reducer.identity is not None
        return self.has_update or exact

    def _constant(self, value: Any, shape: Sequence[int]) -> list:
        if callable(value):
            scalars = [jnp.zeros((), d) for d in self.states]
            value = value(self._state(scalars))
        leaves = jax.tree.leaves(value)
        return [
            jnp.full(tuple(shape), jnp.asarray(v, d), d)
            for v, d in zip(leaves, self.states, strict=True)
        ]

    def origin(self, shape: Sequence[int]) -> list:
        """The identity as the state that a fold starts from, which XLA does not know."""
        return unknown(self.identity(shape))

    def identity(self, shape: Sequence[int]) -> Any:
        """The identity, broadcast; None where the reducer has none."""
        if self.reducer.identity is None:
            return None
        return self._constant(self.reducer.identity, shape)

    @property
    def has_empty(self) -> bool:
        """A fibre without contributions has a value."""
        if isinstance(self.reducer.empty, str):
            return False
        return self.reducer.empty is not None or self.reducer.identity is not None

    def empty(self, shape: Sequence[int]) -> Any:
        """The state of a fibre without contributions; None where that is an error."""
        if not self.has_empty:
            return None
        if self.reducer.empty is None:
            return self.identity(shape)
        return self._constant(self.reducer.empty, shape)

    def filler(self, shape: Sequence[int]) -> list:
        """What to put where no state exists and none may be read: never an error."""
        found = self.empty(shape) or self.identity(shape)
        return found or [jnp.zeros(tuple(shape), d) for d in self.states]


def _same(element):
    return element


def _lift_of(reducer: Reducer) -> Callable:
    return reducer.lift or _same


def _accumulators(reducer, tree, raw, index, acc_dtype, op):
    if acc_dtype is not None:
        kinds = {jnp.issubdtype(d, jnp.floating) for d in raw if d.kind != "b"}
        mixed = len(kinds) > 1
        float_acc = jnp.issubdtype(acc_dtype, jnp.floating)
        return tuple(
            d
            if (d.kind == "b" and kinds)  # a flag beside numbers
            or (mixed and jnp.issubdtype(d, jnp.floating) != float_acc)
            else acc_dtype
            for d in raw
        )
    closed, state = _trace_lift(reducer, tree, raw, index, op)
    in_lift, reach = _inputs_in_arithmetic(closed)
    leaves, state_tree = jax.tree.flatten(state)
    dtypes = tuple(v.dtype for v in leaves)
    used, _ = _inputs_in_arithmetic(_trace_merge(reducer, state_tree, dtypes, op)[0])
    k = len(dtypes)
    summed = {i % k for i in used}
    widen = in_lift.union(*(reach[i] for i in summed)) if summed else in_lift
    return tuple(formats.accumulator(d) if i in widen else d for i, d in enumerate(raw))


def _trace_lift(reducer, tree, dtypes, index, op):
    args = [jax.tree.unflatten(tree, list(dtypes))]
    if index is not None:
        args.append(np.dtype(index))
    return traced(op, reducer, "lift", _lift_of(reducer), *args)


def _trace_merge(reducer, state_tree, dtypes, op):
    state = jax.tree.unflatten(state_tree, list(dtypes))
    return traced(op, reducer, "merge", reducer.merge, state, state)


def make_spec(reducer: Reducer, tree, raw, acc_dtype, index, op: str) -> Spec:
    """Bind a reducer to an element type.

    Args:
        reducer: the reducer.
        tree, raw: structure and dtypes of an element's leaves.
        acc_dtype: the accumulator asked for, or None for the rule.
        index: the dtype of the source index.
        op: the op that asks, for messages.

    Returns:
        The `Spec`.

    Raises:
        TileTypeError: a storage format, functions that do not fit the element, a merge
            or update that changes the state's structure or dtypes, or an identity or
            empty value that is no state.
    """
    for dtype in raw:
        formats.require_arithmetic(dtype, op)
    if acc_dtype is not None:
        acc_dtype = _stated_accumulator(acc_dtype, op)
    raw, index = tuple(map(np.dtype, raw)), index if reducer.indexed else None
    spec = _bound(reducer, tree, raw, acc_dtype, index, op, formats.x64_enabled())
    return spec if spec.reducer is reducer else replace(spec, reducer=reducer)


def _stated_accumulator(acc_dtype, op):
    formats.require_arithmetic(acc_dtype, op)
    acc = formats.require_enabled(acc_dtype, op)
    if acc.kind == "b":
        raise TileTypeError(
            message(
                op,
                expected="an accumulator that numbers fit",
                got="acc_dtype=bool",
                way_out="Use logical_or or logical_and to stay in bool.",
            )
        )
    return acc


# Equal reducers bind alike. Only success is kept: a refusal is told at every call.
@functools.lru_cache(maxsize=1024)
def _bound(reducer, tree, raw, acc_dtype, index, op, x64):
    elements = _accumulators(reducer, tree, raw, index, acc_dtype, op)
    _, lifted = _trace_lift(reducer, tree, elements, index, op)
    leaves, state_tree = jax.tree.flatten(lifted)
    states = tuple(np.dtype(v.dtype) for v in leaves)
    if acc_dtype is None:
        closed, _ = _trace_merge(reducer, state_tree, states, op)
        used = {i % len(states) for i in _inputs_in_arithmetic(closed)[0]}
        states = tuple(
            formats.accumulator(d) if i in used else d for i, d in enumerate(states)
        )
    _, merged = _trace_merge(reducer, state_tree, states, op)
    state = jax.tree.unflatten(state_tree, states)
    check_stable(op, reducer, "merge", state, merged)
    result_tree, results = state_tree, states
    if reducer.finish is not None:
        _, out = traced(op, reducer, "finish", reducer.finish, state)
        outs, result_tree = jax.tree.flatten(out)
        results = tuple(np.dtype(v.dtype) for v in outs)
    spec = Spec(
        reducer,
        tree,
        raw,
        tuple(map(np.dtype, elements)),
        state_tree,
        states,
        result_tree,
        results,
        index,
    )
    check_parts(op, spec)
    return spec
