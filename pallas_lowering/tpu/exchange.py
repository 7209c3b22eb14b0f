"""reindex, gather and scatter in TPU kernels."""

from __future__ import annotations

import numpy as np

from jaxtile.pallas_lowering._exchange import define_exchange
from jaxtile.pallas_lowering.tpu import BACKEND, TRAITS


def _movable(aval) -> str | None:
    dtype = np.dtype(aval.dtype)
    if dtype.itemsize == 2:
        return (
            f"{dtype.name} is half a word, and words are what is moved there bit for bit; "
            "cast it to float32 first, which is exact"
        )
    return None


define_exchange(BACKEND, TRAITS, _movable)
