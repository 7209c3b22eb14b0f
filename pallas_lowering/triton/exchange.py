"""reindex, gather and scatter in Pallas Triton kernels."""

from __future__ import annotations

from jaxtile.pallas_lowering._exchange import define_exchange
from jaxtile.pallas_lowering.triton import BACKEND, TRAITS, _turn


def _movable(aval) -> str | None:
    return None


define_exchange(BACKEND, TRAITS, _movable, _turn.turned)
