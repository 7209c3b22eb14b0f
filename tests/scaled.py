"""Scaled codes: operands of every grid of scales, and what they count as."""

import numpy as np

from codes import every_code

RNG = np.random.default_rng(29)
F32 = np.float32
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"

# Formats and shapes of a and b, then how many scales each has along its axes.
GRIDS = {
    "runs and squares": (E4M3, (37, 256), (37, 2), E4M3, (256, 384), (2, 3)),
    "runs and columns": (E4M3, (37, 256), (37, 2), E5M2, (256, 131), (2, 131)),
    "rows and columns": (E5M2, (130, 384), (130, 1), E4M3, (384, 9), (1, 9)),
    "one each": (E4M3, (5, 70), (1, 1), E4M3, (70, 3), (1, 1)),
    "other runs": (E4M3, (3, 192), (3, 4), E4M3, (192, 8), (6, 2)),
    "a batch": (E4M3, (2, 3, 64), (2, 1, 2), E4M3, (64, 5), (2, 5)),
    "a vector": (E4M3, (96,), (3,), E4M3, (96, 4), (3, 1)),
    "single elements": (E4M3, (4, 5), (4, 5), E4M3, (5, 6), (5, 6)),
}


def some(name, *shape):
    """Codes of every size, none of them NaN or an infinity."""
    known = every_code(name)
    return RNG.choice(known[np.isfinite(known.astype(F32))], shape)


def scales(*shape):
    return np.exp(RNG.standard_normal(shape) * 3).astype(F32)


def values(codes, units):
    """What codes count as in float64."""
    units = units.astype(np.float64)
    for axis, n in enumerate(codes.shape):
        units = np.repeat(units, n // units.shape[axis], axis)
    return codes.astype(np.float64) * units


def case(name):
    """Operands of `scaled_matmul`, its result in float64, and that of magnitudes."""
    left, shape, grid, right, other, places = GRIDS[name]
    a, b, s, t = some(left, *shape), some(right, *other), scales(*grid), scales(*places)
    wide = values(a, s), values(b, t)
    return (a, b, s, t), wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
