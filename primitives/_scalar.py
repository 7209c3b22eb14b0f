"""Scalar functions evaluated on arrays with the arithmetic that the contract states.

Compilers keep excess precision where they like: XLA computes a chain of bfloat16 ops in
float32 and rounds once, and LLVM contracts a * b + c into one fused multiply-add,
depending on how the code around it was fused. `evaluate` traces a function on scalars
and replays it so that

* every op with a float16 or bfloat16 result rounds that result, in every fusion;
* a product is rounded before anything is added to it;
* quotients, and in maps every result, are computed as written: XLA would turn x / c into
  x * (1 / c), (a / b) / c into a / (b * c), (x + c) - c into x, x + 0.0 into x, and
  exp(a) * exp(b) into exp(a + b).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxtile._jax_private import align_varying, placed_like
from jaxtile.primitives._define import PLATFORM
from jaxtile.primitives.cast import cast_p
from jaxtile.reducers import value_key

# Results that are one of the operands, or exact: nothing to round.
SELECTIONS = frozenset(
    "select_n max min and or xor not eq ne lt le gt ge is_finite stop_gradient copy "
    "broadcast_in_dim reshape squeeze".split()
)
_EXACT = SELECTIONS | {"neg", "abs", "sign", "clamp"}
_PRODUCTS = frozenset({"mul", "integer_pow", "square", "pow"})
_SUMS = frozenset({"add", "sub"})
QUOTIENTS = frozenset({"div"})
# The results that XLA looks through.
REWRITTEN = QUOTIENTS | _SUMS | _PRODUCTS | {"exp", "exp2", "log", "sqrt", "rsqrt"}
_SUMS = frozenset({"add", "sub"})
QUOTIENTS = frozenset({"div"})
# The results that XLA looks through.
REWRITTEN = QUOTIENTS | _SUMS | _PRODUCTS | {"exp", "exp2", "log", "sqrt", "rsqrt"}
_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


_CONTROL = ("scan", "while", "cond")


def as_closed(jaxpr: Any) -> tuple[Jaxpr, list]:
    """The jaxpr and constants of a Jaxpr or ClosedJaxpr."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, []


def inner_jaxpr(eqn) -> Any:
    """The jaxpr that a call-like equation stands for, or None."""
    if eqn.primitive.name in _CONTROL:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key]
    return None


def inner_jaxprs(eqn) -> Iterator[Jaxpr]:
    """Every jaxpr that an equation holds: of calls, loops, branches and kernels."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


class Keyed:
    """A callable that hashes by what it computes, to key the cache of traces."""

    def __init__(self, fn: Callable):
        self.fn, self.key = fn, value_key(fn)

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


@functools.lru_cache(maxsize=4096)
def _traced(keyed: Keyed, tree, dtypes, x64):
    args = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct((), d) for d in dtypes])
    return jax.make_jaxpr(keyed.fn, return_shape=True)(*args)


def trace(fn: Callable, tree, dtypes) -> tuple[ClosedJaxpr, Any]:
    """The scalar jaxpr of `fn` and its output pytree of `ShapeDtypeStruct`s."""
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return _traced(Keyed(fn), tree, tuple(map(np.dtype, dtypes)), x64)


def _guard(product):
    # A select that no compiler can fold stands between the product and an add, so that
    # the two cannot become one fused multiply-add. optimization_barrier and
    # reduce_precision do not hold on every jax line.
    return jnp.where(product == product, product, jnp.full_like(product, jnp.nan))


def _truth(like):
    """An array of True, shaped as `like`, that XLA does not know to be one.

    A barrier keeps it until XLA has done its algebra; nothing is left of it in the compiled
    code. One scalar would not do: XLA has rules for scalars that are broadcast.
    """
    like = jnp.asarray(like)
    return lax.optimization_barrier(placed_like(jnp.full_like(like, True, bool), like))


def unknown(values: Any) -> Any:
    """The arrays of a pytree, of which XLA's algebra knows nothing: x + 0.0 would be x."""
    return jax.tree.map(lax.optimization_barrier, values)


def _kept(x, truth):
    """x, of which XLA's algebra knows nothing."""
    if truth is None:
        return _guard(x)
    return jnp.where(truth, x, jnp.asarray(np.nan, jnp.result_type(x)))


def _bind(eqn, values, truth, keeps):
    name = eqn.primitive.name
    kind = jnp.result_type(values[0]) if values else jnp.int32  # a symbolic size's
    floating = jnp.issubdtype(kind, jnp.floating)
    if truth is not None and floating and name in _SUMS | QUOTIENTS:
        first = [values[0] if name == "div" else _kept(values[0], truth)]
        values = first + [_kept(v, truth) for v in values[1:]]
    # Inside shard_map a constant varies along no axis, and an op's operands along the same.
    outs = eqn.primitive.bind(*align_varying(values), **eqn.params)
    outs = list(outs) if eqn.primitive.multiple_results else [outs]
    return [_kept(v, truth) for v in outs] if floating and name in keeps else outs


def _needs_truth(jaxpr: Jaxpr, keeps: frozenset) -> bool:
    """An op has a result or a constant operand that XLA must not look through."""
    varying = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        fixed = [isinstance(v, Literal) or v not in varying for v in eqn.invars]
        if name in keeps or (name in _SUMS and any(fixed)):
            return True
        if any(_needs_truth(inner, keeps) for inner in inner_jaxprs(eqn)):
            return True
        varying.update(() if all(fixed) else eqn.outvars)
    return False


def convert(x, dtype):
    """`cast_p` where there is something to cast."""
    x = jnp.asarray(x)
    return x if x.dtype == dtype else cast_p.bind(x, dtype=np.dtype(dtype))[0]


def _divide(a, b):
    """The correctly rounded float32 quotient; XLA's own on CUDA is off by up to 2 ulp.

    float64 has more than twice the digits, so rounding its quotient again is exact. LLVM
    knows that too and would divide in float32 after all: the guard keeps it from seeing.
    """
    with jax.enable_x64(True):
        wide = [lax.convert_element_type(jnp.asarray(v), jnp.float64) for v in (a, b)]
        return lax.convert_element_type(_guard(lax.div(*wide)), jnp.float32)


def equation(eqn, values, exposed=True, truth=None, keeps=REWRITTEN):
    """The results of an elementwise equation, in stated arithmetic.

    Args:
        eqn: the equation.
        values: its operands.
        exposed: an add may follow, with which a compiler could fuse a product.
        truth: True for each element, as `_truth` makes it, where there is need of one.
        keeps: ops whose results no compiler may look through.
    """
    name = eqn.primitive.name
    dtype = eqn.outvars[0].aval.dtype
    if name == "div" and dtype == jnp.float32 and PLATFORM.get() == "cuda":
        return [_divide(*values)]
    if name == "convert_element_type":
        return [convert(values[0], dtype)]
    if truth is None and PLATFORM.get() == "cpu" and name in keeps:
        truth = _truth(max(values, key=np.ndim))
    if dtype in _NARROW and name not in _EXACT:
        wide = [
            convert(v, jnp.float32) if jnp.asarray(v).dtype in _NARROW else v
            for v in values
        ]
        return [convert(out, dtype) for out in _bind(eqn, wide, truth, keeps)]
    contracts = PLATFORM.get() != "tpu"  # there a product and an add stay two ops
    guarded = contracts and exposed and name in _PRODUCTS
    guarded = guarded and jnp.issubdtype(dtype, jnp.floating)
    outs = _bind(eqn, values, truth, keeps - _PRODUCTS if guarded else keeps)
    return [_guard(out) for out in outs] if guarded else outs


def _exposed(jaxpr: Jaxpr, opaque: frozenset) -> set:
    """The values that leave a jaxpr, or enter another op than the opaque ones."""
    found = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in opaque:
            found.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _replay(jaxpr: Jaxpr, consts, args, opaque, truth, keeps) -> list:
    env: dict = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        if isinstance(atom, Literal):
            return np.asarray(atom.val, atom.aval.dtype)  # pyright: ignore
        return env[atom]

    exposed = _exposed(jaxpr, opaque)
    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        inner = inner_jaxpr(eqn)
        if inner is None:
            here = not exposed.isdisjoint(eqn.outvars)
            outs = equation(eqn, values, here, truth, keeps)
        else:
            outs = _replay(*as_closed(inner), values, opaque, truth, keeps)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def has_control(jaxpr: Jaxpr) -> bool:
    """Whether there are loops or branches in a scalar jaxpr or what it calls."""
    for eqn in jaxpr.eqns:
        inner = inner_jaxpr(eqn)
        if eqn.primitive.name in _CONTROL or (
            inner is not None and has_control(as_closed(inner)[0])
        ):
            return True
    return False


def inlined(closed: Any, args: Sequence) -> list:
    """The results of a scalar jaxpr, without the calls and constants in it.

    Where it was traced inside shard_map, those are of a mesh, and nothing may close over
    an array of one there.
    """
    jaxpr, consts = as_closed(closed)
    consts = [c if isinstance(c, Tracer) else np.asarray(c) for c in consts]
    return _replay(jaxpr, consts, args, frozenset(), None, frozenset())


def _over_arrays(fn: Callable, ndim: int) -> Callable:
    for _ in range(ndim):
        fn = jax.vmap(fn)
    return fn


def evaluate(
    fn: Callable,
    *args: Any,
    opaque: frozenset = frozenset(),
    keeps: frozenset = QUOTIENTS,
) -> Any:
    """`fn` of pytrees of equally shaped arrays, elementwise, in stated arithmetic.

    Args:
        fn: of scalars.
        *args: its operands.
        opaque: names of ops that no compiler opens to fuse a product into an add.
        keeps: names of ops whose results no compiler may look through.
    """
    leaves, tree = jax.tree.flatten(args)
    closed, out = trace(fn, tree, tuple(jnp.asarray(v).dtype for v in leaves))
    jaxpr, consts = as_closed(closed)

    def scalar(truth, *values):
        outs = _replay(jaxpr, consts, values, opaque, truth, keeps)
        return [jnp.asarray(o) for o in outs]

    hides = PLATFORM.get() == "cpu" and _needs_truth(jaxpr, keeps)
    truth = _truth(leaves[0]) if hides else None
    outs = _over_arrays(scalar, jnp.ndim(leaves[0]))(truth, *leaves)
    outs = [placed_like(v, leaves[0]) for v in outs]
    return jax.tree.unflatten(jax.tree.structure(out), outs)


def elementwise(fn: Callable, *args: Any) -> Any:
    """`fn` of pytrees of equally shaped arrays, elementwise, as jax differentiates it."""
    leaves, tree = jax.tree.flatten(args)

    def scalar(*values):
        return fn(*jax.tree.unflatten(tree, values))

    out = _over_arrays(scalar, jnp.ndim(leaves[0]))(*leaves)
    return jax.tree.map(lambda v: placed_like(v, leaves[0]), out)
