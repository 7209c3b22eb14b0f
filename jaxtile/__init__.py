"""jaxtile: tile operations for JAX, each one primitive with a stated contract."""

from jaxtile import errors as errors
from jaxtile import formats as formats
from jaxtile import policy as policy
from jaxtile.backends import use_implementation as use_implementation
from jaxtile.catalogue import add as add
from jaxtile.catalogue import argmax as argmax
from jaxtile.catalogue import argmin as argmin
from jaxtile.catalogue import bitwise_and as bitwise_and
from jaxtile.catalogue import bitwise_or as bitwise_or
from jaxtile.catalogue import bitwise_xor as bitwise_xor
from jaxtile.catalogue import first as first
from jaxtile.catalogue import last as last
from jaxtile.catalogue import logaddexp as logaddexp
from jaxtile.catalogue import logical_and as logical_and
from jaxtile.catalogue import logical_or as logical_or
from jaxtile.catalogue import maximum as maximum
from jaxtile.catalogue import maximum_number as maximum_number
from jaxtile.catalogue import minimum as minimum
from jaxtile.catalogue import minimum_number as minimum_number
from jaxtile.catalogue import multiply as multiply
from jaxtile.composite import Moments as Moments
from jaxtile.composite import affine as affine
from jaxtile.composite import matrix_affine as matrix_affine
from jaxtile.composite import product as product
from jaxtile.composite import segmented as segmented
from jaxtile.composite import welford as welford
from jaxtile.dims import Dim as Dim
from jaxtile.dims import dims as dims
from jaxtile.reducers import Laws as Laws
from jaxtile.reducers import Provenance as Provenance
from jaxtile.reducers import Reducer as Reducer
from jaxtile.reduction import linear_recurrence as linear_recurrence
from jaxtile.reduction import reduce as reduce
from jaxtile.reduction import scan as scan
from jaxtile.tile import Tile as Tile
from jaxtile.tile import tile as tile

__version__ = "0.1.0"
