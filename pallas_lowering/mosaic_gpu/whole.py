"""Which whole-array calls of reduce and scan these kernels take."""

from __future__ import annotations

import math

from jaxtile.pallas_lowering.mosaic_gpu import BACKEND, whole_reduce, whole_scan
from jaxtile.pallas_lowering.mosaic_gpu._refusals import refuse_against, refuse_formats
from jaxtile.pallas_lowering.mosaic_gpu._states import Algebra, refuse_regions
from jaxtile.primitives import _native, _prefix
from jaxtile.primitives._operands import unpack
from jaxtile.primitives.reduce import reduce_p
from jaxtile.primitives.scan import scan_p

# What XLA was measured to reduce as fast; it also fuses them with what is around.
_XLA_REDUCES = frozenset(("add", "argmax"))
_MOST_FIBRES = 2**31 - 1


def _refuse(avals, spec, count, fibres, out, finish) -> str | None:
    reason = refuse_formats([*(a.dtype for a in avals), *spec.states, *out])
    if reason is not None:
        return reason
    if count == 0 or fibres == 0:
        return (
            "there is nothing to launch for an empty array; leave it to the reference"
        )
    if fibres > _MOST_FIBRES:
        return f"{fibres} fibres are more than a grid has CTAs; split the batch"
    return refuse_regions(Algebra(spec, False, out, finish))


def _refuse_reduce(*avals, spec, axes, policy, seeded, masked, finish, out):
    shape = unpack(spec, avals, seeded, masked)[0][0].shape
    count = math.prod([shape[d] for d in axes])
    fibres = math.prod([s for d, s in enumerate(shape) if d not in axes])
    if not axes:
        return "no axis is reduced; leave it to the reference"
    return _refuse(avals, spec, count, fibres, out, finish)


def _slower_reduce(*avals, spec, axes, policy, seeded, masked, finish, out):
    native = spec.reducer.native in _XLA_REDUCES and _native.permitted(spec, policy)
    if native and not masked:
        return (
            f"XLA's own {spec.reducer.native} is as fast and fuses with what is around "
            "it; insist on it by implementation="
        )
    return None


def _refuse_scan(
    *avals,
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
    shape = unpack(spec, avals, seeded, masked)[0][0].shape
    fibres = math.prod(shape) // max(1, shape[axis])
    spec = _prefix.swapped(spec) if direction == "suffix" else spec
    return refuse_against(policy, direction) or _refuse(
        avals, spec, shape[axis], fibres, out, finish
    )


BACKEND.runs(reduce_p, _refuse_reduce, _slower_reduce)(whole_reduce.run)
BACKEND.runs(scan_p, _refuse_scan)(whole_scan.run)
