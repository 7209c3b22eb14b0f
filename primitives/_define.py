"""`define`: the registrations that make a function a JAX primitive, in one call."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxtile import _jax_private
from jaxtile.primitives import _shards

REFERENCE = "reference"


class Out(NamedTuple):
    """An abstract output.

    `dims[i]` is the first operand's dimension that dimension i comes from, by whose
    explicit mesh axes it is sharded, unless `spec` says by which.
    """

    shape: tuple[int, ...]
    dtype: Any
    dims: tuple[int, ...]
    spec: tuple | None = None


class Choice(Protocol):
    """Who knows the whole-array kernels and picks one of them."""

    def insist(self, primitive: Primitive, name: str, avals, params) -> None:
        """Raise where the backend that was asked for refuses."""

    def kernel(
        self,
        primitive: Primitive,
        platform: str,
        name: str | None,
        avals,
        params,
        misplaced: str | None,
    ) -> Callable[..., list] | None:
        """`(*arrays, **params) -> [array]` for a platform; None is the reference."""


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
    along: Callable[..., tuple[int, ...]] | None = None,
    share: Callable[..., Callable[..., list] | None] | None = None,
    places: Callable[..., Sequence] = _shards.dims_of,
    local: bool = False,
) -> Primitive:
    """Give a primitive its rules.

    A parameter `implementation` (None, "reference" or a backend's name) is not the
    function's: it chooses what runs, and neither `abstract` nor `reference` sees it.

    Args:
        primitive: the primitive, or the name of a new one, shown in jaxprs.
        abstract: `(*avals, **params) -> [Out]`, with all validation.
        reference: `(*arrays, platform, **params) -> [array]` in plain jax: it defines
            the bits. `platform` is "cpu", "cuda" or "" and may only choose among realisations
            that the policy permits.
        batch: `(args, dims, **params) -> (outs, out_dims)`.
        jvp: `(primals, tangents, **params) -> (outs, tangents_out)`.
        transpose: `(cotangents, *args, **params) -> [cotangent]`.
        along: `(**params)`, the dimensions of the first operand that the op combines, for
            ops that whole-array kernels run: on a mesh every device holds them whole. An
            operand of lower rank lacks them.
        share: `(parts, implementation, **params) -> fn or None`, how devices work together
            where those dimensions are sharded, `parts` saying by which mesh axes:
            `fn(*shards, platform) -> [array]`. None has them gathered.
        places: `(avals, whole, **params)`, for each operand its dimensions as those of the
            first; what the first lacks has a number of its own.
        local: on a mesh the reference too runs on every device's own shards, because the
            partitioner would gather what it is made of.

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

    def abstract_eval(*avals, implementation=None, **params):
        if BEFORE_KERNELS and _PALLAS in sys.modules:
            BEFORE_KERNELS.pop()()
        spec = _jax_private.sharding_spec(avals[0])
        outs = abstract(*avals, **params)
        if implementation not in (None, REFERENCE):
            CHOICE[0].insist(primitive, implementation, avals, params)
        specs = [o.spec or [spec[d] if d >= 0 else None for d in o.dims] for o in outs]
        return [
            _jax_private.out_aval(o.shape, o.dtype, spec, avals)
            for o, spec in zip(outs, specs, strict=True)
        ]

    primitive.def_abstract_eval(abstract_eval)
    for platform in ("", "cpu", "cuda", "tpu"):
        rule = _rule(
            primitive, platform, abstract, reference, along, share, places, local
        )
        mlir.register_lowering(primitive, rule, platform=platform or None)
    batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    REFERENCES[primitive] = reference
    return primitive


def _rule(primitive, platform, abstract, reference, along, share, places, local):
    """The lowering rule on a platform: the chosen kernel, or the reference."""
    home = platform if platform in ("cpu", "cuda") else ""
    plain = _jax_private.lower_plain(_on(home, reference, platform=home))
    if along is None:
        return plain

    def lower(ctx, *args, implementation, **params):
        mesh = run = misplaced = None
        chosen = implementation != REFERENCE and CHOICE
        if chosen or local:
            mesh, misplaced = _jax_private.placement(ctx)
        if chosen:
            run = CHOICE[0].kernel(
                primitive, platform, implementation, ctx.avals_in, params, misplaced
            )
        if mesh is None and run is not None:
            return _jax_private.lower_plain(_on(home, run))(ctx, *args, **params)
        if mesh is None or (run is None and not local):
            return plain(ctx, *args, **params)
        whole = along(**params)
        results = [o.dims for o in abstract(*ctx.avals_in, **params)]
        asked = {"implementation": implementation, **params}

        def shared(parts):
            fn = share and share(parts, **asked)
            return fn and _on(home, fn, platform=home)

        plan = _shards.Plan(
            run=functools.partial(primitive.bind, **asked),
            dims=(places(ctx.avals_in, whole, **params), results),
            whole=whole,
            share=shared,
        )
        return _shards.lower(ctx, args, mesh, plan)

    return lower


# Where an op is being lowered; arithmetic that a platform rounds otherwise asks.
PLATFORM: contextvars.ContextVar[str] = contextvars.ContextVar("platform", default="")


@contextlib.contextmanager
def lowered_on(platform: str) -> Iterator[None]:
    """Within the block, arithmetic is traced for this platform."""
    token = PLATFORM.set(platform)
    try:
        yield
    finally:
        PLATFORM.reset(token)


@contextlib.contextmanager
def compile_time() -> Iterator[None]:
    """What the block computes is known while tracing, in `shard_map` too."""
    with _jax_private.no_mesh(), jax.ensure_compile_time_eval():
        yield


def _on(home: str, fn: Callable[..., list], **known) -> Callable[..., list]:
    def run(*args, **params):
        with lowered_on(home):
            return fn(*args, **known, **params)

    return run


# A kernel body cannot be traced before Pallas is imported, so whoever has rules for kernels
# leaves a loader here, and users without kernels never pay for it.
BEFORE_KERNELS: list[Callable[[], None]] = []
_PALLAS = "jax.experimental.pallas"

# Primitives know no backend: whoever has whole-array kernels leaves the choice here.
CHOICE: list[Choice] = []

REFERENCES: dict[Primitive, Callable[..., list]] = {}


def zero_tangent(value: Any) -> ad.Zero:
    """The symbolic zero tangent of a value; float0 for integers."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())
