"""The table of which op runs where, from the predicates that decide it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtile import backends, catalogue
from jaxtile.explain import supports
from jaxtile.pallas_lowering import NAMES
from jaxtile.policy import MmaPolicy


def _products() -> list[tuple[str, str, tuple, dict]]:
    """Calls of mma on blocks of (64, 128) and (128, 64)."""

    def case(label, a, b=None, **policy):
        x = jax.ShapeDtypeStruct((64, 128), jnp.dtype(a))
        y = jax.ShapeDtypeStruct((128, 64), jnp.dtype(b or a))
        return f"mma {label}", "mma", (x, y), {"policy": MmaPolicy(**policy)}

    fp8 = "float8_e4m3fn"
    return [
        *(case(d, d) for d in ("float32", "bfloat16", "float16", "int8")),
        case("float8_e4m3fn by float8_e5m2", fp8, "float8_e5m2"),
        case("bfloat16 by int8", "bfloat16", "int8"),
        case("float32, tf32x3", "float32", input_precision="tf32x3"),
        case("float32, bf16x6", "float32", input_precision="bf16x6"),
        case("bfloat16, promote_every=128", "bfloat16", promote_every=128),
        case("float32, order kept", "float32", allow_reassociation=False),
    ]


def _turned(i, j):
    return j, i


def _shifted(i, j):
    return i - 1, j


def _cases() -> list[tuple[str, str, tuple, dict]]:
    def block(dtype="float32"):
        return jax.ShapeDtypeStruct((64, 128), jnp.dtype(dtype))

    x, add = block(), catalogue.add
    ids, places = jax.ShapeDtypeStruct((64,), "int32"), block("int32")
    sums = [
        (f"reduce add, {policy}", "reduce", (x, 0, add), {"policy": policy})
        for policy in ("unordered_tree", "ordered_tree", "fixed_tree", "fold_left")
    ]
    narrow = [
        (f"reduce add, {d}", "reduce", (block(d), 0, add), {})
        for d in ("bfloat16", "float16", "int32", "int8")
    ]
    pairs = ("float32", "bfloat16"), ("float32", "float16"), ("float32", "int32")
    casts = [(f"cast {a} to {b}", "cast", (block(a), b), {}) for a, b in pairs]
    return [
        *casts,
        ("cast int32 to bfloat16", "cast", (block("int32"), "bfloat16"), {}),
        ("bitcast float32 to uint32", "bitcast", (x, "uint32"), {}),
        ("quantize float32 to float8_e4m3fn", "quantize", (x, "float8_e4m3fn"), {}),
        ("decode float8_e4m3fn", "decode", (block("float8_e4m3fn"),), {}),
        ("map exp", "map", (jnp.exp, x), {}),
        ("map floor", "map", (jnp.floor, x), {}),
        *sums,
        ("reduce add along the last axis", "reduce", (x, 1, add), {}),
        *narrow,
        ("reduce maximum", "reduce", (x, 0, catalogue.maximum), {}),
        ("scan add", "scan", (x, 0, add), {}),
        *_products(),
        ("reindex, a transpose", "reindex", (x, (128, 64), _turned), {}),
        ("reindex, a shift", "reindex", (x, x.shape, _shifted), {"fill": 0.0}),
        ("gather rows", "gather", (x, ids, 0), {}),
        ("gather along rows", "gather", (x, places, 1), {"batch": "all"}),
        ("scatter add", "scatter", (x, ids, 0, 64, add), {}),
        ("sort", "sort", (x, 1), {}),
        ("argsort", "argsort", (x, 1), {}),
        ("topk of 8", "topk", (x, 1, 8), {}),
    ]


def support_table() -> str:
    """What each backend lowers inside kernels, and on whole arrays.

    Returns:
        A markdown table of typical calls on blocks of (64, 128), and below it each
        reason for a "no". `supports` answers for one call.

    Example:
        >>> import jaxtile as jt
        >>> print(jt.support_table().splitlines()[0])
        | op | mosaic_gpu kernel | triton kernel | tpu kernel | whole array |
    """
    reasons: list[str] = []

    def cell(reason):
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no [{reasons.index(reason) + 1}]"

    head = ["op", *(f"{name} kernel" for name in NAMES), "whole array"]
    rows = [head, ["---"] * len(head)]
    for label, op, args, params in _cases():
        found = {name: supports(op, name, *args, **params) for name in NAMES}
        whole = [name for name in NAMES if found[name].whole_array is None]
        cells = [cell(found[name].reason) for name in NAMES]
        rows.append([label, *cells, ", ".join([*whole, backends.REFERENCE])])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes])
