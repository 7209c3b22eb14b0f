"""Order policies: which regrouping of a reduction or scan is permitted.

For contributions x0, x1, x2 and seed z:

* `unordered_tree`: any grouping, any permutation, the seed exactly once;
* `ordered_tree`: any grouping, leaf order kept, the seed at its place;
* `fixed_tree`: one tree. Level by level combine neighbours (x[2i], x[2i+1]); an odd
  last element moves up unchanged; at the end merge(seed, tree). The same bits on every
  backend, at every batch size. A scan's prefix i is the left fold of the maximal
  aligned power-of-two blocks that partition [0, i], each block being its tree;
* `fold_left`: op(op(op(z, x0), x1), x2);
* `fold_right`: op(x0, op(x1, op(x2, z))), the element on the left.

Permission to regroup is about order alone: it never permits another accumulator type,
approximate functions, a fused multiply-add across steps, or dropping NaNs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxtile.errors import PolicyError, TileTypeError, TileValueError, message


class Transform(enum.Flag):
    """What a policy may permit a realisation to do with the contributions."""

    NOTHING = 0
    REGROUP = enum.auto()
    PERMUTE = enum.auto()


class Kind(enum.Enum):
    """The reference computation that a policy starts from."""

    TREE = "tree"
    FIXED = "fixed"
    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True)
class Policy:
    """A frozen, hashable order policy; rules ask `permits` and never compare names.

    Example:
        >>> import jaxtile as jt
        >>> jt.policy.fold_left.permits(jt.policy.Transform.REGROUP)
        False
        >>> jt.policy.unordered_tree.meet(jt.policy.ordered_tree).name
        'ordered_tree'
    """

    name: str
    kind: Kind
    permitted: Transform

    def permits(self, transform: Transform) -> bool:
        """True if a realisation may apply every transform in `transform`.

        Args:
            transform: one `Transform`, or several joined by `|`.

        Returns:
            The answer.

        Raises:
            PolicyError: it is no `Transform`.
        """
        if not isinstance(transform, Transform):
            raise PolicyError(
                message(
                    "policy.permits",
                    expected="a Transform",
                    got=repr(transform),
                    way_out="Pass jaxtile.policy.Transform.REGROUP or PERMUTE.",
                )
            )
        return transform & self.permitted == transform

    def meet(self, other: Policy | str) -> Policy:
        """The weakest policy that is at least as strict as both.

        Args:
            other: the policy to combine with, or its name.

        Returns:
            One of the two.

        Raises:
            PolicyError: both forbid regrouping and they differ, so that no single
                computation satisfies them; no such policy.
        """
        other = as_policy(other)
        if self.permitted == other.permitted and self != other:
            raise PolicyError(
                message(
                    "policy.meet",
                    expected="two policies that one computation can satisfy",
                    got=f"{self.name} and {other.name}",
                    way_out="Pick one of them for both uses.",
                )
            )
        return other if self.permits(other.permitted) else self

    def __repr__(self) -> str:
        return self.name


unordered_tree = Policy(
    "unordered_tree", Kind.TREE, Transform.REGROUP | Transform.PERMUTE
)
ordered_tree = Policy("ordered_tree", Kind.TREE, Transform.REGROUP)
fixed_tree = Policy("fixed_tree", Kind.FIXED, Transform.NOTHING)
fold_left = Policy("fold_left", Kind.LEFT, Transform.NOTHING)
fold_right = Policy("fold_right", Kind.RIGHT, Transform.NOTHING)

ALL = (unordered_tree, ordered_tree, fixed_tree, fold_left, fold_right)
_BY_NAME = {policy.name: policy for policy in ALL}


def as_policy(policy: Policy | str) -> Policy:
    """The policy that a name or a policy stands for.

    Args:
        policy: a `Policy` or its name.

    Returns:
        The `Policy`.

    Raises:
        PolicyError: the name is not one of the five.

    Example:
        >>> import jaxtile as jt
        >>> jt.policy.as_policy("fold_left")
        fold_left
    """
    found = policy if isinstance(policy, Policy) else None
    if found is None and isinstance(policy, str):
        found = _BY_NAME.get(policy)
    if found is None:
        raise PolicyError(
            message(
                "policy",
                expected=f"one of {', '.join(_BY_NAME)}",
                got=repr(policy),
                way_out="Pass the name, or jaxtile.policy.<name>.",
            )
        )
    return found


# How float32 inputs of an mma are rounded or split, by name: the fraction bits of a part,
# how many parts, and the highest sum of two parts' places of which a product is taken.
PRECISIONS = {
    "f32": (23, 1, 0),
    "tf32": (10, 1, 0),
    "tf32x3": (10, 2, 1),
    "bf16": (7, 1, 0),
    "bf16x3": (7, 2, 1),
    "bf16x6": (7, 3, 2),
}


@dataclass(frozen=True)
class MmaPolicy:
    """What a realisation of `mma` may do with its products; frozen and hashable.

    By default any order of the sum, in the accumulator's type, of products of the inputs
    as they are: no backend may round an input first.

    Args:
        allow_reassociation: False keeps the order of K: one chain, from the seed, of
            products and sums that round to the accumulator one by one. A row has the same
            bits alone and in any batch.
        input_precision: rounds float32 inputs, by name, the same way on every backend:
            "tf32" (10 fraction bits) and "bf16" (7) to nearest, ties to even, finite values
            staying finite. "tf32x3" and "bf16x3" take two such parts of each input, and
            three products of parts; "bf16x6" takes three parts and six products. "f32" is
            the default by name.
        promote_every: after every so many products their sum is added to a true float32
            (or float64) accumulator. Tensor cores' own sums are less accurate.

    Raises:
        TileTypeError: a flag that is no bool, a count that is no integer.
        TileValueError: no such precision; a count below 1.
        PolicyError: an order that is kept, together with several products or several sums
            in each step.

    Example:
        >>> import jaxtile as jt
        >>> jt.MmaPolicy(promote_every=128).allow_reassociation
        True
    """

    allow_reassociation: bool = True
    input_precision: str | None = None
    promote_every: int | None = None

    def __post_init__(self):
        if not isinstance(self.allow_reassociation, bool):
            raise TileTypeError(
                message(
                    "MmaPolicy",
                    expected="allow_reassociation to be True or False",
                    got=repr(self.allow_reassociation),
                    way_out="Pass a Python bool.",
                )
            )
        self._check_precision()
        self._check_promotion()

    def _check_precision(self):
        name = self.input_precision
        if name is not None and not (isinstance(name, str) and name in PRECISIONS):
            raise TileValueError(
                message(
                    "MmaPolicy",
                    expected=f"input_precision in {tuple(PRECISIONS)}",
                    got=repr(name),
                    way_out="None, the default, rounds no input.",
                )
            )
        if self.parts > 1 and not self.allow_reassociation:
            raise PolicyError(
                message(
                    "MmaPolicy",
                    expected="one product in each step of a chain",
                    got=f"input_precision={name!r} with allow_reassociation=False",
                    way_out='Keep the order with "f32", "tf32" or "bf16", or allow '
                    "reassociation.",
                )
            )

    def _check_promotion(self):
        count = self.promote_every
        if count is None:
            return
        if not isinstance(count, int) or isinstance(count, bool):
            raise TileTypeError(
                message(
                    "MmaPolicy",
                    expected="promote_every to be an integer, or None",
                    got=repr(count),
                    way_out="Pass how many products the hardware may add by itself.",
                )
            )
        if count < 1:
            raise TileValueError(
                message(
                    "MmaPolicy",
                    expected="promote_every of at least 1",
                    got=str(count),
                    way_out="128 is a usual count.",
                )
            )
        if not self.allow_reassociation:
            raise PolicyError(
                message(
                    "MmaPolicy",
                    expected="one chain, or sums of groups, but not both",
                    got=f"promote_every={count} with allow_reassociation=False",
                    way_out="A chain is promoted at every product: drop promote_every.",
                )
            )

    @property
    def parts(self) -> int:
        """How many parts of each input are multiplied."""
        return PRECISIONS[self.input_precision or "f32"][1]
