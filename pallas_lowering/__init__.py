"""Lowerings of the primitives into Pallas kernels: one folder a backend."""

from __future__ import annotations

import importlib

from jaxtile.pallas_lowering import _registry
from jaxtile.primitives._define import BEFORE_KERNELS, CHOICE

# Who serves a platform, the best first.
SERVES = {"cuda": ("mosaic_gpu", "triton"), "tpu": ("tpu",)}
NAMES = tuple(name for names in SERVES.values() for name in names)


def load_all() -> None:
    """Import every backend; record why one cannot be imported.

    A missing optional dependency of jax's own backend (absl for Mosaic GPU) leaves that
    backend out, and `supports` says so.
    """
    for name in NAMES:
        if name in _registry.BACKENDS or name in _registry.FAILED:
            continue
        try:
            module = importlib.import_module(f"jaxtile.pallas_lowering.{name}")
        except ImportError as error:
            _registry.FAILED[name] = (
                f"{name} cannot be imported: {error}; install what it misses"
            )
        else:
            _registry.BACKENDS[name] = module.BACKEND


def load_on_first_kernel() -> None:
    """Load every backend before the first op that a Pallas user traces.

    Whole arrays load them when an op is lowered for a platform that one serves.
    """
    from jaxtile.pallas_lowering import _choice

    BEFORE_KERNELS.append(load_all)
    CHOICE.append(_choice)
