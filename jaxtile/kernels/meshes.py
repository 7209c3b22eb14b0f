"""Kernels on operands that are spread over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import core
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxtile import _jax_private
from jaxtile.kernels import plain
from jaxtile.kernels.handles import Part
from jaxtile.primitives._define import new_primitive


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


def on_one_device(launch: Callable, arrays: Sequence) -> list:
    """`launch(*arrays)`, traced as outside of `shard_map`.

    What Pallas' interpreter is made of does not know along which manual axes it varies.

    Args:
        launch: `(*arrays) -> [array]`, which is not differentiated.
        arrays: the operands.
    """
    if not any(_jax_private.varying_axes(jax.typeof(x)) for x in arrays):
        return launch(*arrays)
    with _jax_private.one_device():
        closed = jax.make_jaxpr(launch)(*map(_struct, arrays))
    return launch_p.bind(*_jax_private.align_varying(arrays), closed=closed)


def _abstract(*avals, closed):
    return [
        _jax_private.out_aval(a.shape, a.dtype, (None,) * a.ndim, avals)
        for a in closed.out_avals
    ]


def _evaluate(*args, closed):
    return core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def _batch(args, dims, *, closed):
    fn = jax.vmap(lambda *xs: _evaluate(*xs, closed=closed), dims)
    outs = on_one_device(fn, args)
    return outs, [0] * len(outs)


launch_p = new_primitive("launch")
launch_p.def_impl(_evaluate)
launch_p.def_abstract_eval(_abstract)
batching.primitive_batchers[launch_p] = _batch
mlir.register_lowering(launch_p, _jax_private.lower_plain(_evaluate))
