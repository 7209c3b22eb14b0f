"""quantize, decode, pack and unpack in kernels: what each backend takes, and why not."""

from __future__ import annotations

from jaxtile.pallas_lowering._registry import Backend
from jaxtile.primitives._storage import decode_p, quantize_p
from jaxtile.primitives.pack import pack_p
from jaxtile.primitives.unpack import unpack_p


def define_storage(backend: Backend) -> None:
    """Register the rules of the storage formats' primitives with a backend."""
    for primitive in (pack_p, unpack_p):
        backend.refuses(
            primitive,
            "its vectors have no elements of 4 bits; do it outside the kernel",
        )
    for primitive in (quantize_p, decode_p):
        backend.refuses(primitive, "it has no rule yet; do it outside the kernel")
