"""The kernel language: one source for plain jax and for Pallas kernels."""

from jaxtile.kernels.api import Kernel as Kernel
from jaxtile.kernels.api import kernel as kernel
from jaxtile.kernels.api import view as view
from jaxtile.kernels.handles import Handle as Handle
from jaxtile.kernels.handles import Window as Window
from jaxtile.kernels.nest import Nest as Nest
from jaxtile.kernels.tuning import tune as tune
from jaxtile.kernels.views import TileRef as TileRef
from jaxtile.kernels.views import View as View
