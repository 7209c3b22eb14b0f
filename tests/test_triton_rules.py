"""The functions that Triton kernels trace, run as plain jax against the oracles.

What only Triton shows is in tests/lowering and tests/device.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import oracle
from fibres import REDUCERS, STRICT, element, init_of, legal, rng_of, seed_of, stacked
from jaxtile.pallas_lowering import load_all
from jaxtile.primitives import reduce_p, scan_p
from oracle import same_bits
from rules import through

load_all()
from jaxtile.pallas_lowering.triton import _launch  # noqa: E402
from jaxtile.pallas_lowering.triton import reduce as triton_reduce  # noqa: E402
from jaxtile.pallas_lowering.triton import scan as triton_scan  # noqa: E402

TILE = {reduce_p: triton_reduce._reduce, scan_p: triton_scan._scan}
WHOLE = {reduce_p: triton_reduce.reduce_arrays, scan_p: triton_scan.scan_arrays}
_DIRECTIONS = ("prefix", "suffix", "reverse")
_SHAPES = [(2, 21), (21, 2), (19, 5), (1, 5)]
_TILES = [((2, 16), 1), ((16, 2), 0), ((2, 16, 2), 1), ((2, 4), 0), ((16, 1), 0)]


@pytest.fixture
def small(monkeypatch):
    """Interpret mode, and blocks so small that short axes need several launches."""
    monkeypatch.setattr(_launch, "INTERPRET", True)
    for name in ("_TILE", "_ROW"):
        monkeypatch.setattr(_launch, name, 8)
    for name in ("_TREE_ROWS", "_SCAN_ROWS", "_STEP", "_LINE", "_MOST_FIBRES"):
        monkeypatch.setattr(_launch, name, 4)


def _drawn(*key, shape, axis):
    """Data of a reducer along an axis, with a mask and a seed as the name decides."""
    name = key[0]
    rng = rng_of(*key)
    _, _, makers, seed = REDUCERS[name]
    leaves = [make(rng, shape) for make in makers]
    mask = rng.random(shape) < 0.6 if rng.random() < 0.4 else None
    seed = seed_of(name) if seed is not None and rng.random() < 0.5 else None
    fibre = tuple(s for d, s in enumerate(shape) if d != axis)
    return rng, leaves, mask, seed, init_of(seed, fibre), fibre


def _fibres(leaves, mask, axis):
    """Each fibre as the oracle takes it: elements and flags."""
    moved = [np.moveaxis(v, axis, -1) for v in leaves]
    rows = oracle.rows(moved)
    if mask is None:
        return [(row, None) for row in rows]
    flags = np.moveaxis(mask, axis, -1).reshape(len(rows), -1)
    return list(zip(rows, flags, strict=True))


def _check_reduce(rules, name, policy, shape, axis):
    reducer, op, _, _ = REDUCERS[name]
    _, leaves, mask, seed, init, fibre = _drawn(
        name, policy, shape, shape=shape, axis=axis
    )
    if mask is not None:
        mask[tuple(0 if d == axis else slice(None) for d in range(len(shape)))] = True

    def run(*leaves):
        x = element(leaves)
        return jt.reduce(x, axis, reducer, policy=policy, where=mask, init=init)

    got = through(rules, run, *leaves)
    want = [
        oracle.REDUCTIONS[policy](op, row, seed, flags)
        for row, flags in _fibres(leaves, mask, axis)
    ]
    for g, w in zip(got, stacked(want, fibre), strict=False):
        same_bits(g, w)


def _check_scan(rules, name, policy, direction, shape, axis):
    reducer, op, _, _ = REDUCERS[name]
    key = name, policy, direction, shape
    rng, leaves, mask, seed, init, _ = _drawn(*key, shape=shape, axis=axis)
    exclusive = bool(seed is not None and rng.random() < 0.5)
    kwargs = {"policy": policy, "direction": direction, "exclusive": exclusive}

    def run(*leaves):
        x = element(leaves)
        return jt.scan(x, axis, reducer, where=mask, init=init, **kwargs)

    got = [np.moveaxis(np.asarray(v), axis, -1) for v in through(rules, run, *leaves)]
    for place, (row, flags) in enumerate(_fibres(leaves, mask, axis)):
        want = oracle.scan(op, row, policy, seed, flags, direction, exclusive)
        for k, leaf in enumerate(got):
            shown = leaf.reshape(-1, leaf.shape[-1])[place]
            expected = shown.copy()
            for i, state in enumerate(want):
                if state is not None:  # elsewhere it is the empty value
                    expected[i] = state[k]
            same_bits(shown, expected)


def _tile(*key):
    return _TILES[rng_of(*key).integers(len(_TILES))]


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("name", REDUCERS)
def test_reduce_of_a_tile(name, policy):
    if legal(name, policy):
        _check_reduce(TILE, name, policy, *_tile(name, policy))


@pytest.mark.parametrize(("name", "policy"), list(itertools.product(REDUCERS, STRICT)))
def test_scan_of_a_tile(name, policy):
    if legal(name, policy):
        direction = _DIRECTIONS[rng_of(name, policy).integers(3)]
        _check_scan(TILE, name, policy, direction, *_tile(name, policy, "scan"))


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("name", REDUCERS)
def test_reduce_of_arrays(small, name, policy):
    if legal(name, policy):
        rng = rng_of(name, policy)
        shape = _SHAPES[rng.integers(len(_SHAPES))]
        _check_reduce(WHOLE, name, policy, shape, int(rng.integers(2)))


@pytest.mark.parametrize(("name", "policy"), list(itertools.product(REDUCERS, STRICT)))
def test_scan_of_arrays(small, name, policy):
    if not legal(name, policy):
        return
    rng = rng_of(name, policy)
    directions = {
        "fold_left": ("prefix", "reverse"),
        "fold_right": ("suffix",),
        "fixed_tree": _DIRECTIONS,
    }[policy]
    direction = directions[rng.integers(len(directions))]
    shape = _SHAPES[rng.integers(len(_SHAPES))]
    _check_scan(WHOLE, name, policy, direction, shape, int(rng.integers(2)))


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_reduce_of_arrays_over_several_axes(small, axes):
    x = rng_of(axes).standard_normal((3, 5, 7)).astype(np.float32)

    def run(x):
        return jt.reduce(x, axes, jt.add, policy="fixed_tree")

    (got,) = through(WHOLE, run, x)
    same_bits(got, run(jnp.asarray(x)))


@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_reduce_of_a_tile_over_several_axes(axes, policy):
    x = rng_of(axes).standard_normal((2, 4, 8)).astype(np.float32)

    def run(x):
        return (
            jt.reduce(x, axes, jt.add, policy=policy, init=0.5),
            jt.reduce(x, axes, jt.argmax, policy=policy, where=x < 0),
        )

    got = through(TILE, run, x)
    for g, w in zip(got, jax.tree.leaves(run(jnp.asarray(x))), strict=True):
        same_bits(g, w)


@pytest.mark.parametrize("op", ["reduce", "scan"])
@pytest.mark.parametrize("policy", ["unordered_tree", "ordered_tree"])
@pytest.mark.parametrize("axis", [0, 1])
def test_any_tree_of_tiles_of_integers(op, policy, axis):
    x = rng_of(op, policy).integers(-(2**31), 2**31, (8, 16)).astype(np.int32)

    def run(x):
        return getattr(jt, op)(x, axis, jt.add, policy=policy, where=x > 0)

    (got,) = through(TILE, run, x)
    same_bits(got, run(jnp.asarray(x)))


@pytest.mark.parametrize("op", ["reduce", "scan"])
@pytest.mark.parametrize("policy", ["unordered_tree", "ordered_tree"])
def test_any_tree_of_arrays_of_integers(small, op, policy):
    x = rng_of(op, policy).integers(-(2**31), 2**31, (3, 37)).astype(np.int32)

    def run(x):
        return getattr(jt, op)(x, 1, jt.add, policy=policy, where=x > 0)

    (got,) = through(WHOLE, run, x)
    same_bits(got, run(jnp.asarray(x)))


@pytest.mark.parametrize(
    ("shape", "itemsize", "sentence"),
    [
        ((1, 2**31, 1), 4, "an axis or a grid of 2^31 or more"),
        ((1, 2**16, 2**15 + 1), 1, "one-byte elements"),
        ((1, 2**16, 2**15 + 1), 4, None),
    ],
)
def test_arrays_beyond_a_launch_are_refused(shape, itemsize, sentence):
    reason = _launch.why_too_large(shape, [itemsize])
    assert reason is sentence or sentence in reason
