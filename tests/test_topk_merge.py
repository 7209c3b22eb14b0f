"""topk_merge: the reducer against topk's oracle, in reduce, scan and segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import order
from fibres import rng_of
from jaxtile.errors import TileTypeError, TileValueError
from oracle import same_bits

POLICIES = ("unordered_tree", "ordered_tree", "fixed_tree", "fold_left", "fold_right")


def _want(row, k, largest=True, nan="last"):
    """Values and indices of one fibre, empty places at the end."""
    p = order.permutation(list(row), largest, nan)[:k]
    rest = k - len(p)
    return (
        np.concatenate([row[p], np.zeros(rest, row.dtype)]),
        np.array([*p, *[-1] * rest], np.int32),
    )


def _check(best, rows, k, **rules):
    values, indices = (np.stack(v, -1) for v in best)
    for row, value, index in zip(rows, values, indices, strict=True):
        want = _want(row, k, **rules)
        order.same(value, want[0])
        order.same(index, want[1])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("k", [1, 3, 4])
def test_every_policy_keeps_the_same_k(policy, k):
    x = order.anything(rng_of(policy, k), (3, 21), "float32")
    run = jax.jit(lambda x: jt.reduce(x, 1, jt.topk_merge(k), policy=policy))
    _check(run(x), x, k)


@pytest.mark.parametrize("dtype", order.FORMATS)
@pytest.mark.parametrize("largest", [False, True])
def test_every_format_keeps_its_dtype_and_bits(dtype, largest):
    x = order.anything(rng_of(dtype), (2, 9), jnp.dtype(dtype))
    best = jt.reduce(x, 1, jt.topk_merge(2, largest=largest, nan="largest"))
    _check(best, x, 2, largest=largest, nan="largest")


def test_short_fibres_leave_places_empty():
    x = np.float32([[1, np.nan, 2]])
    merge = jt.topk_merge(5)
    _check(jt.reduce(x, 1, merge), x, 5)
    _check(jt.reduce(x[:, :0], 1, merge), x[:, :0], 5)
    masked = jt.reduce(x, 1, merge, where=x == 2)
    assert [int(v[0]) for v in masked.indices] == [2, -1, -1, -1, -1]


def test_a_smaller_k_is_the_head_of_a_larger():
    x = order.anything(rng_of("head"), (4, 33), "float32")
    seven = jt.reduce(x, 1, jt.topk_merge(7))
    three = jt.reduce(x, 1, jt.topk_merge(3))
    for a, b in zip(
        jax.tree.leaves(three), [*seven[0][:3], *seven[1][:3]], strict=True
    ):
        same_bits(a, b)


def test_streaming_over_tiles_is_topk_of_the_whole():
    x = order.anything(rng_of("stream"), (2, 40), "float32")
    place = np.broadcast_to(np.arange(40, dtype=np.int32), x.shape)
    merge, state = jt.topk_merge(4, indexed=False), None
    for start in (32, 0, 16):
        tile = x[:, start : start + 16], place[:, start : start + 16]
        state = jt.reduce(tile, 1, merge, init=state)
    _check(state, x, 4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("k", [3, 20])
def test_pairs_with_indices_of_their_own(policy, k):
    """Shuffled, masked, and with empty pairs among them, which stay empty."""
    rng = rng_of(policy, k, "pairs")
    x = order.anything(rng, (3, 30), "float32")
    index = np.stack([rng.permutation(100)[:30] for _ in x]).astype(np.int32)
    mask = rng.random(x.shape) < 0.8
    nowhere = np.iinfo(np.int32).max
    index[:, 5:8], mask[:, 5:8] = nowhere, True
    merge = jt.topk_merge(k, indexed=False)
    run = jax.jit(lambda *v: jt.reduce(v[:2], 1, merge, where=v[2], policy=policy))
    best = run(x, index, mask)
    values, found = (np.stack(v, -1) for v in best)
    for row, own, keep, value, place in zip(x, index, mask, values, found, strict=True):
        own = np.where(keep, own, nowhere)
        by = [i for i in np.argsort(own) if own[i] != nowhere]
        p = [by[j] for j in order.permutation(list(row[by]), True, "last")][:k]
        order.same(value[: len(p)], row[p])
        order.same(place, np.array([*own[p], *[-1] * (k - len(p))], np.int32))
    whole = run(x, index, np.ones_like(mask))
    for a, b in zip(
        jax.tree.leaves(whole),
        jax.tree.leaves(jt.reduce((x, index), 1, merge, policy=policy)),
        strict=True,
    ):
        same_bits(a, b)


def test_a_mask_of_indexed_elements():
    x = order.anything(rng_of("masked"), (3, 30), "float32")
    mask = rng_of("mask").random(x.shape) < 0.5
    best = jt.reduce(x, 1, jt.topk_merge(6), where=mask)
    values, found = (np.stack(v, -1) for v in best)
    for row, keep, value, place in zip(x, mask, values, found, strict=True):
        by = np.flatnonzero(keep)
        p = [by[j] for j in order.permutation(list(row[by]), True, "last")][:6]
        order.same(value, row[p])
        order.same(place, np.array(p, np.int32))


def test_scans_and_segments():
    x = order.anything(rng_of("scan"), (1, 12), "float32")
    prefixes = jt.scan(x, 1, jt.topk_merge(2))
    for n in range(12):
        _check(jax.tree.map(lambda v, n=n: v[:, n], prefixes), x[:, : n + 1], 2)
    heads = np.arange(12) % 5 == 0
    element = (heads, (x[0], np.arange(12, dtype=np.int32)))
    inside = jt.scan(element, 0, jt.segmented(jt.topk_merge(2, indexed=False)))
    for n in range(12):
        start = n - n % 5
        value, index = _want(x[0, start : n + 1], 2)
        same_bits(np.stack([v[n] for v in inside.values]), value)
        shifted = np.where(index < 0, -1, index + start).astype(np.int32)
        np.testing.assert_array_equal([int(v[n]) for v in inside.indices], shifted)


def test_derivatives_are_those_of_topk():
    x = jnp.asarray(rng_of("grad").permutation(14).reshape(2, 7), jnp.float32)
    weight = jnp.array([1.0, 2.0, -1.0])

    def streamed(x):
        return jnp.sum(
            jnp.stack(jt.reduce(x, 1, jt.topk_merge(3))[0], -1) ** 2 * weight
        )

    def direct(x):
        return jnp.sum(jt.topk(x, 1, 3).values ** 2 * weight)

    np.testing.assert_allclose(jax.grad(streamed)(x), jax.grad(direct)(x), rtol=1e-6)
    tangent = jnp.ones_like(x)
    for f in (streamed, direct):
        got = jax.jvp(jax.grad(f), (x,), (tangent,))[1]
        np.testing.assert_allclose(got, jax.grad(direct)(x + 1) - jax.grad(direct)(x))


def test_equal_reducers_are_equal():
    assert jt.topk_merge(3) == jt.topk_merge(3)
    assert jt.topk_merge(3) != jt.topk_merge(3, largest=False)
    assert jt.topk_merge(3) != jt.topk_merge(4)


def test_refusals():
    with pytest.raises(TileValueError, match="topk_merge: .*k in \\[1, 2.*; got 0"):
        jt.topk_merge(0)
    for k in (257, 2**40):  # a state has k components: it would never compile
        with pytest.raises(
            TileValueError, match=rf"k in \[1, 256\]; got {k}. .*jaxtile.topk"
        ):
            jt.topk_merge(k)
    with pytest.raises(TileTypeError, match="topk_merge: .*an integer k"):
        jt.topk_merge(1.0)
    with pytest.raises(TileValueError, match="topk_merge: .*nan in"):
        jt.topk_merge(1, nan="drop")
    with pytest.raises(TileTypeError, match=r"topk_merge: .*\(value, index\)"):
        jt.reduce(jnp.ones(3), 0, jt.topk_merge(1, indexed=False))
