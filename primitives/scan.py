r"""scan: every prefix of each fibre combined by a reducer, in a stated order.

    prefix:   y_i = seed . x_0 . x_1 ... x_i        (earlier on the left)
    suffix:   y_i = x_i . x_(i+1) ... x_(n-1) . seed
    reverse:  y_i = seed . x_(n-1) . x_(n-2) ... x_i   (the scan of the flipped sequence)

where the policy says how the dots associate (see `jaxtile.policy`). The first inclusive
prefix is the element itself, bits kept. Exclusive prefixes leave x_i out and never
subtract. Masked elements are skipped: their place shows the prefix so far. Under
`fixed_tree` a suffix is the mirror image: its blocks align with the end. A fold policy
that runs against the direction (`fold_right` of prefixes, `fold_left` of suffixes) is a
separate chain for each prefix, quadratic by definition.

Operands: element leaves, then seed leaves (if `seeded`), then a mask (if `masked`).
Results: the prefixes, then the final raw state (if `final`).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtile.catalogue import add as ADD
from jaxtile.errors import NoDerivativeError, TileShapeError, message
from jaxtile.policy import Kind, ordered_tree
from jaxtile.primitives import _fold, _prefix
from jaxtile.primitives._define import Out, define
from jaxtile.primitives._operands import batch_fibres, check_operands, unpack
from jaxtile.primitives._scalar import convert, evaluate
from jaxtile.primitives._spec import Spec, make_spec
from jaxtile.primitives._tangent import (
    affine_scan,
    finish_tangents,
    float_tangent,
    is_float,
    is_zero,
    prefix_tangents,
    shift_in,
)


def bind_scan(
    spec,
    elements,
    init,
    mask,
    *,
    axis,
    policy,
    direction="prefix",
    exclusive=False,
    final=False,
    finish=True,
    out=None,
):
    """Bind `scan_p` from its parts.

    Args:
        spec: the bound reducer.
        elements: its leaves, equally shaped.
        init: seed leaves of the fibres' shape, or None.
        mask: a bool array of the elements' shape, or None.
        axis: the scanned axis.
        policy: the order policy.
        direction: "prefix", "suffix" or "reverse".
        exclusive: leave x_i out of y_i.
        final: also give the raw state over everything.
        finish: give `finish`'s results; else raw states.
        out: dtypes that the prefixes narrow to, once, at the end.

    Returns:
        The output leaves.
    """
    operands = [*elements, *(init or ()), *(() if mask is None else (mask,))]
    return scan_p.bind(
        *operands,
        spec=spec,
        axis=axis,
        policy=policy,
        direction=direction,
        exclusive=exclusive,
        final=final,
        seeded=init is not None,
        masked=mask is not None,
        finish=finish,
        out=tuple(out or (spec.results if finish else spec.states)),
    )


def raw_prefixes(spec, elements, init, mask, axis):
    """Inclusive raw prefix states in source order, as the derivative needs them."""
    elements = list(elements[: spec.n_elements])
    if not spec.swapped:
        return bind_scan(
            spec, elements, init, mask, axis=axis, policy=ordered_tree, finish=False
        )
    # A swapped spec is a flipped suffix: state it as one, so that kernels see it.
    back = _prefix.flip(elements, axis)
    m = None if mask is None else lax.rev(mask, (axis,))
    plain = replace(spec, swapped=False)
    outs = bind_scan(
        plain,
        back,
        init,
        m,
        axis=axis,
        policy=ordered_tree,
        direction="suffix",
        finish=False,
    )
    return _prefix.flip(outs, axis)


def _abstract(*avals, spec: Spec, axis, policy, seeded, masked, out, final, **params):
    elements, init, mask = unpack(spec, avals, seeded, masked)
    shape = elements[0].shape
    kept = tuple(d for d in range(len(shape)) if d != axis)
    check_operands("scan", spec, policy, elements, init, mask, kept, (axis,))
    nothing = final and shape[axis] == 0
    if not seeded and (params["exclusive"] or nothing):
        if not spec.has_empty and spec.reducer.identity is None:
            raise TileShapeError(
                message(
                    "scan",
                    expected=f"init= for the prefix of nothing: {spec.reducer!r} has "
                    "no identity",
                    got=f"exclusive={params['exclusive']}, axis of {shape[axis]}",
                    way_out="Pass init=.",
                )
            )
    dims = tuple(range(len(shape)))
    outs = [Out(shape, d, dims) for d in out]
    fibre = tuple(shape[d] for d in kept)
    return outs + [Out(fibre, d, kept) for d in spec.states] * final


def _inclusive(spec, elements, init, mask, axis, policy, platform):
    against = policy.kind is (Kind.LEFT if spec.swapped else Kind.RIGHT)
    if against:
        return _prefix.right_nested(spec, elements, axis, init, mask)
    if policy.kind is Kind.FIXED:
        return _prefix.fixed(spec, elements, axis, init, mask)
    if policy.kind is not Kind.TREE:
        return _prefix.chain(spec, elements, axis, init, mask, platform)
    if platform != "cpu":
        return _prefix.fixed(spec, elements, axis, init, mask)
    return _prefix.chunked(spec, elements, axis, init, mask, platform)


def _nothing(spec, init, fibre):
    return list(init) if init is not None else spec.filler(fibre)


def _reference(
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
    platform="",
):
    elements, init, mask = unpack(spec, operands, seeded, masked)
    shape = elements[0].shape
    n, fibre = shape[axis], tuple(s for d, s in enumerate(shape) if d != axis)
    elements = elements + _fold.index_leaf(spec, shape, axis)
    backward = direction != "prefix"
    if backward:
        elements = _prefix.flip(elements, axis)
        mask = None if mask is None else lax.rev(mask, (axis,))
    if direction == "suffix":
        spec = _prefix.swapped(spec)
    if n == 0:
        states = [jnp.zeros(shape, d) for d in spec.states]
        last = _nothing(spec, init, fibre)
    else:
        states = _inclusive(spec, elements, init, mask, axis, policy, platform)
        last = [lax.index_in_dim(v, n - 1, axis, keepdims=False) for v in states]
        if exclusive:
            first = _nothing(spec, init, fibre)
            states = [shift_in(f, v, axis) for f, v in zip(first, states, strict=True)]
    if backward:
        states = _prefix.flip(states, axis)
    results = spec.finish(states, evaluate) if finish else states
    outs = [convert(v, d) for v, d in zip(results, out, strict=True)]
    return outs + (last if final else [])


def _forward(spec, elements, de, mask, axis, direction):
    """The same scan as a prefix scan: flipped, and swapped for a suffix."""
    if direction == "prefix":
        return spec, elements, de, mask
    elements, de = (
        [lax.rev(v, (axis,)) if v.dtype != jax.dtypes.float0 else v for v in values]
        for values in (elements, de)
    )
    mask = None if mask is None else lax.rev(mask, (axis,))
    return _prefix.swapped(spec) if direction == "suffix" else spec, elements, de, mask


def _is_affine(spec, finish, final, direction):
    name = spec.reducer.native
    plain = finish and not final and direction != "suffix"
    return name in ("affine", "matrix_affine") and plain


def _affine_parts(spec, elements):
    """The rows of A and the b's of an affine element."""
    element = jax.tree.unflatten(spec.tree, elements)
    if spec.reducer.native == "affine":
        return [[element[0]]], [element[1]]
    return [list(row) for row in element[0]], list(element[1])


def _affine_jvp(spec, elements, init, mask, de, dz, h, params):
    """dh_i = A_i dh_(i-1) + (dA_i h_(i-1) + db_i): the same recurrence again."""
    axis, direction = params["axis"], params["direction"]
    (rows, _), (drows, db) = (_affine_parts(spec, v) for v in (elements, de))
    k = len(db)
    first = init[-k:] if init is not None else [jnp.zeros_like(v) for v in _first(h, axis)]
    before = [_before(f, v, axis, direction) for f, v in zip(first, h, strict=True)]
    u = []
    for i in range(k):
        terms = [convert(drows[i][j], before[j].dtype) * before[j] for j in range(k)]
        u.append(sum(terms, convert(db[i], h[i].dtype)))
    if mask is not None:
        u = [jnp.where(mask, v, 0) for v in u]
    wide = [[convert(v, h[0].dtype) for v in row] for row in rows]
    dinit = None if dz is None else dz[-k:]
    return affine_scan(wide, u, dinit, mask, axis, direction, params["policy"])


def _first(values, axis):
    return [lax.index_in_dim(v, 0, axis, keepdims=False) for v in values]


def _before(first, values, axis, direction):
    if direction == "prefix":
        return shift_in(first, values, axis)
    return lax.rev(shift_in(first, lax.rev(values, (axis,)), axis), (axis,))


def _jvp(primals, tangents, **params):
    spec, axis = params["spec"], params["axis"]
    elements, init, mask = unpack(spec, primals, params["seeded"], params["masked"])
    outs = scan_p.bind(*primals, **params)
    de, dz, _ = unpack(spec, tangents, params["seeded"], params["masked"])
    if all(is_zero(t) for t in (*de, *(dz or ()))):
        return outs, [ad.Zero.from_primal_value(v) for v in outs]
    de = [float_tangent(p, t) for p, t in zip(elements, de, strict=True)]
    dz = init and [float_tangent(p, t) for p, t in zip(init, dz, strict=True)]
    if spec.reducer.native == "add":
        moving = [*de, *(dz or ()), *(() if mask is None else (mask,))]
        return outs, scan_p.bind(*moving, **params)
    return outs, _general_jvp(outs, elements, init, mask, de, dz, params)


def _general_jvp(outs, elements, init, mask, de, dz, params):
    spec, axis, direction = (params[k] for k in ("spec", "axis", "direction"))
    exclusive, finish, final = (params[k] for k in ("exclusive", "finish", "final"))
    n = elements[0].shape[axis]
    if n == 0:
        return [
            jnp.zeros_like(v) if is_float(v.dtype) else np.zeros(v.shape, _FLOAT0)
            for v in outs
        ]
    if _is_affine(spec, finish, final, direction) and not exclusive:
        same = params["out"] == spec.results
        h = outs if same else bind_scan(
            spec, elements, init, mask, axis=axis, policy=params["policy"],
            direction=direction,
        )
        dh = _affine_jvp(spec, elements, init, mask, de, dz, h, params)
        return [convert(v, d) for v, d in zip(dh, params["out"], strict=True)]
    order, xs, dxs, m = _forward(spec, elements, de, mask, axis, direction)
    index = _fold.index_leaf(spec, elements[0].shape, axis)
    index = index if direction == "prefix" else _prefix.flip(index, axis)
    y = raw_prefixes(order, xs, init, m, axis) if not spec.index else None
    dy = prefix_tangents(order, [*xs, *index], init, m, dxs, dz, axis)
    y = raw_prefixes(order, xs, init, m, axis) if y is None else y
    floats = [i for i, v in enumerate(y) if is_float(v.dtype)]
    last = [lax.index_in_dim(v, n - 1, axis, keepdims=False) for v in dy]
    if exclusive:
        first = _nothing(spec, init, last[0].shape)
        y = [shift_in(f, v, axis) for f, v in zip(first, y, strict=True)]
        zero = [jnp.zeros_like(v) for v in last]
        dfirst = zero if dz is None else [dz[i] for i in floats]
        dy = [shift_in(f, v, axis) for f, v in zip(dfirst, dy, strict=True)]
    if direction != "prefix":
        y, dy = _prefix.flip(y, axis), _prefix.flip(dy, axis)
    tangents = finish_tangents(spec, y, dy, finish, params["out"])
    if not final:
        return tangents
    moving = iter(last)
    return tangents + [
        next(moving) if is_float(d) else np.zeros(last[0].shape, _FLOAT0)
        for d in spec.states
    ]


_FLOAT0 = jax.dtypes.float0
_OPPOSITE = {"prefix": "reverse", "reverse": "prefix", "suffix": "prefix"}


def _transpose(cotangents, *operands, **params):
    spec = params["spec"]
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [
            ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in operands
        ]
    cts = [
        jnp.zeros(ct.aval.shape, ct.aval.dtype) if type(ct) is ad.Zero else ct
        for ct in cotangents
    ]
    if spec.reducer.native == "add":
        return _transpose_add(cts, operands, params)
    linear = not params["exclusive"]
    if linear and _is_affine(spec, params["finish"], params["final"], params["direction"]):
        return _transpose_affine(cts, operands, params)
    raise NoDerivativeError(
        message(
            "scan",
            expected="a linear scan to transpose: add, or affine in its b",
            got=f"{spec.reducer!r}, direction {params['direction']}",
            way_out="Use jax.vjp, or a prefix or reverse scan.",
        )
    )


def _transpose_add(cts, operands, params):
    """ct_x_i sums the cotangents of every prefix that x_i is in, and of the final."""
    spec, axis = params["spec"], params["axis"]
    elements, init, mask = unpack(spec, operands, params["seeded"], params["masked"])
    ct = convert(cts[0], spec.states[0])
    carry = cts[1:] or None
    leaf = jax.tree.structure(0)
    back = make_spec(ADD, leaf, (ct.dtype,), spec.states[0], None, "scan")
    dtype = (elements[0].aval if ad.is_undefined_primal(elements[0]) else elements[0]).dtype
    outs = bind_scan(
        back,
        [ct],
        carry,
        None,
        axis=axis,
        policy=ordered_tree,
        direction=_OPPOSITE[params["direction"]],
        exclusive=params["exclusive"],
        final=init is not None,
        out=(dtype,),
    )
    dx = outs[0] if mask is None else jnp.where(mask, outs[0], 0)
    result = [dx if ad.is_undefined_primal(elements[0]) else None]
    if init is not None:
        undefined = ad.is_undefined_primal(init[0])
        result.append(outs[1] if undefined else None)
    return result + [None] * params["masked"]


def _transpose_affine(cts, operands, params):
    """lambda_i = ct_i + A_(i+1)^T lambda_(i+1): the affine scan the other way."""
    spec, axis, direction = (params[k] for k in ("spec", "axis", "direction"))
    elements, init, mask = unpack(spec, operands, params["seeded"], params["masked"])
    rows, b = _affine_parts(spec, elements)
    k = len(b)
    if any(ad.is_undefined_primal(v) for row in rows for v in row):
        raise NoDerivativeError(
            message(
                "scan",
                expected="A of the affine scan known and b to transpose",
                got="an unknown A",
                way_out="h is linear in b alone; use jax.vjp for A.",
            )
        )
    cts = [convert(ct, spec.states[0]) for ct in cts]
    eye = [[jnp.full_like(cts[0], i == j) for j in range(k)] for i in range(k)]
    rows = [[convert(v, cts[0].dtype) for v in row] for row in rows]
    if mask is not None:
        rows = [
            [jnp.where(mask, v, e) for v, e in zip(r, s, strict=True)]
            for r, s in zip(rows, eye, strict=True)
        ]
    turned = [[rows[j][i] for j in range(k)] for i in range(k)]
    other = _OPPOSITE[direction]
    moved = [
        [_before(_edge(e, axis), v, axis, other) for v, e in zip(r, s, strict=True)]
        for r, s in zip(turned, eye, strict=True)
    ]
    lam = affine_scan(moved, cts, None, None, axis, other, params["policy"])
    db = lam if mask is None else [jnp.where(mask, v, 0) for v in lam]
    known = [None] * (len(elements) - k)
    grads = known + [
        convert(d, v.aval.dtype) if ad.is_undefined_primal(v) else None
        for d, v in zip(db, b, strict=True)
    ]
    return grads + _seed_cotangents(turned, lam, init, axis, direction, k) + (
        [None] * params["masked"]
    )


def _edge(value, axis):
    return lax.index_in_dim(value, 0, axis, keepdims=False)


def _seed_cotangents(turned, lam, init, axis, direction, k):
    """The seed enters h_0 through A_0."""
    if init is None:
        return []
    n = lam[0].shape[axis]
    place = 0 if direction == "prefix" else n - 1
    end = [lax.index_in_dim(v, place, axis, keepdims=False) for v in lam]
    a = [[lax.index_in_dim(v, place, axis, keepdims=False) for v in r] for r in turned]
    h = [sum(a[i][j] * end[j] for j in range(k)) for i in range(k)]
    head = [None] * (len(init) - k)
    pairs = zip(init[-k:], h, strict=True)
    return head + [v if ad.is_undefined_primal(z) else None for z, v in pairs]


def _batch(args, dims, **params):
    args = batch_fibres(args, dims, params, "axis")
    outs = scan_p.bind(*args, **{**params, "axis": params["axis"] + 1})
    return outs, [0] * len(outs)


scan_p = define(
    "tile_scan",
    abstract=_abstract,
    reference=_reference,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
