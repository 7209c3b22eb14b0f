"""`define`: the registrations that make a function a JAX primitive, in one call."""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxtile import _jax_private


class Out(NamedTuple):
    """An abstract output; `dims[i]` is the first operand's dimension it comes from."""

    shape: tuple[int, ...]
    dtype: Any
    dims: tuple[int, ...]


def new_primitive(name: str) -> Primitive:
    """A primitive with several results, still without rules."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


def define(
    primitive: Primitive | str,
    *,
    abstract: Callable[..., Sequence[Out]],
    reference: Callable[..., list],
    batch: Callable,
    jvp: Callable | None = None,
    transpose: Callable | None = None,
) -> Primitive:
    """Give a primitive its rules.

    Args:
        primitive: the primitive, or the name of a new one, shown in jaxprs.
        abstract: `(*avals, **params) -> [Out]`, with all validation.
        reference: `(*arrays, platform, **params) -> [array]` in plain jax: it defines
            the bits. `platform` is "cpu", "cuda" or "" and may only choose among realisations
            that the policy permits.
        batch: `(args, dims, **params) -> (outs, out_dims)`.
        jvp: `(primals, tangents, **params) -> (outs, tangents_out)`.
        transpose: `(cotangents, *args, **params) -> [cotangent]`.

    Returns:
        The primitive.
    """
    if isinstance(primitive, str):
        primitive = new_primitive(primitive)
    bind = primitive.bind

    @functools.lru_cache(maxsize=4096)
    def jitted(params):
        return jax.jit(functools.partial(bind, **dict(params)))

    primitive.def_impl(
        lambda *args, **params: jitted(tuple(sorted(params.items())))(*args)
    )

    def abstract_eval(*avals, **params):
        if BEFORE_KERNELS and _PALLAS in sys.modules:
            BEFORE_KERNELS.pop()()
        spec = _jax_private.sharding_spec(avals[0])
        return [
            _jax_private.out_aval(
                o.shape, o.dtype, [spec[d] if d >= 0 else None for d in o.dims], avals
            )
            for o in abstract(*avals, **params)
        ]

    primitive.def_abstract_eval(abstract_eval)
    for platform in ("", "cpu", "cuda"):
        rule = _jax_private.lower_reference(_on(platform, reference))
        mlir.register_lowering(primitive, rule, platform=platform or None)
    batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    REFERENCES[primitive] = reference
    return primitive


# Where the reference is being lowered; arithmetic that a platform rounds otherwise asks.
PLATFORM: contextvars.ContextVar[str] = contextvars.ContextVar("platform", default="")


def _on(platform: str, reference: Callable[..., list]) -> Callable[..., list]:
    def run(*args, **params):
        token = PLATFORM.set(platform)
        try:
            return reference(*args, platform=platform, **params)
        finally:
            PLATFORM.reset(token)

    return run


# A kernel body cannot be traced before Pallas is imported, so whoever has rules for kernels
# leaves a loader here, and users without kernels never pay for it.
BEFORE_KERNELS: list[Callable[[], None]] = []
_PALLAS = "jax.experimental.pallas"

REFERENCES: dict[Primitive, Callable[..., list]] = {}


def zero_tangent(value: Any) -> ad.Zero:
    """The symbolic zero tangent of a value; float0 for integers."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())
