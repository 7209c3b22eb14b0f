"""An oracle of quantize: tables of every code's value, and a search in them."""

import functools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np

FLOATS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
)
INTEGERS = ("int4", "int8", "uint4", "uint8")
ALL = FLOATS + INTEGERS
# The mode in which ml_dtypes converts.
PLAIN = dict.fromkeys(FLOATS, "nan") | {
    "float8_e5m2": "inf",
    "float4_e2m1fn": "saturate",
}
MODES = {
    "float8_e4m3fn": ("saturate", "nan"),
    "float8_e5m2": ("saturate", "nan", "inf"),
    "float8_e4m3fnuz": ("saturate", "nan"),
    "float8_e5m2fnuz": ("saturate", "nan"),
    "float8_e8m0fnu": ("saturate", "nan"),
} | dict.fromkeys((*INTEGERS, "float4_e2m1fn"), ("saturate",))
ROUNDINGS = ("nearest_even", "toward_zero", "up", "down")


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def every_code(name):
    """All codes of a format, as an array of it."""
    if name in INTEGERS:
        info = ml_dtypes.iinfo(dtype_of(name))
        return np.arange(int(info.min), int(info.max) + 1).astype(dtype_of(name))
    count = 16 if name.startswith("float4") else 256
    return np.arange(count, dtype=np.uint8).view(dtype_of(name))


def raw(x):
    """The bits of 8-bit codes; of 16-, 32- and 64-bit floats."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.name not in INTEGERS else x


@functools.cache
def magnitudes(name, negative=False):
    """The sizes of the finite values of one sign, with the step past the last one."""
    values = every_code(name).astype(np.float64)
    values = values[np.isfinite(values)]
    values = -values[values <= 0] if negative else values[values >= 0]
    found = sorted({abs(v) for v in values.tolist()})
    step = found[-1] - found[-2] if len(found) > 1 else 1.0
    if name == "float8_e8m0fnu":
        step = found[-1]
    # 448 has no neighbour above it, but its binade goes on in steps of 32.
    return [*found, found[-1] + step]


def boundaries(name):
    """float32 around every value of a format and every middle of two."""
    sizes = np.array(magnitudes(name))
    points = np.concatenate([sizes, (sizes[1:] + sizes[:-1]) / 2])
    points = points[points < 3e38].astype(np.float32).view(np.uint32)
    near = (points[:, None].astype(np.int64) + np.arange(-3, 4)).ravel()
    near = np.unique(near[near >= 0]).astype(np.uint32)
    return np.concatenate([near, near | 0x80000000]).view(np.float32)


def samples(count=400, seed=0):
    """float32 of every size, special ones too."""
    rng = np.random.default_rng(seed)
    some = rng.integers(0, 2**32, count, np.uint32).view(np.float32)
    mid = np.exp(rng.normal(0, 4, count)) * rng.choice([-1, 1], count)
    special = [0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 2.0**-127]
    return np.concatenate([np.float32(special), some, mid.astype(np.float32)])


def rounded(value, name, rounding="nearest_even", overflow="saturate", random=0):
    """The value that an exact number rounds to, or the name of what it becomes.

    `value` is a float, an int or a Fraction; "overflow" stands for what the mode says.
    """
    signless = name == "float8_e8m0fnu"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if isinstance(value, float) and math.isinf(value):
        has_inf = name == "float8_e5m2"
        return value if has_inf else _outside(name, value < 0, overflow)
    negative = math.copysign(1, value) < 0 if isinstance(value, float) else value < 0
    size, sizes = abs(Fraction(value)), magnitudes(name, negative and not signless)
    if signless and (negative or size == 0):
        return sizes[0] if overflow == "saturate" else "nan"
    if signless and size < Fraction(sizes[0]):
        return sizes[0]
    if size >= Fraction(sizes[-1]):
        return _outside(name, negative, overflow)
    place = max(i for i, s in enumerate(sizes[:-1]) if Fraction(s) <= size)
    low, high = Fraction(sizes[place]), Fraction(sizes[place + 1])
    part = (size - low) / (high - low)
    # The significand of a power of two alone is odd, so that ties go up.
    odd = signless or place % 2 == 1
    up = {
        "nearest_even": part > Fraction(1, 2) or (part == Fraction(1, 2) and odd),
        "toward_zero": False,
        "up": part > 0 and not negative,
        "down": part > 0 and negative,
        "stochastic": math.floor(part * 2**23) + (random >> 9) >= 2**23,
    }[rounding]
    if place + up == len(sizes) - 1:
        return _outside(name, negative, overflow)
    return math.copysign(sizes[place + up], -1 if negative else 1)


def _outside(name, negative, overflow):
    if overflow == "nan":
        return "nan"
    if overflow == "inf":
        return -math.inf if negative else math.inf
    if negative and name == "float8_e8m0fnu":
        return magnitudes(name)[0]
    largest = magnitudes(name, negative)[-2]
    return -largest if negative else largest


def check(got, exact, name, rounding="nearest_even", overflow="saturate", random=None):
    """Compare codes with what exact arithmetic says of numbers, signs of zeros too."""
    got = np.asarray(got)
    assert got.dtype == dtype_of(name)
    values = got.astype(np.float64).tolist()
    random = [0] * len(values) if random is None else random.tolist()
    for value, number, r in zip(values, exact, random, strict=True):
        want = rounded(number, name, rounding, overflow, r)
        if want == "nan":
            without = name in INTEGERS or name == "float4_e2m1fn"
            assert value == 0 if without else math.isnan(value), (number, value)
            continue
        assert value == want, (number, value, want)
        if want == 0 and name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"):
            assert math.copysign(1, value) == math.copysign(1, want), number
