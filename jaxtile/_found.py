"""The tile ops of a jaxpr: where they run, and the least that they must do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Primitive

from jaxtile.pallas_lowering import NAMES, _registry
from jaxtile.primitives import _scalar
from jaxtile.primitives._define import REFERENCES

ARRAY = "array"
INTERPRET = "interpret"
UNDECIDED = "undecided"


class Found(NamedTuple):
    """One equation that binds a tile primitive.

    Args:
        eqn: the equation.
        place: "array"; in a kernel its backend, "interpret" or "undecided".
        times: how often it runs at least; a `while` body counts once.
    """

    eqn: Any
    place: str
    times: int

    @property
    def op(self) -> str:
        """The op's public name."""
        return self.eqn.primitive.name.removeprefix("tile_")


# Equations that hold no jaxpr before a platform is known: `(eqn, platform) -> jaxpr`.
OPENS: dict[Primitive, Callable[[Any, str], Jaxpr]] = {}


def find(
    jaxpr: Jaxpr, place: str = ARRAY, times: int = 1, platform: str = ""
) -> Iterator[Found]:
    """Every tile op of a jaxpr, in order, through calls, loops and kernels."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in REFERENCES:
            yield Found(eqn, place, times)
            continue
        inside = _place(eqn) or place
        inners = _scalar.inner_jaxprs(eqn)
        if eqn.primitive in OPENS:
            inners = [OPENS[eqn.primitive](eqn, platform)]
        for inner in inners:
            trips = times * _trips(eqn) // eqn.params.get("sharers", 1)
            yield from find(inner, inside, trips, platform)


def _trips(eqn) -> int:
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    if not grid:
        sizes = [getattr(m, "shape", {}) for m in eqn.params.get("meshes", ())]
        grid = [n for shape in sizes for n in dict(shape).values()]
    return math.prod(n for n in grid if isinstance(n, int))


def _place(eqn) -> str | None:
    """The kernel that an equation starts, or None."""
    if eqn.primitive.name not in ("pallas_call", "mpmd_map", "core_map"):
        return None
    if eqn.params.get("interpret"):
        return INTERPRET
    meshes = (eqn.params.get("mesh"), *eqn.params.get("meshes", ()))
    for value in (eqn.params.get("compiler_params"), *meshes):
        # jax calls the TPU's folder mosaic, the others by their names.
        folders = type(value).__module__.split(".")
        for name in (*NAMES, "mosaic"):
            if name in folders:
                return "tpu" if name == "mosaic" else name
    return {"tpu": "tpu", "gpu": "triton"}.get(jax.default_backend(), UNDECIDED)


# Ops that need not read all of their first operand.
_PICKS = frozenset(("gather", "reindex"))


def bytes_moved(found: Found) -> int:
    """Operands read once and results written once; in a kernel they are in registers."""
    if found.place != ARRAY:
        return 0
    avals = [v.aval for v in (*found.eqn.invars, *found.eqn.outvars)]
    sizes = [a.size * np.dtype(a.dtype).itemsize for a in avals]
    if found.op in _PICKS:
        sizes[0] = min(sizes[0], sizes[-1])
    return found.times * sum(sizes)


def scalar_ops(found: Found) -> int:
    """How many arithmetic operations the op's definition has."""
    params, size = found.eqn.params, found.eqn.invars[0].aval.size
    if "spec" in params:
        spec = params["spec"]
        state = jax.tree.unflatten(spec.state_tree, spec.states)
        leaves, tree = jax.tree.flatten((state, state))
        each = _count(_scalar.trace(spec.reducer.merge, tree, tuple(leaves))[0])
    elif "roles" in params:
        a, b = (v.aval.shape for v in found.eqn.invars[:2])
        products = math.prod(params["roles"].sizes(a, b).values())
        size, each = products, 2
    elif "region" in params:
        dtypes = tuple(v.aval.dtype for v in found.eqn.invars)
        tree = jax.tree.structure(dtypes)
        each = _count(_scalar.trace(params["region"].fn, tree, dtypes)[0])
    else:
        each = 2 * len(params.get("terms", ()))
    return found.times * size * each


def _count(closed) -> int:
    total = 0
    for eqn in _scalar.as_closed(closed)[0].eqns:
        inner = _scalar.inner_jaxpr(eqn)
        if inner is not None:
            total += _count(inner)
        elif eqn.primitive.name not in _MOVES:
            total += 1
    return total


# A maximum is work; a select, a broadcast or a conversion only moves a value.
_MOVES = (_scalar.SELECTIONS - {"max", "min", "and", "or", "xor"}) | {
    "convert_element_type",
    "bitcast_convert_type",
}


_KERNELS = frozenset(("pallas_call", "core_map", "mpmd_map"))


def launches(found: Found, backend: str) -> int:
    """How many kernels a backend's whole-array call is."""
    whole = _registry.BACKENDS[backend].wholes[found.eqn.primitive]
    params = {k: v for k, v in found.eqn.params.items() if k != "implementation"}
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in found.eqn.invars
    ]
    return _kernels(jax.make_jaxpr(lambda *x: whole.run(*x, **params))(*shapes).jaxpr)


def _kernels(jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _KERNELS:
            total += 1
            continue
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            total += _kernels(inner) if hasattr(inner, "eqns") else 0
    return total
