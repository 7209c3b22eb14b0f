"""The roles of the axes of a contraction: by letters, by places, by the identity of dims."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile._checks import as_array
from jaxtile._join import check_rank, distinct, spell
from jaxtile._operators import is_tile
from jaxtile.dims import Dim
from jaxtile.errors import TileShapeError, TileTypeError, message


class Plan(NamedTuple):
    """Two operands with their axes named.

    Args:
        a, b: the arrays.
        labels: of a's axes, of b's, and of the result's.
        say: how messages call a label.
        dims: the result's dims, or None for arrays.
    """

    a: jax.Array
    b: jax.Array
    labels: tuple[Sequence[Hashable], Sequence[Hashable], Sequence[Hashable]]
    say: Callable[[Any], str]
    dims: tuple[Dim, ...] | None = None


def _two_arrays(op: str, a: Any, b: Any) -> list:
    if is_tile(a) or is_tile(b):
        raise TileShapeError(
            message(
                op,
                expected="two tiles, or two arrays",
                got="a tile and an array",
                way_out="Name the array's axes with jaxtile.tile(array, dims).",
            )
        )
    return [as_array(op, a), as_array(op, b)]


def _require_rank(op: str, a: Any, b: Any, least: int, way_out: str) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.ndim < least:
            raise TileShapeError(
                message(
                    op,
                    expected=f"{name} of at least {('one axis', 'two axes')[least - 1]}",
                    got=f"shape {x.shape}",
                    way_out=way_out,
                )
            )


def by_axes(op: str, a: Any, b: Any, c: Any, spec: Any) -> Plan:
    """The plan of two arrays, by places or by the letters of spec."""
    a, b = _two_arrays(op, a, b)
    if is_tile(c):
        raise TileShapeError(
            message(
                op,
                expected="c an array, as a and b are",
                got=f"a tile of {spell(c.dims)}",
                way_out="Name the axes of a and b with jaxtile.tile, or pass c.array.",
            )
        )
    if spec is not None:
        return Plan(a, b, _letters(op, spec, a, b), repr)
    way_out = 'Name the axes, as in spec="mk,k->m", or use jaxtile.matmul.'
    _require_rank(op, a, b, 2, way_out)
    return by_places(op, a, b)


def by_places(op: str, a: Any, b: Any) -> Plan:
    """The plan of NumPy's matmul: K last in a, and last but one, or alone, in b."""
    a, b = _two_arrays(op, a, b)
    _require_rank(op, a, b, 1, "Multiply by it: mma sums products over an axis.")
    # Batch axes are numbered from the end, as they broadcast.
    labels = []
    for x, ends in ((a, ("m", "K")[-a.ndim :]), (b, ("K", "n")[: b.ndim])):
        labels.append((*range(2 - x.ndim, 0), *ends))
    (a, la), (b, lb) = drop_ones(
        (a, labels[0]), (b, labels[1]), lambda d: isinstance(d, int)
    )
    batch = sorted({d for d in (*la, *lb) if isinstance(d, int)})
    out = (*batch, *(d for d in "mn" if d in (*la, *lb)))
    return Plan(a, b, (la, lb, out), _place)


def _place(label: Any) -> str:
    return f"batch axis {label - 2}" if isinstance(label, int) else label


def drop_ones(a: tuple, b: tuple, may: Callable[[Any], bool]) -> list[tuple]:
    """(array, labels) pairs without the axes of size 1 that stretch to the other's.

    An operand that lacks a label repeats along it, so that nothing has to be broadcast.
    """
    sizes = [dict(zip(labels, x.shape, strict=True)) for x, labels in (a, b)]
    kept = []
    for (x, labels), mine, other in ((a, *sizes), (b, *sizes[::-1])):
        drop = [d for d in mine if may(d) and mine[d] == 1 and other.get(d, 1) != 1]
        places = [i for i, d in enumerate(labels) if d in drop]
        left = tuple(d for d in labels if d not in drop)
        kept.append((jnp.squeeze(x, places) if places else x, left))
    return kept


def _letters(op: str, spec: Any, a: Any, b: Any) -> tuple:
    """The labels that spec gives to the axes of a, of b and of the result."""
    if not isinstance(spec, str):
        raise TileTypeError(
            message(
                op,
                expected="spec a string of letters for arrays",
                got=repr(spec),
                way_out='Write "mk,kn->mn"; dims name the axes of tiles.',
            )
        )
    head, arrow, out = spec.replace(" ", "").partition("->")
    sides = head.split(",")
    if not (arrow and len(sides) == 2 and "".join((*sides, out)).isalpha()):
        # A product of two scalars has no letters at all.
        if not (arrow and sides == ["", ""] and not out):
            _fail_spec(op, spec, "two operands and a result, as in 'mk,kn->mn'")
    for name, letters, x in (("a", sides[0], a), ("b", sides[1], b)):
        if len(letters) != x.ndim:
            want = f"a letter for each of the {x.ndim} axes of {name}"
            _fail_spec(op, spec, want)
    for letters in (*sides, out):
        if len(set(letters)) != len(letters):
            _fail_spec(op, spec, "a letter once in an operand")
    for d in out:
        if d not in head:
            _fail_spec(op, spec, f"{d!r} of the result in an operand")
    for d in dict.fromkeys("".join(sides)):
        if d not in out and (d in sides[0]) != (d in sides[1]):
            _fail_spec(op, spec, f"{d!r}, of one operand alone, in the result")
    return tuple(sides[0]), tuple(sides[1]), tuple(out)


def _fail_spec(op: str, spec: str, expected: str):
    raise TileShapeError(
        message(
            op,
            expected=f"a spec with {expected}",
            got=repr(spec),
            way_out="jaxtile.einsum takes diagonals, sums of one operand and '...' too.",
        )
    )


def _tiles(op: str, a: Any, b: Any) -> bool:
    for t in (a, b):
        if is_tile(t):
            check_rank(op, t)
    return is_tile(a) and is_tile(b)


def by_dims(op: str, a: Any, b: Any, c: Any, spec: Any) -> Plan | None:
    """The plan of two tiles, by the dims of c or of spec; None for arrays."""
    if not _tiles(op, a, b):
        return None
    if is_tile(c):
        check_rank(op, c)
    if is_tile(c) and spec is None:
        out = c.dims
    elif spec is not None and not is_tile(c) and np.ndim(c) == 0:
        out = _as_dims(op, spec)
    else:
        kind = "a tile" if is_tile(c) else "an array"
        raise TileShapeError(
            message(
                op,
                expected="for two tiles, c a tile of the result's dims, or else spec= "
                "those dims",
                got=f"{'no c' if np.ndim(c) == 0 else f'c {kind}'} and "
                f"{'no spec' if spec is None else 'a spec'}",
                way_out="What the result has decides what is summed: pass one of them.",
            )
        )
    distinct(op, out)
    _check_roles(op, a.dims, b.dims, out)
    if is_tile(c):
        _check_free(op, (a, b), c)
    return Plan(a.array, b.array, (a.dims, b.dims, out), _dim, out)


def _dim(label: Any) -> str:
    return f"dim {label!r}"


def _as_dims(op: str, spec: Any) -> tuple[Dim, ...]:
    named = (spec,) if isinstance(spec, Dim) else spec
    if not isinstance(named, tuple | list) or not all(
        isinstance(d, Dim) for d in named
    ):
        raise TileTypeError(
            message(
                op,
                expected="spec the dims of the result, for tiles",
                got=repr(spec),
                way_out="Write spec=(rows, cols); letters name the axes of arrays.",
            )
        )
    return tuple(named)


def _check_roles(op: str, a, b, out) -> None:
    """Refuse a dim that is neither contracted, nor batch, nor free."""
    for d in dict.fromkeys((*a, *b, *out)):
        mine, other, kept = d in a, d in b, d in out
        if not mine and not other:
            got = f"{d!r} of the result in neither"
            way_out = f"Drop {d!r}, or give it to an operand; dims are identities."
        elif not kept and mine != other:
            got = f"{d!r} in {'a' if mine else 'b'} alone"
            way_out = f"Reduce along {d!r} first, or give it to the result."
        else:
            continue
        raise TileShapeError(
            message(
                op,
                expected="each dim in both operands (contracted, or batch where the "
                "result has it) or in one and the result (free)",
                got=f"{got}, of a {spell(a)}, b {spell(b)} and the result {spell(out)}",
                way_out=way_out,
            )
        )


def _check_free(op: str, operands: Sequence, c: Any) -> None:
    """Refuse a seed whose sizes are not the operands'."""
    for name, t in zip("ab", operands, strict=True):
        for d, size in zip(t.dims, t.shape, strict=True):
            if d in c.dims and c.shape[c.dims.index(d)] != size:
                raise TileShapeError(
                    message(
                        op,
                        expected=f"one size of dim {d!r} in {name} and in c",
                        got=f"{size} and {c.shape[c.dims.index(d)]}",
                        way_out="Slice or pad; a seed of size 1 does not stretch.",
                    )
                )


def by_last_dims(op: str, a: Any, b: Any) -> Plan | None:
    """The plan of matmul of two tiles; None for arrays."""
    if not _tiles(op, a, b):
        return None
    place = b.dims[-2:][0] if b.dims else None
    if not a.dims or a.dims[-1] is not place:
        raise TileShapeError(
            message(
                op,
                expected="a's last dim in b's last place but one, or as b's only dim",
                got=f"{spell(a.dims)} and {spell(b.dims)}",
                way_out="Use mma with spec=, the dims of the result: there places do not "
                "count.",
            )
        )
    k = a.dims[-1]
    lead = [*a.dims[:-2], *(d for d in b.dims[:-2] if d not in a.dims[:-2])]
    ends = [*a.dims[-2:-1], *(b.dims[-1:] if b.dims[-1] is not k else ())]
    out = (*lead, *ends)
    distinct(op, out)
    _check_roles(op, a.dims, b.dims, out)
    return Plan(a.array, b.array, (a.dims, b.dims, out), _dim, out)
