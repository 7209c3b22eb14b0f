"""The one table of what each backend does with each primitive, and why it refuses.

A backend lowers a primitive inside kernel bodies by a rule of its own
(`@BACKEND.lowers`), by tracing the reference (`BACKEND.via_reference`), or refuses it
with a sentence (`BACKEND.refuses`): there is no third state. The predicate that guards a
rule is the one that `supports`, `explain` and the support table ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Primitive

from jaxtile.errors import UnsupportedOnBackend


def _never(*avals: Any, **params: Any) -> str | None:
    return None


@dataclass
class Backend:
    """One Pallas backend: how rules are registered, and what it lowers.

    Args:
        name: "triton", "mosaic_gpu" or "tpu".
        register: `(primitive, rule)`: the backend's own registration.
        via_reference: `fn -> rule` that traces a function of plain jax in the kernel.
    """

    name: str
    register: Callable[[Primitive, Callable], None]
    trace: Callable[[Callable], Callable]
    refusals: dict[Primitive, Callable] = field(default_factory=dict)

    def _guarded(self, primitive: Primitive, rule: Callable, refuse: Callable):
        def checked(ctx, *args, **params):
            reason = refuse(*ctx.avals_in, **params)
            if reason is not None:
                raise UnsupportedOnBackend(
                    f"{primitive.name} in a {self.name} kernel: {reason}"
                )
            return rule(ctx, *args, **params)

        self.refusals[primitive] = refuse
        self.register(primitive, checked)

    def lowers(self, primitive: Primitive, refuse: Callable = _never) -> Callable:
        """Decorate `(ctx, *args, **params)`, the backend's rule for a primitive."""

        def register(rule):
            self._guarded(primitive, rule, refuse)
            return rule

        return register

    def traces(self, primitive: Primitive, refuse: Callable = _never) -> Callable:
        """Decorate `(*values, **params) -> [value]`: plain jax that lowers here."""

        def register(fn):
            self._guarded(primitive, self.trace(fn), refuse)
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
