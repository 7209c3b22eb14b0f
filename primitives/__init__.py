"""The primitives, one tile op a file: positional, for people who write their own rules."""

from jaxtile.primitives.bitcast import bitcast_p as bitcast_p
from jaxtile.primitives.cast import cast_p as cast_p
from jaxtile.primitives.decode import decode_p as decode_p
from jaxtile.primitives.gather import gather_p as gather_p
from jaxtile.primitives.map import map_p as map_p
from jaxtile.primitives.map_linear import map_linear_p as map_linear_p
from jaxtile.primitives.mma import mma_p as mma_p
from jaxtile.primitives.pack import pack_p as pack_p
from jaxtile.primitives.quantize import quantize_p as quantize_p
from jaxtile.primitives.reduce import reduce_p as reduce_p
from jaxtile.primitives.reindex import reindex_p as reindex_p
from jaxtile.primitives.scan import scan_p as scan_p
from jaxtile.primitives.scatter import scatter_p as scatter_p
from jaxtile.primitives.sort import sort_p as sort_p
from jaxtile.primitives.topk import topk_p as topk_p
from jaxtile.primitives.unpack import unpack_p as unpack_p

ALL = (
    cast_p,
    bitcast_p,
    map_p,
    map_linear_p,
    quantize_p,
    decode_p,
    pack_p,
    unpack_p,
    mma_p,
    reduce_p,
    scan_p,
    reindex_p,
    gather_p,
    scatter_p,
    sort_p,
    topk_p,
)
