"""Scalar functions evaluated on arrays with the arithmetic that the contract states.

Compilers keep excess precision where they like: XLA computes a chain of bfloat16 ops in
float32 and rounds once, and LLVM contracts a * b + c into one fused multiply-add,
depending on how the code around it was fused. `evaluate` traces a function on scalars
and replays it so that

* every op with a float16 or bfloat16 result rounds that result, in every fusion;
* a product is rounded before anything is added to it;
* quotients, and in maps every result, are computed as written: XLA would turn x / c into
  x * (1 / c), (a / b) / c into a / (b * c), (x + c) - c into x, x + 0.0 into x, and
  exp(a) * exp(b) into exp(a + b);
* the same holds inside loops and branches that the function has.

Operands, seeds, elements and identities that may be constants are `unknown` to XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxtile._jax_private import align_varying, placed_like
from jaxtile.primitives._define import PLATFORM
from jaxtile.primitives._unknown import guard, hidden, is_float, kept, truth_of
from jaxtile.primitives.cast import cast_p
from jaxtile.reducers import value_key

# Results that are one of the operands, or exact: nothing to round.
SELECTIONS = frozenset(
    "select_n max min and or xor not eq ne lt le gt ge is_finite stop_gradient copy "
    "broadcast_in_dim reshape squeeze".split()
)
_EXACT = SELECTIONS | {"neg", "abs", "sign", "clamp", "nextafter"}
_PRODUCTS = frozenset({"mul", "integer_pow", "square", "pow"})
_SUMS = frozenset({"add", "sub"})
QUOTIENTS = frozenset({"div"})
# The results that XLA looks through.
REWRITTEN = QUOTIENTS | _SUMS | _PRODUCTS | {"exp", "exp2", "log", "sqrt", "rsqrt"}
# As last op they stay in the open: XLA fuses them into a reduction, and maps hide operands.
_LAST = frozenset({"exp", "exp2"})
# The ops in which XLA looks at constant operands; it takes the sign of -0.0 for 0.0.
_HIDDEN = _SUMS | {"sign"}
# Loops and branches hold functions that are not called in their place.
LOOPS = frozenset({"scan", "while", "cond"})
_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def as_closed(jaxpr: Any) -> tuple[Jaxpr, list]:
    """The jaxpr and constants of a Jaxpr or ClosedJaxpr."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, []


def inner_jaxpr(eqn) -> Any:
    """The jaxpr that a call-like equation stands for, or None."""
    if eqn.primitive.name in LOOPS:
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


def _bind(eqn, values, truth, keeps, fixed):
    name = eqn.primitive.name
    floating = bool(values) and is_float(values[0])  # no values: a symbolic size
    hides = truth is not None and floating
    if hides and name in _HIDDEN:
        values = [hidden(v) if f else v for v, f in zip(values, fixed, strict=True)]
    elif hides and name == "div":
        # XLA multiplies by the rounded reciprocal of a divisor that it knows, even where
        # it knows the dividend as well, and by the divisor of a dividend.
        values = [kept(v, truth) for v in values]
    # Inside shard_map a constant varies along no axis, and operands along the same.
    outs = eqn.primitive.bind(*align_varying(values), **eqn.params)
    outs = list(outs) if eqn.primitive.multiple_results else [outs]
    # Of unknown values a sum is nothing to XLA, a quotient what the next op hides.
    keep = floating and name in keeps
    keep = keep and not (hides and (name in _SUMS or keeps == QUOTIENTS))
    if not keep:
        return outs
    return [guard(v) if truth is None else hidden(v) for v in outs]


def _needs_truth(jaxpr: Jaxpr, keeps: frozenset) -> bool:
    """XLA must not look through a result or a constant operand."""
    varying = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        fixed = [isinstance(v, Literal) or v not in varying for v in eqn.invars]
        if name == "div" or name in keeps or (name in _HIDDEN and any(fixed)):
            return True
        if any(_needs_truth(inner, keeps) for inner in inner_jaxprs(eqn)):
            return True
        varying.update(() if all(fixed) else eqn.outvars)
    return any(fixed_results(jaxpr))


def fixed_results(jaxpr: Jaxpr) -> list[bool]:
    """Which results depend on constants alone."""
    varying = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in varying for v in eqn.invars):
            varying.update(eqn.outvars)
    return [isinstance(v, Literal) or v not in varying for v in jaxpr.outvars]


def _has_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def computes(jaxpr: Jaxpr) -> bool:
    """Whether a scalar function does more with floats than select and compare them."""
    return any(
        any(map(computes, inner_jaxprs(eqn)))
        if inner_jaxpr(eqn) is not None
        else eqn.primitive.name not in _EXACT - {"sign"}
        and any(map(_has_float, eqn.invars))
        for eqn in jaxpr.eqns
    )


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
        return lax.convert_element_type(guard(lax.div(*wide)), jnp.float32)


def equation(eqn, values, exposed=True, truth=None, keeps=REWRITTEN, fixed=None):
    """The results of an elementwise equation, in stated arithmetic.

    Args:
        eqn: the equation.
        values: its operands.
        exposed: an add may follow, with which a compiler could fuse a product.
        truth: True for each element, as `truth_of` makes it, where there is need of one.
        keeps: ops whose results no compiler may look through.
        fixed: which operands XLA may know; None says all.
    """
    name = eqn.primitive.name
    dtype = eqn.outvars[0].aval.dtype
    fixed = [True] * len(values) if fixed is None else fixed
    if name == "div" and dtype == jnp.float32 and PLATFORM.get() == "cuda":
        return [_divide(*values)]
    if name == "convert_element_type":
        return [convert(values[0], dtype)]
    asks = name == "div" or name in keeps or (name in _HIDDEN and any(fixed))
    if truth is None and PLATFORM.get() == "cpu" and asks:
        truth = truth_of(max(values, key=np.ndim))
    if dtype in _NARROW and name not in _EXACT:
        wide = [
            convert(v, jnp.float32) if jnp.asarray(v).dtype in _NARROW else v
            for v in values
        ]
        outs = _bind(eqn, wide, truth, keeps, fixed)
        return [convert(out, dtype) for out in outs]
    contracts = PLATFORM.get() != "tpu"  # there a product and an add stay two ops
    guarded = contracts and exposed and name in _PRODUCTS
    guarded = guarded and jnp.issubdtype(dtype, jnp.floating)
    outs = _bind(eqn, values, truth, keeps - _PRODUCTS if guarded else keeps, fixed)
    return [guard(out) for out in outs] if guarded else outs


def _exposed(jaxpr: Jaxpr, opaque: frozenset) -> set:
    """The values that leave a jaxpr, or enter another op than the opaque ones."""
    found = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in opaque:
            found.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


class _Way(NamedTuple):
    """How a region is evaluated: see `evaluate` and `equation`."""

    opaque: frozenset
    truth: Any
    keeps: frozenset


def _replay(jaxpr: Jaxpr, consts, args, way: _Way, known=None, settles=True) -> list:
    """The results of a jaxpr; `known` says which of its inputs XLA may know."""
    env: dict = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    flags = [False] * len(args) if known is None else known
    varying = {v for v, f in zip(jaxpr.invars, flags, strict=True) if not f}

    def read(atom):
        if isinstance(atom, Literal):
            return np.asarray(atom.val, atom.aval.dtype)  # pyright: ignore
        return env[atom]

    exposed = _exposed(jaxpr, way.opaque)
    used = {v for e in jaxpr.eqns for v in e.invars if not isinstance(v, Literal)}
    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        fixed = [isinstance(v, Literal) or v not in varying for v in eqn.invars]
        inner = inner_jaxpr(eqn)
        if eqn.primitive.name in LOOPS:
            outs = _loop(eqn, _settled(values, fixed, way), way)
        elif inner is None:
            here = not exposed.isdisjoint(eqn.outvars)
            last = settles and used.isdisjoint(eqn.outvars)
            keeps = way.keeps - _LAST if last else way.keeps
            outs = equation(eqn, values, here, way.truth, keeps, fixed)
        else:
            outs = _replay(*as_closed(inner), values, way, fixed, settles=False)
        env.update(zip(eqn.outvars, outs, strict=True))
        varying.update(() if all(fixed) else eqn.outvars)
    fixed = [isinstance(v, Literal) or v not in varying for v in jaxpr.outvars]
    outs = [read(v) for v in jaxpr.outvars]
    return _settled(outs, fixed, way) if settles else outs


def _settled(values, fixed, way: _Way) -> list:
    """Values of which XLA knows none."""
    return [
        hidden(v) if f and way.truth is not None and is_float(v) else v
        for v, f in zip(values, fixed, strict=True)
    ]


def _loop(eqn, values, way: _Way) -> list:
    """A loop or a branch, with the same arithmetic inside."""

    def stated(jaxpr):
        inner, consts = as_closed(jaxpr)
        # The truth out here is none of the inner function's operands.
        run = functools.partial(_replay, inner, consts, way=way._replace(truth=None))
        given: list[Any] = [v.aval for v in inner.invars]
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in given]
        return jax.make_jaxpr(lambda *args: run(args))(*avals)

    params = {
        key: stated(value)
        if isinstance(value, Jaxpr | ClosedJaxpr)
        else tuple(map(stated, value))
        if key == "branches"
        else value
        for key, value in eqn.params.items()
    }
    return eqn.primitive.bind(*values, **params)


def has_control(jaxpr: Jaxpr) -> bool:
    """Whether there are loops or branches in a scalar jaxpr or what it calls."""
    return any(
        eqn.primitive.name in LOOPS or any(map(has_control, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def inlined(closed: Any, args: Sequence) -> list:
    """The results of a scalar jaxpr, without the calls and constants in it.

    Where it was traced inside shard_map, those are of a mesh, and nothing may close over
    an array of one there.
    """
    jaxpr, consts = as_closed(closed)
    consts = [c if isinstance(c, Tracer) else np.asarray(c) for c in consts]
    return _replay(
        jaxpr, consts, args, _Way(frozenset(), None, frozenset()), settles=False
    )


def _over_arrays(fn: Callable, ndim: int) -> Callable:
    for _ in range(ndim):
        fn = jax.vmap(fn)
    return fn


def evaluate(
    fn: Callable,
    *args: Any,
    opaque: frozenset = frozenset(),
    keeps: frozenset = QUOTIENTS,
    settles: bool = True,
) -> Any:
    """`fn` of pytrees of equally shaped arrays, elementwise, in stated arithmetic.

    Args:
        fn: of scalars.
        *args: its operands.
        opaque: names of ops that no compiler opens to fuse a product into an add.
        keeps: names of ops whose results no compiler may look through.
        settles: XLA must not know results that are constants either.
    """
    leaves, tree = jax.tree.flatten(args)
    closed, out = trace(fn, tree, tuple(jnp.asarray(v).dtype for v in leaves))
    jaxpr, consts = as_closed(closed)

    def scalar(truth, *values):
        outs = _replay(
            jaxpr, consts, values, _Way(opaque, truth, keeps), settles=settles
        )
        return [jnp.asarray(o) for o in outs]

    hides = PLATFORM.get() == "cpu" and _needs_truth(jaxpr, keeps)
    truth = truth_of(leaves[0]) if hides else None
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
