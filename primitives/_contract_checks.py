"""What mma demands of its operands, and the sentences with which it refuses."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import formats
from jaxtile._jax_private import sharding_spec
from jaxtile.errors import PolicyError, TileShapeError, TileTypeError, message
from jaxtile.policy import MmaPolicy
from jaxtile.primitives import _contract
from jaxtile.primitives._contract import Dims


def accumulator_of(dtypes: Sequence, acc_dtype, op: str) -> np.dtype:
    """The accumulator of products: the rule of `formats.accumulator`, or as stated.

    Raises:
        TileTypeError: a bool or scale format, a stated one that is no accumulator of them.
    """
    for dtype in dtypes:
        _require_factor(dtype, op)
    wide = functools.reduce(jnp.promote_types, map(formats.decoded, dtypes))
    found = jax.dtypes.canonicalize_dtype(formats.accumulator(wide))
    if acc_dtype is None:
        return np.dtype(found)
    acc = formats.require_arithmetic(acc_dtype, op).dtype
    _check_accumulator(acc, found, op)
    return formats.require_enabled(acc, op)


def _require_factor(dtype, op):
    name = formats.format_of(dtype, op).name
    if name == "bool":
        got, way_out = "bool", 'Say what a sum of bools is: jaxtile.cast(x, "int8").'
    elif name == "float8_e8m0fnu":
        got = f"{name}, a format of scales"
        way_out = "Multiply the result, or the decoded operand, by the decoded scale."
    else:
        return
    raise TileTypeError(
        message(op, expected="operands of numbers", got=got, way_out=way_out)
    )


def _check_accumulator(acc, natural, op):
    floats = jnp.issubdtype(natural, jnp.floating)
    fits = jnp.issubdtype(acc, jnp.floating) or not floats
    if acc.kind == "b" or not fits:
        raise TileTypeError(
            message(
                op,
                expected="acc_dtype a float" if floats else "acc_dtype a number",
                got=acc.name,
                way_out=f"Leave it out for {np.dtype(natural).name}.",
            )
        )


def check_sizes(op: str, a, b, dims: Dims, names: Sequence[str] | None = None) -> None:
    """Refuse a label of two sizes.

    Args:
        op: the op that asks, for the message.
        a, b: the operands' shapes.
        dims: the labels.
        names: what the user calls each label; None names the axes.
    """
    for i, d in enumerate(dims.b):
        if d in dims.a and a[dims.a.index(d)] != b[i]:
            j = dims.a.index(d)
            expected = f"axis {j} of a and axis {i} of b of one size"
            if names is not None:
                expected = f"one size of {names[d]} in a and in b"
            raise TileShapeError(
                message(
                    op,
                    expected=expected,
                    got=f"{a[j]} and {b[i]}, of shapes {tuple(a)} and {tuple(b)}",
                    way_out="Transpose an operand, or slice or pad it.",
                )
            )


def check_labels(a, b, dims: Dims) -> None:
    """Refuse labels that name no contraction."""
    known = [len(x.shape) == len(labels) for x, labels in ((a, dims.a), (b, dims.b))]
    each = (dims.a, dims.b, dims.out)
    distinct = all(len(set(labels)) == len(labels) for labels in each)
    spans = {*dims.a, *dims.b}
    alone = [d for d in spans if (d in dims.a) != (d in dims.b) and d not in dims.out]
    ordered = dims.a == tuple(range(len(dims.a)))
    if not (all(known) and distinct and ordered and spans >= {*dims.out}) or alone:
        raise TileShapeError(
            message(
                "mma",
                expected="distinct labels, one for each axis, 0, 1, ... for a's; those "
                "of the result among them, and those of one operand alone in the result",
                got=f"{dims} for shapes {a.shape} and {b.shape}",
                way_out="Bind with jaxtile.primitives.mma.bind_mma, which numbers them.",
            )
        )


def check_policy(policy: MmaPolicy, acc, k: Sequence) -> None:
    """Refuse a policy that means nothing for the accumulator, or for the sizes of K."""
    floats = jnp.issubdtype(acc, jnp.floating)
    name, every = policy.input_precision, policy.promote_every
    if name is not None and acc != np.float32:
        expected = "an accumulator of float32 under a named input_precision"
        got = f"{np.dtype(acc).name} under {name!r}"
        way_out = "The names round float32 inputs: leave input_precision out."
    elif every is not None and floats and _contract.is_narrow(acc):
        expected = "an accumulator of at least float32 under promote_every"
        got, way_out = (
            np.dtype(acc).name,
            "Leave one of acc_dtype and promote_every out.",
        )
    elif every is not None and not all(isinstance(n, int) for n in k):
        expected = "a K whose size is known under promote_every"
        got, way_out = f"sizes {tuple(k)}", "Export with K an integer."
    else:
        return
    raise PolicyError(message("mma", expected=expected, got=got, way_out=way_out))


def spec_of(avals, dims: Dims) -> tuple:
    """The explicit mesh axes of the result's dimensions."""
    found: dict = {}
    for aval, labels in zip(avals, (dims.a, dims.b), strict=True):
        for entry, d in zip(sharding_spec(aval), labels, strict=True):
            if entry is not None and d in dims.contracted and dims.across:
                continue
            if entry is not None and d in dims.contracted:
                _fail_sharding(f"K not sharded: axis {labels.index(d)}", entry)
            if entry is not None and found.setdefault(d, entry) != entry:
                _fail_sharding("one sharding of a batch axis", (found[d], entry))
    spec = tuple(found.get(d) for d in dims.out)
    used = [n for e in spec if e for n in (e if isinstance(e, tuple) else (e,))]
    if len(set(used)) != len(used):
        _fail_sharding("a mesh axis for one axis of the result", spec)
    return spec


def _fail_sharding(expected, got):
    raise TileShapeError(
        message(
            "mma",
            expected=expected,
            got=f"mesh axes {got}",
            way_out="Reshard first (jax.sharding.reshard), or add per-device results in "
            "jax.shard_map.",
        )
    )
