"""The primitives: one tile op a file, positional arrays, for writers of their own rules."""

from jaxtile.primitives.bitcast import bitcast_p as bitcast_p
from jaxtile.primitives.cast import cast_p as cast_p
from jaxtile.primitives.reduce import reduce_p as reduce_p
from jaxtile.primitives.scan import scan_p as scan_p

ALL = (cast_p, bitcast_p, reduce_p, scan_p)
