"""Reference realisations of the mma policies: products of two arrays by labels.

A label is a number that stands for one axis wherever it occurs. K, what the sum runs over,
are the labels of both operands that the result lacks, in the first operand's order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile import formats
from jaxtile.policy import PRECISIONS, MmaPolicy
from jaxtile.primitives import _fold
from jaxtile.primitives._scalar import convert, evaluate

# Steps written out in one loop body of a chain: they share the accumulator's loads.
_UNROLL = 8


@dataclass(frozen=True)
class Dims:
    """The labels of an mma's axes; the first operand's are 0, 1, 2, ...

    Args:
        a, b: of the operands.
        out: of the result and the seed.
        across: on an explicit mesh the sum may cross devices: a cotangent's, whose
            sharding is known.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    across: bool = False

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter((self.a, self.b, self.out))

    @property
    def contracted(self) -> tuple[int, ...]:
        """K, in the order of the sum."""
        return tuple(d for d in self.a if d in self.b and d not in self.out)

    @property
    def batch(self) -> tuple[int, ...]:
        """The labels of all three."""
        return tuple(d for d in self.a if d in self.b and d in self.out)

    def sizes(self, a: Sequence, b: Sequence) -> dict[int, Any]:
        """The size of each label, by the operands' shapes."""
        return {
            **dict(zip(self.b, b, strict=True)),
            **dict(zip(self.a, a, strict=True)),
        }

    def shape(self, a: Sequence, b: Sequence) -> tuple:
        """The result's shape, by the operands'."""
        sizes = self.sizes(a, b)
        return tuple(sizes[d] for d in self.out)


def numbered(a: Sequence, b: Sequence, out: Sequence, across: bool = False) -> Dims:
    """`Dims` of any hashable labels."""
    number = {d: i for i, d in enumerate(dict.fromkeys((*a, *b)))}
    a, b, out = (tuple(number[d] for d in each) for each in (a, b, out))
    return Dims(a, b, out, across)


def is_narrow(acc) -> bool:
    """A float accumulator that each sum has to be rounded to."""
    return jnp.issubdtype(acc, jnp.floating) and np.dtype(acc).itemsize < 4


def is_chain(policy: MmaPolicy, acc) -> bool:
    """The order shows in the bits, and is kept; integers wrap in any order alike."""
    if not jnp.issubdtype(acc, jnp.floating):
        return False
    return not policy.allow_reassociation or is_narrow(acc)


def contract(a, b, c, dims: Dims, policy: MmaPolicy, acc, platform: str):
    """The raw accumulator: c + sum over K of a * b."""
    if any(_is_zero(a.shape[d]) for d in dims.contracted):
        return jnp.zeros(dims.shape(a.shape, b.shape), acc) if c is None else c
    if is_chain(policy, acc):
        return chain(a, b, c, dims, policy, acc)
    floats = jnp.issubdtype(acc, jnp.floating)
    every = policy.promote_every if floats else None
    run = functools.partial(
        products, policy=policy, acc=acc, loose=_tf32_units(platform)
    )
    z = run(a, b, dims) if every is None else _promoted(run, a, b, dims, every)
    return z if c is None else c + z


def _tf32_units(platform: str) -> Callable:
    """On CUDA the default precision is TF32's, in which rounded parts lose nothing."""
    return lambda dtype, rounded: rounded and platform == "cuda"


def _is_zero(size) -> bool:
    return isinstance(size, int) and size == 0  # a symbolic size is not


def carrier(a, b, acc) -> np.dtype:
    """The narrowest format that holds both inputs and whose products fit `acc`."""
    narrow = {
        "float32": ("bfloat16", "float16"),
        "int32": ("int8",),
        "uint32": ("uint8",),
    }
    for name in narrow.get(np.dtype(acc).name, ()):
        if formats.embeds(a, name) and formats.embeds(b, name):
            return jnp.dtype(name)
    return np.dtype(acc)


def to_carrier(x, dtype):
    """An input in the carrier's format."""
    # Compilers lose float32 subnormals on the way to float64.
    if formats.embeds(x.dtype, dtype) and dtype != jnp.float64:
        return x.astype(dtype)
    return convert(decode(x), dtype)


def decode(x):
    """A storage format in the one that holds it exactly; others as they are."""
    wide = formats.decoded(x.dtype)
    return x if x.dtype == wide else x.astype(wide)


def parts_of(x, policy: MmaPolicy) -> list:
    """The parts of an input that a named precision multiplies, the largest first."""
    fraction, count, _ = PRECISIONS[policy.input_precision or "f32"]
    half = jnp.dtype(jnp.bfloat16)
    if formats.embeds(x.dtype, half):
        return [to_carrier(x, half)]
    part = half if fraction == 7 else jnp.dtype(jnp.float32)
    if fraction >= 10 and x.dtype == jnp.float16:
        return [x.astype(part)]
    rest, parts = to_carrier(x, jnp.float32), []
    for _ in range(count):
        near = _nearest(rest, fraction) if fraction < 23 else rest
        parts.append(near.astype(part))
        # Of an infinity nothing is left, and not NaN.
        rest = jnp.where(jnp.isfinite(near), rest - near, jnp.zeros_like(near))
    return parts


def _nearest(x, fraction: int):
    """float32 rounded to so many fraction bits, ties to even; finite stays finite."""
    drop = np.uint32(23 - fraction)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    keep = np.uint32(0xFFFFFFFF) << drop
    even = (bits >> drop) & np.uint32(1)
    near = (bits + even + ((np.uint32(1) << (drop - np.uint32(1))) - 1)) & keep
    top = np.uint32(0x7F800000)
    near = jnp.where(near & top == top, bits & keep, near)
    near = lax.bitcast_convert_type(near, jnp.float32)
    return jnp.where(jnp.isfinite(x), near, x)


def products(a, b, dims: Dims, *, policy: MmaPolicy, acc, loose: Callable):
    """sum over K of a * b in any order, the inputs as the policy's precision has them.

    `loose(dtype, rounded)` says whether a dot of the default precision loses nothing of
    inputs of that format, which a named precision has rounded already or not.
    """
    dot = functools.partial(_dot, dims=dims, acc=acc, loose=loose)
    name = policy.input_precision or "f32"
    if name == "f32" or not jnp.issubdtype(acc, jnp.floating):
        to = carrier(a.dtype, b.dtype, acc)
        return dot(to_carrier(a, to), to_carrier(b, to), False)
    most = PRECISIONS[name][2]
    left, right = parts_of(a, policy), parts_of(b, policy)
    high, low = _mixed(dot, left[0], right[0]), None
    pairs = [(i, j) for i in range(len(left)) for j in range(len(right))]
    for i, j in sorted(pairs, key=sum, reverse=True):
        if 0 < i + j <= most:
            small = _mixed(dot, left[i], right[j])
            low = small if low is None else low + small
    if low is None:
        return high
    # inf * 0 of a small part is no NaN of the whole product.
    return high + jnp.where(jnp.isfinite(low), low, jnp.zeros_like(low))


def _mixed(dot, x, y):
    """A dot of two parts, each rounded already."""
    to = x.dtype if x.dtype == y.dtype else jnp.dtype(jnp.float32)
    return dot(x.astype(to), y.astype(to), True)


def _dot(x, y, rounded: bool, *, dims: Dims, acc, loose: Callable):
    """jax's own dot, its precision the highest where an input might lose digits."""
    enough = loose(x.dtype, rounded)
    z = lax.dot_general(
        x,
        y,
        (_axes(dims, dims.contracted), _axes(dims, dims.batch)),
        precision=lax.Precision.DEFAULT if enough else lax.Precision.HIGHEST,
        preferred_element_type=np.dtype(acc),
    )
    free = [d for side in (dims.a, dims.b) for d in side if d in dims.out]
    have = [*dims.batch, *(d for d in free if d not in dims.batch)]
    return lax.transpose(z, [have.index(d) for d in dims.out])


def _axes(dims: Dims, group: Sequence[int]) -> tuple[list[int], list[int]]:
    """The axes of a and of b that some labels are."""
    return [dims.a.index(d) for d in group], [dims.b.index(d) for d in group]


def _flat(x, labels: Sequence[int], k: Sequence[int]):
    """(x with K as one first axis, its other labels)."""
    rest = [d for d in labels if d not in k]
    moved = lax.transpose(x, [labels.index(d) for d in (*k, *rest)])
    count = math.prod(x.shape[labels.index(d)] for d in k)
    return moved.reshape(count, *moved.shape[len(k) :]), rest


def _promoted(run: Callable, a, b, dims: Dims, every: int):
    """Groups of `every` products, their sums added in true floats, in the order of K."""
    k = dims.contracted
    if len(k) != 1:
        (a, la), (b, lb) = _flat(a, dims.a, k), _flat(b, dims.b, k)
        dims, k = numbered(("k", *la), ("k", *lb), dims.out), (0,)
    axes = dims.a.index(k[0]), dims.b.index(k[0])
    count = a.shape[axes[0]]

    def group(start, size):
        pieces = [
            lax.dynamic_slice_in_dim(v, start, size, axis)
            for v, axis in zip((a, b), axes, strict=True)
        ]
        return run(*pieces, dims)

    whole, rest = divmod(count, every)
    if not whole:
        return group(0, count)
    total = lax.fori_loop(
        1, whole, lambda i, z: z + group(i * every, every), group(0, every)
    )
    return total + group(whole * every, rest) if rest else total


def chain(a, b, c, dims: Dims, policy: MmaPolicy, acc):
    """One product a step, in the order of K, from the seed: nothing fuses or regroups."""
    k = dims.contracted
    shape = dims.shape(a.shape, b.shape)
    a, b = (chain_input(v, policy, acc) for v in (a, b))
    sides = []
    for v, labels in ((a, dims.a), (b, dims.b)):
        v, rest = _flat(v, labels, k)
        order = [d for d in dims.out if d in rest]
        v = lax.transpose(v, [0, *(1 + rest.index(d) for d in order)])
        place = [dims.out.index(d) for d in order]
        sides.append((v, place))

    def body(i, z):
        x, y = (lax.broadcast_in_dim(_at(v, i), shape, place) for v, place in sides)
        return step(z, x, y)

    # -0.0 is the identity of a float sum, so that the first product keeps its bits.
    start = jnp.full(shape, -0.0, acc) if c is None else c
    return _fold.steps(sides[0][0].shape[0], body, start, _UNROLL)


def _at(v, i):
    return lax.dynamic_index_in_dim(v, i, 0, keepdims=False)


def step(z, x, y):
    """One step of a chain: the product rounds, then the sum."""
    return evaluate(_step, z, x, y)


def _step(z, x, y):
    return z + x * y


def chain_input(x, policy: MmaPolicy, acc):
    """An input of a chain in the accumulator's format, rounded as the policy names."""
    if policy.input_precision not in (None, "f32"):
        (x,) = parts_of(x, policy)
    return to_carrier(x, acc)
