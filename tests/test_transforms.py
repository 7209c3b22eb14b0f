"""Every case of the table under jit, vmap, export and abstract evaluation."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from cases import CASES, SCAN
from oracle import same_bits


def _close(got, want, exact):
    """Equal bits where the policy pins them, else the rounding of five terms."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if exact:
            same_bits(g, w)
            continue
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@functools.cache
def _jitted(case):
    return jax.jit(case.call)


def _loop(case, args, batched, size):
    """The call row by row, stacked."""
    outs = [
        _jitted(case)(*(a[i] if b else a for a, b in zip(args, batched, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_jit_equals_eager(case):
    args = case.make()
    _close(_jitted(case)(*args), case.call(*args), exact=True)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_abstract_evaluation_is_that_of_the_reference(case):
    args = case.make()
    want = jax.eval_shape(case.call, *args)
    got = case.call(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
    assert jax.tree.structure(got) == jax.tree.structure(want)


def _subsets(case):
    n = len(case.args)
    alone = [tuple(i == j for j in range(n)) for i in range(n)]
    return alone + [(True,) * n] * (n > 1)


_VMAPPED = [(case, batched) for case in CASES for batched in _subsets(case)]


@pytest.mark.parametrize(
    ("case", "batched"),
    _VMAPPED,
    ids=[f"{c}-{''.join('xb'[b] for b in s)}" for c, s in _VMAPPED],
)
def test_vmap_equals_a_loop(case, batched):
    args = case.make(batch=[(3,) if b else () for b in batched])
    in_axes = tuple(0 if b else None for b in batched)
    got = jax.jit(jax.vmap(case.call, in_axes))(*args)
    _close(got, _loop(case, args, batched, 3), case.exact)


@pytest.mark.parametrize("case", CASES[::3], ids=repr)
@pytest.mark.parametrize("size", [0, 1])
def test_vmap_of_small_batches(case, size):
    args = case.make(batch=[(size,)] * len(case.args))
    got = jax.jit(jax.vmap(case.call))(*args)
    if size:
        _close(got, _loop(case, args, [True] * len(args), size), case.exact)
    want = jax.eval_shape(case.call, *case.make())
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == ((size, *w.shape), w.dtype)


@pytest.mark.parametrize("case", CASES[1::4], ids=repr)
def test_vmap_along_another_axis(case):
    args = case.make(batch=[(3,)] * len(case.args))
    axes = tuple(min(1, a.ndim - 1) for a in args)
    moved = [jnp.moveaxis(a, 0, d) for a, d in zip(args, axes, strict=True)]
    got = jax.jit(jax.vmap(case.call, in_axes=axes, out_axes=1))(*moved)
    want = _loop(case, args, [True] * len(args), 3)
    _close(got, jax.tree.map(lambda v: jnp.moveaxis(v, 0, 1), want), case.exact)


@pytest.mark.parametrize("case", CASES[2::4], ids=repr)
def test_nested_vmap(case):
    """The first operand in both batches, the others in the inner one alone."""
    batch = [(2, 3)] + [(3,)] * (len(case.args) - 1)
    args = case.make(batch=batch)
    outer = (0,) + (None,) * (len(args) - 1)
    got = jax.jit(jax.vmap(jax.vmap(case.call), outer))(*args)
    want = [_loop(case, [args[0][i], *args[1:]], [True] * len(args), 3) for i in (0, 1)]
    _close(got, jax.tree.map(lambda *v: jnp.stack(v), *want), case.exact)


@pytest.mark.parametrize("case", CASES[::2], ids=repr)
def test_export_round_trip(case):
    args = case.make()
    exported = jax.export.export(_jitted(case))(*args)
    again = jax.export.deserialize(exported.serialize())
    _close(again.call(*args), _jitted(case)(*args), exact=True)


@pytest.mark.parametrize("case", [c for c in CASES if c.exact][::3], ids=repr)
def test_x64_does_not_change_32_bit_results(case):
    args = case.make()
    want = _jitted(case)(*args)
    with jax.enable_x64(True):
        got = jax.jit(case.call)(*args)
    _close(got, want, exact=True)


def _narrow(a):
    return a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a


@pytest.mark.parametrize("case", [c for c in CASES if c.grads][::5], ids=repr)
def test_float64(x64, case):
    args = case.make(np.float64)
    got = jax.jit(case.call)(*args)
    want = case.call(*(_narrow(a) for a in args))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == (np.float64 if w.dtype == np.float32 else w.dtype)
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


def _count_traces(make):
    traces = []

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def run(x, reducer, policy):
        traces.append(reducer)
        return jt.reduce(x, 0, reducer, policy=policy)

    for _ in range(2):
        run(jnp.ones(3), make(), jt.policy.fold_left)
    return len(traces)


def test_equal_reducers_hit_the_cache():
    scale = 2.0

    def user():
        return jt.Reducer(merge=lambda a, b: a + scale * b, identity=0.0)

    for make in (
        user,
        lambda: jt.argmax(ties="last"),
        lambda: jt.product(jt.add),
        lambda: jt.add.named("total"),
    ):
        assert hash(make()) == hash(make())
    assert _count_traces(user) == 1
    assert _count_traces(lambda: jt.argmax(ties="last")) == 1


def test_a_reducer_made_inside_a_function_compiles_once():
    compiled = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    x = jnp.ones(11)

    def run():
        user = jt.Reducer(merge=lambda a, b: a + 3 * b, identity=0.0)
        return jt.reduce(x, 0, user, policy="fold_left")

    run()
    before = len(compiled)
    for _ in range(3):
        run()
    assert len(compiled) == before > 0


def test_policy_names_and_values_are_the_same_call():
    x = jnp.ones(3)

    def jaxpr(policy):
        return str(jax.make_jaxpr(lambda v: jt.scan(v, 0, jt.add, policy=policy))(x))

    assert jaxpr("fixed_tree") == jaxpr(jt.policy.fixed_tree)


@pytest.mark.parametrize("case", [CASES[0], SCAN[0]], ids=repr)
def test_one_call_is_one_primitive(case):
    jaxpr = jax.make_jaxpr(case.call)(*case.make())
    names = [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]
    assert sum(name.startswith("tile_") for name in names) == 1
