"""Pallas TPU: kernels for the TensorCore."""

from jaxtile import _jax_private
from jaxtile.pallas_lowering._elementwise import Traits, define_elementwise
from jaxtile.pallas_lowering._registry import Backend
from jaxtile.pallas_lowering._storage import define_storage

BACKEND = Backend("tpu", _jax_private.tpu())
TRAITS = Traits(
    formats=frozenset("bool int32 uint32 bfloat16 float32".split()),
    other_formats="its vectors are bfloat16, float32 and 32-bit integers: cast it "
    "outside the kernel",
    lacks={},
)
define_elementwise(BACKEND, TRAITS)
define_storage(BACKEND, TRAITS, "float8_e4m3fn float8_e5m2 int8 uint8".split())


from jaxtile.pallas_lowering.tpu import exchange as exchange  # noqa: E402
from jaxtile.pallas_lowering.tpu import mma as mma  # noqa: E402
from jaxtile.pallas_lowering.tpu import reduce as reduce  # noqa: E402
from jaxtile.pallas_lowering.tpu import scan as scan  # noqa: E402
from jaxtile.pallas_lowering.tpu import sort as sort  # noqa: E402
from jaxtile.pallas_lowering.tpu import whole_reduce as whole_reduce  # noqa: E402
from jaxtile.pallas_lowering.tpu import whole_scan as whole_scan  # noqa: E402
