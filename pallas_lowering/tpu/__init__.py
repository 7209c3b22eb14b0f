"""Pallas TPU: kernels for the TensorCore."""

from jaxtile import _jax_private
from jaxtile.pallas_lowering._elementwise import Traits, define_elementwise
from jaxtile.pallas_lowering._registry import Backend
from jaxtile.primitives._moves import gather_p, scatter_p
from jaxtile.primitives.reindex import reindex_p

BACKEND = Backend("tpu", _jax_private.tpu())
TRAITS = Traits(
    formats=frozenset("bool int32 uint32 bfloat16 float32".split()),
    other_formats="its vectors are bfloat16, float32 and 32-bit integers: cast it "
    "outside the kernel",
    lacks={},
)
define_elementwise(BACKEND, TRAITS)
for p in (reindex_p, gather_p, scatter_p):
    BACKEND.refuses(
        p, "it has no rule there yet; call it on arrays, outside the kernel"
    )

from jaxtile.pallas_lowering.tpu import mma as mma  # noqa: E402
from jaxtile.pallas_lowering.tpu import reduce as reduce  # noqa: E402
from jaxtile.pallas_lowering.tpu import scan as scan  # noqa: E402
from jaxtile.pallas_lowering.tpu import whole_reduce as whole_reduce  # noqa: E402
from jaxtile.pallas_lowering.tpu import whole_scan as whole_scan  # noqa: E402
