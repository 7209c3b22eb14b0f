"""Known failures of other libraries in sort, argsort and topk, by number."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import order

NAN, INF = np.nan, np.inf


def _indices(values, k, **rules):
    return list(np.asarray(jt.topk(jnp.asarray(values), 0, k, **rules).indices))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c05_a_nan_is_a_nan_whatever_its_sign(dtype):
    words = np.uint32([0x3F800000, 0xFFC00000, 0x7FC00000, 0x7F800000, 0xFF800000])
    x = words.view(np.float32)
    if dtype == "bfloat16":
        x = (words >> 16).astype(np.uint16).view(jnp.bfloat16)
    best = jt.topk(x, 0, 3, nan="largest")
    assert list(best.indices) == [1, 2, 3]
    order.same(best.values, x[[1, 2, 3]])
    least = jt.topk(x, 0, 2, largest=False, nan="largest")
    assert list(least.indices) == [4, 0]
    order.same(least.values, x[[4, 0]])


def test_c06_zeros_are_one_class_and_keep_their_signs():
    assert list(jt.argsort(jnp.array([0.0, -0.0]), 0)) == [0, 1]
    x = np.float32([-0.0, 0.0, -0.0])
    assert _indices(x, 3) == [0, 1, 2]
    order.same(jt.sort(x, 0), x)
    order.same(jt.sort(x, 0, descending=True), x)
    order.same(jt.topk(x, 0, 3).values, x)


def test_c07_where_a_nan_sits_changes_nothing():
    a, b = [NAN, 1, 2, 3], [1, 2, 3, NAN]
    assert _indices(a, 3, nan="largest") == [0, 3, 2]
    assert _indices(b, 3, nan="largest") == [3, 2, 1]
    for x in (a, b):
        assert list(jt.topk(jnp.asarray(x), 0, 3).values) == [3, 2, 1]


def test_c12_ties_go_to_the_lower_index():
    assert _indices([5, 7, 7, 7, 1], 2) == [1, 2]
    assert _indices(np.full(1000, 1, np.float32), 8) == list(range(8))
    x = np.random.default_rng(0).standard_normal(4096).round().astype(jnp.bfloat16)
    want = order.argsort(x, 0, descending=True)
    for k in (1, 3, 18, 33, 64, 4096, 0):
        assert _indices(x, k) == list(want[:k])


def test_c39_the_smallest_without_negation():
    low = jt.topk(jnp.int32([-(2**31), 5, 0]), 0, 1, largest=False)
    assert (int(low.values[0]), int(low.indices[0])) == (-(2**31), 0)
    two = jt.topk(jnp.array([NAN, 1, 2]), 0, 2, largest=False, nan="largest")
    assert (list(two.values), list(two.indices)) == ([1, 2], [1, 2])
    byte = jt.topk(jnp.uint8([0, 255]), 0, 1, largest=False)
    assert (int(byte.values[0]), int(byte.indices[0])) == (0, 0)
    flag = jt.topk(jnp.array([True, False]), 0, 1, largest=False)
    assert (bool(flag.values[0]), int(flag.indices[0])) == (False, 1)


@pytest.mark.parametrize(
    ("nan", "want"), [("largest", [2, 0, 1, 3]), ("last", [0, 1, 3, 2])]
)
def test_c41_descending_with_nan_and_infinity(nan, want):
    x = jnp.array([INF, 3.1416, NAN, -1])
    got = jt.sort(x, 0, descending=True, nan=nan, return_indices=True)
    assert list(got.indices) == want
    order.same(got.values, np.asarray(x)[want])


def test_c42_four_of_one_bin_are_all_found():
    x = np.zeros(1024, np.float32)
    x[[0, 128, 256, 384]] = [4, 3, 2, 1]
    best = jt.topk(x, 0, 4)
    assert list(best.values) == [4, 3, 2, 1]
    assert list(best.indices) == [0, 128, 256, 384]


@pytest.mark.parametrize("shape", [(257, 257), (33, 64), (65537, 4), (5, 5), (8, 100)])
def test_c45_ragged_shapes(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for axis in (0, 1):
        want = np.argsort(x, axis, kind="stable")
        order.same(jt.argsort(x, axis), want.astype(np.int32))


def test_c65_a_tie_gives_the_gradient_to_its_first():
    grad = jax.grad(lambda x: jt.topk(x, 0, 1).values[0])
    np.testing.assert_array_equal(grad(jnp.array([1.0, 1.0])), [1, 0])
    np.testing.assert_array_equal(grad(jnp.array([1.0, 2.0, NAN])), [0, 1, 0])


def test_c80_integer_results_have_float0_tangents():
    x = jnp.arange(4.0)
    tangent = jax.jvp(lambda x: jt.topk(x, 0, 2), (x,), (x,))[1]
    assert tangent.indices.dtype == jax.dtypes.float0

    def picked(x):
        return jnp.sum(x[jt.topk(x, 0, 2).indices] ** 2)

    np.testing.assert_array_equal(jax.grad(picked)(x), [0, 0, 4, 6])


def test_c86_a_large_topk_compiles_in_seconds():
    start = time.perf_counter()
    best = jt.topk(jnp.arange(1 << 20, dtype=jnp.float32) % 1000, 0, 128)
    assert time.perf_counter() - start < 10
    assert list(best.indices[:2]) == [999, 1999]


def test_c88_argsort_of_wide_keys():
    with jax.enable_x64(True):
        x = np.random.default_rng(2).integers(-(2**62), 2**62, 10_000)
        order.same(jt.argsort(x, 0), np.argsort(x, kind="stable").astype(np.int32))
