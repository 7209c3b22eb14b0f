"""Pallas Mosaic GPU: `plgpu.kernel` for CUDA, the main backend from Hopper on."""

from jaxtile import _jax_private
from jaxtile.pallas_lowering._elementwise import Traits, define_elementwise, negate
from jaxtile.pallas_lowering._registry import Backend
from jaxtile.pallas_lowering._sort import UNSORTED
from jaxtile.pallas_lowering._storage import define_storage
from jaxtile.primitives._moves import gather_p, scatter_p
from jaxtile.primitives.mma import mma_p
from jaxtile.primitives.reindex import reindex_p
from jaxtile.primitives.sort import sort_p
from jaxtile.primitives.topk import topk_p

BACKEND = Backend("mosaic_gpu", _jax_private.mosaic_gpu())
_NO_LAYOUT = "has no layout rule in Warpgroup semantics; map it outside the kernel"
TRAITS = Traits(
    formats=frozenset("bool int32 uint32 float16 bfloat16 float32".split()),
    other_formats="its vectors are float16, bfloat16, float32 and 32-bit integers: "
    "cast it outside the kernel",
    lacks={
        "erf": _NO_LAYOUT,
        "atan2": _NO_LAYOUT,
    },
    rewrites={"neg": negate},
    keeps_rounding=False,
)
define_elementwise(BACKEND, TRAITS)
BACKEND.refuses(
    mma_p,
    "its tensor cores read their operands from shared memory, and mma sees loaded values; "
    "use plgpu.wgmma on the refs, or call mma on whole arrays",
)
define_storage(BACKEND, TRAITS, "float8_e4m3fn float8_e5m2 int8 uint8".split())
for p in (reindex_p, gather_p, scatter_p):
    BACKEND.refuses(
        p,
        "its values lie in registers of many threads, and no operation of its moves them "
        "by an index; read a ref at the index, or call it on whole arrays",
    )
for _primitive in (sort_p, topk_p):
    BACKEND.refuses(_primitive, UNSORTED)

from jaxtile.pallas_lowering.mosaic_gpu import map as map  # noqa: E402
from jaxtile.pallas_lowering.mosaic_gpu import reduce as reduce  # noqa: E402
from jaxtile.pallas_lowering.mosaic_gpu import scan as scan  # noqa: E402
from jaxtile.pallas_lowering.mosaic_gpu import whole as whole  # noqa: E402
from jaxtile.pallas_lowering.mosaic_gpu import whole_gather as whole_gather  # noqa: E402
from jaxtile.pallas_lowering.mosaic_gpu import whole_mma as whole_mma  # noqa: E402
from jaxtile.pallas_lowering.mosaic_gpu import whole_sort as whole_sort  # noqa: E402
