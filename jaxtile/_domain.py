"""Domains of regions, and the states that go through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import formats
from jaxtile._checks import integer, operand
from jaxtile._jax_private import varying_axes
from jaxtile._operators import is_tile
from jaxtile._vectorise import Axis
from jaxtile.dims import IndexSet
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives._functions import IN_JAX, attempt, require_pure
from jaxtile.tile import Tile


class Domain(NamedTuple):
    """The coordinates of a region.

    Args:
        axes: slowest first.
        coordinate: makes what the body takes of one integer scalar for each axis.
    """

    axes: tuple[Axis, ...]
    coordinate: Callable[[Sequence], Any]

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return math.prod(a.size for a in self.axes)

    def at(self, place: Any) -> list:
        """The integers of the coordinate at a place of the lexicographic order."""
        found = []
        for axis in reversed(self.axes):
            found.append(axis.start + axis.step * (place % axis.size))
            place = place // axis.size
        return found[::-1]


_WAYS = (
    "Pass x.domain(dim) of a tile, an integer n for 0 ... n - 1, a range, or a tuple of "
    "sizes."
)


def as_domain(op: str, domain: Any) -> Domain:
    """A domain in any of the forms that a user may write.

    Raises:
        TileTypeError: it is none of them.
        TileShapeError: a size is negative, or there are 2**31 coordinates.
    """
    if isinstance(domain, IndexSet):
        named = domain.dims
        found = Domain(
            tuple(map(Axis, domain.shape)),
            lambda places: dict(zip(named, places, strict=True)),
        )
    elif isinstance(domain, range):
        axis = Axis(len(domain), domain.start, domain.step)
        found = Domain((axis,), lambda places: places[0])
    elif isinstance(domain, tuple | list):
        found = Domain(tuple(Axis(_size(op, n)) for n in domain), tuple)
    else:
        found = Domain((Axis(_size(op, domain)),), lambda places: places[0])
    if found.size >= 2**31:
        raise TileShapeError(
            message(
                op,
                expected="fewer than 2**31 coordinates",
                got=str(found.size),
                way_out="Nest two folds.",
            )
        )
    return found


def _size(op: str, size: Any) -> int:
    found = integer(op, "a domain", size, _WAYS)
    if found < 0:
        raise TileShapeError(
            message(op, expected="a size >= 0", got=str(found), way_out=_WAYS)
        )
    return found


class State(NamedTuple):
    """A state: its leaves as arrays, and how they make the user's pytree.

    Args:
        leaves: the arrays.
        tree: the structure, in which a tile is a node.
        plain: the structure with the arrays of the tiles as leaves.
        names: how messages call each leaf.
    """

    leaves: list
    tree: Any
    plain: Any
    names: list[str]

    def whole(self, leaves: Sequence) -> Any:
        """The user's pytree of other leaves."""
        return jax.tree.unflatten(self.tree, list(leaves))


def as_state(op: str, init: Any) -> State:
    """The state that an initial value makes.

    Raises:
        TileTypeError: a leaf that is no array, tile or number, or has a storage format;
            no leaf at all.
    """
    paths, plain = jax.tree_util.tree_flatten_with_path(init, is_leaf=is_tile)
    if not paths:
        raise TileTypeError(
            message(
                op,
                expected="init with at least one array, tile or number",
                got=repr(init),
                way_out="Write init=0.0, or a pytree of such states.",
            )
        )
    names = ["the state" + jax.tree_util.keystr(path) for path, _ in paths]
    given = [_leaf(op, leaf) for _, leaf in paths]
    leaves, tree = jax.tree.flatten(jax.tree.unflatten(plain, given))
    return State(leaves, tree, plain, names)


def _leaf(op: str, leaf: Any) -> Any:
    value = operand(op, leaf)
    array = value.array if is_tile(value) else jnp.asarray(value)
    formats.require_arithmetic(array.dtype, op)
    array = jax.lax.convert_element_type(array, array.dtype)  # a number's dtype stays
    return Tile(array, value.dims) if is_tile(value) else array


def trace_body(
    op: str,
    body: Callable,
    domain: Domain,
    state: State,
    extra: Callable[[], Sequence] = tuple,
) -> Any:
    """The jaxpr of a body, on integers of a coordinate and leaves of a state.

    Args:
        op: the op that asks, for messages.
        body: of the user.
        domain, state: what it is called with.
        extra: gives further results, after the body has run.

    Raises:
        TileTypeError: the body cannot be traced, has side effects, or returns a state of
            another structure or dtype.
        TileShapeError: it returns another shape.
    """
    k = len(domain.axes)

    def run(*values):
        coordinate = domain.coordinate(list(values[:k]))
        out = body(coordinate, state.whole(values[k:]))
        return bare(out, state), list(extra())

    index = jax.ShapeDtypeStruct((), np.int32)
    shapes = list(map(_struct, state.leaves))

    def tell():
        return (
            "a body that jax can trace on (coordinate, state)",
            f"It takes both and returns the next state; {IN_JAX}.",
        )

    make = jax.make_jaxpr(run, return_shape=True)
    closed, (out, _) = attempt(op, tell, make, *[index] * k, *shapes)
    require_pure(op, "a body", closed)
    _check_result(op, state, shapes, out)
    return closed


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, and the manual mesh axes along which it varies."""
    aval = jax.typeof(leaf)
    if not varying_axes(aval):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    manual = dict(sharding=aval.sharding, manual_axis_type=aval.mat)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **manual)


def bare(out: Any, state: State) -> Any:
    """What a body returned, with tiles without dims as the scalars that the state has."""

    def plain(leaf):
        return leaf.array if is_tile(leaf) and not leaf.dims else leaf

    found = jax.tree.map(plain, out, is_leaf=is_tile)
    return found if jax.tree.structure(found) == state.tree else out


def _check_result(op: str, state: State, shapes: Sequence, out: Any) -> None:
    leaves, tree = jax.tree.flatten(out)
    if tree != state.tree:
        raise TileTypeError(
            message(
                op,
                expected=f"a body that returns a state like init, {_show(state, shapes)}",
                got=str(out),
                way_out="Return every component, in init's structure and with its dims.",
            )
        )
    for name, want, got in zip(state.names, shapes, leaves, strict=True):
        if want.dtype != got.dtype:
            raise TileTypeError(
                message(
                    op,
                    expected=f"{name} to stay {want.dtype.name}, the dtype of init",
                    got=f"{got.dtype.name} from the body",
                    way_out=f"Start from {got.dtype.name}, which then is the accumulator, "
                    "or cast in the body.",
                )
            )
        if want.shape != got.shape:
            raise TileShapeError(
                message(
                    op,
                    expected=f"{name} to keep init's shape {want.shape}",
                    got=f"{got.shape} from the body",
                    way_out="Give init the shape of the state: jnp.zeros(shape, dtype).",
                )
            )


def _show(state: State, shapes: Sequence) -> str:
    return str(state.whole(shapes))
