"""The kernel language: one source for plain jax and for Pallas kernels."""

from jaxtile.kernel.api import Kernel as Kernel
from jaxtile.kernel.api import kernel as kernel
from jaxtile.kernel.api import view as view
from jaxtile.kernel.handles import Handle as Handle
from jaxtile.kernel.handles import Window as Window
from jaxtile.kernel.nest import Nest as Nest
from jaxtile.kernel.tuning import tune as tune
from jaxtile.kernel.views import TileRef as TileRef
from jaxtile.kernel.views import View as View
