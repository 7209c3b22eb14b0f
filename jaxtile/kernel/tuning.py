"""tune: the fastest of some configurations that keep one contract."""

from __future__ import annotations

from typing import Any


def tune(kernel: Any, args: Any, space: Any) -> dict[str, Any]:
    """TODO"""
    raise NotImplementedError
