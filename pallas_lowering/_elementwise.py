"""cast, bitcast, map and map_linear in kernels: the same plain jax on every backend.

What differs is data: the formats that a backend computes with, and the scalar ops that
it lacks or realises with another meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxtile.pallas_lowering._registry import Backend
from jaxtile.primitives import _scalar
from jaxtile.primitives import cast as _cast
from jaxtile.primitives.bitcast import bitcast_p
from jaxtile.primitives.cast import cast_p
from jaxtile.primitives.map import map_p
from jaxtile.primitives.map_linear import _sum_terms, map_linear_p


@dataclass(frozen=True)
class Traits:
    """What a backend's kernels can compute elementwise.

    Args:
        formats: names of the arithmetic formats.
        other_formats: what to do with the other ones, as a sentence's end.
        lacks: scalar ops of floats that fail after the rule; each with what to do.
        rewrites: scalar ops of floats (or "max of bool") that lower to another meaning,
            or not at all, as functions of arrays that keep ours.
        shape: why a shape is refused, or None.
        keeps_rounding: its compiler never removes a narrowing that is widened again.
        opaque: ops of floats into whose insides no product is fused.
    """

    formats: frozenset[str]
    other_formats: str
    lacks: Mapping[str, str]
    rewrites: Mapping[str, Callable] = field(default_factory=dict)
    shape: Callable[[Any], str | None] = lambda aval: None
    keeps_rounding: bool = True
    opaque: frozenset[str] = frozenset()

    def operand(self, aval: Any) -> str | None:
        """Why a value of this type is refused, or None."""
        return self.format(aval.dtype) or self.shape(aval)

    def format(self, dtype: Any) -> str | None:
        """Why a format is refused, or None."""
        name = np.dtype(dtype).name
        if name in self.formats:
            return None
        return f"{name} is not computed with there; {self.other_formats}"


def cast_values(x, dtype):
    """The native conversion, with selects where its meaning is not ours."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    floating = functools.partial(jnp.issubdtype, np.dtype(x.dtype))
    to_float = jnp.issubdtype(dtype, jnp.floating)
    if dtype.kind == "b" or (floating(jnp.floating) and not to_float):
        return _cast.convert(x, dtype)
    if to_float and dtype.itemsize == 2 and x.dtype != jnp.float32:
        x = x.astype(jnp.float32)
    return x.astype(dtype)


def negate(x):
    """The sign flipped, of zeros too: 0 - x would give +0.0 for both of them."""
    return lax.mul(x, jnp.full_like(x, -1))


def propagate_nan(op: Callable) -> Callable:
    """A maximum or minimum that gives NaN where either operand is one."""

    def extreme(a, b):
        a, b = jnp.broadcast_arrays(a, b)  # one may be a literal
        found = lax.select(b != b, b, op(a, b))
        return lax.select(a != a, a, found)

    return extreme


def _inlined(fn: Callable, rewrites: Mapping[str, Callable]) -> Callable:
    """`fn` without calls, and with some of its ops rewritten.

    In Mosaic GPU a constant cannot enter a nested jit, such as that of `jnp.where`.
    """

    def run(*values):
        closed = jax.make_jaxpr(fn)(*values)
        return _replay(closed.jaxpr, closed.consts, values, rewrites)

    return run


def _replay(jaxpr, consts, values, rewrites):
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        args, inner = [read(v) for v in eqn.invars], _scalar.inner_jaxpr(eqn)
        dtype = eqn.outvars[0].aval.dtype
        floating = jnp.issubdtype(dtype, jnp.floating)
        name = eqn.primitive.name
        rewrite = rewrites.get(name if floating else f"{name} of {dtype}")
        if inner is not None:
            outs = _replay(*_scalar.as_closed(inner), args, rewrites)
        elif eqn.primitive.name == "reshard":
            outs = args  # a kernel's values lie on one device
        elif rewrite:
            outs = [rewrite(*args)]
        else:
            outs = eqn.primitive.bind(*args, **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def rounds_twice(source: Any, target: Any) -> bool:
    """The way through float32, the only native one, rounds before the last rounding."""
    source, target = np.dtype(source), np.dtype(target)
    if not jnp.issubdtype(target, jnp.floating) or target.itemsize != 2:
        return False
    return source.name in ("float64", "int32", "uint32", "int64", "uint64")


def refuse_cast(traits: Traits, source: Any, target: Any) -> str | None:
    """Why the conversion of one format to another is refused, or None."""
    reason = traits.format(source) or traits.format(target)
    if reason is None and rounds_twice(source, target):
        source, target = np.dtype(source).name, np.dtype(target).name
        reason = (
            f"{source} to {target} would round twice there; cast to float32 first if "
            "two roundings are meant, or cast outside the kernel"
        )
    return reason


def refuse_region(backend: Backend, traits: Traits, jaxpr: Any) -> str | None:
    """Why a scalar jaxpr does not run there, or None."""
    jaxpr, consts = _scalar.as_closed(jaxpr)
    if consts:
        return (
            "its function closes over an array, and a kernel has no constants; pass "
            "the array as an operand"
        )
    for eqn in jaxpr.eqns:
        reason = _refuse_equation(backend, traits, eqn)
        if reason is not None:
            return reason
    return None


def _refuse_equation(backend, traits, eqn) -> str | None:
    inner, name = _scalar.inner_jaxpr(eqn), eqn.primitive.name
    if inner is not None:
        return refuse_region(backend, traits, inner)
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    for aval in avals:
        reason = traits.format(aval.dtype)
        if reason is not None:
            return reason
    if name == "convert_element_type":
        return refuse_cast(traits, avals[0].dtype, avals[-1].dtype)
    floats = any(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
    if floats and name in traits.lacks:
        return f"{name} of floats {traits.lacks[name]}"
    if name in _scalar.LOOPS or not backend.hooks.knows(eqn.primitive):
        return f"its function uses {name}, which has no rule there; map it outside"
    return None


def _region_of(fn, avals):
    order = jax.tree.structure(tuple(avals))
    return _scalar.trace(fn, order, tuple(v.dtype for v in avals))[0]


def refuse_map(backend: Backend, traits: Traits, *avals: Any, region: Any):
    """Why a map of these values is refused, or None."""
    reason = next(filter(None, map(traits.operand, avals)), None)
    return reason or refuse_region(backend, traits, _region_of(region.fn, avals))


def map_values(traits: Traits, *values: Any, region: Any) -> list:
    """A map as plain jax."""

    def run(*values):
        found = _scalar.evaluate(region.fn, *values, opaque=traits.opaque)
        return jax.tree.leaves(found)

    return _inlined(run, traits.rewrites)(*values)


def define_elementwise(backend: Backend, traits: Traits) -> None:
    """Register the rules of the elementwise primitives with a backend."""

    def first(avals):
        return next(filter(None, map(traits.operand, avals)), None)

    def refuse_cast_p(x, *, dtype):
        return traits.operand(x) or refuse_cast(traits, x.dtype, dtype)

    def refuse_bitcast_p(x, *, dtype):
        return traits.operand(x) or traits.format(dtype)

    def refuse_map_linear(*avals, terms, dtypes, split):
        fn = functools.partial(_sum_terms, terms, dtypes, split)
        return first(avals) or refuse_region(backend, traits, _region_of(fn, avals))

    @backend.traces(cast_p, refuse_cast_p)
    def lower_cast(x, *, dtype):
        y = cast_values(x, dtype)
        narrowed = y.dtype.itemsize == 2 and jnp.issubdtype(y.dtype, jnp.floating)
        if traits.keeps_rounding or not narrowed or y.ndim == 0:
            return [y]
        # A select stands between the narrowing and a widening, which LLVM would fold
        # into nothing in the middle of a chain of contractible ops.
        return [lax.select(y == y, y, jnp.full_like(y, jnp.nan))]

    @backend.traces(bitcast_p, refuse_bitcast_p)
    def lower_bitcast(x, *, dtype):
        return [lax.bitcast_convert_type(x, dtype)]

    @backend.traces(map_p, functools.partial(refuse_map, backend, traits))
    def lower_map(*values, region):
        return map_values(traits, *values, region=region)

    @backend.traces(map_linear_p, refuse_map_linear)
    def lower_map_linear(*values, terms, dtypes, split):
        fn = functools.partial(_sum_terms, terms, dtypes, split)
        run = functools.partial(_scalar.evaluate, fn)
        return _inlined(run, traits.rewrites)(*values)
