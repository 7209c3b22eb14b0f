"""Oracle and data of sort and topk: Python's own stable sort of exact values."""

import ml_dtypes  # noqa: F401
import numpy as np

NANS = ("last", "first", "largest", "smallest")
NARROW = ("bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16")
FORMATS = (*NARROW, "int32", "uint32", "float32")


def permutation(values, descending=False, nan="last"):
    """The stable order of a list of values."""
    exact = [v.item() if hasattr(v, "item") else v for v in values]
    exact = [float(v) if isinstance(v, float) else int(v) for v in exact]
    front = nan == "first" or (nan == "largest" and descending)
    front = front or (nan == "smallest" and not descending)

    def rank(i):
        v = exact[i]
        if v != v:
            return (0 if front else 2, 0)
        return (1, -v if descending else v)

    return sorted(range(len(exact)), key=rank)


def argsort(x, axis, **rules):
    """The permutation of every fibre."""
    x = np.moveaxis(np.asarray(x), axis, -1)
    rows = [
        permutation(list(row), **rules) for row in x.reshape(-1, max(x.shape[-1], 1))
    ]
    return np.moveaxis(np.array(rows, np.int32).reshape(x.shape), -1, axis)


def anything(rng, shape, dtype):
    """Random bits of a format, a third of them drawn from a few hard values."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    count = int(np.prod(shape, dtype=int))
    found = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        hard = np.array([info.min, info.max, 0, 1], dtype)
    else:
        word = np.dtype(f"u{dtype.itemsize}")
        low = np.array([1], word).view(dtype)  # the least subnormal
        named = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float64)
        quiet = named.astype(dtype)
        hard = np.concatenate([quiet, -quiet, low, -low])
    return np.where(rng.random(shape) < 1 / 3, rng.choice(hard, shape), found)


def image(x):
    """The bits of an array, to compare NaNs and zeros by."""
    x = np.ascontiguousarray(x)
    return x if x.dtype.kind in "biu" else x.view(f"u{x.dtype.itemsize}")


def same(got, want):
    """Equal dtype, shape and bits."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(image(got), image(want))
