"""mma on whole arrays: matrix products on the tensor cores, the seed and epilogue fused.

A bare product is left to XLA's own dot. These kernels are for what it does in more passes
or not at all: a seed, an epilogue and a narrowing in one read and one write, sums
promoted to float32, float32 inputs in bfloat16 parts, and chains in the order of K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import _jax_private
from jaxtile.pallas_lowering.mosaic_gpu import BACKEND, _chain_gemm, _gemm, _region
from jaxtile.policy import PRECISIONS, MmaPolicy
from jaxtile.primitives import _contract
from jaxtile.primitives._contract import Dims
from jaxtile.primitives._scalar import convert, elementwise
from jaxtile.primitives.mma import mma_p, unpack

_F32 = np.dtype(np.float32)
_HALVES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_OUTS = (_F32, *_HALVES)
_PARTED = ("bf16x3", "bf16x6")
# The tensor cores take these as they are, with K as the last axis of both. Their own sums
# keep 14 bits only, so that they serve where sums are promoted.
_EIGHTHS = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
# Copies move whole rows of so many bytes; other sizes are padded with zeros.
_ROW_BYTES = 128
# Rows lie by so many in shared memory.
_TILED = 8
_LEAST = 128
# Multiprocessors of an H200, and the share of them that the last wave of thin tiles keeps.
_WAVE, _SHARE = 132, 0.8

# Two warpgroups fill the tensor cores by 128 x 128 each; with a seed's strips one block
# less fits. Registers hold two sums of 64 x 128, not of 128 x 128.
_PLAIN = _gemm.Plan((128, 128), True, 64, 4, 64)
_SEEDED = _gemm.Plan((128, 128), True, 64, 3, 32)
# Of a result with a thin side the operands' reading is all: many CTAs, each with much of
# it under way.
_THIN = _gemm.Plan((64, 64), True, 128, 6, 64, groups=1)
_PROMOTED = {
    64: _gemm.Plan((64, 128), False, 64, 5, 32, True),
    128: _gemm.Plan((64, 128), False, 128, 3, 32, True),
}


def _is_thin(sizes: Sequence[int], policy: MmaPolicy) -> bool:
    """Whether a result of (batch, m, n) is a row of tiles, about one for each CTA."""
    batch, m, n = sizes
    side = _THIN.tile[0]
    tiles = batch * -(-max(m, n) // side)
    full = tiles >= _SHARE * _WAVE * -(-tiles // _WAVE)
    return min(m, n) <= side and full and policy.promote_every is None


def _plan(policy: MmaPolicy, seeded: bool, dtype, out, sizes) -> _gemm.Plan:
    """The plan of a product of operands of a dtype, with a result of (batch, m, n)."""
    if _is_thin(sizes, policy):
        plan = replace(_THIN, steps=5) if seeded else _THIN
    elif policy.promote_every is None:
        plan = _SEEDED if seeded else _PLAIN
    else:
        plan = _PROMOTED[policy.promote_every]
    if np.dtype(dtype).itemsize == 1:
        plan = replace(plan, steps=5)
    elif seeded and plan.k == 128 and plan.promote:
        plan = replace(plan, steps=2)  # the strips of the seed take a block's room
    return plan if np.dtype(out).itemsize < 4 else replace(plan, strip=32)


def _groups(dims: Dims) -> list[tuple[int, ...]]:
    """The labels of batch, M, N and K, each in the result's (K: the first's) order."""
    batch = tuple(d for d in dims.out if d in dims.batch)
    m = tuple(d for d in dims.out if d in dims.a and d not in batch)
    n = tuple(d for d in dims.out if d in dims.b and d not in batch)
    return [batch, m, n, dims.contracted]


def _parts(policy: MmaPolicy) -> tuple[tuple[tuple[int, int], ...], int]:
    """The pairs of parts, the smallest products first, and where the largest begins."""
    if policy.input_precision not in _PARTED:
        return ((0, 0),), 0
    _, count, most = PRECISIONS[policy.input_precision]
    pairs = [(i, j) for i in range(count) for j in range(count) if i + j <= most]
    pairs.sort(key=sum, reverse=True)
    return tuple(pairs), len(pairs) - 1


def _refuse_inputs(a, b, policy: MmaPolicy, acc) -> str | None:
    parted = policy.input_precision in _PARTED
    if parted and (a.dtype, b.dtype) != (_F32, _F32):
        return f"{policy.input_precision} takes float32 inputs; leave the name out"
    if parted and policy.promote_every is None:
        return (
            "the tensor cores' own sums would cost what the parts gain; add "
            "promote_every=128"
        )
    if not parted and policy.input_precision not in (None, "f32"):
        return f"{policy.input_precision} has no kernel; leave it to the reference"
    if not parted and _contract.carrier(a.dtype, b.dtype, acc) not in _HALVES:
        return (
            f"{a.dtype} x {b.dtype} has no tensor core kernel that rounds no input; ask "
            'for input_precision="bf16x6"'
        )
    return None


def _refuse(*avals, roles, policy, acc, seeded, region, out):
    a, b, _, scalars = unpack(avals, seeded)
    if _jax_private.MOSAIC_GPU_LINE < (0, 11):
        return "its pipelines need jax 0.11 or newer; upgrade jax"
    if acc != _F32:
        return f"it sums in float32, not {acc}; leave it to the reference"
    chain = _contract.is_chain(policy, acc)
    reason = None if chain else _refuse_inputs(a, b, policy, acc)
    if reason is not None:
        return reason
    if policy.promote_every not in (None, *_PROMOTED):
        return f"promote_every is one of {tuple(_PROMOTED)} in the kernel"
    if 0 in (*a.shape, *b.shape):
        return (
            "there is nothing to launch for an empty array; leave it to the reference"
        )
    if np.dtype(out) not in _OUTS:
        return f"the result narrows to {out}; cast it outside"
    if scalars:
        return "the epilogue closes over traced scalars; add them as part of the seed"
    return None if region is None else _refuse_region(region, acc)


def _refuse_region(region, acc) -> str | None:
    z = jax.ShapeDtypeStruct((), acc)
    closed = jax.make_jaxpr(lambda z: elementwise(region.fn, z))(z)
    return _region.lacks(closed)


def _slower(*avals, roles, policy, acc, seeded, region, out):
    a, b, *_ = avals
    bare = not seeded and region is None and policy.promote_every is None
    bare = bare and not _contract.is_chain(policy, acc)
    sizes = roles.sizes(a.shape, b.shape)
    batch, m, n = (math.prod(sizes[d] for d in g) for g in _groups(roles)[:3])
    if _is_thin((batch, m, n), policy) and not _contract.is_chain(policy, acc):
        return None
    if bare and np.dtype(out) == acc:
        return (
            "XLA's own dot takes one pass too; insist on the kernel by implementation="
        )
    if min(m, n) < _LEAST:
        return f"a tile of {_LEAST} is more than the result's {m} x {n}"
    return None


def _carrier(a, b, policy: MmaPolicy):
    """The format that the tensor cores read."""
    if a == b and a in _EIGHTHS and policy.promote_every == 128:
        return a
    return _contract.carrier(a, b, _F32)


def _arranged(x, labels: Sequence[int], batch, free, k, minor_k: bool):
    """(x as (batch, free, k) or (batch, k, free), whether K is last)."""
    minor_k = minor_k or not free or labels[-1] in k
    order = (*batch, *free, *k) if minor_k else (*batch, *k, *free)
    x = lax.transpose(x, [labels.index(d) for d in order])
    ends = np.cumsum([0, len(batch), len(order) - len(batch)])
    split = ends[1] + len(free if minor_k else k)
    shape = [
        math.prod(x.shape[i:j])
        for i, j in ((0, ends[1]), (ends[1], split), (split, ends[2]))
    ]
    return x.reshape(shape), minor_k


def _k_first(x, labels: Sequence[int], groups, free, policy):
    """An operand of chains as (batch, k, free), padded."""
    x = _contract.chain_input(x, policy, _F32)
    order = [groups[0], groups[3], groups[free]]
    x = lax.transpose(x, [labels.index(d) for g in order for d in g])
    sizes = dict(zip((d for g in order for d in g), x.shape, strict=True))
    x = x.reshape([math.prod(sizes[d] for d in g) for g in order])
    k, n = (
        -s % m
        for s, m in zip(x.shape[1:], (_chain_gemm.BLOCK, _chain_gemm.TILE), strict=True)
    )
    return jnp.pad(x, [(0, 0), (0, k), (0, n)]) if k or n else x


def _columns(dtype) -> int:
    return _ROW_BYTES // np.dtype(dtype).itemsize


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x, rows: int, columns: int):
    """Zeros up to multiples of sizes of the last two axes."""
    more = [-s % m for s, m in zip(x.shape[-2:], (rows, columns), strict=True)]
    widths = [(0, 0)] * (x.ndim - 2) + [(0, n) for n in more]
    return jnp.pad(x, widths) if any(more) else x


def _tiled(x, dtype):
    """As copies take it: what lies beyond its rows they fill with zeros."""
    return _padded(x, min(_TILED, x.shape[-2]), _columns(dtype))


class _Side(NamedTuple):
    """An operand as the launch takes it: its parts, and whether K is last."""

    parts: jax.Array
    minor_k: bool

    @classmethod
    def of(cls, x, labels, groups, free, policy, other):
        """The operand x, whose free labels are `groups[free]`."""
        to = _carrier(x.dtype, other, policy)
        whole = to in _EIGHTHS
        x, minor_k = _arranged(x, labels, groups[0], groups[free], groups[3], whole)
        if policy.input_precision in _PARTED:
            parts = _contract.parts_of(x, policy)
        else:
            parts = [x if whole else _contract.to_carrier(x, to)]
        return cls(jnp.stack([_tiled(p, p.dtype) for p in parts]), minor_k)

    @property
    def free(self) -> int:
        """The size beside K."""
        return self.parts.shape[2 if self.minor_k else 3]

    @property
    def k(self) -> int:
        """The size of K, padded where it is last."""
        return self.parts.shape[3 if self.minor_k else 2]


def _multiprocessors() -> int:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices("cuda")[0].core_count if device is None else device.num_cores


@BACKEND.runs(mma_p, _refuse, _slower)
def run(*operands, roles, policy, acc, seeded, region, out):
    """`mma_p` on whole arrays."""
    a, b, c, _ = unpack(operands, seeded)
    groups = _groups(roles)
    sizes = roles.sizes(a.shape, b.shape)
    batch, m, n, _ = (math.prod(sizes[d] for d in g) for g in groups)
    order = [d for g in groups[:3] for d in g]
    if c is not None:
        c = lax.transpose(c, [roles.out.index(d) for d in order]).reshape(batch, m, n)

    def finish(z, *seed):
        z = seed[0] + z if seed else z
        if region is not None:
            (z,) = jax.tree.leaves(elementwise(region.fn, z))
        return [convert(z, out)]

    launch = _chains if _contract.is_chain(policy, acc) else _sums
    z = launch(a, b, c, roles, groups, policy, np.dtype(out), finish)
    z = z[:, :m, :n].reshape([sizes[d] for d in order])
    return [lax.transpose(z, [order.index(d) for d in roles.out])]


def _chains(a, b, c, roles, groups, policy, out, finish):
    """The padded result (batch, m, n), each element a chain."""
    count = math.prod(a.shape[roles.a.index(d)] for d in groups[3])
    left = _k_first(a, roles.a, groups, 1, policy)
    right = _k_first(b, roles.b, groups, 2, policy)
    c = None if c is None else _padded(c, _chain_gemm.TILE, _chain_gemm.TILE)
    return _chain_gemm.multiply(left, right, c, count, out, finish)


def _sums(a, b, c, roles, groups, policy, out, finish):
    """The padded result (batch, m, n), summed in any order."""
    left = _Side.of(a, roles.a, groups, 1, policy, b.dtype)
    right = _Side.of(b, roles.b, groups, 2, policy, a.dtype)
    dtype = left.parts.dtype
    c = None if c is None else _tiled(c, dtype)
    pairs, first_high = _parts(policy)
    n, k = _rounded(right.free, _columns(dtype)), max(left.k, right.k)
    product = _gemm.Product(
        left.parts.shape[1], left.free, n, k, left.minor_k, right.minor_k, pairs,
        first_high, c is not None, out,
    )  # fmt: skip
    sizes = (product.batch, product.m, product.n)
    plan, cores = _plan(policy, c is not None, dtype, out, sizes), _multiprocessors()
    return _gemm.multiply(left.parts, right.parts, c, product, plan, finish, cores)
