"""The one table of what each backend does with each primitive, and why it refuses.

A backend lowers a primitive inside kernel bodies by a rule of its own
(`@BACKEND.lowers`), by tracing plain jax (`@BACKEND.traces`), or refuses it with a
sentence (`BACKEND.refuses`): there is no third state. The predicate that guards a rule
is the one that `supports`, `explain` and the support table ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jax.extend.core import Primitive

from jaxtile._jax_private import Hooks
from jaxtile.errors import UnsupportedOnBackend


def _never(*avals: Any, **params: Any) -> str | None:
    return None


@dataclass
class Backend:
    """One Pallas backend: how rules are registered, and what it lowers.

    Args:
        name: "triton", "mosaic_gpu" or "tpu".
        hooks: its private table in jax.
    """

    name: str
    hooks: Hooks
    refusals: dict[Primitive, Callable] = field(default_factory=dict)

    def fail(self, primitive: Primitive, reason: str) -> NoReturn:
        """Refuse, for a reason that only the rule itself can see.

        Raises:
            UnsupportedOnBackend: always.
        """
        raise UnsupportedOnBackend(
            f"{primitive.name} in a {self.name} kernel: {reason}"
        )

    def _guarded(self, primitive, rule, refuse, scratch_bytes=0):
        def checked(ctx, *args, **params):
            reason = refuse(*ctx.avals_in, **params)
            if reason is not None:
                self.fail(primitive, reason)
            return rule(ctx, *args, **params)

        self.refusals[primitive] = refuse
        self.hooks.register(primitive, checked, scratch_bytes)

    def lowers(
        self, primitive: Primitive, refuse: Callable = _never, scratch_bytes: int = 0
    ) -> Callable:
        """Decorate `(ctx, *args, **params)`, the backend's rule for a primitive."""

        def register(rule):
            self._guarded(primitive, rule, refuse, scratch_bytes)
            return rule

        return register

    def traces(self, primitive: Primitive, refuse: Callable = _never) -> Callable:
        """Decorate `(*values, **params) -> [value]`: plain jax that lowers here."""

        def register(fn):
            self._guarded(primitive, self.hooks.trace(fn), refuse)
            return fn

        return register

    def refuses(self, primitive: Primitive, reason: str) -> None:
        """State why a primitive has no rule here."""
        self._guarded(primitive, _never, lambda *avals, **params: reason)

    def why_not(self, primitive: Primitive, *avals: Any, **params: Any) -> str | None:
        """The sentence with which this backend refuses these operands, or None."""
        refuse = self.refusals.get(primitive)
        if refuse is None:
            return "this backend has no rule for it"
        return refuse(*avals, **params)


BACKENDS: dict[str, Backend] = {}
FAILED: dict[str, str] = {}
