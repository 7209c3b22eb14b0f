"""Calls of quantize and decode inside kernels: to lower, to simulate, to run."""

import jax.numpy as jnp
import numpy as np

import codes
import jaxtile as jt
import targets
from jaxtile.primitives._storage import bind_decode, quantize_p

F32 = np.dtype(np.float32)
HELD = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
SHAPES = {"mosaic_gpu": (128, 8), "triton": (16, 64), "tpu": (32, 128)}
PLAIN = dict(rounding="nearest_even", overflow="saturate")


def _quantize(name, **named):
    return lambda x: jt.quantize(x, name, **named)


def _stochastic(name, **named):
    named["rounding"] = "stochastic"
    return lambda x, bits: jt.quantize(x, name, bits=bits, **named)


def _scaled(name, dtype=None):
    params = dict(PLAIN, format=name, scaled=True, random=False, dtype=dtype)
    return lambda x, s: quantize_p.bind(x, s, **params)[0]


def _decoded(dtype, scaled=False):
    if scaled:
        return lambda x, s: bind_decode(x, s, dtype=dtype)[0]
    return lambda x: jt.decode(x, dtype)


def _data(kind, shape, seed=0):
    """Values that meet every branch: boundaries, every size, special ones."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    if kind == "bits":
        return rng.integers(0, 2**32, shape, np.uint32)
    if kind == "scale":
        return np.exp(rng.normal(0, 2, shape)).astype(F32)
    if kind in codes.ALL:
        return rng.choice(codes.every_code(kind), shape)
    if kind == "int32":
        wide = rng.integers(-(2**31), 2**31, shape, np.int32)
        return wide >> rng.integers(0, 32, shape, np.int32)
    near = codes.boundaries("float8_e4m3fn")
    every = np.concatenate([near, codes.samples(size)])
    with np.errstate(over="ignore", invalid="ignore"):
        return rng.permutation(every)[:size].reshape(shape).astype(jnp.dtype(kind))


CALLS = {
    "e4m3fn": (_quantize("float8_e4m3fn", overflow="nan"), "float32"),
    "e5m2": (_quantize("float8_e5m2", overflow="inf", rounding="up"), "bfloat16"),
    "int8": (_quantize("int8", rounding="down"), "float32"),
    "integers": (_quantize("float8_e5m2"), "int32"),
    "e4m3fnuz-values": (_quantize("float8_e4m3fnuz", out_dtype=F32), "float32"),
    "e8m0-values": (_quantize("float8_e8m0fnu", out_dtype=F32), "float32"),
    "int4-values": (_quantize("int4", out_dtype=F32), "float32"),
    "float4-values": (_quantize("float4_e2m1fn", out_dtype=F32), "float32"),
    "stochastic": (_stochastic("float8_e4m3fn"), "float32", "bits"),
    "scaled": (_scaled("float8_e4m3fn"), "float32", "scale"),
    "scaled-values": (_scaled("float4_e2m1fn", F32), "float32", "scale"),
    "decode-e4m3fn": (_decoded(F32), "float8_e4m3fn"),
    "decode-e5m2": (_decoded(jnp.bfloat16), "float8_e5m2"),
    "decode-int8": (_decoded(F32), "int8"),
    "decode-scaled": (_decoded(F32, True), "float8_e4m3fn", "scale"),
}


def kernel(name, backend):
    """A call's body, the specs of its result and operands, the operands, and the result.

    The result is the reference's, eager on the default device.
    """
    call, *kinds = CALLS[name]
    operands = [_data(k, SHAPES[backend], i) for i, k in enumerate(kinds)]
    want = np.asarray(call(*map(jnp.asarray, operands)))

    def body(*refs):
        refs[-1][...] = call(*(ref[...] for ref in refs[:-1]))

    out = targets.spec(want.shape, want.dtype)
    return body, out, [targets.spec(v.shape, v.dtype) for v in operands], operands, want
