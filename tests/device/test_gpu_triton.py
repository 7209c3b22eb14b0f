"""Triton kernels of reduce and scan on a GPU: bits of the CPU reference.

Folds and `fixed_tree` agree to the bit, as do integers and selections; other trees of
floats to the error that any grouping has. exp and log1p are CUDA's, so that logaddexp
agrees to a few units in the last place a merge.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
import targets
from fibres import AFFINE, MIXED, rng_of
from on_device import on_cpu, on_gpu
from oracle import same_bits

pytestmark = pytest.mark.gpu

POLICIES = [policy.name for policy in jt.policy.ALL]
TREES = ["unordered_tree", "ordered_tree"]


def _floats(rng, shape):
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)).astype("f4")


def _near_one(rng, shape):
    # Products of 300001 of them stay normal: the CPU flushes subnormals to zero.
    return np.exp(rng.uniform(-0.05, 0.05, shape)).astype("f4")


def _special(rng, shape):
    values = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, 2], "f4")
    return rng.choice(values, shape, p=[0.02, 0.06, 0.06, 0.2, 0.2, 0.1, 0.1, 0.26])


def _ints(rng, shape):
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def _flags(rng, shape):
    return rng.random(shape) < 0.3


def _int16(rng, shape):
    return rng.integers(-300, 300, shape).astype(np.int16)


# name: reducer, makers of the element's leaves, whether any grouping has the same bits
REDUCERS = {
    "add": (jt.add, [_floats], False),
    "int add": (jt.add, [_ints], True),
    "multiply": (jt.multiply, [_near_one], False),
    "maximum": (jt.maximum, [_special], True),
    "minimum_number": (jt.minimum_number, [_special], True),
    "argmax": (jt.argmax, [_special], True),
    "xor": (jt.bitwise_xor, [_ints], True),
    "logical_or": (jt.logical_or, [_flags], True),
    "logaddexp": (jt.logaddexp, [_floats], False),
    "welford": (jt.welford, [_floats], False),
    "affine": (AFFINE, [_near_one, _floats], False),
    "mixed": (MIXED, [_flags, _int16, _floats], False),
}


def _drawn(name, shape, *key):
    reducer, makers, exact = REDUCERS[name]
    rng = rng_of(name, shape, *key)
    return reducer, tuple(make(rng, shape) for make in makers), exact


def _element(leaves):
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


def _compare(got, want, name, policy, exact):
    """Leaf by leaf, under what the policy lets differ."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    # What a rounding leaves over (welford's low part) is as exact as what it was left by.
    floats = [v[np.isfinite(v)] for v in want if v.dtype.kind == "f"]
    scale = max((np.max(np.abs(v), initial=1e-30) for v in floats), default=1)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        where = f"{name} {policy}, leaf {k} of {len(got)}, shape {b.shape}"
        try:
            if name == "logaddexp":
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
            elif policy in TREES and not exact and b.dtype.kind == "f":
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * scale)
            else:
                same_bits(a, b)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None


def _legal(name, policy):
    return policy != "unordered_tree" or REDUCERS[name][0].laws.commutative


def _in_kernel(fn, *arrays):
    """`fn` of whole blocks inside one Triton kernel."""
    from jax.experimental.pallas import triton as plt

    shapes = jax.eval_shape(fn, *arrays)
    flat, tree = jax.tree.flatten(shapes)

    def body(*refs):
        values = [ref[...] for ref in refs[: len(arrays)]]
        outs = jax.tree.leaves(fn(*values))
        for ref, out in zip(refs[len(arrays) :], outs, strict=True):
            ref[...] = jnp.broadcast_to(out, ref.shape)

    out = [targets.spec(v.shape or (1,), v.dtype) for v in flat]
    kernel = pl.pallas_call(body, out_shape=out, compiler_params=plt.CompilerParams())
    made = on_gpu(kernel, *arrays)
    made = [v.reshape(s.shape) for v, s in zip(made, flat, strict=True)]
    return jax.tree.unflatten(tree, made)


def _both_in_kernel(name, policy, fn, arrays, exact):
    _compare(_in_kernel(fn, *arrays), on_cpu(fn, *arrays), name, policy, exact)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", REDUCERS)
def test_reduce_and_scan_of_a_tile(name, policy, axis):
    if not _legal(name, policy):
        pytest.skip(f"{name} does not commute")
    reducer, leaves, exact = _drawn(name, (8, 64))

    def fn(*leaves):
        x = _element(leaves)
        return (
            jt.reduce(x, axis, reducer, policy=policy),
            jt.scan(x, axis, reducer, policy=policy, return_final=True),
        )

    _both_in_kernel(name, policy, fn, leaves, exact)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("direction", ["suffix", "reverse"])
@pytest.mark.parametrize("policy", ["ordered_tree", "fixed_tree", "fold_left"])
@pytest.mark.parametrize("name", ["add", "affine"])
def test_directions_of_a_tile(name, policy, direction, axis):
    reducer, leaves, exact = _drawn(name, (4, 32), direction)

    def fn(*leaves):
        kwargs = {"policy": policy, "direction": direction, "return_final": True}
        return jt.scan(_element(leaves), axis, reducer, **kwargs)

    _both_in_kernel(name, policy, fn, leaves, exact)


@pytest.mark.parametrize("axis", [0, 1, (0, 2), None])
@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree", "fold_right"])
@pytest.mark.parametrize("name", ["add", "argmax"])
def test_axes_of_a_tile(name, policy, axis):
    reducer, leaves, exact = _drawn(name, (4, 16, 8), axis)

    def fn(*leaves):
        return jt.reduce(_element(leaves), axis, reducer, policy=policy)

    _both_in_kernel(name, policy, fn, leaves, exact)


@pytest.mark.parametrize("axes", [0, (0, 2), (1, 2)])
def test_transposes_and_trees_of_what_many_ops_made(axes):
    _, (x,), _ = _drawn("add", (4, 2, 8), "long")

    def fn(x):
        for _ in range(30):
            x = jt.map(lambda v: 0.5 * v + v * v * 1e-6, x)
        return jt.reduce(x, axes, jt.add, policy="fixed_tree"), jt.transpose(x)

    _both_in_kernel("add", "fixed_tree", fn, (x,), False)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["add", "argmax", "affine"])
def test_masks_and_seeds_of_a_tile(name, policy):
    if not _legal(name, policy):
        pytest.skip(f"{name} does not commute")
    reducer, leaves, exact = _drawn(name, (8, 32), "mask")
    mask = rng_of(name, policy).random((8, 32)) < 0.6
    mask[3] = False  # a fibre of nothing
    states = jax.eval_shape(lambda *v: jt.scan(_element(v), 1, reducer), *leaves)
    seeds = [np.full((8,), 3, v.dtype) for v in jax.tree.leaves(states)]

    def fn(mask, *given):
        x, init = _element(given[: len(leaves)]), _element(given[len(leaves) :])
        kwargs = {"policy": policy, "where": mask}
        return (
            jt.reduce(x, 1, reducer, **kwargs),
            jt.reduce(x, 1, reducer, init=init, **kwargs),
            jt.scan(x, 1, reducer, **kwargs),
            jt.scan(x, 1, reducer, init=init, exclusive=True, **kwargs),
        )

    _both_in_kernel(name, policy, fn, (mask, *leaves, *seeds), exact)


@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree", "fold_left"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_formats_of_a_tile(dtype, policy):
    wide = rng_of(dtype).integers(-9, 9, (8, 64)) / (1 if dtype[0] in "iub" else 7)
    x = np.abs(wide).astype(jnp.dtype(dtype)) if dtype == "uint32" else None
    x = wide.astype(jnp.dtype(dtype)) if x is None else x

    def fn(x):
        return (
            jt.reduce(x, 1, jt.add, policy=policy),
            jt.reduce(x, 1, jt.maximum, policy=policy),
            jt.scan(x, 1, jt.add, policy=policy),
        )

    _both_in_kernel(dtype, policy, fn, (x,), dtype[0] in "iub" and dtype[1] != "f")


@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree", "fold_left"])
def test_float64_and_int64_of_a_tile(x64, policy):
    x = rng_of(policy).normal(size=(8, 64))
    i = rng_of(policy).integers(-(2**62), 2**62, (8, 64))

    def fn(x, i):
        return [
            op(v, 1, jt.add, policy=policy)
            for op in (jt.reduce, jt.scan)
            for v in (x, i)
        ]

    _both_in_kernel("float64", policy, fn, (x, i), False)


def test_products_do_not_fuse_with_what_follows():
    x, b = (_floats(rng_of(k), (8, 64)) for k in ("x", "b"))

    def fn(x, b):
        total = jt.reduce(x * x, 1, jt.add, policy="fixed_tree")
        product = jt.reduce(b, 1, jt.multiply, policy="fixed_tree")
        return total, product

    _both_in_kernel("add", "fixed_tree", fn, (x, b), False)


_SHAPES = [
    ((37, 101, 53), 0),
    ((37, 101, 53), 1),
    ((37, 101, 53), 2),
    ((5, 10001), 1),
    ((10001, 200), 0),
    ((300001,), 0),
    ((3000, 7), 0),
]


def _whole(name, policy, fn, arrays, exact):
    """`fn(*arrays, implementation=...)` by the kernels and by the CPU's reference."""

    def by(implementation):
        return lambda *v: fn(*v, implementation=implementation)

    got = on_gpu(by("triton"), *arrays)
    _compare(got, on_cpu(by("reference"), *arrays), name, policy, exact)


@pytest.mark.parametrize(("shape", "axis"), _SHAPES)
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("add", "unordered_tree"),
        ("add", "fixed_tree"),
        ("add", "fold_left"),
        ("affine", "fold_right"),
        ("welford", "fixed_tree"),
        ("argmax", "unordered_tree"),
    ],
)
def test_reduce_of_arrays(name, policy, shape, axis):
    if policy.startswith("fold") and len(shape) == 1:
        pytest.skip("one thread for 300001 steps")
    reducer, leaves, exact = _drawn(name, shape)

    def fn(*leaves, implementation):
        kwargs = {"policy": policy, "implementation": implementation}
        return jt.reduce(_element(leaves), axis, reducer, **kwargs)

    _whole(name, policy, fn, leaves, exact)


@pytest.mark.parametrize(("shape", "axis"), _SHAPES)
@pytest.mark.parametrize(
    ("name", "policy", "direction"),
    [
        ("add", "ordered_tree", "prefix"),
        ("add", "fixed_tree", "reverse"),
        ("affine", "fixed_tree", "prefix"),
        ("affine", "ordered_tree", "suffix"),
        ("add", "fold_left", "prefix"),
        ("int add", "ordered_tree", "reverse"),
    ],
)
def test_scan_of_arrays(name, policy, direction, shape, axis):
    if policy.startswith("fold") and len(shape) == 1:
        pytest.skip("one thread for 300001 steps")
    reducer, leaves, exact = _drawn(name, shape, direction)

    def fn(*leaves, implementation):
        return jt.scan(
            _element(leaves),
            axis,
            reducer,
            policy=policy,
            direction=direction,
            return_final=True,
            implementation=implementation,
        )

    _whole(name, policy, fn, leaves, exact)


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
@pytest.mark.parametrize(("shape", "axis"), [((9, 5000), 1), ((700, 150), 0)])
@pytest.mark.parametrize("name", ["add", "argmax"])
def test_masks_and_seeds_of_arrays(name, policy, shape, axis):
    reducer, leaves, exact = _drawn(name, shape, "mask")
    mask = rng_of(name, policy).random(shape) < 0.6
    mask[(2,) if axis else (slice(None), 2)] = False  # a fibre of nothing
    states = jax.eval_shape(lambda *v: jt.scan(_element(v), axis, reducer), *leaves)
    seeds = [np.full((shape[1 - axis],), 3, v.dtype) for v in jax.tree.leaves(states)]

    def fn(mask, *given, implementation):
        x, init = _element(given[: len(leaves)]), _element(given[len(leaves) :])
        kwargs = {"policy": policy, "where": mask, "implementation": implementation}
        return (
            jt.reduce(x, axis, reducer, **kwargs),
            jt.scan(x, axis, reducer, return_final=True, **kwargs),
            jt.scan(x, axis, reducer, init=init, exclusive=True, **kwargs),
        )

    _whole(name, policy, fn, (mask, *leaves, *seeds), exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool"])
def test_formats_of_arrays(dtype):
    x = (rng_of(dtype).integers(-9, 9, (33, 5000)) / 7).astype(jnp.dtype(dtype))

    def fn(x, implementation):
        kwargs = {"policy": "fixed_tree", "implementation": implementation}
        out = None if dtype in ("int8", "bool") else jnp.dtype(dtype)
        return (
            jt.reduce(x, 1, jt.add, out_dtype=out, **kwargs),
            jt.scan(x, 1, jt.add, out_dtype=out, **kwargs),
        )

    _whole(dtype, "fixed_tree", fn, (x,), False)


def test_several_axes_of_arrays():
    x = _floats(rng_of("axes"), (37, 101, 53))

    def fn(x, implementation):
        kwargs = {"policy": "fixed_tree", "implementation": implementation}
        return [jt.reduce(x, a, jt.add, **kwargs) for a in ((0, 1), (0, 2), None)]

    _whole("add", "fixed_tree", fn, (x,), False)


def test_the_same_bits_every_time():
    x = _floats(rng_of("again"), (3, 100003))

    def fn(x):
        kwargs = {"policy": "unordered_tree", "implementation": "triton"}
        return jt.reduce(x, 1, jt.add, **kwargs), jt.scan(x, 1, jt.add, **kwargs)

    first = on_gpu(fn, x)
    for _ in range(5):
        for a, b in zip(on_gpu(fn, x), first, strict=True):
            same_bits(a, b)
