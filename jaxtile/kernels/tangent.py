"""The derivative of a kernel whose transpose is a kernel too.

Forward mode is plain jax's; what reverse mode transposes is one equation, whose transpose
its author gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxtile import _found, _jax_private
from jaxtile.errors import NoDerivativeError, message
from jaxtile.kernels import launches
from jaxtile.primitives._define import new_primitive

# The tangents of a kernel's results: linear in its last operands.
tangent_p = new_primitive("kernel_tangent")


def attach(run: Callable, forward: Callable, backward: Callable, operands: Sequence):
    """The results of `run(*operands)`, whose reverse mode is the rule's.

    Args:
        run: differentiable as plain jax is.
        forward: `(*operands) -> (results, residuals)`.
        backward: `(residuals, cotangents) -> cotangents`, None where they are zero.
        operands: arrays and tiles.
    """
    kernel = jax.custom_jvp(run)

    def rule(primals, tangents):
        results, residuals = forward(*primals)
        return results, _tangents(run, backward, primals, tangents, results, residuals)

    kernel.defjvp(rule)
    return kernel(*operands)


def _tangents(run, backward, primals, tangents, results, residuals):
    given, tree = jax.tree.flatten((primals, residuals))
    moving, moved = jax.tree.flatten(tangents)
    outs, shown = jax.tree.flatten(results)
    inexact = [_moves(v) for v in moving]
    pushed = [jnp.issubdtype(v.dtype, jnp.inexact) for v in outs]
    # What jit keeps of push and pull must hold no tracer.
    known = len(given)
    into, out_of = [np.shape(v) for v in moving], [np.shape(v) for v in outs]

    def full(leaves, shapes, which):
        """Leaves in their places, and where nothing moves what stands for that."""
        rest = iter(leaves)
        return [
            next(rest) if w else np.zeros(shape, jax.dtypes.float0)
            for shape, w in zip(shapes, which, strict=True)
        ]

    def push(*values):
        primals, _ = jax.tree.unflatten(tree, values[:known])
        dots = jax.tree.unflatten(moved, full(values[known:], into, inexact))
        found = jax.tree.leaves(jax.jvp(run, primals, dots)[1])
        return [v for v, w in zip(found, pushed, strict=True) if w]

    def pull(*values):
        primals, residuals = jax.tree.unflatten(tree, values[:known])
        cts = full(values[known:], out_of, pushed)
        found = backward(residuals, jax.tree.unflatten(shown, cts))
        whole = [
            jax.tree.map(jnp.zeros_like, p) if ct is None else ct
            for p, ct in zip(primals, found, strict=True)
        ]
        return [v for v, w in zip(jax.tree.leaves(whole), inexact, strict=True) if w]

    dots = [v for v, w in zip(moving, inexact, strict=True) if w]
    shapes = tuple((v.shape, v.dtype) for v, w in zip(outs, pushed, strict=True) if w)
    values = _jax_private.align_varying([*given, *dots])
    params = {"push": push, "pull": pull, "known": known, "outs": shapes}
    found = tangent_p.bind(*values, **params)
    return jax.tree.unflatten(shown, full(found, out_of, pushed))


def _moves(tangent: Any) -> bool:
    return getattr(tangent, "dtype", None) != jax.dtypes.float0


@tangent_p.def_abstract_eval
def _(*avals, outs, **params):
    return launches.unsharded(outs, avals)


@tangent_p.def_impl
def _(*arrays, push, **params):
    return jax.jit(push)(*arrays)


def _opened(eqn: Any, platform: str) -> Any:
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(eqn.params["push"])(*avals).jaxpr


_found.OPENS[tangent_p] = _opened


def _jvp(primals, tangents, *, push, **params):
    dots = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(push, tuple(primals), tuple(dots))


def _transpose(cts, *values, pull, known, outs, **params):
    wanted = [ad.is_undefined_primal(v) for v in values]
    given = [
        jnp.zeros(s, d) if type(c) is ad.Zero else c
        for c, (s, d) in zip(cts, outs, strict=True)
    ]
    found = pull(*values[:known], *given)
    return [None] * known + [
        v if w else None for v, w in zip(found, wanted[known:], strict=True)
    ]


def _batch(args, dims, *, push, pull, known, outs):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)

    def front(x, d):
        if d is None:
            return jnp.broadcast_to(x, (size, *x.shape))
        return jnp.moveaxis(x, d, 0)

    def wide(fn, moving):
        axes = (*dims[:known], *(0,) * moving)
        return jax.vmap(fn, in_axes=axes, axis_size=size)

    # All that is transposed has the axis: jax sums the cotangents of what had not.
    dots = [front(x, d) for x, d in zip(args[known:], dims[known:], strict=True)]
    found = tangent_p.bind(
        *args[:known],
        *dots,
        push=wide(push, len(dots)),
        pull=wide(pull, len(outs)),
        known=known,
        outs=tuple(((size, *shape), dtype) for shape, dtype in outs),
    )
    return found, [0] * len(found)


# An operand of a kernel whose rule is for reverse mode alone, and its tangent: the same, if
# forward mode ever came to it. Its transpose is.
operand_p, reverse_p = map(new_primitive, ("kernel_operand", "kernel_reverse"))


def reverse_only(operands: Sequence, op: str) -> Sequence:
    """The operands, whose tangents are only transposed.

    Args:
        operands: arrays and tiles.
        op: for messages.
    """
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, operand_p.bind(*leaves, op=op))


def _marked_jvp(primals, tangents, *, op):
    found = list(tangents)
    places = [k for k, t in enumerate(found) if type(t) is not ad.Zero]
    given = reverse_p.bind(*(found[k] for k in places), op=op) if places else []
    for k, t in zip(places, given, strict=True):
        found[k] = t
    return operand_p.bind(*primals, op=op), found


def _same(*values, **_):
    return list(values)


def _refuse(*_, op):
    raise NoDerivativeError(
        message(
            op,
            expected="reverse mode, whose rule fwd and bwd are",
            got="forward mode",
            way_out="If they are the derivative of the body itself, say "
            "forward_mode=True; else transpose jax.vjp by jax.linear_transpose.",
        )
    )


operand_p.def_impl(_same)
operand_p.def_abstract_eval(_same)
ad.primitive_jvps[operand_p] = _marked_jvp
batching.primitive_batchers[operand_p] = lambda args, dims, op: (
    operand_p.bind(*args, op=op),
    dims,
)
mlir.register_lowering(operand_p, lambda ctx, *args, op: args)
reverse_p.def_impl(_refuse)
reverse_p.def_abstract_eval(_same)
mlir.register_lowering(reverse_p, lambda ctx, *args, op: _refuse(op=op))
ad.deflinear2(reverse_p, lambda cts, *_, op: list(cts))
# jax batches no tangents of reverse mode: it transposes them first.
batching.primitive_batchers[reverse_p] = _refuse
ad.primitive_jvps[tangent_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(
    tangent_p,
    mlir.lower_fun(lambda *v, push, **params: push(*v), multiple_results=True),
)
