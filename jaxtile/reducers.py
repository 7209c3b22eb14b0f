"""Reducers: a combine function, what is known of it, and how values enter and leave it.

A reducer works on a *state*, a pytree of scalars of possibly different dtypes:
`merge(state, state)`, `lift(element) -> state`, `update(state, element)` (default
`merge(s, lift(e))`), `update_right(element, state)` for right folds, and
`finish(state) -> result`. The catalogue is in `jaxtile.catalogue`.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import formats
from jaxtile._checks import choice, flag, function, operand
from jaxtile._operators import is_tile
from jaxtile.errors import TileTypeError, message


class Provenance(enum.Enum):
    """Where the knowledge of a law comes from."""

    BUILTIN = "builtin"
    DERIVED = "derived"
    DECLARED = "declared"


@dataclass(frozen=True)
class Laws:
    """Laws of a merge in exact arithmetic; what rounding may change is the policy's.

    Args:
        associative: merge(merge(a, b), c) = merge(a, merge(b, c)).
        commutative: merge(a, b) = merge(b, a).
        identity: the reducer's identity is neutral on both sides.
        provenance: who says so.

    Raises:
        TileTypeError: a law is not a bool.

    Example:
        >>> import jaxtile as jt
        >>> jt.Laws(associative=True).commutative
        False
    """

    associative: bool = False
    commutative: bool = False
    identity: bool = True
    provenance: Provenance = Provenance.DECLARED

    def __post_init__(self):
        for law in ("associative", "commutative", "identity"):
            flag("Laws", law, getattr(self, law))

    def __str__(self) -> str:
        held = [n for n in ("associative", "commutative") if getattr(self, n)]
        return f"the laws {', '.join(held)}" if held else "no law"


class _Same:
    """A key that only the very same object has, which lives as long as the key."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self):
        return id(self.value)

    def __eq__(self, other: object):
        return isinstance(other, _Same) and self.value is other.value


def _names(code: types.CodeType) -> set[str]:
    """The names that a function's code, and the code inside it, looks up."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _globals_of(fn: types.FunctionType) -> dict[str, Any]:
    """What a function reads from its module: a notebook's constants change."""
    home = fn.__globals__
    if str(home.get("__name__")).split(".")[0] == "jaxtile":
        return {}
    found = {n: home[n] for n in sorted(_names(fn.__code__)) if n in home}
    return {
        # A function of another module is what it is; one beside this reads constants too.
        n: _Same(v) if getattr(v, "__globals__", home) is not home else v
        for n, v in found.items()
    }


def value_key(value: Any, _seen: dict[int, int] | None = None) -> Hashable:
    """A key that is equal for values which compute the same thing.

    Two functions from the same source line with equal closures, which read equal globals,
    get equal keys, so that a reducer written inside a jitted function never causes a second
    trace.
    """
    seen = {} if _seen is None else _seen
    key = functools.partial(value_key, _seen=seen)
    if isinstance(value, types.FunctionType | list | dict):
        # Once: functions may call each other, and a call graph has too many paths.
        if id(value) in seen:
            return ("seen", seen[id(value)])
        seen[id(value)] = len(seen)
    if isinstance(value, types.FunctionType):
        closure = tuple(key(cell.cell_contents) for cell in value.__closure__ or ())
        defaults = tuple(map(key, value.__defaults__ or ()))
        keywords = key(value.__kwdefaults__ or ())
        outside = tuple((n, key(v)) for n, v in _globals_of(value).items())
        home = id(value.__globals__)
        return (value.__code__, home, closure, defaults, keywords, outside)
    if isinstance(value, functools.partial):
        return (key(value.func), tuple(map(key, value.args)), key(value.keywords))
    if isinstance(value, np.generic | np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", value.hex())  # -0.0 == 0.0, NaN != NaN: compare the bits
    if isinstance(value, tuple | list):
        return (type(value), tuple(map(key, value)))
    if isinstance(value, dict):
        return (dict, frozenset((k, key(v)) for k, v in value.items()))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return (type(value), value)


def _meet_and_merge(merge: Callable, a: Any, b: Any) -> Any:
    """merge of two states whose leaves broadcast and promote as jax.numpy's do."""
    left, right = jax.tree.flatten(a), jax.tree.flatten(b)
    if left[1] == right[1]:
        pairs = [_meet(x, y) for x, y in zip(left[0], right[0], strict=True)]
        a = jax.tree.unflatten(left[1], [x for x, _ in pairs])
        b = jax.tree.unflatten(right[1], [y for _, y in pairs])
    return merge(a, b)


def _meet(x: Any, y: Any) -> list:
    if jnp.shape(x) == jnp.shape(y) and getattr(x, "dtype", 0) == getattr(
        y, "dtype", 1
    ):
        return [x, y]
    dtype = jnp.result_type(x, y)
    return jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype))


def _require_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TileTypeError(
            message(
                "Reducer",
                expected=f"{name} of type {kind.__name__}",
                got=repr(value),
                way_out="Leave it out, or state laws=jaxtile.Laws(associative=True) and "
                'name="...".',
            )
        )


@dataclass(frozen=True, eq=False)
class Reducer:
    """A combine function with its identity, its laws, and its way in and out.

    Args:
        merge: `(state, state) -> state`, earlier contributions on the left.
        identity: a pytree of scalars shaped like the state, a function from the state's
            `jax.ShapeDtypeStruct`s to one, or None where there is none.
        lift: `element -> state`; by default the element is the state.
        update: `(state, element) -> state`; by default `merge(state, lift(element))`.
        update_right: `(element, state) -> state` of right folds; by default
            `merge(lift(element), state)`.
        finish: `state -> result`; by default the state is the result.
        laws: what is known of merge. Without it only folds are permitted.
        name: for messages.
        indexed: `lift` takes `(element, source_index)`.
        exact_identity: merging the identity keeps every bit of the other side.
        resume: `result -> state`, so that a finished result can seed the next call.
        empty: as `identity`, the state of an empty fibre; None uses the identity;
            `"error"` forbids empty fibres.

    Raises:
        TileTypeError: a function is not callable, or another argument of another type.
        TileValueError: an empty value that is a string other than "error".

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> norm = jt.Reducer(
        ...     merge=lambda a, b: a + b, identity=0.0, lift=lambda x: x * x,
        ...     finish=jnp.sqrt, laws=jt.Laws(associative=True, commutative=True))
        >>> print(jt.reduce(jnp.array([3.0, 4.0]), 0, norm))
        5.0
    """

    merge: Callable[..., Any]
    identity: Any = None
    lift: Callable[..., Any] | None = None
    update: Callable[..., Any] | None = None
    update_right: Callable[..., Any] | None = None
    finish: Callable[..., Any] | None = None
    laws: Laws = field(default_factory=Laws)
    name: str = ""
    indexed: bool = False
    exact_identity: bool = False
    empty: Any = None
    resume: Callable[..., Any] | None = None
    # What the derivative and native realisations may know; see catalogue.py.
    tangent_merge: Callable[..., Any] | None = None
    winner: Reducer | None = None
    weights: Callable[..., Any] | None = None
    native: str | None = None
    order: Any = None
    variants: Callable[..., Reducer] | None = None

    def __post_init__(self):
        for name in ("merge", "lift", "update", "update_right", "finish", "resume"):
            value = getattr(self, name)
            if value is not None or name == "merge":
                way_out = f"Pass a function, as in {name}=lambda ...: ..."
                function("Reducer", f"a callable {name}", value, way_out)
        for name, kind in (("laws", Laws), ("name", str)):
            _require_type(name, getattr(self, name), kind)
        for name in ("indexed", "exact_identity"):
            flag("Reducer", name, getattr(self, name))
        choice(
            "Reducer",
            "empty, where it is a name,",
            self.empty if isinstance(self.empty, str) else None,
            (None, "error"),
            'Pass a state, a function of one, or "error".',
        )

    @functools.cached_property
    def _key(self) -> Hashable:
        names = self.__dataclass_fields__
        return tuple(value_key(getattr(self, n)) for n in names if n != "variants")

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reducer) and self._key == other._key

    def __repr__(self) -> str:
        return self.name or f"Reducer({getattr(self.merge, '__name__', self.merge)})"

    def __call__(self, *states: Any, **options: Any) -> Any:
        """Merge two states elementwise, or pick a variant such as `argmax(ties="last")`.

        Leaves broadcast and promote as those of jax.numpy's functions do.

        Args:
            *states: two states of arrays or tiles.
            **options: options of the catalogue's reducer, given without states.

        Returns:
            The merged state, or the variant `Reducer`.

        Raises:
            TileTypeError: neither two states that merge nor known options were given; a
                state of a storage format.
        """
        if not states and options and self.variants is not None:
            return self._variant(options)
        if len(states) != 2 or options:
            raise TileTypeError(
                message(
                    repr(self),
                    expected="two states to merge",
                    got=f"{len(states)} states and options {sorted(options)}",
                    way_out=f"Call {self!r}(a, b), or pass it to reduce or scan.",
                )
            )
        leaves, tree = jax.tree.flatten(states, is_leaf=is_tile)
        leaves = [operand(repr(self), leaf) for leaf in leaves]
        for leaf in leaves:
            if hasattr(leaf, "dtype"):
                formats.require_arithmetic(leaf.dtype, repr(self))
        merge = functools.update_wrapper(
            functools.partial(_meet_and_merge, self.merge), self.merge
        )
        for tile in filter(is_tile, leaves):
            return tile.lift_map(merge, *states)
        try:
            return merge(*jax.tree.unflatten(tree, leaves))
        except (TypeError, ValueError, AttributeError) as error:
            raise TileTypeError(
                message(
                    repr(self),
                    expected="two states of one structure, whose leaves broadcast",
                    got=f"{type(error).__name__}: {error}".splitlines()[0].rstrip("."),
                    way_out="Give both the structure, shape and dtypes of one state.",
                )
            ) from error

    def _variant(self, options: dict[str, Any]) -> Reducer:
        assert self.variants is not None
        known = inspect.signature(self.variants).parameters
        if not options.keys() <= known.keys():
            raise TileTypeError(
                message(
                    repr(self),
                    expected=f"options among {', '.join(known)}",
                    got=", ".join(options),
                    way_out=f"Leave them out, or pass {self!r} itself.",
                )
            )
        return self.variants(**options)

    def named(self, name: str) -> Reducer:
        """The same reducer under another name in messages.

        Args:
            name: the name to show.

        Returns:
            A new `Reducer`.

        Example:
            >>> import jaxtile as jt
            >>> jt.add.named("total")
            total
        """
        return replace(self, name=name)
