"""The realisation of a kernel where none is asked for: one of each platform."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters import batching, mlir

from jaxtile import _found, _jax_private, backends
from jaxtile.errors import UnsupportedOnBackend
from jaxtile.kernels import direct, launches
from jaxtile.pallas_lowering import SERVES, _registry, load_all
from jaxtile.primitives._define import REFERENCE, new_primitive

# Lowered on a platform by the realisation that is tuned for it, else as plain jax.
kernel_p = new_primitive("kernel_by_platform")


def run(realisations: dict[str, Callable], calls: dict[str, Any], operands, results):
    """The results of a kernel, by the realisation of the platform it is lowered for.

    Args:
        realisations: by name.
        calls: of the reference, and of the realisations that the kernel is tuned for.
        operands, results: as of `plain.run`.
    """

    arrays, dims = [x for x, _ in operands], [d for _, d in operands]

    def by(name):
        def fn(*arrays):
            pairs = list(zip(arrays, dims, strict=True))
            return realisations[name](calls[name], pairs, results)

        return fn

    again = by(REFERENCE)
    if _closes_over_traced(again, arrays):
        return again(*arrays)  # which cannot go through an equation
    tuned = {name: by(name) for name in calls if name != REFERENCE}
    outs = [struct for struct, _ in results]

    def fast(*arrays):
        return bind(again, tuned, arrays, outs)

    return direct.differentiable(fast, again)(*arrays)


def bind(plain: Callable, tuned: dict[str, Callable], arrays: Sequence, outs: Sequence):
    """Bind `kernel_p`.

    Args:
        plain: `(*arrays) -> [array]`, which runs everywhere.
        tuned: by backend, the same; it may raise UnsupportedOnBackend.
        arrays: the operands.
        outs: the shape and dtype of each result.
    """
    if any(any(_jax_private.sharding_spec(jax.typeof(x))) for x in arrays):
        return plain(*arrays)  # an explicit mesh says how each of its ops is sharded
    outs = tuple((v.shape, v.dtype) for v in outs)
    arrays = _jax_private.align_varying(arrays)
    return kernel_p.bind(*arrays, plain=plain, tuned=tuple(tuned.items()), outs=outs)


def _closes_over_traced(fn: Callable, arrays: Sequence) -> bool:
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with _jax_private.one_device():
        closed = jax.make_jaxpr(fn)(*structs)
    return any(isinstance(c, Tracer) for c in closed.consts)


def realised(platform: str, avals: Sequence, params: dict[str, Any]) -> Callable:
    """What runs on a platform: of the tuned, the first that takes the call, or plain."""
    for name, fn in params["tuned"]:
        if name in SERVES.get(platform, ()) and _takes(name, fn, avals):
            return fn
    return params["plain"]


def _takes(name: str, fn: Callable, avals: Sequence) -> bool:
    load_all()
    if name in _registry.FAILED or _registry.BACKENDS[name].hooks.unavailable():
        return False
    try:
        jaxpr = jax.make_jaxpr(fn)(*avals).jaxpr
    except UnsupportedOnBackend:
        return False
    inside = (f.eqn for f in _found.find(jaxpr) if f.place == name)
    return not any(
        backends.kernel_refusal(
            name, eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params
        )
        for eqn in inside
    )


def _opened(eqn: Any, platform: str) -> Any:
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(realised(platform, avals, eqn.params))(*avals).jaxpr


_found.OPENS[kernel_p] = _opened


@kernel_p.def_abstract_eval
def _(*avals, outs, **params):
    return launches.unsharded(outs, avals)


@kernel_p.def_impl
def _(*arrays, **params):
    return jax.jit(functools.partial(kernel_p.bind, **params))(*arrays)


def _lower(platform, ctx, *args, **params):
    fn = params["plain"]
    mesh, misplaced = _jax_private.placement(ctx)
    if mesh is None and misplaced is None:
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_in]
        fn = realised(platform, avals, params)
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *args)


def _plain(ctx, *args, plain, **params):
    return mlir.lower_fun(plain, multiple_results=True)(ctx, *args)


mlir.register_lowering(kernel_p, _plain)
for _name in SERVES:
    mlir.register_lowering(kernel_p, functools.partial(_lower, _name), platform=_name)


def _batch(args, dims, *, plain, tuned, outs):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)

    def wide(fn):
        return jax.vmap(fn, in_axes=tuple(dims), axis_size=size)

    outs = tuple(((size, *shape), dtype) for shape, dtype in outs)
    tuned = tuple((name, wide(fn)) for name, fn in tuned)
    found = kernel_p.bind(*args, plain=wide(plain), tuned=tuned, outs=outs)
    return found, [0] * len(found)


batching.primitive_batchers[kernel_p] = _batch
