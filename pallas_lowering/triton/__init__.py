"""Pallas Triton: `pl.pallas_call` kernels for CUDA, deprecated upstream from jax 0.11."""

import math

import jax.numpy as jnp
from jax import lax

from jaxtile import _jax_private
from jaxtile.pallas_lowering._elementwise import (
    Traits,
    define_elementwise,
    negate,
    propagate_nan,
)
from jaxtile.pallas_lowering._registry import Backend
from jaxtile.pallas_lowering._storage import define_storage
from jaxtile.primitives import _scalar

BACKEND = Backend("triton", _jax_private.triton())


def _shape(aval):
    size = math.prod(aval.shape)
    if size & (size - 1) or size == 0:
        return (
            f"shape {aval.shape} is not of powers of two, and Triton has no other "
            "tensors; pad the block and pass where="
        )
    return None


def _divide(a, b):
    """Triton's own float32 quotient is off by up to 2 ulp."""
    return _scalar._divide(a, b) if a.dtype == jnp.float32 else lax.div(a, b)


def _clz(x):
    """By halves: Triton on CUDA has no instruction for math.ctlz."""
    width = x.dtype.itemsize * 8
    one = x.dtype.type
    count = jnp.full_like(x, 0)
    step = width // 2
    while step:
        short = lax.shift_right_logical(x, jnp.full_like(x, width - step)) == one(0)
        x = jnp.where(short, x << one(step), x)
        count = jnp.where(short, count + one(step), count)
        step //= 2
    return count + (x == one(0)).astype(x.dtype)


TRAITS = Traits(
    formats=frozenset(
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 "
        "float32 float64".split()
    ),
    other_formats="cast it outside the kernel",
    lacks={},
    rewrites={
        "div": _divide,
        "neg": negate,
        "clz of uint32": _clz,
        "clz of uint64": _clz,
        "max": propagate_nan(lax.max),
        "min": propagate_nan(lax.min),
        "max of bool": lax.bitwise_or,
        "min of bool": lax.bitwise_and,
    },
    shape=_shape,
    # Single instructions, and calls that begin with explicit multiply-adds of x as a
    # factor. A product of products is looked at by what follows it.
    opaque=frozenset("mul exp exp2 tanh rsqrt sqrt lt le gt ge eq ne".split()),
)
define_elementwise(BACKEND, TRAITS)
define_storage(BACKEND, TRAITS, "float8_e4m3fn float8_e5m2 int8 uint8".split())


from jaxtile.pallas_lowering.triton import exchange as exchange  # noqa: E402
from jaxtile.pallas_lowering.triton import mma as mma  # noqa: E402
from jaxtile.pallas_lowering.triton import reduce as reduce  # noqa: E402
from jaxtile.pallas_lowering.triton import scan as scan  # noqa: E402
from jaxtile.pallas_lowering.triton import sort as sort  # noqa: E402
