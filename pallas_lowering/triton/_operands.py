"""What reduce and scan share in Triton kernels: operands, refusals, empty fibres."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxtile.pallas_lowering._elementwise import refuse_cast, refuse_region
from jaxtile.pallas_lowering.triton import BACKEND, TRAITS, _line, _turn
from jaxtile.pallas_lowering.triton._launch import viewed, why_too_large
from jaxtile.primitives import _fold
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert, trace


def unpacked(spec, operands, axes, seeded, masked):
    """Elements (the index last), seed, mask, and the one axis that is ordered in them.

    A product in the kernel must not fuse with the first add of a merge: floats are
    guarded.
    """
    elements, init, mask = unpack(spec, operands, seeded, masked)
    axis = axes[0] if axes else elements[0].ndim
    adjacent = tuple(axes) == tuple(range(axis, axis + len(axes)))

    def lined(v):
        if adjacent:
            return v.reshape(*v.shape[:axis], -1, *v.shape[axis + len(axes) :])
        return _fold.collapse(_turn.hold(v), axes)

    elements = [lined(_line.guard(v)) for v in elements]
    mask = None if mask is None else lined(mask)
    shape = elements[0].shape
    axis = axis if adjacent else len(shape) - 1
    elements += _fold.index_leaf(spec, shape, axis)
    if init is not None:
        init = [lax.expand_dims(_line.guard(v), (axis,)) for v in init]
    return elements, init, mask, axis


def settled(spec, state, valid):
    """The state, or the empty value where no contribution was seen."""
    if valid is None:
        return state
    return _fold.pick(valid, state, spec.filler(state[0].shape))


def refuse_spec(spec, out, finish):
    """Why a bound reducer does not run in a Triton kernel, or None."""
    dtypes = [*spec.raw, *spec.elements, *spec.states, *out]
    results = spec.results if finish else spec.states
    casts = [
        *zip(spec.raw, spec.elements, strict=True),
        *zip(results, out, strict=True),
    ]
    reasons = [TRAITS.format(d) for d in dtypes]
    reasons += [refuse_cast(TRAITS, a, b) for a, b in casts if a != b]
    reasons += [refuse_region(BACKEND, TRAITS, r) for r in _regions(spec, finish)]
    return next(filter(None, reasons), None)


@functools.lru_cache(maxsize=1024)
def _regions(spec, finish):
    """The scalar jaxprs of a reducer's functions."""
    state = jax.tree.unflatten(spec.state_tree, list(spec.states))
    element = (jax.tree.unflatten(spec.tree, list(spec.elements)),)
    element += () if spec.index is None else (spec.index,)
    reducer = spec.reducer
    calls = [
        (reducer.merge, (state, state)),
        (reducer.lift, element),
        (reducer.update, (state, *element)),
        (reducer.update_right, (*element, state)),
        (reducer.finish if finish else None, (state,)),
    ]
    found = []
    for fn, args in calls:
        if fn is not None:
            leaves, tree = jax.tree.flatten(args)
            found.append(trace(fn, tree, tuple(leaves))[0])
    return found


def refuse_operands(avals, params):
    """Why reduce or scan refuse operands and reducer in a kernel, or None."""
    spec = params["spec"]
    elements, _, _ = unpack(spec, avals, params["seeded"], params["masked"])
    if 0 in elements[0].shape:
        return "a kernel has no empty values; do it outside on an empty array"
    return TRAITS.operand(elements[0]) or refuse_spec(
        spec, params["out"], params["finish"]
    )


def viewed_inputs(elements, init, mask, axes):
    """The operands as a launch takes them, by name."""
    views = [viewed(v, axes) for v in elements]
    outer, _, inner = views[0].shape
    return {
        "elements": views,
        "states": [],
        "init": [v.reshape(outer, 1, inner) for v in init or ()],
        "mask": [] if mask is None else [viewed(mask, axes)],
    }


def contributions(spec, refs, place):
    """The line of a program's block, lifted or, from an earlier launch, raw states."""
    line = []
    for p, inside in place.block(place.b):
        there = place.load(refs["mask"][0], p, inside) if refs["mask"] else inside
        if there is not None:
            there = jnp.broadcast_to(there, (place.tiling.lanes, place.tiling.extent))
        if refs["elements"]:
            states = spec.lift(element_at(spec, refs, place, p, inside))
        else:
            states = [place.load(r, p, inside) for r in refs["states"]]
        line.append((states, there))
    return line[::-1] if place.tiling.backward else line


def element_at(spec, refs, place, p, inside):
    """The leaves of the elements at places p, the source index last."""
    values = [place.load(r, p, inside) for r in refs["elements"]]
    if spec.index is None:
        return values
    index = jnp.broadcast_to(jnp.asarray(p, spec.index), values[0].shape)
    return [*values, index]


def write(spec, finish, out, place, refs, p, state, valid, there=None):
    """Settle, finish, narrow once, and store at places p."""
    state = settled(spec, state, valid)
    results = spec.finish(state) if finish else state
    for ref, v, d in zip(refs, results, out, strict=True):
        place.store(ref, p, convert(v, d), there)


def refuse_launch(avals, axes, params):
    """Why reduce or scan of whole arrays is refused, or None."""
    spec = params["spec"]
    elements, _, _ = unpack(spec, avals, params["seeded"], params["masked"])
    if 0 in elements[0].shape or not axes:
        return "nothing to combine; the reference does it without a kernel"
    dtypes = [*spec.raw, *spec.states, *params["out"]]
    shape = jax.eval_shape(lambda v: viewed(v, axes), elements[0]).shape
    large = why_too_large(shape, [d.itemsize for d in dtypes])
    return large or refuse_spec(spec, params["out"], params["finish"])
