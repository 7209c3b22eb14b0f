"""scan in Pallas Triton kernels: every reducer, direction and policy.

A tree policy that permits regrouping is one `tt.scan`, which keeps the order. It has no
exclusive form and no shift, so that exclusive prefixes and `fixed_tree` are a sweep up
and down the tree. A fold is the chain, written where it stands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtile.pallas_lowering.triton import BACKEND, _folds, _line
from jaxtile.pallas_lowering.triton._chain import run_chain, start_of
from jaxtile.pallas_lowering.triton._launch import chain_for, launch, tile_for
from jaxtile.pallas_lowering.triton._operands import (
    contributions,
    refuse_launch,
    refuse_operands,
    settled,
    unpacked,
    viewed_inputs,
    write,
)
from jaxtile.pallas_lowering.triton.reduce import totals
from jaxtile.policy import Kind
from jaxtile.primitives import _fold
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._scalar import convert
from jaxtile.primitives.scan import scan_p


def _refuse(*avals, **params):
    return refuse_operands(avals, params)


@BACKEND.traces(scan_p, _refuse)
def _scan(
    *operands,
    spec,
    axis,
    policy,
    direction,
    exclusive,
    final,
    seeded,
    masked,
    finish,
    out,
):
    spec = _line.in_kernel(spec)
    elements, init, mask, _ = unpacked(spec, operands, (axis,), seeded, masked)
    backward = direction != "prefix"
    if direction == "suffix":
        spec = replace(spec, swapped=True)
    tree = policy.kind in (Kind.TREE, Kind.FIXED)
    prefixes = trees if tree else chains
    order = backward, exclusive, policy, axis
    shown, last = prefixes(spec, elements, mask, init, *order)
    states = settled(spec, *shown)
    results = spec.finish(states) if finish else states
    outs = [_line.guard(convert(v, d)) for v, d in zip(results, out, strict=True)]
    if not final:
        return outs
    last = [_line.guard(v) for v in settled(spec, *last)]
    return outs + [lax.squeeze(v, (axis,)) for v in last]


def trees(spec, elements, mask, init, backward, exclusive, policy, axis):
    """Prefixes of one tile, and what is up to its end, under a tree policy."""
    states = spec.lift(elements)
    shape = states[0].shape
    if init is None:
        fibre = _line.resized(shape, axis, 1)
        before = spec.filler(fibre), jnp.zeros(fibre, bool)
    else:
        before = init, None
    if exclusive or policy.kind is Kind.FIXED:
        line = [(states, mask)]
        out, upto = _line.fixed_scan(spec, line, before, backward, axis=axis)
        return (out if exclusive else upto)[0], _last(upto[0], backward, axis)
    upto = _line.any_scan(spec, states, mask, backward, axis)
    if init is not None:
        wide = [jnp.broadcast_to(v, shape) for v in init]
        upto = _fold.join(spec, wide, None, upto[0], upto[1])
    return upto, _last(upto, backward, axis)


def _last(piece, backward, axis):
    states, valid = piece
    shape = states[0].shape
    here = _line.places(shape, axis) == (0 if backward else shape[axis] - 1)
    flag = None if valid is None else _line.take(valid, here, axis)
    return [_line.take(v, here, axis) for v in states], flag


def chains(spec, elements, mask, init, backward, exclusive, policy, axis):
    """Prefixes of one tile, and what is up to its end, under a fold policy."""
    shape = elements[0].shape
    fibre = _line.resized(shape, axis, 1)
    first = _fold.nothing(spec, init, fibre) if exclusive else None
    if policy.kind is not (Kind.LEFT if spec.swapped else Kind.RIGHT):
        start = _fold.start(spec, fibre, init, mask is not None)
        return _folds.fold_scan(spec, elements, mask, start, first, backward, axis)
    start = _fold.start(spec, fibre, init, True)
    last = _folds.fold(spec, elements, mask, start, True, backward, axis)
    wide = [jnp.broadcast_to(v, shape) for v in start[0]]
    flag = None if start[1] is None else jnp.broadcast_to(start[1], shape)
    carry = (wide, flag)
    shown = _folds.nested_scan(spec, elements, mask, carry, first, backward, axis)
    return shown, last


def refuse_arrays(*avals, axis, policy, direction, **params):
    """Why a scan of whole arrays is refused, or None."""
    if policy.kind is (Kind.LEFT if direction == "suffix" else Kind.RIGHT):
        return (
            f"{policy} against the direction is a chain for each prefix; the reference "
            "does it, or scan in the other direction"
        )
    return refuse_launch(avals, (axis,), params)


@dataclass(frozen=True)
class _Shown:
    """What a scan writes: raw states and flags for a later launch, or results.

    Args:
        spec: the reducer.
        finish, out: of the results; out of None is raw states.
        exclusive: each place shows what is before it.
        flagged: also write which raw states exist.
    """

    spec: _line.KernelSpec
    finish: bool
    out: tuple | None
    exclusive: bool
    flagged: bool = False

    def outs(self, shape, final):
        """The outputs of a launch."""
        outer, _, inner = shape
        states = self.spec.states
        return {
            "out": [(shape, d) for d in self.out or states],
            "seen": [(shape, np.dtype(bool))] * self.flagged,
            "final": [((outer, 1, inner), d) for d in states] * final,
        }

    def first(self, place, refs):
        """Write what is before everything, at the first place of exclusive prefixes."""
        init = [place.load(r, np.int32(0)) for r in refs["init"]] or None
        shape = (place.tiling.lanes, 1)
        state = _fold.nothing(self.spec, init, shape)
        p = np.int32(place.tiling.shape[1] - 1 if place.tiling.backward else 0)
        begins = jnp.broadcast_to(jnp.asarray(place.b == 0), shape)
        self.write(place, refs, p, state, jnp.full(shape, init is not None), begins)

    def write(self, place, refs, p, state, valid, there):
        """Write at places p that are there."""
        if self.out is not None:
            shown = self.spec, self.finish, self.out
            write(*shown, place, refs["out"], p, state, valid, there)
            return
        for ref, v in zip(refs["out"], state, strict=True):
            place.store(ref, p, v, there)
        for ref in refs["seen"]:
            place.store(ref, p, valid, there)

    def prefixes(self, place, refs, p, inside, state, valid):
        """Write the prefixes up to places p."""
        t = place.tiling
        if self.exclusive:
            p = p + np.int32(-1 if t.backward else 1)
            self.write(place, refs, p, state, valid, place.on_axis(p))
        else:
            self.write(place, refs, p, state, valid, inside)

    def last(self, place, refs, p, state, valid):
        """Write the state up to the end, the last place of some block."""
        if not refs["final"]:
            return
        end = 0 if place.tiling.backward else place.tiling.shape[1] - 1
        here = jnp.broadcast_to(jnp.asarray(p == end), state[0].shape)
        settle = settled(self.spec, state, valid)
        for ref, v in zip(refs["final"], settle, strict=True):
            place.store(ref, np.int32(0), v, here)


@BACKEND.runs(scan_p, refuse_arrays)
def scan_arrays(
    *operands,
    spec,
    axis,
    policy,
    direction,
    exclusive,
    final,
    seeded,
    masked,
    finish,
    out,
):
    """scan of whole arrays: `scan_p`'s operands and parameters, its results.

    Under a tree policy a launch totals the blocks, a scan of these totals, by the same
    way, gives what is up to each block, and a launch scans the blocks between:
    exactly how `fixed_tree` divides a prefix. Exclusive prefixes are written a place
    further.
    """
    spec = _line.in_kernel(spec)
    elements, init, mask = unpack(spec, operands, seeded, masked)
    given = viewed_inputs(elements, init, mask, (axis,))
    backward = direction != "prefix"
    if direction == "suffix":
        spec = replace(spec, swapped=True)
    shown = _Shown(spec, finish, out, exclusive)
    shape = given["elements"][0].shape
    if policy.kind in (Kind.LEFT, Kind.RIGHT):
        body = functools.partial(_chain_body, spec, shown)
        tiling = chain_for(shape, backward)
        made = launch(
            tiling, body, given, shown.outs(shape, final), "jaxtile_fold_scan"
        )
    else:
        made = _blocks(spec, given, policy, backward, shown, final)
    whole, fibre = elements[0].shape, list(elements[0].shape)
    del fibre[axis]
    outs = [v.reshape(whole) for v in made["out"]]
    return outs + [v.reshape(fibre) for v in made["final"]]


def _chain_body(spec, shown, place, refs):
    if shown.exclusive:
        shown.first(place, refs)

    def show(p, inside, steps):
        states = zip(*(state for state, _ in steps), strict=True)
        state = [_line.from_columns(v) for v in states]
        flags = [valid for _, valid in steps]
        valid = None
        if any(v is not None for v in flags):
            ones = jnp.ones((place.tiling.lanes, 1), bool)
            valid = _line.from_columns([ones if v is None else v for v in flags])
        shown.prefixes(place, refs, p, inside, state, valid)

    state, valid = run_chain(spec, place, refs, start_of(spec, place, refs), show=show)
    end = 0 if place.tiling.backward else place.tiling.shape[1] - 1
    shown.last(place, refs, np.int32(end), state, valid)


def _blocks(spec, given, policy, backward, shown, final):
    """Prefixes under a tree policy."""
    shape = (given["elements"] or given["states"])[0].shape
    tiling = tile_for(shape, backward, scan=True)
    ahead = {"upto": [], "known": []}
    if tiling.blocks > 1:
        sums = {**given, **totals(spec, given, policy, tiling)}
        flagged = bool(given["mask"]) and not given["init"]
        raw = _Shown(spec, False, None, exclusive=False, flagged=flagged)
        made = _blocks(spec, sums, policy, False, raw, False)
        ahead = {"upto": made["out"], "known": made["seen"]}
    body = functools.partial(_block_body, spec, policy, shown)
    outs = shown.outs(shape, final)
    return launch(tiling, body, {**given, **ahead}, outs, "jaxtile_scan")


def _block_body(spec, policy, shown, place, refs):
    if shown.exclusive:
        shown.first(place, refs)
    line = contributions(spec, refs, place)
    upto = _up_to(spec, policy, refs, place, line)
    pieces = place.block(place.b)
    for (p, inside), piece in zip(
        pieces[::-1] if place.tiling.backward else pieces, upto, strict=True
    ):
        shown.prefixes(place, refs, p, inside, *piece)
        shown.last(place, refs, p, *piece)


def _before(spec, place, refs):
    """The piece before a program's block; its flag is None where it exists."""
    shape = (place.tiling.lanes, 1)
    init = [place.load(r, np.int32(0)) for r in refs["init"]]
    state, valid = init or spec.filler(shape), None if init else jnp.zeros(shape, bool)
    if refs["upto"]:
        later = jnp.broadcast_to(jnp.asarray(place.b > 0), shape)
        loaded, known = _upto_block(refs, place, place.b - np.int32(1), later)
        state = _fold.pick(later, loaded, state)
        if not init:
            valid = later if known is None else known
    return state, valid


def _upto_block(refs, place, b, there=None):
    """What an earlier launch found up to the end of block b."""
    known = [place.load(r, b, there) for r in refs["known"]]
    states = [place.load(r, b, there) for r in refs["upto"]]
    return states, known[0] if known else None


def _up_to(spec, policy, refs, place, line):
    """The prefixes of a block, as a line."""
    t, before = place.tiling, _before(spec, place, refs)
    if t.extent == 1 or policy.kind is Kind.FIXED:
        # The pieces are in the order already; a tile is turned around inside.
        turned = t.backward and t.extent > 1
        whole = _upto_block(refs, place, place.b) if refs["upto"] else None
        return _line.fixed_scan(spec, line, before, turned, whole)[1]
    states, valid = _line.any_scan(spec, *line[0], reverse=t.backward)
    if t.blocks == 1 and before[1] is not None:
        return [(states, valid)]
    wide = [jnp.broadcast_to(v, states[0].shape) for v in before[0]]
    flag = before[1]
    flag = None if flag is None else jnp.broadcast_to(flag, states[0].shape)
    return [_fold.join(spec, wide, flag, states, valid)]
