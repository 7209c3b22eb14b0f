"""What thread code refuses wherever it runs, in kernels and on whole arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxtile.policy import Kind, Policy

_FORMATS = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 "
    "float64".split()
)


def refuse_formats(dtypes: Iterable[Any]) -> str | None:
    """Why registers do not compute with one of these formats, or None."""
    for dtype in dtypes:
        if np.dtype(dtype).name not in _FORMATS:
            return f"{np.dtype(dtype).name} is not computed with there; cast it first"
    return None


def refuse_against(policy: Policy, direction: str) -> str | None:
    """Why a fold that runs against a scan's direction is refused, or None."""
    if policy.kind is not (Kind.LEFT if direction == "suffix" else Kind.RIGHT):
        return None
    return (
        f"{policy} against the direction is a separate chain for each prefix; use "
        "the reference, or the fold that runs with the direction"
    )
