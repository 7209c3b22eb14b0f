"""map: one elementwise op whose scalar region is a function.

    y[q] = fn(x0[q], ..., xn[q])     for every coordinate q

All operands have one shape. Every op of the region on bfloat16 or float16 rounds its
result, and no product fuses with the add after it: see `_scalar`. The derivative is

    dy_j[q] = sum_i J_ji[q] dx_i[q],     J_ji = d fn_j / d x_i

where J is another map of the operands, and the sum a `map_linear` of the tangents,
which is closed under derivatives and transposition.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jaxtile import _jax_private, formats
from jaxtile.errors import NoDerivativeError, TileShapeError, TileTypeError, message
from jaxtile.primitives._define import Out, compile_time, define, zero_tangent
from jaxtile.primitives._functions import IN_JAX, attempt, require_pure
from jaxtile.primitives._scalar import (
    REWRITTEN,
    as_closed,
    computes,
    evaluate,
    inner_jaxpr,
    trace,
)
from jaxtile.primitives._unknown import unknown_operands
from jaxtile.primitives.map_linear import (
    batch_aligned,
    has_tangent,
    map_linear,
    one_shape,
)
from jaxtile.reducers import value_key


@dataclass(frozen=True, eq=False)
class Region:
    """A function of scalars that hashes by what it computes.

    Args:
        fn: takes scalars, returns a pytree of scalars.
        name: for messages and jaxprs.
    """

    fn: Callable[..., Any]
    name: str = "map"

    @functools.cached_property
    def _key(self):
        return value_key(self.fn)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and self._key == other._key

    def __repr__(self) -> str:
        return self.name


def map_arrays(
    fn: Callable[..., Any],
    *args: Any,
    name: str = "map",
    spread: Callable = jnp.broadcast_to,
) -> Any:
    """Bind `map_p` for a function of pytrees.

    Args:
        fn: a function of pytrees of scalars. Scalars that it closes over, traced ones
            too, become operands.
        *args: pytrees of equally shaped arrays, at least one, and of Python scalars,
            which become constants of the region.
        name: for messages and jaxprs.
        spread: `(scalar, shape) -> array`, of what fn closes over.

    Returns:
        The pytree that fn returns, of arrays.

    Raises:
        TileShapeError: fn returns arrays, closes over a traced array that is not a
            scalar, or the operands' shapes differ.
        TileTypeError: a storage format, no array at all, or an fn that cannot be
            traced, has side effects or returns nothing.
    """
    leaves, tree = jax.tree.flatten(args)
    constants = tuple((v,) if isinstance(v, bool | int | float) else () for v in leaves)
    arrays = [v for v, constant in zip(leaves, constants, strict=True) if not constant]
    _require_array(arrays, len(leaves), name)
    for v in arrays:
        formats.require_arithmetic(v.dtype, name)
    shape = arrays[0].shape
    call = functools.partial(_call, fn, tree, constants)
    tell = functools.partial(_expectation, name, leaves)
    made = region_of(fn, call, [v.dtype for v in arrays], name, tell)
    arrays = [*(spread(c, shape) for c in made.captured), *arrays]
    arrays = _jax_private.align_varying(arrays)
    outs = map_p.bind(*arrays, region=made.region)
    return jax.tree.unflatten(jax.tree.structure(made.out), outs)


class Made(NamedTuple):
    """A function made a region.

    Args:
        region: it takes the captured scalars first, then the function's own.
        captured: scalar arrays that the function closes over.
        out: the pytree of `ShapeDtypeStruct`s that it returns.
    """

    region: Region
    captured: list
    out: Any


def region_of(fn: Callable, call: Callable, dtypes, name: str, tell: Callable) -> Made:
    """The region of a user's function of scalars.

    Args:
        fn: the function, asked whether it may hold arrays.
        call: the same function by position, of scalars of these dtypes.
        dtypes: of the scalars.
        name: the op that asks, for messages and jaxprs.
        tell: gives what was expected, and the way out, where it cannot be traced.

    Raises:
        TileShapeError: it returns arrays, or closes over a traced array.
        TileTypeError: it cannot be traced, has side effects or returns nothing.
    """
    fits = functools.partial(attempt, name, tell)
    captured: list = []
    if _keeps_no_array(fn, set()):
        order = jax.tree.structure(tuple(dtypes))
        closed, out = fits(trace, call, order, tuple(dtypes))
    else:
        call, captured, closed, out = fits(_hoist, call, tuple(dtypes), name)
    require_pure(name, "a function", closed)
    _check_results(out, name)
    return Made(Region(call, name), captured, out)


def _require_array(arrays, count, name):
    if not arrays:
        raise TileTypeError(
            message(
                name,
                expected="at least one array",
                got=f"{count} Python scalars",
                way_out="Wrap one with jnp.asarray.",
            )
        )


def _expectation(name, leaves):
    """What the function was expected to do with the operands, and the way out."""
    kinds = ", ".join(
        v.dtype.name if hasattr(v, "dtype") else type(v).__name__ for v in leaves
    )
    if name == "map":
        return (
            f"a function that jax can trace on scalars ({kinds})",
            f"It takes one argument for each operand; {IN_JAX}.",
        )
    return (
        f"operands that {name} takes, not ({kinds})",
        "Convert them with jaxtile.cast.",
    )


def _call(fn, tree, constants, *scalars):
    given = iter(scalars)
    leaves = [c[0] if c else next(given) for c in constants]
    return fn(*jax.tree.unflatten(tree, leaves))


_STATELESS = frozenset("builtins jax jaxlib numpy ml_dtypes".split())


def _keeps_no_array(value: Any, seen: set[int]) -> bool:
    """True if a function surely holds no array, so that its trace may be cached."""
    if id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, jax.Array | np.ndarray):
        return False
    held: Any = None
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or ()]
        held = (*cells, *(value.__defaults__ or ()))
        held += tuple((value.__kwdefaults__ or {}).values())
    elif isinstance(value, functools.partial):
        held = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, tuple | list):
        held = value
    elif isinstance(value, dict):
        held = value.values()
    elif hasattr(value, "__wrapped__"):
        held = (value.__wrapped__,)
    elif isinstance(value, types.MethodType | types.BuiltinMethodType):
        held = (value.__self__,)
    if held is not None:
        return all(_keeps_no_array(v, seen) for v in held)
    return type(value).__module__.split(".")[0] in _STATELESS


def _hoist(call, dtypes, name):
    """The region with the scalars that it closes over as leading operands."""
    scalars = [jax.ShapeDtypeStruct((), d) for d in dtypes]
    closed, out = jax.make_jaxpr(call, return_shape=True)(*scalars)
    captured, kept = [], []
    for const in closed.consts:
        lifted = jnp.ndim(const) == 0
        kept.append(None if lifted else const)
        if lifted:
            captured.append(jnp.asarray(const))
        elif isinstance(const, core.Tracer):
            raise TileShapeError(
                message(
                    name,
                    expected="a function that closes over scalars",
                    got=f"a traced array of shape {const.shape}",
                    way_out="Pass it as an operand, or look it up with gather.",
                )
            )
    # A second trace, since on some jax lines a jaxpr keeps the tracers it met.
    fill = functools.partial(_fill, closed.jaxpr, tuple(kept))
    lead = [jax.ShapeDtypeStruct((), c.dtype) for c in captured]
    free = jax.make_jaxpr(fill)(*lead, *scalars)
    return functools.partial(_replay, free, out), captured, free, out


def _fill(jaxpr, kept, *scalars):
    given = iter(scalars)
    consts = [next(given) if k is None else k for k in kept]
    return core.eval_jaxpr(jaxpr, consts, *given)


def _replay(closed, out, *scalars):
    outs = core.eval_jaxpr(*as_closed(closed), *scalars)
    return jax.tree.unflatten(jax.tree.structure(out), outs)


def _check_results(out, name):
    leaves = jax.tree.leaves(out)
    if not leaves:
        raise TileTypeError(
            message(
                name,
                expected="a function that returns scalars",
                got="None, or an empty pytree",
                way_out="Return at least one scalar.",
            )
        )
    for leaf in leaves:
        if leaf.shape != ():
            raise TileShapeError(
                message(
                    name,
                    expected="a function from scalars to scalars",
                    got=f"a result of shape {leaf.shape}",
                    way_out="Return each component as its own scalar.",
                )
            )


def _results(region, avals):
    order = jax.tree.structure(tuple(avals))
    closed, out = trace(region.fn, order, tuple(v.dtype for v in avals))
    return closed, jax.tree.leaves(out)


def _abstract(*avals, region):
    for v in avals:
        formats.require_arithmetic(v.dtype, region.name)
    one_shape(avals, region.name)
    _, outs = _results(region, avals)
    for v in outs:
        formats.require_arithmetic(v.dtype, region.name)
    kept = tuple(range(avals[0].ndim))
    return [Out(avals[0].shape, np.dtype(v.dtype), kept) for v in outs]


def _reference(*arrays, region, platform=""):
    order = jax.tree.structure(arrays)
    closed, _ = trace(region.fn, order, tuple(v.dtype for v in arrays))
    if computes(as_closed(closed)[0]):
        arrays = unknown_operands(arrays)
    return jax.tree.leaves(evaluate(region.fn, *arrays, keeps=REWRITTEN))


def _require_forward(jaxpr, name):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("custom_vjp"):
            raise NoDerivativeError(
                message(
                    name,
                    expected="a function with a forward derivative",
                    got="one that defines only a jax.custom_vjp",
                    way_out="Use jax.custom_jvp: map derives reverse mode from it.",
                )
            )
        inner = inner_jaxpr(eqn)
        if inner is not None:
            _require_forward(as_closed(inner)[0], name)


def _jacobian(fn, floats, active, wanted, *scalars):
    """The entries d fn_j / d x_i for float results j and active operands i."""
    entries = {}
    for i in active:

        def along(v, i=i):
            return jax.tree.leaves(fn(*scalars[:i], v, *scalars[i + 1 :]))

        one = np.ones((), scalars[i].dtype)
        _, column = jax.jvp(along, (scalars[i],), (one,))
        entries.update({(j, i): column[j] for j in floats})
    return [entries[key] for key in (wanted or entries)]


def _constant_entries(fn, primals) -> dict[int, float]:
    """The positions and values of results that depend on no operand."""
    avals = tuple(jax.ShapeDtypeStruct((), v.dtype) for v in primals)
    closed, _ = _results(Region(fn), avals)
    jaxpr = closed.jaxpr
    varying = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        if any(v in varying for v in eqn.invars if not hasattr(v, "val")):
            varying.update(eqn.outvars)
    fixed = {k: float(v.val) for k, v in enumerate(jaxpr.outvars) if hasattr(v, "val")}
    rest = [
        k for k, v in enumerate(jaxpr.outvars) if k not in fixed and v not in varying
    ]
    if rest:
        with compile_time():
            values = evaluate(fn, *(jnp.zeros((), v.dtype) for v in avals))
            fixed.update({k: float(values[k]) for k in rest})
    return fixed


def _jvp(primals, tangents, *, region):
    outs = map_p.bind(*primals, region=region)
    zeros = [zero_tangent(y) for y in outs]
    active = tuple(i for i, t in enumerate(tangents) if has_tangent(t))
    floats = tuple(j for j, y in enumerate(outs) if jnp.issubdtype(y.dtype, np.inexact))
    if not active or not floats:
        return outs, zeros
    _require_forward(_results(region, primals)[0].jaxpr, region.name)
    entries = functools.partial(_jacobian, region.fn, floats, active)
    # A constant entry (of x + y, -x, 2x) costs no residual.
    constant = _constant_entries(functools.partial(entries, ()), primals)
    keys = [(j, i) for i in active for j in floats]
    wanted = tuple(key for k, key in enumerate(keys) if k not in constant)
    coefficients = []
    if wanted:
        jacobian = Region(functools.partial(entries, wanted), f"d_{region.name}")
        coefficients = map_p.bind(*primals, region=jacobian)
    rows = {j: n for n, j in enumerate(floats)}
    columns = {i: n for n, i in enumerate(active)}
    terms: list[tuple] = [(rows[j], n, columns[i]) for n, (j, i) in enumerate(wanted)]
    for k, value in constant.items():
        if value != 0:
            j, i = keys[k]
            terms.append((rows[j], value, columns[i]))
    dtypes = [outs[j].dtype for j in floats]
    linear = map_linear(coefficients, [tangents[i] for i in active], terms, dtypes)
    for j, dy in zip(floats, linear, strict=True):
        zeros[j] = zeros[j] if dy is None else dy
    return outs, zeros


map_p = define(
    "tile_map",
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    batch=lambda args, dims, **params: batch_aligned(map_p, args, dims, **params),
)
