r"""Derivatives of states: every scan's derivative is an affine scan.

For y_i = update(y_(i-1), x_i) over the k float leaves of the state,

    dy_i = A_i dy_(i-1) + B_i dx_i,   A_i = d update / d y,   B_i = d update / d x,

a scan with `matrix_affine(k)` that is linear in dx. Its transpose is the affine scan in
the other direction with A transposed and moved by one, so reverse mode and second
derivatives need no further rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.interpreters import ad

from jaxtile._jax_private import iota_like
from jaxtile.catalogue import logical_or
from jaxtile.errors import NoDerivativeError, message
from jaxtile.policy import Policy, ordered_tree
from jaxtile.primitives._bind import bind_scan, raw_prefixes
from jaxtile.primitives._fold import shift_in
from jaxtile.primitives._scalar import convert, elementwise
from jaxtile.primitives._spec import Spec, make_spec
from jaxtile.recurrences import delayed, matrix_affine


def require_linear(op: str, spec: Spec) -> None:
    """Refuse to transpose a reduction that is not linear in its elements.

    Raises:
        NoDerivativeError: the reducer is not add.
    """
    if spec.reducer.native != "add":
        raise NoDerivativeError(
            message(
                op,
                expected="a linear reducer (add) to transpose",
                got=repr(spec.reducer),
                way_out="Only add is linear in its elements; use jax.vjp.",
            )
        )


def is_float(dtype: Any) -> bool:
    """True for dtypes that carry a tangent of their own."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_zero(tangent: Any) -> bool:
    """True for symbolic zeros and for the tangents of integers."""
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


def float_tangent(primal: Any, tangent: Any) -> Any:
    """An array for a float primal's tangent; float0 zeros for an integer's."""
    if not is_float(primal.dtype):
        # NumPy has no array of a symbolic size, and nothing looks at this one's.
        known = all(isinstance(n, int) for n in primal.shape)
        return np.zeros(primal.shape if known else (), jax.dtypes.float0)
    return jnp.zeros_like(primal) if is_zero(tangent) else tangent


def _split(values: Sequence) -> tuple[list[int], list[int]]:
    floats = [i for i, v in enumerate(values) if is_float(v.dtype)]
    return floats, [i for i in range(len(values)) if i not in floats]


def _float_jvp(fn: Callable, values: Sequence, tangents: Sequence) -> list:
    """The tangents of fn's float outputs; integers are constants, whatever their tangents."""
    floats, _ = _split(values)

    def of_floats(*moving):
        full = list(values)
        for i, v in zip(floats, moving, strict=True):
            full[i] = v
        return [v for v in fn(full) if is_float(v.dtype)]

    point = [values[i] for i in floats]
    return jax.jvp(of_floats, point, [tangents[i] for i in floats])[1]


def elementwise_jvp(fn: Callable, values: Sequence, tangents: Sequence) -> Any:
    """The tangent of an elementwise function of float arrays with one result."""
    run = lambda *args: elementwise(fn, *args)  # noqa: E731
    return jax.jvp(run, tuple(values), tuple(tangents))[1]


def finish_tangents(spec: Spec, state, dstate, finish: bool, out) -> list:
    """Tangents of the outputs from those of the state's float leaves."""
    floats, _ = _split(state)
    full: list = [None] * len(state)
    for i, d in zip(floats, dstate, strict=True):
        full[i] = d

    def outputs(leaves):
        results = spec.finish(leaves, elementwise) if finish else list(leaves)
        return [convert(v, d) for v, d in zip(results, out, strict=True)]

    moving = iter(_float_jvp(outputs, state, full))
    shape = state[0].shape
    none = ad.Zero(core.ShapedArray(shape, jax.dtypes.float0))
    return [next(moving) if is_float(d) else none for d in out]


def _safe(elements, mask):
    # A masked element may hold NaN; 0 * NaN would reach the cotangent. One is inside the
    # domain of every function that masks are used with.
    if mask is None:
        return list(elements)
    return [jnp.where(mask, v, jnp.ones_like(v)) for v in elements]


def _has_previous(init, mask, like, axis, implementation):
    """Where a state precedes position i; None means everywhere."""
    if init is not None:
        return None
    if mask is None:
        return iota_like(like, np.int32, axis) > 0
    spec = make_spec(logical_or, jax.tree.structure(0), (bool,), None, None, "scan")
    (seen,) = bind_scan(
        spec,
        [mask],
        None,
        None,
        axis=axis,
        policy=ordered_tree,
        implementation=implementation,
    )
    return shift_in(jnp.zeros_like(lax.index_in_dim(seen, 0, axis, False)), seen, axis)


def _step(spec: Spec) -> Callable:
    """update(state, element) as the derivative sees it: ties go to the earlier side."""
    chosen = spec.reducer.tangent_merge
    if chosen is None:
        return lambda s, e: spec.update(s, e, elementwise)
    plain = replace(spec.reducer, merge=chosen, native=None)
    select = replace(spec, reducer=plain)
    return lambda s, e: select.merge(s, spec.lift(e, elementwise), elementwise)


def prefix_tangents(
    spec, elements, init, mask, de, dz, axis, implementation=None
) -> list:
    """dy of every float leaf of the inclusive prefix states, along `axis`."""
    y = raw_prefixes(spec, elements, init, mask, axis, implementation)
    x = _safe(elements, mask)
    lifted = spec.lift(x)
    first = init or [lax.index_in_dim(v, 0, axis, False) for v in lifted]
    before = [shift_in(f, v, axis) for f, v in zip(first, y, strict=True)]
    present = _has_previous(init, mask, y[0], axis, implementation)
    if present is not None:
        before = [jnp.where(present, b, v) for b, v in zip(before, lifted, strict=True)]
    floats, _ = _split(y)
    step = _step(spec)
    columns = [_column(step, before, x, j, present) for j in floats]
    u = _drive(spec, step, before, x, de, present)
    if dz is not None:
        dz = [dz[i] for i in floats]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return affine_scan(rows, u, dz, mask, axis, "prefix", ordered_tree, implementation)


def _column(step, before, x, j, present):
    """d update / d (float leaf j of the state), for every float leaf of the result."""
    tangents = [
        (jnp.ones_like if i == j else jnp.zeros_like)(b) if is_float(b.dtype) else None
        for i, b in enumerate(before)
    ]
    column = _float_jvp(lambda s: step(s, x), before, tangents)
    if present is None:
        return column
    return [jnp.where(present, c, jnp.zeros_like(c)) for c in column]


def _drive(spec, step, before, x, de, present):
    """B_i dx_i: linear in the tangents."""
    de = [*de, *[None] * (len(x) - len(de))]
    u = _float_jvp(lambda e: step(before, e), x, de)
    if present is None:
        return u
    lone = _float_jvp(lambda e: spec.lift(e, elementwise), x, de)
    return [jnp.where(present, a, b) for a, b in zip(u, lone, strict=True)]


def affine_scan(
    rows, u, init, mask, axis, direction, policy: Policy, implementation=None
) -> list:
    """h_i = A_i h_(i-1) + u_i for `rows` of A: a tile op linear in u and init."""
    k = len(u)
    leaves = [v for row in rows for v in row] + list(u)
    tree = jax.tree.structure((((0,) * k,) * k, (0,) * k))
    if init is not None:
        eye = [jnp.full_like(init[i], i == j) for i in range(k) for j in range(k)]
        init = eye + list(init)
    how = (axis, direction, policy, implementation)
    return _recurrence(matrix_affine(k), tree, leaves, init, mask, *how)


def delayed_scan(a, u, axis, direction, policy: Policy, implementation=None) -> list:
    """h_i = a_(i-1) h_(i-1) + u_i: a tile op linear in u, which transposes that of a_i."""
    tree = jax.tree.structure((0, 0))
    how = (axis, direction, policy, implementation)
    return _recurrence(delayed, tree, [a, u], None, None, *how)


def _recurrence(
    reducer, tree, leaves, init, mask, axis, direction, policy, implementation
) -> list:
    spec = make_spec(reducer, tree, [v.dtype for v in leaves], None, None, "scan")
    order = {"policy": policy, "direction": direction}
    return bind_scan(
        spec, leaves, init, mask, axis=axis, **order, implementation=implementation
    )
