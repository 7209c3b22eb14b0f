"""The one table of what each backend does with each primitive, and why it refuses.

A backend runs a primitive on whole arrays under jit (`@BACKEND.runs`). It lowers one
inside kernel bodies by a rule of its own
(`@BACKEND.lowers`), by tracing plain jax (`@BACKEND.traces`), or refuses it with a
sentence (`BACKEND.refuses`): there is no third state. The predicate that guards a rule
is the one that `supports`, `explain` and the support table ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from jax.extend.core import Primitive

from jaxtile._jax_private import Hooks
from jaxtile.errors import UnsupportedOnBackend
from jaxtile.primitives._define import REFERENCE


def _never(*avals: Any, **params: Any) -> str | None:
    return None


class Whole(NamedTuple):
    """A whole-array kernel of a primitive: see `Backend.runs`."""

    run: Callable[..., list]
    refuse: Callable[..., str | None]
    slower: Callable[..., str | None]


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
    wholes: dict[Primitive, Whole] = field(default_factory=dict)

    def fail(self, primitive: Primitive, reason: str) -> NoReturn:
        """Refuse, for a reason that only the rule itself can see.

        Raises:
            UnsupportedOnBackend: always.
        """
        raise UnsupportedOnBackend(
            f"{primitive.name} in a {self.name} kernel: {reason}"
        )

    def _guarded(self, primitive, rule, refuse, scratch_bytes=None):
        def checked(ctx, *args, **params):
            reason = self.why_not(primitive, *ctx.avals_in, **params)
            if reason is not None:
                self.fail(primitive, reason)
            params.pop("implementation", None)
            return rule(ctx, *args, **params)

        self.refusals[primitive] = refuse
        self.hooks.register(primitive, checked, scratch_bytes)

    def lowers(
        self,
        primitive: Primitive,
        refuse: Callable = _never,
        scratch_bytes: Callable[..., int] | None = None,
    ) -> Callable:
        """Decorate `(ctx, *args, **params)`, the backend's rule for a primitive.

        Args:
            primitive: what it lowers.
            refuse: `(*avals, **params)`, the sentence why it can not, or None.
            scratch_bytes: as `Hooks.register` takes it.
        """

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

    def runs(
        self, primitive: Primitive, refuse: Callable = _never, slower: Callable = _never
    ) -> Callable:
        """Decorate `(*arrays, **params) -> [array]`, a whole-array kernel.

        It is jax to trace, with a `plgpu.kernel` or a `pl.pallas_call` inside, and sees
        the arrays of one device. No function here is given `implementation`.

        Args:
            primitive: what it computes.
            refuse: `(*avals, **params)`, the sentence why it can not, or None.
            slower: `(*avals, **params)`, the sentence why the reference is measured to
                be the better choice, or None; asked only where nobody insists.
        """

        def register(run):
            self.wholes[primitive] = Whole(run, refuse, slower)
            return run

        return register

    def why_not_whole(
        self, primitive: Primitive, *avals: Any, implementation=None, **params: Any
    ) -> str | None:
        """Why this backend does not run these whole arrays, or None."""
        if primitive not in self.wholes:
            op = primitive.name.removeprefix("tile_")
            return (
                f"{self.name} has no whole-array kernel for {op} yet; the op lowers "
                "inside your own kernel bodies where the support table says so"
            )
        return self.wholes[primitive].refuse(*avals, **params)

    def why_not(
        self, primitive: Primitive, *avals: Any, implementation=None, **params: Any
    ) -> str | None:
        """The sentence with which this backend refuses these operands, or None."""
        refuse = self.refusals.get(primitive)
        if refuse is None:
            return "this backend has no rule for it"
        if implementation not in (None, REFERENCE, self.name):
            return (
                f"implementation={implementation!r} is another backend's; leave it out "
                "in kernel bodies"
            )
        return refuse(*avals, **params)


BACKENDS: dict[str, Backend] = {}
FAILED: dict[str, str] = {}
