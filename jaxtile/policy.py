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

from jaxtile.errors import PolicyError, message


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
