"""The launch of a Pallas kernel: where it may run, and that it knows of no mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import core
from jax.interpreters import batching, mlir

from jaxtile import _jax_private
from jaxtile.errors import UnsupportedOnBackend, message
from jaxtile.pallas_lowering import _choice
from jaxtile.primitives._define import new_primitive


def bind(launch: Callable, arrays: Sequence, name: str, backend: str | None) -> list:
    """`launch(*arrays)`, traced as outside of `shard_map`.

    What Pallas' interpreter is made of does not know along which manual axes it varies.

    Args:
        launch: `(*arrays) -> [array]`, which is not differentiated.
        arrays: the operands.
        name: of the kernel, for messages.
        backend: whose kernel it is; None runs everywhere.

    Raises:
        UnsupportedOnBackend: an array in which Triton's offsets wrap; when lowered for a
            platform that the backend does not serve.
    """
    with _jax_private.one_device():
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        closed = jax.make_jaxpr(launch)(*structs)
    if backend == "triton":
        _require_offsets(name, [*structs, *closed.out_avals])
    arrays = _jax_private.align_varying(arrays)
    return launch_p.bind(*arrays, closed=closed, name=name, backend=backend)


# Pallas Triton counts elements in 32 bits as long as there are 2^32 bytes of them.
_WRAPS, _WIDE = 2**31, 2**32


def _require_offsets(name: str, arrays: Sequence) -> None:
    for x in arrays:
        if _WRAPS < x.size <= _WIDE // x.dtype.itemsize:
            raise UnsupportedOnBackend(
                message(
                    f"kernel {name} on triton",
                    expected=f"arrays of at most {_WRAPS} bytes, or of more than {_WIDE}",
                    got=f"{x.dtype.name}{list(x.shape)}, where an offset wraps",
                    way_out='Split the array, or use implementation="reference".',
                )
            )


def unsharded(outs: Sequence[tuple], avals: Sequence) -> list:
    """Abstract results of shapes and dtypes, on the operands' manual mesh axes alone."""
    return [
        _jax_private.out_aval(shape, dtype, (None,) * len(shape), avals)
        for shape, dtype in outs
    ]


def _abstract(*avals, closed, **_):
    return unsharded([(a.shape, a.dtype) for a in closed.out_avals], avals)


def _evaluate(*args, closed, **_):
    return core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


_inline = _jax_private.lower_plain(_evaluate)


def _lower(platform, ctx, *args, name, backend, **params):
    reason = backend and _choice.elsewhere(backend, platform)
    if reason:
        raise UnsupportedOnBackend(
            message(
                name,
                expected=f"to run where {backend} does",
                got=f"implementation={backend!r}: {reason}",
                way_out='Use implementation=None or "reference"; "interpret" shows on any '
                "machine what the kernel computes.",
            )
        )
    return _inline(ctx, *args, **params)


def _batch(args, dims, *, closed, **params):
    if 0 in (a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None):
        # No grid has instances of nothing.
        outs = [jnp.zeros((0, *a.shape), a.dtype) for a in closed.out_avals]
        return _jax_private.align_varying([*outs, *args])[: len(outs)], [0] * len(outs)
    fn = jax.vmap(functools.partial(_evaluate, closed=closed), dims)
    outs = bind(fn, args, **params)
    return outs, [0] * len(outs)


launch_p = new_primitive("kernel_launch")
launch_p.def_impl(lambda *a, **kw: jax.jit(functools.partial(launch_p.bind, **kw))(*a))
launch_p.def_abstract_eval(_abstract)
batching.primitive_batchers[launch_p] = _batch
for _platform in ("", "cpu", "cuda", "tpu"):
    _rule = functools.partial(_lower, _platform)
    mlir.register_lowering(launch_p, _rule, platform=_platform or None)
