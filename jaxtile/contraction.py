"""mma and matmul, on arrays with axes and on tiles with dims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxtile import _edges, backends, formats
from jaxtile._arguments import seed_leaf
from jaxtile._checks import function
from jaxtile._operators import is_tile
from jaxtile._roles import Plan, by_axes, by_dims, by_last_dims, by_places
from jaxtile.dims import Dim
from jaxtile.errors import TileTypeError, message
from jaxtile.policy import MmaPolicy
from jaxtile.primitives._contract import numbered
from jaxtile.primitives._contract_checks import accumulator_of, check_sizes
from jaxtile.primitives._functions import IN_JAX
from jaxtile.primitives.map import region_of
from jaxtile.primitives.mma import bind_mma
from jaxtile.tile import Tile

_SEED = "The seed has the result's shape, or one that broadcasts to it."


def mma(
    a: Any,
    b: Any,
    c: Any = None,
    policy: MmaPolicy | None = None,
    *,
    spec: str | Sequence[Dim] | None = None,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    epilogue: Callable[[Any], Any] | None = None,
    implementation: str | None = None,
) -> Any:
    """One fused update: the products of two arrays, summed onto a third.

        y[o] = epilogue(c[o] + sum over k of a[o, k] * b[o, k])

    Inputs convert to the accumulator's type, exactly from formats of at most its precision;
    none is rounded first unless the policy names a precision. Storage formats (8 bits and
    below) may be inputs, of one format or two. Derivatives are mma again, under the same
    policy and accumulator; the cotangent of a storage operand is quantized to its format,
    nearest even and saturated.

    Args:
        a: an array `[..., M, K]`, or a tile.
        b: an array `[..., K, N]`, or a tile. Leading axes are batch axes, which broadcast
            as NumPy's do.
        c: the seed, which enters once: an array or number that broadcasts to the result,
            or, with tiles, a tile of the result's dims or a number. None is zero.
        policy: what the sum may do; by default any order.
        spec: for arrays the axes by letters, as "bmk,bkn->bmn": each letter once in an
            operand, K what the result lacks. For tiles the result's dims, where c is
            no tile: dims of both operands that the result lacks are K, dims of all three are
            batch.
        acc_dtype: the accumulator, to which each sum rounds. By default float32, float64
            for float64 inputs, and int32 or uint32 for integers below 32 bits.
        out_dtype: the dtype to narrow to once, at the end.
        epilogue: a function of one scalar, the accumulator, that returns one. It may close
            over scalars, traced ones too.
        implementation: None picks when the call is lowered, by platform and shape;
            "reference" or a backend's name insists. Derivatives insist on the reference
            only.

    Returns:
        The result in the accumulator's or the epilogue's dtype, or `out_dtype`; a `Tile`
        with the dims of c or of spec where the operands are tiles.

    Raises:
        TileShapeError: ranks, sizes or roles of dims that do not fit; a spec that does not;
            K sharded on an explicit mesh; an epilogue that returns arrays.
        TileTypeError: operands that are no arrays or tiles, or have a bool or scale format;
            a c wider than the accumulator; an acc_dtype or epilogue that does not fit.
        PolicyError: a policy that does not fit the accumulator.
        UnsupportedOnBackend: the implementation that was asked for refuses: when traced
            for a shape or format, when lowered for a platform or device.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> a, b = jnp.array([[1.0, 2.0]]), jnp.array([[3.0], [4.0]])
        >>> print(jt.mma(a, b, 0.5, epilogue=lambda z: 2 * z))
        [[23.]]
        >>> m, k = jt.dims("m k")
        >>> print(jt.mma(jt.tile(a, (m, k)), jt.tile(b[:, 0], k), spec=m).array)
        [11.]
    """
    plan = by_dims("mma", a, b, c, spec) or by_axes("mma", a, b, c, spec)
    options = Options(policy, acc_dtype, out_dtype, epilogue, implementation)
    return run("mma", plan, options, c)


def matmul(
    a: Any,
    b: Any,
    policy: MmaPolicy | None = None,
    *,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    epilogue: Callable[[Any], Any] | None = None,
    implementation: str | None = None,
) -> Any:
    """The matrix product, by one `mma`.

        y[..., m, n] = sum over k of a[..., m, k] * b[..., k, n]

    Args:
        a: an array of at least one axis, the last of which is K; or a tile.
        b: an array whose last axis but one, or only axis, is K; or a tile, whose dim in
            that place must be a's last one. Leading axes are batch axes: of arrays they
            broadcast as NumPy's do, of tiles they go by identity.
        policy: as for `mma`, and so the rest.
        acc_dtype: the accumulator.
        out_dtype: the dtype to narrow to once.
        epilogue: a function of the accumulator.
        implementation: what runs it.

    Returns:
        An array, without the axis that an operand of one axis lacks; or a `Tile`.

    Raises:
        The errors of `mma`.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.matmul(jnp.ones((2, 3), jnp.bfloat16), jnp.ones(3, jnp.bfloat16)))
        [3. 3.]
    """
    plan = by_last_dims("matmul", a, b) or by_places("matmul", a, b)
    options = Options(policy, acc_dtype, out_dtype, epilogue, implementation)
    return run("matmul", plan, options)


class Options(NamedTuple):
    """The keywords that every contraction takes."""

    policy: MmaPolicy | None = None
    acc_dtype: Any = None
    out_dtype: Any = None
    epilogue: Callable | None = None
    implementation: str | None = None


def run(op: str, plan: Plan, options: Options, c: Any = None) -> Any:
    """Check what is left, and bind."""
    a, b, labels, say, dims = plan
    if dims is not None:
        summed = set(labels[0]) & set(labels[1]) - set(dims)
        a, b = (
            _edges.cleared(v, named, summed, dims)
            for v, named in ((a, labels[0]), (b, labels[1]))
        )
    policy = as_mma_policy(op, options.policy)
    acc = accumulator_of((a.dtype, b.dtype), options.acc_dtype, op)
    known = numbered(*labels)
    names = [say(d) for d in dict.fromkeys((*labels[0], *labels[1]))]
    check_sizes(op, a.shape, b.shape, known, names)
    if c is not None:
        c = c.array if is_tile(c) else c
        c = seed_leaf(op, "c", c, acc, known.shape(a.shape, b.shape), _SEED)
    made = None if options.epilogue is None else _epilogue(op, options.epilogue, acc)
    out = acc if made is None else made.out.dtype
    if options.out_dtype is not None:
        formats.require_arithmetic(options.out_dtype, op)
        out = formats.require_enabled(options.out_dtype, op)
    y = bind_mma(
        a,
        b,
        c,
        labels,
        policy=policy,
        acc=acc,
        out=out,
        region=made and made.region,
        captured=made.captured if made else (),
        implementation=backends.asked(op, options.implementation),
    )
    return y if dims is None else Tile(_edges.apart(y, dims, dims), dims)


def as_mma_policy(op: str, policy: Any) -> MmaPolicy:
    """The policy; None is the default one."""
    if policy is None:
        return MmaPolicy()
    if isinstance(policy, MmaPolicy):
        return policy
    raise TileTypeError(
        message(
            op,
            expected="an MmaPolicy",
            got=repr(policy),
            way_out="Write jaxtile.MmaPolicy(allow_reassociation=False); the orders of "
            "reduce are other policies.",
        )
    )


def _epilogue(op: str, fn: Any, acc):
    """The epilogue as a region with one result."""
    function(op, "epilogue to be a function", fn, "Write epilogue=lambda z: z * 2.")

    def tell():
        return (
            f"an epilogue that jax can trace on a scalar of {acc.name}",
            f"It takes the accumulator; {IN_JAX}.",
        )

    made = region_of(fn, functools.partial(_one, fn), (acc,), op, tell)
    if jax.tree.structure(made.out) != jax.tree.structure(0):
        raise TileTypeError(
            message(
                op,
                expected="an epilogue that returns one scalar",
                got=f"{len(jax.tree.leaves(made.out))} in a {type(made.out).__name__}",
                way_out="Leave it out and pass the result to jaxtile.map.",
            )
        )
    formats.require_arithmetic(made.out.dtype, op)
    return made


def _one(fn, z):
    return fn(z)
