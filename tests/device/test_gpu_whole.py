"""Whole-array kernels on a GPU: the bits of the CPU reference, at any shape.

Folds, `fixed_tree`, integers and selections must agree to the bit; other orders within
the error bound of any tree. Each case names the array, so that a failure can be rerun.
"""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import oracle
from on_device import on_cpu, on_gpu

pytestmark = pytest.mark.gpu

REDUCERS = {
    "add": jt.add,
    "welford": jt.welford,
    "argmax": jt.argmax,
    "maximum": jt.maximum,
    "multiply": jt.multiply,
}
SHAPES = [
    ((37, 101, 53), (0, 1, 2)),
    ((65, 4099), (0, 1)),
    ((300, 5), (1,)),
    ((7, 4096), (1,)),
    ((130, 1001), (1,)),
    ((1, 100003), (1,)),
    ((5, 33), (1,)),
    ((70001, 3), (0,)),
]
AXES = [(shape, axis) for shape, axes in SHAPES for axis in axes]
IMPLEMENTATION = "mosaic_gpu"


def draw(name, shape, dtype="float32"):
    """Data that keeps products and sums of squares far from subnormals."""
    rng = np.random.default_rng(zlib.crc32(f"{name}{shape}{dtype}".encode()))
    x = rng.standard_normal(shape)
    if name == "multiply":
        x = np.exp(x / 64)
    if np.dtype(dtype) == bool:
        return x > 1
    if np.issubdtype(np.dtype(dtype), np.integer):
        x = np.abs(x) * 10
    return x.astype(jnp.dtype(dtype))


def same_bits(fn, *args):
    """The kernel gives the CPU reference's bits."""
    got = kernel(fn, *args)
    want = on_cpu(functools.partial(fn, implementation="reference"), *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.same_bits(a, b)


def kernel(fn, *args):
    """The result of the whole-array kernel."""
    return on_gpu(functools.partial(fn, implementation=IMPLEMENTATION), *args)


def reduction(axis, reducer, policy, **params):
    def fn(x, where=None, implementation=None):
        return jt.reduce(
            x,
            axis,
            reducer,
            where=where,
            policy=policy,
            implementation=implementation,
            **params,
        )

    return fn


def prefixes(axis, reducer, policy, **params):
    def fn(x, where=None, implementation=None):
        return jt.scan(
            x,
            axis,
            reducer,
            where=where,
            policy=policy,
            implementation=implementation,
            **params,
        )

    return fn


@pytest.mark.parametrize(("shape", "axis"), AXES, ids=str)
@pytest.mark.parametrize("name", REDUCERS)
def test_reduce_has_the_bits_of_fixed_tree_and_folds(name, shape, axis):
    x = draw(name, shape)
    policies = ["fixed_tree"]
    if shape[axis] < 5000:
        policies += ["fold_left", "fold_right"][: 1 + (name == "welford")]
    for policy in policies:
        same_bits(reduction(axis, REDUCERS[name], policy), x)


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
def test_reduce_over_several_axes(axes):
    x = draw("axes", (12, 34, 56))
    same_bits(reduction(axes, jt.argmax, "fixed_tree"), x)
    same_bits(reduction(axes, jt.add, "fixed_tree"), x)


@pytest.mark.parametrize(("shape", "axis"), AXES, ids=str)
def test_masks_skip_whatever_they_hide(shape, axis):
    x = draw("mask", shape)
    where = np.random.default_rng(0).random(shape) < 0.3
    x = np.where(where, x, np.nan).astype(x.dtype)
    for reducer in (jt.add, jt.welford, jt.argmax):
        same_bits(reduction(axis, reducer, "fixed_tree"), x, where)
    same_bits(prefixes(axis, jt.welford, "fixed_tree", return_final=True), x, where)


@pytest.mark.parametrize(("shape", "axis"), AXES, ids=str)
@pytest.mark.parametrize("name", ["add", "welford", "argmax"])
def test_scan_has_the_bits_of_fixed_tree_and_folds(name, shape, axis):
    x = draw(name, shape)
    reducer = REDUCERS[name]
    ways = [{}, dict(direction="suffix", return_final=True), dict(direction="reverse")]
    if name != "argmax":
        ways.append(dict(exclusive=True, return_final=True))
    for way in ways:
        same_bits(prefixes(axis, reducer, "fixed_tree", **way), x)
    if shape[axis] < 5000:
        with_it = "fold_right" if name == "welford" else "fold_left"
        direction = "suffix" if name == "welford" else "prefix"
        same_bits(prefixes(axis, reducer, with_it, direction=direction), x)


DTYPES = ["bfloat16", "float16", "int8", "uint16", "int32", "uint32", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_formats(dtype, axis):
    x = draw("formats", (33, 1000), dtype)
    for reducer in (jt.add, jt.maximum if dtype != "bool" else jt.logical_and):
        same_bits(reduction(axis, reducer, "fixed_tree"), x)
        same_bits(prefixes(axis, reducer, "fixed_tree"), x)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bits(dtype):
    with jax.enable_x64(True):
        x = draw("wide", (33, 1000), dtype)
        for reducer in (jt.add, jt.maximum):
            same_bits(reduction(1, reducer, "fixed_tree"), x)
            same_bits(prefixes(0, reducer, "fixed_tree"), x)
        if dtype == "float64":
            same_bits(reduction(0, jt.welford, "fixed_tree"), x)


def test_pairs_of_leaves_and_seeds():
    a = draw("multiply", (40, 3000))
    b = draw("b", (40, 3000))
    same_bits(prefixes(1, jt.affine, "fixed_tree", return_final=True), (a, b))
    same_bits(prefixes(0, jt.affine, "fold_left", return_final=True), (a, b))
    both = jt.product(jt.maximum, jt.add)
    same_bits(reduction(1, both, "fixed_tree"), (a, b))
    for policy in ("fixed_tree", "fold_left"):
        same_bits(reduction(1, jt.add, policy, init=1.5), b)
        same_bits(prefixes(1, jt.add, policy, init=1.5, exclusive=True), b)


def test_a_users_state_of_mixed_dtypes():
    def merge(a, b):
        return a[0] + b[0], a[1] + b[1], a[2] | b[2]

    mixed = jt.Reducer(
        merge,
        lift=lambda x: (x, jnp.int32(1), x > 2),
        laws=jt.Laws(associative=True, commutative=True),
    )
    x = draw("mixed", (17, 2500), "bfloat16")
    for axis in (0, 1):
        same_bits(reduction(axis, mixed, "fixed_tree"), x)
        same_bits(prefixes(axis, mixed, "fixed_tree"), x)


@pytest.mark.parametrize("policy", ["ordered_tree", "unordered_tree", "fixed_tree"])
def test_logaddexp_and_variance_within_rounding(policy):
    x = draw("lse", (65, 4099))
    got = kernel(reduction(1, jt.logaddexp, policy), x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got, np.logaddexp.reduce(wide, 1), rtol=2e-6)
    fn = reduction(1, jt.welford, policy)
    for shape in ((64, 4096), (65, 4099)):
        x = draw("var", shape) + np.float32(100)
        count, mean, m2 = kernel(fn, x)
        wide = x.astype(np.float64)
        np.testing.assert_array_equal(count, shape[1])
        np.testing.assert_allclose(mean, wide.mean(1), rtol=1e-6)
        np.testing.assert_allclose(m2 / count, wide.var(1), rtol=2e-5)


def test_special_values():
    x = draw("special", (6, 3001))
    x[0, 7] = np.nan
    x[1, 7], x[1, 9] = np.inf, -np.inf
    x[2] = -0.0
    x[3] = -np.inf
    for reducer in (jt.add, jt.maximum, jt.minimum, jt.argmax, jt.maximum_number):
        same_bits(reduction(1, reducer, "fixed_tree"), x)
        same_bits(prefixes(1, reducer, "fixed_tree"), x)
    nothing = np.zeros(x.shape, bool)
    same_bits(reduction(1, jt.add, "fixed_tree"), x, nothing)


def test_jit_vmap_and_grad_run_the_kernels():
    x = draw("transform", (5, 40, 300))

    def mapped(x, implementation=None):
        fn = reduction(1, jt.welford, "fixed_tree")
        return jax.vmap(functools.partial(fn, implementation=implementation))(x)

    same_bits(mapped, x)

    def slope(x, implementation=None):
        def loss(x):
            y = prefixes(1, jt.add, "fixed_tree")(x, implementation=implementation)
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(x)

    got = on_gpu(slope, x)
    want = on_cpu(functools.partial(slope, implementation="reference"), x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


LARGE = [
    ((2**28 + 3,), 0, "uint32"),
    ((65537, 4099), 0, "int32"),
    ((65537, 4099), 1, "int32"),
    ((3, 2**27), 1, "int32"),
    ((2**22, 5), 1, "int32"),
]


@pytest.mark.parametrize(("shape", "axis", "dtype"), LARGE, ids=str)
def test_large_arrays(shape, axis, dtype):
    # Integers wrap alike in every order, so NumPy is the oracle.
    x = np.random.default_rng(1).integers(0, 2**20, shape, dtype=dtype)
    total = kernel(reduction(axis, jt.add, "fixed_tree"), x)
    np.testing.assert_array_equal(total, x.sum(axis, dtype=dtype))
    shown = kernel(prefixes(axis, jt.add, "ordered_tree"), x)
    np.testing.assert_array_equal(shown, x.cumsum(axis, dtype=dtype))


def test_a_batch_does_not_change_a_rows_bits():
    x = draw("batch", (4096, 4097))
    fn = reduction(1, jt.add, "fixed_tree")
    oracle.same_bits(kernel(fn, x)[:1], kernel(fn, x[:1]))


def test_fifty_runs_agree():
    with jax.default_device(jax.devices("gpu")[0]):
        x = jnp.asarray(draw("runs", (257, 40001)))
        for fn in (
            reduction(1, jt.welford, "unordered_tree"),
            prefixes(1, jt.add, "ordered_tree"),
            prefixes(0, jt.add, "unordered_tree"),
        ):
            call = jax.jit(functools.partial(fn, implementation=IMPLEMENTATION))
            first = jax.tree.leaves(call(x))
            for _ in range(50):
                for a, b in zip(jax.tree.leaves(call(x)), first, strict=True):
                    assert jnp.array_equal(a, b)
