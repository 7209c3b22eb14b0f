"""reduce, scan and linear_recurrence, on arrays with axes and on tiles with dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtile import backends, formats
from jaxtile._arguments import out_dtypes, parts, retile
from jaxtile._checks import choice, flag, operand
from jaxtile._join import is_constant, meet
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import PolicyError, message
from jaxtile.policy import Kind, Policy, as_policy, ordered_tree, unordered_tree
from jaxtile.primitives._bind import bind_reduce, bind_scan
from jaxtile.recurrences import affine, one_kind
from jaxtile.reducers import Reducer
from jaxtile.tile import Tile

_DIRECTIONS = ("prefix", "suffix", "reverse")
_WAYS = '"reverse" scans the flipped sequence, "suffix" keeps the earlier side left.'


def reduce(
    x: Any,
    axis: int | Dim | Sequence | None,
    reducer: Reducer,
    *,
    init: Any = None,
    where: Any = None,
    policy: Policy | str = unordered_tree,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    keepdims: bool = False,
    implementation: str | None = None,
) -> Any:
    """Combine the elements along the axes with a reducer, in the order of a policy.

    y[g] = finish(init . lift(x[g, 0]) . lift(x[g, 1]) ...)

    Args:
        x: an array or tile of any arithmetic dtype and rank, or a pytree of equally
            shaped ones.
        axis: an integer axis or `Dim`, several, or None for all. Several are taken in
            lexicographic order of the array's axes.
        reducer: how elements combine; see `jaxtile.catalogue`.
        init: a seed state for every fibre, used exactly once. A number counts by its
            value; an array keeps its precision, so it must not be wider than the state.
        where: a bool mask; masked elements are skipped whatever they hold. A tile goes by
            its dims, as for init.
        policy: one of the five orders, or its name.
        acc_dtype: the accumulator, to which each combine rounds. By default floats and
            integers below 32 bits that are summed accumulate in 32 bits.
        out_dtype: the dtype to narrow to once, after `finish`.
        keepdims: keep the reduced axes with size 1.
        implementation: None picks when the call is lowered, by platform and shape;
            "reference", "triton", "mosaic_gpu" or "tpu" insists. Derivatives insist on the
            reference only.

    Returns:
        The reducer's result without the axes, in the accumulator's dtype or `out_dtype`.

    Raises:
        ContractError: the policy needs a law that the reducer lacks.
        PolicyError: no such policy.
        TileShapeError: axes, shapes or dims do not fit; an empty fibre without a seed of
            a reducer that has no empty value; a sharded axis on an explicit mesh.
        TileTypeError: an operand that is no array, tile or number, has a storage format,
            or overflows in 32 bits with x64 off; a mask or keepdims that is not bool; a
            seed, or a part of the reducer, that does not fit the state.
        UnsupportedOnBackend: the implementation that was asked for refuses: when traced
            for a shape or format, when lowered for a platform or device.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> print(jt.reduce(x, 1, jt.add, policy="fixed_tree"))
        [3. 7.]
        >>> print(jt.reduce(jnp.ones(5000, jnp.bfloat16), 0, jt.add))
        5000.0
    """
    order = as_policy(policy)
    keepdims = flag("reduce", "keepdims", keepdims)
    spec, arrays, seed, mask, axes, dims = parts(
        "reduce", x, axis, reducer, init, where, acc_dtype, False
    )
    out = out_dtypes("reduce", spec, out_dtype)
    leaves = bind_reduce(
        spec,
        arrays,
        seed,
        mask,
        axes=axes,
        policy=order,
        out=out,
        implementation=backends.asked("reduce", implementation),
    )
    if dims is not None and not keepdims:
        dims = tuple(d for i, d in enumerate(dims) if i not in axes)
    if keepdims:
        leaves = [jnp.expand_dims(v, axes) for v in leaves]
    return retile(spec.result_tree, leaves, dims)


def scan(
    x: Any,
    axis: int | Dim,
    reducer: Reducer,
    *,
    init: Any = None,
    where: Any = None,
    exclusive: bool = False,
    direction: str = "prefix",
    return_final: bool = False,
    policy: Policy | str = ordered_tree,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Any:
    """Every prefix along an axis, combined by a reducer in the order of a policy.

    prefix: y_i = init . x_0 ... x_i; suffix: y_i = x_i ... x_(n-1) . init; reverse: the
    prefix scan of the flipped sequence, flipped back. `fold_right` seeds the far end.

    Args:
        x: an array or tile of any arithmetic dtype and rank, or a pytree of equally
            shaped ones.
        axis: the integer axis or `Dim`.
        reducer: how elements combine; the earlier run is always merge's left operand.
        init: a seed state for every fibre.
        where: a bool mask; a masked element is skipped, its place shows the prefix so far.
        exclusive: leave x_i out of y_i (never by subtraction).
        direction: "prefix", "suffix" or "reverse".
        return_final: also return the raw state over everything, the next call's `init`.
        policy: one of the five orders, or its name.
        acc_dtype: the accumulator, to which each combine rounds.
        out_dtype: the dtype that the prefixes narrow to, once, after `finish`.
        implementation: None picks when the call is lowered, by platform and shape;
            "reference", "triton", "mosaic_gpu" or "tpu" insists. Derivatives insist on the
            reference only.

    Returns:
        The prefixes, shaped like x, or `(prefixes, final_state)`.

    Raises:
        ContractError: the policy needs a law that the reducer lacks.
        PolicyError: no such policy.
        TileValueError: no such direction.
        TileShapeError: axis, shapes or dims do not fit; the prefix of nothing of a
            reducer without identity; a sharded axis on an explicit mesh.
        TileTypeError: an operand that is no array, tile or number, has a storage format,
            or overflows in 32 bits with x64 off; a mask or flag that is not bool; a seed,
            or a part of the reducer, that does not fit the state.
        UnsupportedOnBackend: the implementation that was asked for refuses: when traced
            for a shape or format, when lowered for a platform or device.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.scan(jnp.array([1, 2, 3]), 0, jt.add))
        [1 3 6]
        >>> print(jt.scan(jnp.array([1, 2, 3]), 0, jt.add, exclusive=True, init=10))
        [10 11 13]
    """
    order = as_policy(policy)
    exclusive = flag("scan", "exclusive", exclusive)
    return_final = flag("scan", "return_final", return_final)
    choice("scan", "direction", direction, _DIRECTIONS, _WAYS)
    spec, arrays, seed, mask, axes, dims = parts(
        "scan", x, axis, reducer, init, where, acc_dtype, True
    )
    out = out_dtypes("scan", spec, out_dtype)
    leaves = bind_scan(
        spec,
        arrays,
        seed,
        mask,
        axis=axes[0],
        policy=order,
        direction=direction,
        exclusive=exclusive,
        final=return_final,
        out=out,
        implementation=backends.asked("scan", implementation),
    )
    k = len(spec.results)
    prefixes = retile(spec.result_tree, leaves[:k], dims)
    if not return_final:
        return prefixes
    rest = (
        None if dims is None else tuple(d for i, d in enumerate(dims) if i != axes[0])
    )
    return prefixes, retile(spec.state_tree, leaves[k:], rest)


def linear_recurrence(
    a: Any,
    b: Any,
    axis: int | Dim,
    h0: Any = None,
    *,
    direction: str = "prefix",
    policy: Policy | str = ordered_tree,
    implementation: str | None = None,
) -> Any:
    """The first-order linear recurrence along an axis.

    h_t = a_t h_(t-1) + b_t, with h_(-1) = h0; "reverse" runs it from the end.

    Args:
        a: decay, an array, tile or number. a and b are both floats, or both integers
            (which wrap); they broadcast as operands of `map` do.
        b: drive, likewise.
        axis: the time axis.
        h0: the state before the first step, of h's shape without the axis.
        direction: "prefix" or "reverse" (also "suffix": the merge's sides swapped).
        policy: one of the five orders, or its name.
        implementation: None picks; a backend's name insists.

    Returns:
        h, of the shape that a and b broadcast to.

    Raises:
        TileTypeError: one of a and b is a float and the other is not, or one is bool.
        PolicyError: h0 with `fold_right` (for suffixes `fold_left`), whose seed is at
            the far end.
        The errors of `scan`.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> print(jt.linear_recurrence(jnp.full(3, 0.5), jnp.ones(3), 0))
        [1.   1.5  1.75]
    """
    against = Kind.LEFT if direction == "suffix" else Kind.RIGHT
    if h0 is not None and as_policy(policy).kind is against:
        raise PolicyError(
            message(
                "linear_recurrence",
                expected="a policy that starts from h0",
                got=f"policy={as_policy(policy)}, direction={direction!r}",
                way_out="A recurrence from h0 is a left fold (a right one for suffixes): "
                "drop the policy or h0.",
            )
        )
    op = "linear_recurrence"
    choice(op, "direction", direction, _DIRECTIONS, _WAYS)
    a, b = operand(op, a), operand(op, b)
    a, b = _coefficient(a, b), _coefficient(b, a)
    one_kind(op, a.dtype, b.dtype)
    arrays, dims = meet(op, [a, b])
    if dims is not None:
        arrays = [Tile(v, dims) for v in arrays]
    return scan(
        tuple(arrays),
        axis,
        affine,
        init=None if h0 is None else (1, operand(op, h0)),
        direction=direction,
        policy=policy,
        implementation=implementation,
    )


def _coefficient(value: Any, other: Any) -> Any:
    """A coefficient; a weakly typed number in the dtype that the other's sums have."""
    if is_tile(value):
        return value
    array = jnp.asarray(value)
    kind = getattr(other, "dtype", None) or jnp.result_type(other)
    sums = formats.accumulator(jax.dtypes.canonicalize_dtype(kind))
    if bool in (array.dtype, sums) or not _is_weak(value):
        return array
    if jnp.issubdtype(array.dtype, jnp.floating) > jnp.issubdtype(sums, jnp.floating):
        return array
    return array.astype(sums)


def _is_weak(value: Any) -> bool:
    return is_constant(value) or getattr(value, "weak_type", False)
