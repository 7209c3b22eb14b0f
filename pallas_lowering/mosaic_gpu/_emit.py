"""The body of a kernel of `jaxtile.kernel` as thread code of one warpgroup."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from jaxtile.pallas_lowering._elementwise import _sum_terms
from jaxtile.pallas_lowering.mosaic_gpu import _thread as th
from jaxtile.pallas_lowering.mosaic_gpu._body import (
    OURS,
    SAME,
    Body,
    Step,
    Value,
    fibres_of,
    read_p,
    refuse,
    write_p,
)
from jaxtile.pallas_lowering.mosaic_gpu._given import Given
from jaxtile.pallas_lowering.mosaic_gpu._lanes import EXCHANGE_BYTES, Thread
from jaxtile.pallas_lowering.mosaic_gpu._launch import Program
from jaxtile.pallas_lowering.mosaic_gpu._layouts import MOST_EACH
from jaxtile.pallas_lowering.mosaic_gpu._ops import constant
from jaxtile.pallas_lowering.mosaic_gpu._region import Region, convert, lacks
from jaxtile.pallas_lowering.mosaic_gpu._runs import runs_of
from jaxtile.pallas_lowering.mosaic_gpu._spread import (
    Axis,
    Grid,
    Line,
    Spread,
    assign,
    both,
    most_each,
)
from jaxtile.pallas_lowering.mosaic_gpu.map import region_of
from jaxtile.pallas_lowering.mosaic_gpu.reduce import Reduction, reduction_parts
from jaxtile.pallas_lowering.mosaic_gpu.scan import Scan, scan_parts
from jaxtile.primitives._define import REFERENCES

# Warps of an instance, and scalars of a value in each thread that need no more.
_WARPS, _ENOUGH_EACH = (4, 8, 16), 32


class Plan:
    """What is known of a body before its code is written.

    Args:
        kernel: its name, for messages.
        body: its steps.
        warps: of an instance, or None for as many as its values want.
    """

    def __init__(self, kernel: str, body: Body, warps: int | None):
        self.kernel, self.body = kernel, body
        if warps is not None and warps not in _WARPS:
            refuse(kernel, f"num_warps={warps}", f"Take one of {_WARPS}.")
        self.warps, self.spreads = self._spread(warps)
        self.bytes = 0
        self.regions: dict[Step, Region] = {}
        for step in body.every():
            if step.name in ("tile_reduce", "tile_scan"):
                sizes = self.combined(step)[0]
                crossing = EXCHANGE_BYTES * self.warps // _WARPS[0]
                self.bytes = max(self.bytes, sizes.bytes(False), crossing)
            elif _is_region(step):
                self.regions[step] = self._region(step)

    def _spread(self, warps: int | None) -> tuple[int, dict[Axis, Spread]]:
        """The fewest warps whose registers hold the values, and how the axes lie."""
        tried = list(_WARPS) if warps is None else [warps]
        number = tried.pop(0)
        spreads = assign(self.body, number)
        while tried and most_each(self.body, spreads)[0] > _ENOUGH_EACH:
            number = tried.pop(0)
            spreads = assign(self.body, number)
        each, value = most_each(self.body, spreads)
        if each > MOST_EACH and value is not None:
            refuse(
                self.kernel,
                f"a tile of shape {value.aval.shape}: {each} values in each thread, "
                f"above {MOST_EACH}",
                "Pick smaller blocks.",
            )
        return number, spreads

    def combined(self, step: Step):
        """The sizes and the algebra of a reduce or scan."""
        make = reduction_parts if step.name == "tile_reduce" else scan_parts
        return make(step.avals, step.params)

    def _region(self, step: Step) -> Region:
        if step.name == "tile_map":
            region = region_of(step.avals, step.params["region"])
        else:
            region = Region(_scalar_function(step), [a.dtype for a in step.avals])
        reason = lacks(region.closed)
        if reason is not None:
            refuse(
                self.kernel,
                f"{step.name.removeprefix('tile_')}: {reason}",
                "Compute that before the kernel.",
            )
        return region


_TABLES = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose iota scan while tile_reduce "
    "tile_scan tile_read tile_write".split()
)


def _is_region(step: Step) -> bool:
    return step.name not in _TABLES | SAME | {"tile_cast"}


def _scalar_function(step: Step) -> Callable[..., Sequence]:
    """What an elementwise step does to scalars."""
    primitive, params = step.primitive, step.params
    if step.name == "tile_map_linear":
        return functools.partial(
            _sum_terms, params["terms"], params["dtypes"], params["split"]
        )
    if step.name in OURS:
        return functools.partial(REFERENCES[primitive], **params)
    return lambda *xs: [primitive.bind(*xs, **params)]


def _conversion(step: Step) -> Callable[[ir.Value], list]:
    kinds = step.avals[0].dtype, step.params["dtype"]
    return lambda x: [convert(x, *kinds)]


class Emitter:
    """Writes a body's code at the present place of a kernel.

    Args:
        plan: the body's.
        program: the arrays.
        first: of each array its first element, and of the grid the first instance, that
            are this instance's: offsets by (role, number).
    """

    def __init__(self, plan: Plan, program: Program, first: dict[Any, Any]):
        self.plan, self.program, self.first = plan, program, first
        words: Any = program.words
        self.memory = words.ref if words is not None else None
        self.thread = Thread(words, plan.warps * th.WARP)
        self.lines = {a: Line(s, self.thread) for a, s in plan.spreads.items()}
        self.env: dict[Value, np.ndarray] = {}

    def run(self, inputs: Sequence[ir.Value]) -> None:
        """Write the code of the whole body, for scalar inputs."""
        body = self.plan.body
        for value, scalar in zip(body.inputs, inputs, strict=True):
            self.env[value] = _filled((1,), scalar)
        self._steps(body.steps)

    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            reads = [self._read(v) for v in step.reads]
            rule = _RULES.get(step.name, Emitter._elementwise)
            found = rule(self, step, *reads)
            self.env.update(zip(step.gives, found, strict=True))

    def _read(self, value: Value) -> np.ndarray:
        if value.const is not None:
            return _filled((1,), constant(value.const, value.aval.dtype))
        return self.env[value]

    def grid(self, value: Value) -> Grid:
        """Where a value's scalars lie."""
        return Grid([self.lines[a] for a in value.roots], self.thread)

    # Elementwise.

    def _elementwise(self, step: Step, *arrays: np.ndarray) -> list[np.ndarray]:
        counts = self.grid(step.gives[0]).counts
        if step.name in SAME:
            return list(arrays)
        region: Callable[..., list] = self.plan.regions.get(step) or _conversion(step)
        known: dict[tuple, list] = {}
        outs = [np.empty(counts, object) for _ in step.gives]
        spread: list[Any] = [
            np.broadcast_to(a.reshape(()) if a.size == 1 else a, counts) for a in arrays
        ]
        for place in np.ndindex(*counts):
            scalars = [a[place] for a in spread]
            # Equal operands, as after a broadcast, are computed once.
            key = tuple(map(id, scalars))
            if key not in known:
                known[key] = region(*scalars)
            for out, scalar in zip(outs, known[key], strict=True):
                out[place] = scalar
        return outs

    # Shapes.

    def _broadcast(self, step: Step, array: np.ndarray) -> list[np.ndarray]:
        counts = self.grid(step.gives[0]).counts
        shape = [1] * len(counts)
        operand = self.grid(step.reads[0])
        for line, d in zip(
            operand.lines, step.params["broadcast_dimensions"], strict=True
        ):
            shape[2 * d : 2 * d + 2] = line.counts
        return [np.broadcast_to(array.reshape(shape), counts)]

    def _reshape(self, step: Step, array: np.ndarray) -> list[np.ndarray]:
        return [array.reshape(self.grid(step.gives[0]).counts)]

    def _transpose(self, step: Step, array: np.ndarray) -> list[np.ndarray]:
        order = [2 * p + k for p in step.params["permutation"] for k in (0, 1)]
        return [array.transpose(order or [0])]

    def _iota(self, step: Step) -> list[np.ndarray]:
        grid, dtype = self.grid(step.gives[0]), step.gives[0].aval.dtype
        where = grid.along((step.params["dimension"],))
        out = np.empty(where.shape, object)
        out.flat[:] = [convert(v, np.int32, dtype) for v in where.flat]
        return [out]

    # Combining.

    def _combine(self, step: Step, *arrays: np.ndarray) -> list[np.ndarray]:
        at_places, at_fibres, _ = fibres_of(step)
        sizes, algebra = self.plan.combined(step)
        given = Given(
            step.primitive,
            sizes,
            algebra,
            step.params["policy"],
            step.params.get("direction", "prefix") != "prefix",
            self.grid(at_places[0]),
            self.grid(at_fibres[0]) if at_fibres else None,
        )
        make = Reduction if step.name == "tile_reduce" else Scan
        work = make(given, step.params)
        found = given.found(
            work, self.thread, self.memory, sizes.ordered(self._aligned(step, arrays))
        )
        outs = []
        for value, scalars in zip(step.gives, found, strict=True):
            out = np.empty(self.grid(value).counts, object)
            out.flat[:] = list(scalars)
            outs.append(out)
        return outs

    def _aligned(self, step, arrays):
        """The operands, each with an array of its own."""
        shapes = [self.grid(v).counts for v in step.reads]
        return [
            np.broadcast_to(a, s).copy() for a, s in zip(arrays, shapes, strict=True)
        ]

    # Loops.

    def _loop(self, step: Step, *arrays: np.ndarray) -> list[np.ndarray]:
        body: Any = step.body
        tested, inside, carried = step.loop()
        count = len(carried)
        given = dict(zip(step.reads, arrays, strict=True))
        for outer, inner in (
            *tested[: len(tested) - count],
            *inside[: len(inside) - count],
        ):
            self.env[inner] = given[outer]
        shapes = [self.grid(v).counts for v in carried]

        def run(inner: Body, flat: Sequence[ir.Value]) -> list[np.ndarray]:
            mine = inner.inputs[len(inner.inputs) - count :]
            self.env.update(zip(mine, _split(flat, shapes), strict=True))
            self._steps(inner.steps)
            return [self._read(v) for v in inner.results]

        def turn(flat):
            return _flat(run(body, flat), shapes)

        start = _flat(arrays[len(arrays) - count :], shapes)
        if step.test is None:
            turns = th.i32(step.params["length"])
            last = th.loop(turns, lambda _, flat: turn(flat), start)
        else:
            test = step.test
            last = th.repeat(lambda flat: run(test, flat)[0].item(), turn, start)
        return _split(last, shapes)

    # Memory.

    def _load(self, step: Step, fill: np.ndarray, *starts) -> list[np.ndarray]:
        place = step.params["place"]
        grid = self.grid(step.gives[0])
        first = self.first[place.role, place.number]
        runs, count = runs_of(place, grid, first, starts)
        buffer = self.program.inputs[place.number]
        out = np.empty(grid.counts, object)
        for index, offset, inside in runs:
            for k, value in enumerate(buffer.load(offset, count)):
                if inside is not None:
                    value = th.select(inside, value, fill.item())
                out[(*index[:-1], index[-1] + k)] = value
        return [out]

    def _store(self, step: Step, token, value: np.ndarray, *starts):
        place = step.params["place"]
        grid = self.grid(step.reads[1])
        first = self.first[place.role, place.number]
        runs, count = runs_of(place, grid, first, starts)
        buffer = self.program.outputs[place.number]
        value = np.broadcast_to(value, grid.counts)
        alone = grid.first_of_alike()
        for index, offset, inside in runs:
            values = [value[(*index[:-1], index[-1] + k)] for k in range(count)]
            condition = both(alone, inside)
            if condition is None:
                buffer.store(values, offset)
                continue
            with th.when(condition):
                buffer.store(values, offset)
        return [token]


_RULES: dict[str, Callable] = {
    "broadcast_in_dim": Emitter._broadcast,
    "reshape": Emitter._reshape,
    "squeeze": Emitter._reshape,
    "expand_dims": Emitter._reshape,
    "transpose": Emitter._transpose,
    "iota": Emitter._iota,
    "tile_reduce": Emitter._combine,
    "tile_scan": Emitter._combine,
    "scan": Emitter._loop,
    "while": Emitter._loop,
    read_p.name: Emitter._load,
    write_p.name: Emitter._store,
}


def _filled(counts: Sequence[int], scalar: ir.Value) -> np.ndarray:
    out = np.empty(counts, object)
    out.fill(scalar)
    return out


def _flat(arrays: Sequence[np.ndarray], shapes: Sequence) -> list[ir.Value]:
    pairs = zip(arrays, shapes, strict=True)
    return [v for a, s in pairs for v in np.broadcast_to(a, s).flat]


def _split(flat: Sequence[ir.Value], shapes: Sequence) -> list[np.ndarray]:
    rest, out = list(flat), []
    for shape in shapes:
        array = np.empty(shape, object)
        array.flat[:], rest = rest[: array.size], rest[array.size :]
        out.append(array)
    return out
