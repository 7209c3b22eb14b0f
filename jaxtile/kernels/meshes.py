"""Kernels on operands that are spread over the explicit axes of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtile import _jax_private
from jaxtile.kernels import plain
from jaxtile.kernels.handles import Part


def on_explicit_axes(
    run: Callable, call: Any, operands: Sequence, arrays: Sequence, results: Sequence
) -> Any:
    """`run(*operands)` where the partitioner may see to explicit mesh axes.

    A result is sharded as the operands that the same nests cut: its loops and reshapes
    have no shardings that jax's types could tell.

    Args:
        run: the kernel.
        call: its name and body.
        results: as of `plain.run`.
        operands: what `run` takes.
        arrays: `(array, dims or None)` of each.
    """
    avals = [jax.typeof(x) for x, _ in arrays]
    meshes = [jax.sharding.get_abstract_mesh(), *(a.sharding.mesh for a in avals)]
    mesh = next((m for m in meshes if m.explicit_axes), None)
    if mesh is None:
        return run(*operands)
    given = list(map(_jax_private.sharding_spec, avals))
    found: list[plain.Plain] = []

    def look(*xs):
        pairs = [(x, dims) for x, (_, dims) in zip(xs, arrays, strict=True)]
        found.append(plain.trace(call.name, call.body, pairs, results)[0])

    with _jax_private.no_mesh():
        jax.eval_shape(look, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        out = jax.eval_shape(run, *jax.tree.map(_struct, operands))
    specs = _specs(found[-1], given, len(results))
    shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    tree = jax.tree.unflatten(jax.tree.structure(out), shardings)
    return jax.sharding.auto_axes(run, out_sharding=tree)(*operands)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _specs(engine: plain.Plain, given: Sequence[tuple], count: int) -> list[list]:
    """The mesh axes of each dimension of each result."""
    known: dict = {}
    for place, parts in engine.loads:
        for part, axes in zip(parts, given[place], strict=True):
            if axes is not None:
                known.setdefault(_cut(part), axes)
    specs: list[list] = [[] for _ in range(count)]
    for store in engine.stores:
        spec, used = [], set()
        for part in store.parts:
            axes = known.get(_cut(part))
            names = {axes} if isinstance(axes, str) else set(axes or ())
            spec.append(None if names & used else axes)
            used |= names
        specs[store.place] = spec
    return specs


def _cut(part: Part) -> Any:
    """What tiles have in common that cut an axis alike."""
    owner = part.handle or (part.dim if part.whole else object())
    return owner, part.extent
