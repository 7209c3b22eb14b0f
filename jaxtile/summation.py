"""einsum: sums of products named by letters, composed of mma and reduce."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import opt_einsum
from opt_einsum.parser import parse_einsum_input

from jaxtile import backends, formats
from jaxtile._checks import as_array
from jaxtile._operators import is_tile
from jaxtile._roles import Plan, drop_ones
from jaxtile.catalogue import add
from jaxtile.contraction import Options, as_mma_policy, run
from jaxtile.errors import TileShapeError, TileTypeError, message
from jaxtile.policy import MmaPolicy, fold_left, unordered_tree
from jaxtile.primitives._contract import decode
from jaxtile.primitives._contract_checks import accumulator_of
from jaxtile.primitives._functions import attempt
from jaxtile.primitives._scalar import convert
from jaxtile.reduction import reduce

_SOME = 8  # what jax's own einsum takes for a symbolic size


def einsum(
    spec: Any,
    *operands: Any,
    policy: MmaPolicy | None = None,
    acc_dtype: Any = None,
    out_dtype: Any = None,
    optimize: Any = "auto",
    implementation: str | None = None,
) -> Any:
    """The sum of products that a spec names, by `mma` of two operands at a time.

    A diagonal is an indexing, a sum over an axis of one operand alone a `reduce`; between
    the steps values have the accumulator's dtype.

    Args:
        spec: what `jnp.einsum` takes: "bij,bjk->bik", with "..." or without "->" too; or
            the first array, then its axes' numbers, in turn, and at last the result's.
        *operands: arrays, or as above. An axis of size 1 stretches to the others of its
            letter.
        policy: as for `mma`; a policy that keeps the order keeps that of sums too.
        acc_dtype: the accumulator of every step; by default that of all the operands.
        out_dtype: the dtype to narrow to once, at the end.
        optimize: the order of the steps, as `opt_einsum.contract_path` takes it; False is
            from left to right.
        implementation: as for `mma`.

    Returns:
        The array, in the accumulator's dtype or `out_dtype`.

    Raises:
        TileTypeError: a spec that does not fit the operands; tiles, and what `mma` refuses.
        TileShapeError: a diagonal of unequal sizes.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> x = jnp.array([[1, 2], [3, 4]])
        >>> print(jt.einsum("ij,jk->ik", x, x), jt.einsum("ii", x))
        [[ 7 10]
         [15 22]] 5
    """
    arrays, letters, out = _parse(spec, operands)
    acc = accumulator_of([x.dtype for x in arrays], acc_dtype, "einsum")
    narrow = acc
    if out_dtype is not None:
        formats.require_arithmetic(out_dtype, "einsum")
        narrow = formats.require_enabled(out_dtype, "einsum")
    named = [_diagonal(x, each) for x, each in zip(arrays, letters, strict=True)]
    name = backends.asked("einsum", implementation)
    known = as_mma_policy("einsum", policy)
    options = Options(known, acc_dtype=acc, implementation=name)
    for step in _path(letters, out, arrays, optimize):
        taken = [named[i] for i in step]
        named = [pair for i, pair in enumerate(named) if i not in step]
        total = taken[0]
        for n, other in enumerate(taken[1:], 2):
            rest = [each for _, each in (*named, *taken[n:])]
            ends = options if rest else options._replace(out_dtype=narrow)
            total = _product(total, other, rest, out, ends)
        named.append(total)
    x, have = named[0]
    if len(arrays) == 1:
        x, have = _alone(x, have, out, options)
        turn = [have.index(d) for d in out]
        x = x if turn == sorted(turn) else jnp.transpose(x, turn)
        x = convert(convert(decode(x), acc), narrow)
    return x


def _parse(spec: Any, operands: Sequence) -> tuple[list, list[str], str]:
    """(arrays, the letters of each, the letters of the result)."""
    interleaved = not isinstance(spec, str)
    given = (spec, *operands) if interleaved else operands
    # With numbers for letters, every second argument is an array, but for the result's.
    places = (
        range(0, len(given) - len(given) % 2, 2) if interleaved else range(len(given))
    )
    values = list(given)
    for i in places:
        if is_tile(values[i]):
            raise TileTypeError(
                message(
                    "einsum",
                    expected="arrays, whose axes the spec names",
                    got="a tile",
                    way_out="jaxtile.mma goes by dims; or pass the tile's .array.",
                )
            )
        values[i] = as_array("einsum", values[i])
    call = values if interleaved else [spec, *values]
    tell = functools.partial(_tell, spec if isinstance(spec, str) else "its numbers")
    heads, out, arrays = attempt("einsum", tell, parse_einsum_input, call)
    letters = heads.split(",")
    for x, each in zip(arrays, letters, strict=True):
        attempt("einsum", tell, _check_rank, x, each)
    attempt("einsum", tell, _check_sizes, arrays, letters)
    return list(arrays), letters, out


def _tell(spec: str) -> tuple[str, str]:
    return (
        f"a spec that fits the operands, not {spec!r}",
        'Write a letter for each axis, as in "ij,jk->ik".',
    )


def _check_rank(x, letters: str):
    if len(letters) != x.ndim:
        raise ValueError(f"{letters!r} for an operand of shape {x.shape}")


def _check_sizes(arrays, letters):
    sizes: dict[str, Any] = {}
    for x, each in zip(arrays, letters, strict=True):
        for d, n in zip(each, x.shape, strict=True):
            known = sizes.get(d, 1)
            if n != 1 and known not in (1, n):
                raise ValueError(f"sizes {known} and {n} of {d!r}")
            sizes[d] = n if known == 1 else known


def _path(letters, out, arrays, optimize) -> list[tuple[int, ...]]:
    """The operands of each step, of which the result goes to the end."""
    if optimize is False:
        return [tuple(range(len(arrays)))]
    spec = f"{','.join(letters)}->{out}"
    # The planner wants integers; what it makes of a symbolic size changes no result.
    shapes = [
        tuple(n if isinstance(n, int) else _SOME for n in x.shape) for x in arrays
    ]

    def tell():
        return "optimize as opt_einsum.contract_path takes it", 'Write "auto".'

    attempt("einsum", tell, _check_name, optimize)
    plan: Any = opt_einsum.contract_path
    find = functools.partial(plan, optimize=optimize, shapes=True)
    path, _ = attempt("einsum", tell, find, spec, *shapes)
    steps = [tuple(step) for step in path]
    attempt("einsum", tell, _check_path, steps, len(arrays))
    return steps


def _check_name(optimize: Any):
    """opt_einsum looks names up for three operands or more."""
    if isinstance(optimize, str):
        opt_einsum.paths.get_path_fn(optimize)


def _check_path(steps: Sequence, left: int):
    """opt_einsum takes a path that forgets an operand, or takes one twice."""
    for step in steps:
        if len(set(step)) != len(step) or not all(0 <= i < left for i in step):
            raise ValueError(f"step {step} of {left} operands")
        left += 1 - len(step)
    if left != 1:
        raise ValueError(f"a path {steps} that leaves {left} operands")


def _diagonal(x, letters: str) -> tuple[Any, tuple[str, ...]]:
    """An operand in which every letter has one axis, and its letters."""
    have = list(letters)
    for d in dict.fromkeys(letters):
        while have.count(d) > 1:
            i = have.index(d)
            j = have.index(d, i + 1)
            if x.shape[i] != x.shape[j]:
                raise TileShapeError(
                    message(
                        "einsum",
                        expected=f"one size of {d!r} in {letters!r}",
                        got=f"shape {x.shape}",
                        way_out="A diagonal is of a square: slice the operand.",
                    )
                )
            x = jnp.diagonal(x, axis1=i, axis2=j)
            have = [e for p, e in enumerate(have) if p not in (i, j)] + [d]
    return x, tuple(have)


def _alone(x, have, kept, options: Options) -> tuple[Any, tuple]:
    """The operand summed over the letters that nothing else has."""
    axes = [i for i, d in enumerate(have) if d not in kept]
    if axes:
        policy = as_mma_policy("einsum", options.policy)
        order = unordered_tree if policy.allow_reassociation else fold_left
        x = reduce(
            convert(decode(x), options.acc_dtype),
            axes,
            add,
            policy=order,
            acc_dtype=options.acc_dtype,
            implementation=options.implementation,
        )
    return x, tuple(d for d in have if d in kept)


def _product(a, b, rest, out, options: Options) -> tuple[Any, tuple]:
    """Two operands made one, by mma, with the letters that are still wanted."""
    wanted = {*out, *(d for each in rest for d in each)}
    a, b = drop_ones(a, b, lambda d: True)
    a, b = (
        _alone(*x, wanted.union(other[1]), options) for x, other in ((a, b), (b, a))
    )
    have = dict.fromkeys(d for d in (*a[1], *b[1]) if d in wanted)
    if not rest:
        have = [d for d in out if d in have]
    labels = (a[1], b[1], tuple(have))
    plan = Plan(a[0], b[0], labels, repr)
    return run("einsum", plan, options), tuple(have)
