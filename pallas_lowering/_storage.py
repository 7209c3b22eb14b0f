"""quantize, decode, pack and unpack in kernels: the references, traced, or why not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jaxtile.pallas_lowering._elementwise import Traits, _inlined
from jaxtile.pallas_lowering._registry import Backend
from jaxtile.primitives import decode, quantize
from jaxtile.primitives._storage import TARGETS, decode_p, quantize_p
from jaxtile.primitives.pack import pack_p
from jaxtile.primitives.unpack import unpack_p


def define_storage(backend: Backend, traits: Traits, codes: Sequence[str]) -> None:
    """Register the rules of the storage formats' primitives with a backend.

    Args:
        backend: the backend.
        traits: what its kernels compute elementwise.
        codes: names of the formats whose codes its kernels load and store.
    """

    def refuse_code(dtype: Any) -> str | None:
        name = str(dtype)
        if name in codes:
            return None
        return (
            f"its vectors hold no {name}; convert outside the kernel, or give quantize "
            "out_dtype="
        )

    def refuse_operand(aval: Any) -> str | None:
        storage = aval.dtype.name in TARGETS
        return (refuse_code if storage else traits.format)(aval.dtype)

    def refuse_grid(avals: Any) -> str | None:
        if all(v.shape == avals[0].shape for v in avals):
            return None
        return "it spreads no scales over blocks; broadcast them to x's shape first"

    def refuse_quantize(x, *rest, format, dtype, **params):
        reasons = [traits.operand(x), refuse_grid((x, *rest))]
        reasons += map(refuse_operand, rest)
        last = refuse_code(format) if dtype is None else traits.format(dtype)
        return next(filter(None, [*reasons, last]), None)

    def refuse_decode(*avals, dtype, exact):
        reasons = [traits.shape(avals[0]), refuse_grid(avals)]
        reasons += map(refuse_operand, avals)
        return next(filter(None, [*reasons, traits.format(dtype)]), None)

    @backend.traces(quantize_p, refuse_quantize)
    def lower_quantize(*values, **params):
        run = functools.partial(quantize.reference, **params)
        return _inlined(run, traits.rewrites)(*values)

    @backend.traces(decode_p, refuse_decode)
    def lower_decode(*values, **params):
        run = functools.partial(decode.reference, **params)
        return _inlined(run, traits.rewrites)(*values)

    for primitive in (pack_p, unpack_p):
        backend.refuses(
            primitive, "its vectors have no 4-bit elements; do it outside the kernel"
        )
