"""The body of a kernel of `jaxtile.kernel` as a straight list of steps, its calls opened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from jax import core
from jax.core import Tracer
from jax.extend.core import Literal

from jaxtile.errors import UnsupportedOnBackend, message
from jaxtile.pallas_lowering.mosaic_gpu import BACKEND
from jaxtile.pallas_lowering.mosaic_gpu._ops import BINARY, UNARY
from jaxtile.primitives import ALL, _scalar
from jaxtile.primitives._define import new_primitive
from jaxtile.primitives._operands import unpack


@dataclass(frozen=True)
class Piece:
    """The part of one axis of an array that a tile covers.

    Args:
        dim: what names the tile's axis, or None where it has none.
        size: coordinates of the tile.
        extent: of the array.
        ragged: some may lie outside of the array.
        step: every start is a multiple of it; 0 where the start is 0.
    """

    dim: Any
    size: int
    extent: int
    ragged: bool
    step: int


@dataclass(frozen=True)
class Place:
    """Where a tile lies.

    Args:
        role: "operand" or "result".
        number: which of them.
        pieces: of each axis of the array.
        dtype: of the array.
    """

    role: str
    number: int
    pieces: tuple[Piece, ...]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tile."""
        return tuple(p.size for p in self.pieces if p.dim is not None)


# `read(fill, *starts)` is a tile, `write(token, value, *starts)` the next token: what
# threads a token through is neither dropped nor moved.
read_p, write_p = new_primitive("tile_read"), new_primitive("tile_write")


@read_p.def_abstract_eval
def _(fill, *starts, place: Place):
    return [core.ShapedArray(place.shape, place.dtype)]


@write_p.def_abstract_eval
def _(token, value, *starts, place: Place):
    return [token]


class Axis:
    """Axes that lie alike; `root` stands for all that have been joined.

    Args:
        size: of all of them.
    """

    def __init__(self, size: int):
        self.size, self._joined = size, None

    @property
    def root(self) -> Axis:
        """The axis that stands for this one."""
        found = self
        while found._joined is not None:
            found = found._joined
        return found

    def join(self, other: Axis) -> None:
        """Both are one from now on."""
        mine, theirs = self.root, other.root
        if mine is not theirs:
            mine._joined = theirs


@dataclass(eq=False)
class Value:
    """A value of the body.

    Args:
        aval: its shape and dtype.
        const: the scalar that it is, or None.
        axes: one for each dimension.
    """

    aval: Any
    const: Any = None
    axes: list[Axis] = field(default_factory=list)

    def __post_init__(self):
        self.axes = [Axis(n) for n in self.aval.shape]

    @property
    def roots(self) -> tuple[Axis, ...]:
        """What stands for its axes."""
        return tuple(a.root for a in self.axes)


@dataclass(eq=False)
class Step:
    """An equation.

    Args:
        primitive, params: its own.
        reads, gives: operands and results.
        body: of a loop, else None.
        test: whether a loop that counts no turns goes on, else None.
    """

    primitive: Any
    params: dict
    reads: list[Value]
    gives: list[Value]
    body: Body | None = None
    test: Body | None = None

    @property
    def inner(self) -> list[Body]:
        """What a loop repeats."""
        return [b for b in (self.test, self.body) if b is not None]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    def loop(self) -> tuple[list, list, list]:
        """Pairs of operands and what they are in each turn: of the test, of the body.

        The last list is of the operands that are carried.
        """
        count = self.params.get("cond_nconsts", 0)
        first = len(self.reads) - len(self.gives)
        carried = self.reads[first:]
        body: Any = self.body
        inside = [*zip([*self.reads[count:first], *carried], body.inputs, strict=True)]
        ahead = [] if self.test is None else self.test.inputs
        tested = [*zip([*self.reads[:count], *carried], ahead, strict=False)]
        return tested, inside, carried

    @property
    def avals(self) -> list:
        """Of the operands."""
        return [v.aval for v in self.reads]


@dataclass(eq=False)
class Body:
    """Steps, from inputs to results."""

    inputs: list[Value]
    steps: list[Step]
    results: list[Value]

    def every(self) -> Iterator[Step]:
        """All steps, those of loops too."""
        for step in self.steps:
            yield step
            for inner in step.inner:
                yield from inner.every()

    def values(self) -> list[Value]:
        """All values, each once."""
        found = dict.fromkeys(self.inputs)
        for step in self.every():
            found.update(dict.fromkeys([*step.reads, *step.gives]))
            for inner in step.inner:
                found.update(dict.fromkeys([*inner.inputs, *inner.results]))
        return list(found)


def refuse(kernel: str, got: str, way_out: str) -> NoReturn:
    """Say why a kernel does not run here.

    Raises:
        UnsupportedOnBackend: always.
    """
    raise UnsupportedOnBackend(
        message(
            kernel,
            expected="a body that a Mosaic GPU kernel takes",
            got=got,
            way_out=f'{way_out} Or use implementation="triton" or "reference".',
        )
    )


def opened(kernel: str, closed: Any) -> Body:
    """The body of a jaxpr.

    Raises:
        UnsupportedOnBackend: an op that has no thread code.
    """
    body = _inside(kernel, closed)
    for step in body.every():
        _check(kernel, step)
    return body


def _constant(kernel: str, value: Any, aval: Any) -> Value:
    if isinstance(value, Tracer) or aval.shape:
        refuse(
            kernel,
            f"a body that closes over an array of shape {aval.shape}, and a kernel has "
            "no constants",
            "Pass the array as an operand.",
        )
    return Value(aval, np.asarray(value, aval.dtype))


def _open(kernel, jaxpr, consts, args: Sequence[Value], steps: list[Step]) -> list:
    env: dict = {
        v: _constant(kernel, c, v.aval)
        for v, c in zip(jaxpr.constvars, consts, strict=True)
    }
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        if isinstance(atom, Literal):
            return _constant(kernel, atom.val, atom.aval)  # pyright: ignore
        return env[atom]

    for eqn in jaxpr.eqns:
        reads = [read(v) for v in eqn.invars]
        inner = _scalar.inner_jaxpr(eqn)
        if inner is not None:
            gives = _open(kernel, *_scalar.as_closed(inner), reads, steps)
        else:
            gives = [Value(v.aval) for v in eqn.outvars]
            step = Step(eqn.primitive, eqn.params, reads, gives)
            if eqn.primitive.name == "scan":
                step.body = _turn(kernel, eqn)
            elif eqn.primitive.name == "while":
                step.test, step.body = (
                    _inside(kernel, eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr")
                )
            steps.append(step)
        env.update(zip(eqn.outvars, gives, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _turn(kernel: str, eqn: Any) -> Body:
    """One turn of a loop that counts them."""
    jaxpr = _scalar.as_closed(eqn.params["jaxpr"])[0]
    sides: list[tuple[Any, Any]] = [*zip(eqn.invars, jaxpr.invars, strict=True)]
    sides += zip(eqn.outvars, jaxpr.outvars, strict=True)
    # What is sliced or stacked has another axis outside.
    if any(outer.aval.shape != inner.aval.shape for outer, inner in sides):
        refuse(kernel, "a scan over arrays", "Loop by nest.serial.")
    return _inside(kernel, eqn.params["jaxpr"])


def _inside(kernel: str, closed: Any) -> Body:
    jaxpr, consts = _scalar.as_closed(closed)
    inputs = [Value(v.aval) for v in jaxpr.invars]
    steps: list[Step] = []
    return Body(inputs, steps, _open(kernel, jaxpr, consts, inputs, steps))


_MOVES = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose iota".split()
)
SAME = frozenset("copy stop_gradient reshard".split())
_SCALAR = (
    frozenset(BINARY)
    | frozenset(UNARY)
    | SAME
    | frozenset(
        "select_n clamp integer_pow convert_element_type bitcast_convert_type "
        "reduce_precision clz".split()
    )
)
OURS = frozenset(
    "tile_cast tile_bitcast tile_map tile_map_linear tile_quantize tile_decode".split()
)


def _check(kernel: str, step: Step) -> None:
    """Refuse what has no thread code."""
    name = step.name.removeprefix("tile_")
    if step.primitive in ALL:
        reason = BACKEND.why_not(step.primitive, *step.avals, **step.params)
        if reason is not None:
            refuse(kernel, f"{name}: {reason}", "Split the kernel there.")
        return
    known = step.primitive in (read_p, write_p) or step.name in _MOVES | _SCALAR
    if not known and step.body is None:
        refuse(
            kernel,
            f"{name}, which has no thread code",
            "Use jaxtile's ops, which the support table lists.",
        )


def fibres_of(step: Step) -> tuple[list[Value], list[Value], tuple[int, ...]]:
    """What a reduce or scan has at each place, at each fibre, and the axes of a fibre."""
    params = step.params
    spec, seeded, masked = (params[k] for k in ("spec", "seeded", "masked"))
    elements, init, mask = unpack(spec, step.reads, seeded, masked)
    places = [*elements, *(() if mask is None else (mask,))]
    if step.name == "tile_reduce":
        return places, [*(init or ()), *step.gives], params["axes"]
    shown = len(params["out"])
    places += step.gives[:shown]
    return places, [*(init or ()), *step.gives[shown:]], (params["axis"],)


def elements(value: Value) -> int:
    """How many elements a value has."""
    return math.prod(value.aval.shape)
