"""check_laws: look for a counterexample to the laws that a reducer declares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile._checks import as_array
from jaxtile.errors import ContractError, TileTypeError, message
from jaxtile.primitives._spec import Spec, make_spec
from jaxtile.reducers import Reducer

# Roundings that two groupings of three states may differ by, with room for a merge of
# many operations.
_ROUNDINGS = 64


@dataclass(frozen=True)
class LawReport:
    """What was tried; printing it says what it can and cannot mean.

    Args:
        reducer: the reducer.
        held: the declared laws to which no counterexample was found.
        undeclared: the laws that the reducer does not declare, which were not tried.
        combinations: how many pairs and triples of states were merged.
        undecided: how many of them overflowed, so that they say nothing.
    """

    reducer: Reducer
    held: tuple[str, ...]
    undeclared: tuple[str, ...]
    combinations: int
    undecided: int

    def __str__(self) -> str:
        held = ", ".join(self.held) or "none"
        text = (
            f"{self.reducer!r}: no counterexample to the declared laws ({held}) in "
            f"{self.combinations} combinations. Examples can falsify a law; they "
            "cannot prove one."
        )
        if self.undeclared:
            text += f" Not declared, so not tried: {', '.join(self.undeclared)}."
        if self.undecided:
            text += f" {self.undecided} combinations overflowed and say nothing."
        return text


def check_laws(reducer: Reducer, examples: Sequence[Any]) -> LawReport:
    """Try to falsify the laws that a reducer declares, on every pair and triple.

    Integer, bool and index leaves must agree exactly; float leaves to rounding,
    relative to the largest value that took part. A declared `exact_identity` must keep bits.

    Args:
        reducer: the reducer.
        examples: elements (not states), pytrees of scalars alike in structure; some ten
            of them, with zeros, signs, ties, infinities and NaN where they matter.

    Returns:
        A `LawReport`, whose text says that it cannot prove a law.

    Raises:
        ContractError: a declared law fails; the message shows the counterexample.
        TileTypeError: no examples, or examples that the reducer cannot take.

    Example:
        >>> import jax.numpy as jnp, jaxtile as jt
        >>> from jaxtile.laws import check_laws
        >>> report = check_laws(jt.add, [1, 2, 3])
        >>> print(report.held, report.combinations)
        ('associative', 'commutative', 'identity') 42
    """
    spec, states = _states(reducer, examples)
    laws = reducer.laws
    tried = {
        "associative": (laws.associative, _associative),
        "commutative": (laws.commutative, _commutative),
        "identity": (laws.identity and reducer.identity is not None, _identity),
    }
    combinations = undecided = 0
    for law, (declared, check) in tried.items():
        if declared:
            more, open_ = check(spec, states, law)
            combinations, undecided = combinations + more, undecided + open_
    return LawReport(
        reducer,
        tuple(law for law, (declared, _) in tried.items() if declared),
        tuple(law for law, (declared, _) in tried.items() if not declared),
        combinations,
        undecided,
    )


def _states(reducer: Reducer, examples: Sequence) -> tuple[Spec, list]:
    """The lifted states of all examples, one array for each leaf."""
    if not isinstance(reducer, Reducer):
        raise TileTypeError(
            message(
                "check_laws",
                expected="a Reducer",
                got=repr(reducer),
                way_out="Pass jaxtile.add, or jaxtile.Reducer(merge=...).",
            )
        )
    many = hasattr(examples, "__iter__") and not isinstance(examples, str)
    trees = [jax.tree.flatten(e) for e in examples] if many else []
    if not trees or any(tree != trees[0][1] for _, tree in trees):
        raise TileTypeError(
            message(
                "check_laws",
                expected="at least one example, all of one structure",
                got=f"{len(trees)} examples" if many else repr(examples),
                way_out="Pass a list of elements such as reduce would take.",
            )
        )
    leaves = [_batch(v) for v in zip(*(t[0] for t in trees), strict=True)]
    dtypes = [v.dtype for v in leaves]
    spec = make_spec(reducer, trees[0][1], dtypes, None, jnp.int32, "check_laws")
    index = [] if spec.index is None else [jnp.arange(len(trees), dtype=spec.index)]
    return spec, spec.lift(leaves + index)


def _batch(values: Sequence) -> jax.Array:
    """One leaf of all examples."""
    arrays = [as_array("check_laws", v) for v in values]
    shapes = sorted({v.shape for v in arrays if v.ndim})
    if shapes:
        raise TileTypeError(
            message(
                "check_laws",
                expected="examples that are pytrees of scalars",
                got=f"arrays of shape {', '.join(map(str, shapes))}",
                way_out="Pass single elements, as a list.",
            )
        )
    return jnp.stack(arrays)


def _choices(states: Sequence, count: int) -> list[list]:
    """Every combination of `count` states, each side as one batch."""
    n = states[0].shape[0]
    places = np.array(list(itertools.product(range(n), repeat=count))).T
    return [[v[p] for v in states] for p in places]


def _associative(spec: Spec, states, law):
    a, b, c = _choices(states, 3)
    ab, bc = spec.merge(a, b), spec.merge(b, c)
    left, right = spec.merge(ab, c), spec.merge(a, bc)
    return _compare(spec, law, (a, b, c), (ab, bc), left, right)


def _commutative(spec: Spec, states, law):
    a, b = _choices(states, 2)
    return _compare(spec, law, (a, b), (), spec.merge(a, b), spec.merge(b, a))


def _identity(spec: Spec, states, law):
    neutral = spec.identity(states[0].shape)
    assert neutral is not None  # tried only where there is one
    exact = spec.reducer.exact_identity
    total, undecided = 0, 0
    for merged in (spec.merge(neutral, states), spec.merge(states, neutral)):
        more, open_ = _compare(spec, law, (states,), (), merged, states, exact)
        total, undecided = total + more, undecided + open_
    return total, undecided


def _compare(spec, law, inputs, between, left, right, exact=False):
    """Raise on the first combination whose sides differ; count the others."""
    count = int(left[0].shape[0])
    wrong, undecided = np.zeros(count, bool), np.zeros(count, bool)
    # A state's float leaves may be parts of one number (a mean and its low part), so
    # rounding is measured against the largest of them.
    floats = [v for s in (*inputs, *between, left, right) for v in map(np.asarray, s)]
    floats = [v for v in floats if jnp.issubdtype(v.dtype, jnp.floating)]
    for k in range(len(spec.states)):
        args = [np.asarray(s[k]) for s in inputs]
        inner = [np.asarray(s[k]) for s in between]
        sides = np.asarray(left[k]), np.asarray(right[k])
        differ, overflowed = _differ(args, inner, sides, exact, floats)
        wrong |= differ
        undecided |= overflowed
    wrong &= ~undecided
    if wrong.any():
        place = int(np.argmax(wrong))
        _falsified(spec, law, inputs, left, right, place)
    return count, int(undecided.sum())


def _differ(args, inner, sides, exact, floats):
    left, right = sides
    nothing = np.zeros(left.shape, bool)
    if not jnp.issubdtype(left.dtype, jnp.floating):
        return left != right, nothing
    both_nan = (left != left) & (right != right)
    if exact:
        word = f"u{left.dtype.itemsize}"
        return (left.view(word) != right.view(word)) & ~both_nan, nothing
    eps = float(jnp.finfo(left.dtype).eps)
    wide = [v.astype(np.float64) for v in (*args, *inner, left, right)]
    finite = [np.where(np.isfinite(v), np.abs(v.astype(np.float64)), 0) for v in floats]
    scale = np.max(finite, axis=0)
    *_, x, y = wide
    with np.errstate(invalid="ignore"):
        near = (x == y) | (np.abs(x - y) <= _ROUNDINGS * eps * scale)
    calm = np.all([np.isfinite(v) for v in wide[: len(args)]], axis=0)
    burst = ~np.all([np.isfinite(v) for v in wide[len(args) :]], axis=0)
    return ~(near | both_nan), calm & burst


def _falsified(spec: Spec, law: str, inputs, left, right, place: int) -> None:
    def show(state) -> str:
        leaves = [np.asarray(v)[place].item() for v in state]
        return str(jax.tree.unflatten(spec.state_tree, leaves))

    names = ", ".join(
        f"{name} = {show(s)}" for name, s in zip("abc", inputs, strict=False)
    )
    equation = {
        "associative": "merge(merge(a, b), c) = merge(a, merge(b, c))",
        "commutative": "merge(a, b) = merge(b, a)",
        "identity": "merge(identity, a) = a = merge(a, identity)",
    }
    raise ContractError(
        message(
            "check_laws",
            expected=f"{spec.reducer!r} to be {law}: {equation[law]}",
            got=f"{show(left)} against {show(right)} for {names}",
            way_out=f"Declare laws without {law}, or correct merge.",
        )
    )
