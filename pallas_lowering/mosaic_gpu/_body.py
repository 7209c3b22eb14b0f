"""The body of a kernel of `jaxtile.kernel` as a straight list of steps, and its axes.

Calls are opened. Axes of different values that must lie alike, because an elementwise op,
a broadcast, a reduction or a loop joins them, become one `Axis`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import numpy as np
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
    return [jax.core.ShapedArray(place.shape, place.dtype)]


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
    """

    primitive: Any
    params: dict
    reads: list[Value]
    gives: list[Value]
    body: Body | None = None

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

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
            if step.body is not None:
                yield from step.body.every()

    def values(self) -> list[Value]:
        """All values, each once."""
        found = dict.fromkeys(self.inputs)
        for step in self.every():
            found.update(dict.fromkeys([*step.reads, *step.gives]))
            if step.body is not None:
                found.update(dict.fromkeys([*step.body.inputs, *step.body.results]))
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
    """The body of a jaxpr, with its axes joined.

    Raises:
        UnsupportedOnBackend: an op that has no thread code, or axes that cannot lie
            alike.
    """
    jaxpr, consts = _scalar.as_closed(closed)
    inputs = [Value(v.aval) for v in jaxpr.invars]
    steps: list[Step] = []
    results = _open(kernel, jaxpr, consts, inputs, steps)
    body = Body(inputs, steps, results)
    named: dict[Any, Axis] = {}
    for step in body.every():
        _check(kernel, step)
        _join(kernel, step, named)
    for value in body.values():
        roots = [a for a in value.roots if a.size > 1]
        if len(set(roots)) != len(roots):
            refuse(
                kernel,
                f"a value of shape {value.aval.shape} two of whose axes lie alike, being "
                "joined elsewhere",
                "Give them dims of their own.",
            )
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
                step.body = _loop(kernel, eqn)
            steps.append(step)
        env.update(zip(eqn.outvars, gives, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _loop(kernel: str, eqn: Any) -> Body:
    params = eqn.params
    state = params["num_consts"] + params["num_carry"]
    if len(eqn.invars) != state or len(eqn.outvars) != params["num_carry"]:
        refuse(kernel, "a scan over arrays", "Loop by nest.serial.")
    jaxpr, consts = _scalar.as_closed(params["jaxpr"])
    inputs = [Value(v.aval) for v in jaxpr.invars]
    steps: list[Step] = []
    results = _open(kernel, jaxpr, consts, inputs, steps)
    return Body(inputs, steps, results)


_MOVES = frozenset("broadcast_in_dim reshape squeeze expand_dims transpose iota".split())
SAME = frozenset("copy stop_gradient".split())
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


def _pair(kernel: str, first: Sequence[Axis], second: Sequence[Axis], what: str):
    if [a.size for a in first] != [a.size for a in second]:
        refuse(
            kernel,
            f"{what} from axes of {[a.size for a in first]} to "
            f"{[a.size for a in second]}",
            "Load the tile in the shape that you need.",
        )
    for a, b in zip(first, second, strict=True):
        a.join(b)


def _all(*values: Value) -> None:
    """Elementwise: what is no scalar lies alike."""
    ranked = [v for v in values if v.axes]
    for value in ranked[1:]:
        for a, b in zip(ranked[0].axes, value.axes, strict=True):
            a.join(b)


def _join(kernel: str, step: Step, named: dict[Any, Axis]) -> None:
    """Join the axes that a step has lie alike."""
    rule = _JOINS.get(step.name)
    if rule is not None:
        rule(kernel, step)
    elif step.primitive in (read_p, write_p):
        tile = step.gives[0] if step.primitive is read_p else step.reads[1]
        dims = [p.dim for p in step.params["place"].pieces if p.dim is not None]
        for dim, axis in zip(dims, tile.axes, strict=True):
            axis.join(named.setdefault((dim, axis.size), axis))
    elif step.name != "iota":
        _all(*step.reads, *step.gives)


def _broadcast(kernel: str, step: Step) -> None:
    wide = step.gives[0].axes
    for a, d in zip(step.reads[0].axes, step.params["broadcast_dimensions"], strict=True):
        if a.size == wide[d].size:
            a.join(wide[d])


def _reshape(kernel: str, step: Step) -> None:
    sides = [
        [a for a in v.axes if a.size > 1] for v in (step.reads[0], step.gives[0])
    ]
    _pair(kernel, *sides, "a reshape")


def _transpose(kernel: str, step: Step) -> None:
    given = [step.reads[0].axes[p] for p in step.params["permutation"]]
    _pair(kernel, given, step.gives[0].axes, "a transpose")


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


def _fibres(kernel: str, step: Step) -> None:
    places, fibres, axes = fibres_of(step)
    _all(*places)
    kept = [a for k, a in enumerate(places[0].axes) if k not in axes]
    for value in fibres:
        for a, b in zip(kept, value.axes, strict=True):
            a.join(b)


def _carry(kernel: str, step: Step) -> None:
    body: Any = step.body
    consts = step.params["num_consts"]
    for outer, inner in zip(step.reads, body.inputs, strict=True):
        _all(outer, inner)
    for inner, after, outer in zip(
        body.inputs[consts:], body.results, step.gives, strict=True
    ):
        _all(inner, after, outer)


_JOINS: dict[str, Callable[[str, Step], None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "tile_reduce": _fibres,
    "tile_scan": _fibres,
    "scan": _carry,
}


def tokens() -> Any:
    """The first token."""
    return jax.numpy.zeros((), np.int32)


def elements(value: Value) -> int:
    """How many elements a value has."""
    return math.prod(value.aval.shape)
