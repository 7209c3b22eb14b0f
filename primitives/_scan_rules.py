"""The derivative rules of scan: JVP and transpose.

Every tangent is an affine scan (see `_tangent.py`), linear in the tangents; the transpose
of add and of an affine scan is the same scan in the other direction.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtile._jax_private import iota_like
from jaxtile.catalogue import add as ADD
from jaxtile.errors import NoDerivativeError, message
from jaxtile.policy import Kind, ordered_tree
from jaxtile.primitives._bind import (
    bind_scan,
    flip,
    of_tangent,
    raw_prefixes,
    scan_p,
)
from jaxtile.primitives._define import zero_tangent
from jaxtile.primitives._fold import nothing, shift_in
from jaxtile.primitives._operands import unpack
from jaxtile.primitives._prefix import swapped
from jaxtile.primitives._scalar import convert
from jaxtile.primitives._spec import make_spec
from jaxtile.primitives._tangent import (
    affine_scan,
    delayed_scan,
    finish_tangents,
    float_tangent,
    is_float,
    is_zero,
    prefix_tangents,
)


def _forward(spec, elements, de, mask, axis, direction):
    """The same scan as a prefix scan: flipped, and swapped for a suffix."""
    if direction == "prefix":
        return spec, elements, de, mask
    elements, de = (
        [lax.rev(v, (axis,)) if v.dtype != jax.dtypes.float0 else v for v in values]
        for values in (elements, de)
    )
    mask = None if mask is None else lax.rev(mask, (axis,))
    return swapped(spec) if direction == "suffix" else spec, elements, de, mask


def _is_affine(spec, finish, final, direction):
    name = spec.reducer.native
    plain = finish and not final and direction != "suffix"
    return name in ("affine", "matrix_affine", "delayed_affine") and plain


def _is_delayed(spec):
    return spec.reducer.native == "delayed_affine"


def _affine_parts(spec, elements):
    """The rows of A and the b's of an affine element."""
    element = jax.tree.unflatten(spec.tree, elements)
    if spec.reducer.native != "matrix_affine":
        return [[element[0]]], [element[1]]
    return [list(row) for row in element[0]], list(element[1])


def _affine_jvp(spec, elements, init, mask, de, dz, h, params):
    """dh_i = A_i dh_(i-1) + (dA_i h_(i-1) + db_i): the same recurrence again."""
    axis, direction = params["axis"], params["direction"]
    (rows, _), (drows, db) = (_affine_parts(spec, v) for v in (elements, de))
    k, order, name = len(db), params["policy"], params["implementation"]
    if _is_delayed(spec):
        (((a,),), ((da,),)), zero = (rows, drows), jnp.zeros_like(_edge(h[0], axis))
        moved = _before(zero, convert(da, h[0].dtype) * h[0], axis, direction)
        u = moved + convert(db[0], h[0].dtype)
        return delayed_scan(a, u, axis, direction, order, name)
    first = (
        init[-k:] if init is not None else [jnp.zeros_like(_edge(v, axis)) for v in h]
    )
    before = [_before(f, v, axis, direction) for f, v in zip(first, h, strict=True)]
    u = []
    for i in range(k):
        terms = [convert(drows[i][j], before[j].dtype) * before[j] for j in range(k)]
        u.append(sum(terms, convert(db[i], h[i].dtype)))
    if mask is not None:
        u = [jnp.where(mask, v, 0) for v in u]
    wide = [[convert(v, h[0].dtype) for v in row] for row in rows]
    dinit = None if dz is None else dz[-k:]
    return affine_scan(wide, u, dinit, mask, axis, direction, order, name)


def _before(first, values, axis, direction):
    if direction == "prefix":
        return shift_in(first, values, axis)
    return lax.rev(shift_in(first, lax.rev(values, (axis,)), axis), (axis,))


def jvp(primals, tangents, **params):
    spec = params["spec"]
    elements, init, mask = unpack(spec, primals, params["seeded"], params["masked"])
    outs = scan_p.bind(*primals, **params)
    params = {**params, "implementation": of_tangent(params["implementation"])}
    de, dz, _ = unpack(spec, tangents, params["seeded"], params["masked"])
    if all(is_zero(t) for t in (*de, *(dz or ()))):
        return outs, [zero_tangent(v) for v in outs]
    de = [float_tangent(p, t) for p, t in zip(elements, de, strict=True)]
    dz = init and [float_tangent(p, t) for p, t in zip(init, dz, strict=True)]
    if spec.reducer.native == "add":
        moving = [*de, *(dz or ()), *(() if mask is None else (mask,))]
        return outs, scan_p.bind(*moving, **params)
    return outs, _general_jvp(outs, elements, init, mask, de, dz, params)


def _check_chain(spec, policy, direction):
    """Prefixes that are chains of their own have no recurrence to differentiate."""
    against = Kind.LEFT if direction == "suffix" else Kind.RIGHT
    if policy.kind is against and not spec.reducer.laws.associative:
        raise NoDerivativeError(
            message(
                "scan",
                expected=f"an associative reducer to differentiate {direction} scans "
                f"under policy {policy}",
                got=f"{spec.reducer!r} with {spec.reducer.laws}",
                way_out="Declare laws=Laws(associative=True, ...) if it holds, or fold "
                "in the scan's direction.",
            )
        )


def _affine_tangents(outs, elements, init, mask, de, dz, params):
    spec, axis = params["spec"], params["axis"]
    h = outs
    if params["out"] != spec.results:  # the narrowed outputs have lost the state
        kept = ("policy", "direction", "implementation")
        order = {k: params[k] for k in kept}
        h = bind_scan(spec, elements, init, mask, axis=axis, **order)
    dh = _affine_jvp(spec, elements, init, mask, de, dz, h, params)
    return [convert(v, d) for v, d in zip(dh, params["out"], strict=True)]


def _general_jvp(outs, elements, init, mask, de, dz, params):
    spec, axis, direction = (params[k] for k in ("spec", "axis", "direction"))
    exclusive, finish, final = (params[k] for k in ("exclusive", "finish", "final"))
    _check_chain(spec, params["policy"], direction)
    n = elements[0].shape[axis]
    if n == 0:
        return [
            jnp.zeros_like(v) if is_float(v.dtype) else np.zeros(v.shape, _FLOAT0)
            for v in outs
        ]
    if _is_affine(spec, finish, final, direction) and not exclusive:
        return _affine_tangents(outs, elements, init, mask, de, dz, params)
    order, xs, dxs, m = _forward(spec, elements, de, mask, axis, direction)
    index = [iota_like(elements[0], spec.index, axis)] if spec.index else []
    index = index if direction == "prefix" else flip(index, axis)
    name = params["implementation"]
    y = raw_prefixes(order, xs, init, m, axis, name)
    dy = prefix_tangents(order, [*xs, *index], init, m, dxs, dz, axis, name)
    last = [lax.index_in_dim(v, n - 1, axis, keepdims=False) for v in dy]
    if exclusive:
        y, dy = _exclude(spec, y, dy, init, dz, axis)
    if direction != "prefix":
        y, dy = flip(y, axis), flip(dy, axis)
    moving = iter(last)
    final_tangents = [
        next(moving) if is_float(d) else np.zeros(last[0].shape, _FLOAT0)
        for d in spec.states
    ]
    return finish_tangents(spec, y, dy, finish, params["out"]) + final_tangents * final


def _exclude(spec, y, dy, init, dz, axis):
    """Exclusive states and tangents from inclusive ones."""
    fibre = lax.index_in_dim(y[0], 0, axis, keepdims=False).shape
    first = nothing(spec, init, fibre)
    floats = [i for i, v in enumerate(y) if is_float(v.dtype)]
    edge = [lax.index_in_dim(v, 0, axis, keepdims=False) for v in dy]
    dfirst = (
        [jnp.zeros_like(v) for v in edge] if dz is None else [dz[i] for i in floats]
    )
    y = [shift_in(f, v, axis) for f, v in zip(first, y, strict=True)]
    return y, [shift_in(f, v, axis) for f, v in zip(dfirst, dy, strict=True)]


_FLOAT0 = jax.dtypes.float0
_OPPOSITE = {"prefix": "reverse", "reverse": "prefix", "suffix": "prefix"}


def transpose(cotangents, *operands, **params):
    spec = params["spec"]
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [
            ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in operands
        ]
    cts = [ad.instantiate_zeros(ct) for ct in cotangents]
    if spec.reducer.native == "add":
        return _transpose_add(cts, operands, params)
    linear = not params["exclusive"]
    if linear and _is_affine(
        spec, params["finish"], params["final"], params["direction"]
    ):
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
    x: Any = elements[0].aval if ad.is_undefined_primal(elements[0]) else elements[0]
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
        out=(x.dtype,),
        implementation=of_tangent(params["implementation"]),
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
    lam = _transposed_chain(spec, turned, eye, cts, params)
    db = lam if mask is None else [jnp.where(mask, v, 0) for v in lam]
    known = [None] * (len(elements) - k)
    grads = known + [
        convert(d, v.aval.dtype) if ad.is_undefined_primal(v) else None
        for d, v in zip(db, b, strict=True)
    ]
    return (
        grads
        + _seed_cotangents(turned, lam, init, axis, direction, k)
        + ([None] * params["masked"])
    )


def _transposed_chain(spec, rows, eye, cts, params):
    axis, order = params["axis"], params["policy"]
    other = _OPPOSITE[params["direction"]]
    how = (axis, other, order, of_tangent(params["implementation"]))
    if _is_delayed(spec):
        return affine_scan(rows, cts, None, None, *how)
    if len(rows) == 1:
        return delayed_scan(rows[0][0], cts[0], *how)
    moved = [
        [_before(_edge(e, axis), v, axis, other) for v, e in zip(r, s, strict=True)]
        for r, s in zip(rows, eye, strict=True)
    ]
    return affine_scan(moved, cts, None, None, *how)


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
