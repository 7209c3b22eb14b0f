r"""reindex: y[j] = x[f(j)] for affine f, with a value for what lies outside.

    y[j] = fill_g    for the first guard g that j does not pass
         = x[f(j)]   where it passes all of them

A guard is a conjunction of 0 <= c(j) < n for affine c. A chain of reindexes is one: its
coordinates substituted, a guard and a fill for each link, the outermost first. Where all
guards hold, f(j) lies in x. Bits are moved, never computed with.

Operands: x, then a fill for each guard, which has the leading dims of the result, often
none. Coordinate maps that are not affine are a `gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.primitives import _slices
from jaxtile.primitives._affine import Affine
from jaxtile.primitives._bits import from_bits, place_dtype, to_bits
from jaxtile.primitives._define import Out, define, zero_tangent
from jaxtile.primitives._moves import add_spec, bind_scatter, pick, sum_outside
from jaxtile.primitives._operands import require_whole
from jaxtile.primitives._tangent import float_tangent, is_float, is_zero

Guard = tuple[tuple[Affine, int], ...]


def _abstract(x, *fills, coordinates, guards, shape):
    if len(coordinates) != x.ndim or len(fills) != len(guards):
        raise TileShapeError(
            message(
                "reindex",
                expected=f"a coordinate for each axis of {x.shape}, a fill for each "
                f"of {len(guards)} guards",
                got=f"{len(coordinates)} and {len(fills)}",
                way_out="jaxtile.reindex binds them.",
            )
        )
    for fill in fills:
        if fill.dtype != x.dtype or fill.shape != shape[: fill.ndim]:
            raise TileTypeError(
                message(
                    "reindex",
                    expected=f"a fill of {x.dtype.name} and the leading sizes of {shape}",
                    got=f"{fill.dtype.name} of shape {fill.shape}",
                    way_out="Pass a scalar of x's dtype.",
                )
            )
    kept = _kept(x.shape, coordinates, shape)
    moved = [d for d in range(x.ndim) if d not in kept.values()]
    summed = any(len(c.terms) > 1 for c in coordinates)
    require_whole("reindex", x, tuple(range(x.ndim)) if summed else tuple(moved))
    dims = tuple(kept.get(k, -1) for k in range(len(shape)))
    return [Out(tuple(shape), x.dtype, dims)]


def _kept(source, coordinates, shape) -> dict[int, int]:
    """The axes of the result that are whole axes of x, and which."""
    kept: dict[int, int] = {}
    for d, c in enumerate(coordinates):
        if len(c.terms) == 1 and c.offset == 0:
            (k,) = c.terms
            straight = c.coefficients[k] == 1 and shape[k] == source[d]
            others = [e for i, e in enumerate(coordinates) if i != d]
            if straight and not any(k in e.terms for e in others):
                kept[k] = d
    return kept


def _box(guard: Guard, box: Sequence[tuple[int, int]]) -> list | None:
    """The part of a box that passes a guard, or None where that is no box."""
    box = list(box)
    for c, size in guard:
        ends = [v for k in c.terms for v in box[k]]
        if not all(isinstance(v, int) for v in (c.offset, size, *ends)):
            return None  # a symbolic size has no least of two ends
        if not c.terms:
            if not 0 <= c.offset < size:
                if not box:
                    return None  # one place cannot be none
                box = [(low, low) for low, _ in box]
            continue
        if len(c.terms) > 1:
            return None
        k = next(iter(c.terms))
        a, b = c.coefficients[k], c.offset
        # 0 <= a j + b < size, solved for j.
        ends = (
            (-(b // a), (size - 1 - b) // a)
            if a > 0
            else (-((size - 1 - b) // -a), b // -a)
        )
        low, high = box[k]
        low, high = max(low, ends[0]), min(high, ends[1] + 1)
        box[k] = (low, high) if low < high else (box[k][0], box[k][0])
    return box


def _boxes(guards: Sequence[Guard], shape: Sequence[int]) -> list | None:
    """What passes no guard yet, the first, the first two, and so on; None: no boxes."""
    boxes: list = [[(0, n) for n in shape]]
    for guard in guards:
        box = _box(guard, boxes[-1])
        if box is None:
            return None
        boxes.append(box)
    return boxes


def _sizes(box) -> list[int]:
    return [high - low for low, high in box]


def _core(coordinates, source, box):
    """The plan of the coordinates in a box; None where it needs a gather or is empty."""
    moved = [
        Affine(
            c.offset
            + sum(a * low for a, (low, _) in zip(c.coefficients, box, strict=True)),
            c.coefficients,
        )
        for c in coordinates
    ]
    return _slices.plan(moved, source, _sizes(box))


def _value(c: Affine, shape: Sequence[int]) -> Any:
    """A coordinate at every place of the result."""
    low, high = c.range(shape)
    dtype = place_dtype(-low, high, *shape)
    total = jnp.full(tuple(shape), c.offset, dtype)
    for k in c.terms:
        total += c.coefficients[k] * lax.broadcasted_iota(dtype, tuple(shape), k)
    return total


def passes(guard: Guard, shape: Sequence[int]) -> Any:
    """Where a guard holds."""
    ok = jnp.ones(tuple(shape), bool)
    for c, size in guard:
        value = _value(c, shape)
        ok &= (value >= 0) & (value < size)
    return ok


def flat_place(coordinates: Sequence, source: Sequence[int], ok: Any, shape) -> Any:
    """The place in x laid out flat, -1 where `ok` is false."""
    flat = jnp.zeros(tuple(shape), place_dtype(*source, _size(source)))
    for c, n in zip(coordinates, source, strict=True):
        flat = flat * n + _value(c, shape).astype(flat.dtype)
    return flat if ok is None else jnp.where(ok, flat, -1)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _wide(fill, shape):
    return lax.broadcast_in_dim(fill, tuple(shape), tuple(range(fill.ndim)))


def _reference(x, *fills, coordinates, guards, shape, platform=""):
    bits, values = to_bits(x), [to_bits(f) for f in fills]
    if 0 in shape:
        return [from_bits(jnp.zeros(shape, bits.dtype), x.dtype)]
    boxes = _boxes(guards, shape)
    if boxes is not None:
        found = _sliced(bits, values, coordinates, boxes)
        if found is not None:
            return [from_bits(found, x.dtype)]
    return [from_bits(_gathered(bits, values, coordinates, guards, shape), x.dtype)]


def _sliced(bits, fills, coordinates, boxes):
    """Slices inside, pads around."""
    sizes = _sizes(boxes[-1])
    if 0 in sizes:
        y = jnp.zeros(sizes, bits.dtype)
    else:
        core = _core(coordinates, bits.shape, boxes[-1])
        if core is None:
            return None
        y = core.run(bits)
    shape = tuple(_sizes(boxes[0]))
    for fill, outer, inner in zip(
        fills[::-1], boxes[-2::-1], boxes[:0:-1], strict=True
    ):
        around = [
            (i[0] - o[0], o[1] - i[1], 0) for o, i in zip(outer, inner, strict=True)
        ]
        if fill.ndim == 0:
            y = lax.pad(y, fill, around)
            continue
        # The fill differs from place to place: pad, and then choose.
        there = lax.pad(jnp.ones(y.shape, bool), jnp.asarray(False), around)
        starts, stops = zip(*outer, strict=True)
        other = lax.slice(_wide(fill, shape), starts, stops)
        y = jnp.where(there, lax.pad(y, jnp.zeros((), y.dtype), around), other)
    return y


def _gathered(bits, fills, coordinates, guards, shape):
    oks = [passes(g, shape) for g in guards]
    ok = jnp.ones(shape, bool)
    for each in oks:
        ok &= each
    if bits.size == 0:
        y = jnp.zeros(shape, bits.dtype)
    else:
        place = jnp.maximum(flat_place(coordinates, bits.shape, ok, shape), 0)
        y = pick(bits.reshape(-1), place, 0, ())
    for fill, each in zip(fills[::-1], oks[::-1], strict=True):
        y = jnp.where(each, y, _wide(fill, shape))
    return y


# Linear in x and the fills. The transpose undoes the slices, or adds cotangents up at the
# places that they were read from; a fill gets the sum over the places that it stood for.


def bind_reindex(x, fills, coordinates, guards, shape) -> Any:
    """Bind `reindex_p`."""
    return reindex_p.bind(
        x,
        *fills,
        coordinates=tuple(coordinates),
        guards=tuple(guards),
        shape=tuple(shape),
    )[0]


def _jvp(primals, tangents, **params):
    (y,) = reindex_p.bind(*primals, **params)
    if not is_float(y.dtype) or all(map(is_zero, tangents)):
        return [y], [zero_tangent(y)]
    moving = [float_tangent(p, t) for p, t in zip(primals, tangents, strict=True)]
    return [y], reindex_p.bind(*moving, **params)


def _transpose(cotangents, x, *fills, coordinates, guards, shape):
    (ct,) = cotangents
    values = (x, *fills)
    if type(ct) is ad.Zero:
        return [ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in values]
    outs: list[Any] = [None] * len(values)
    if ad.is_undefined_primal(x):
        outs[0] = _to_source(ct, x.aval, coordinates, guards, shape)
    before = jnp.ones(shape, bool)
    for i, (fill, guard) in enumerate(zip(fills, guards, strict=True)):
        ok = passes(guard, shape)
        if ad.is_undefined_primal(fill):
            outs[i + 1] = sum_outside(ct, before & ~ok, fill.aval.ndim, "reindex")
        before &= ok
    return outs


def _to_source(ct, x, coordinates, guards, shape):
    if 0 in shape or x.size == 0:
        return jnp.zeros(x.shape, ct.dtype)
    boxes = _boxes(guards, shape)
    if boxes is not None:
        if 0 in _sizes(boxes[-1]):
            return jnp.zeros(x.shape, ct.dtype)
        core = _core(coordinates, x.shape, boxes[-1])
        if core is not None:
            starts, stops = zip(*boxes[-1], strict=True) if shape else ((), ())
            return core.back(lax.slice(ct, starts, stops))
    ok = jnp.ones(shape, bool)
    for guard in guards:
        ok &= passes(guard, shape)
    place = flat_place(coordinates, x.shape, ok, shape).reshape(-1)
    (flat,) = bind_scatter(
        add_spec(ct.dtype, "reindex"),
        [ct.reshape(-1)],
        place,
        None,
        axis=0,
        batch=(),
        size=x.size,
        out=(ct.dtype,),
    )
    return flat.reshape(x.shape)


def _behind(c: Affine) -> Affine:
    return Affine(c.offset, (0, *c.coefficients))


def _batch(args, dims, *, coordinates, guards, shape):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    (x, *fills), (dx, *dfills) = args, dims
    lead = []
    if dx is not None:
        x = jnp.moveaxis(x, dx, 0)
        lead = [Affine(0, (1, *[0] * len(shape)))]
    for i, (fill, d) in enumerate(zip(fills, dfills, strict=True)):
        if d is not None:
            fills[i] = jnp.moveaxis(fill, d, 0)
        elif fill.ndim:
            fills[i] = jnp.broadcast_to(fill, (size, *fill.shape))
    moved = tuple(tuple((_behind(c), n) for c, n in guard) for guard in guards)
    inner = (*lead, *map(_behind, coordinates))
    return [bind_reindex(x, fills, inner, moved, (size, *shape))], [0]


reindex_p = define(
    "tile_reindex",
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
