"""Whole-array kernels of Mosaic GPU at odd shapes, on a machine in NumPy.

The plan's constants are cut small, so that arrays of a few thousand elements go the
ways of long ones: several warps a row, chunks, launches of partial states.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets
from jaxtile import primitives
from jaxtile.pallas_lowering import _choice, load_all

load_all()

from jaxtile.pallas_lowering.mosaic_gpu import (  # noqa: E402
    _plan,
    whole_reduce,
    whole_scan,
)
from kernels import FARTHEST  # noqa: E402
from machines import on_machine  # noqa: E402

RULES = {primitives.reduce_p: whole_reduce.run, primitives.scan_p: whole_scan.run}

pytestmark = pytest.mark.skipif(
    targets.LINE < (0, 11), reason="this jax prints no module of a kernel"
)


@pytest.fixture
def machine(monkeypatch):
    """Runs a function's leaves; notes (CTAs, warpgroups) of every launch."""
    return on_machine(monkeypatch, RULES)


@pytest.fixture
def small(monkeypatch):
    """Few warps and threads keep this machine busy."""
    for name, value in [
        ("_ENOUGH_WARPS", 8),
        ("_MOST_VALUES", 16),
        ("_ENOUGH_THREADS", 8),
        ("_FEW_WARPS", 64),
        ("_MOST_TILES", 2),
        ("_MOST_WARPS_OF_ROW", 4),
    ]:
        monkeypatch.setattr(_plan, name, value)


def _words(x):
    word = np.dtype(f"u{x.dtype.itemsize}")
    return np.where(x != x, word.type(1), np.ascontiguousarray(x).view(word))


def _check(run, fn, *args):
    got, launches = run(fn, *args)
    want = list(map(np.asarray, jax.tree.leaves(jax.jit(fn)(*args))))
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        bad = np.argwhere(_words(a) != _words(b))
        assert not len(bad), f"leaf {k} differs at {len(bad)} places, first {bad[0]}"
    return launches


def _data(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype) == bool:
        return rng.random(shape) < 0.5
    if np.issubdtype(np.dtype(dtype), np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    wide = rng.normal(size=shape) * 10.0 ** rng.integers(-2, 3, shape)
    x = wide.astype(jnp.dtype(dtype))
    if x.size > 9:
        x.reshape(-1)[[3, 5, 8]] = -0.0, np.nan, np.inf
    return x


_sum_and_difference = jt.Reducer(
    merge=lambda a, b: (a[0] + b[0], a[1] - b[1]), name="sum and difference"
)


def _mask(shape):
    """A row or column without anything, and gaps."""
    mask = np.random.default_rng(7).random(shape) < 0.5
    mask[0] = False
    mask[..., 0] = False
    return mask


def _sample(*choices):
    """A third of all combinations, with each choice of each in some."""
    return list(itertools.product(*choices))[::3]


SHAPES = [(1, 1), (3, 1), (5, 33), (2, 130), (1, 2003), (3, 1000), (140, 5), (70, 3)]


@pytest.mark.parametrize(
    ("shape", "axis", "name", "masked"),
    _sample(SHAPES, (0, 1), ("welford", "argmax"), (False, True)),
)
def test_reduce_has_the_bits_of_the_reference(
    machine, small, shape, axis, name, masked
):
    def fn(x, where=None):
        reducer = getattr(jt, name)
        return jt.reduce(x, axis, reducer, where=where, policy="fixed_tree")

    _check(machine, fn, _data(shape), *([_mask(shape)] * masked))


@pytest.mark.parametrize(
    ("direction", "shape", "policy", "masked"),
    _sample(
        ("prefix", "suffix", "reverse"),
        ((3, 1), (2, 130), (1, 603), (70, 3)),
        ("fixed_tree", "fold_left"),
        (False, True),
    ),
)
def test_scan_has_the_bits_of_the_reference(
    machine, small, shape, policy, masked, direction
):
    if policy == "fold_left" and direction == "suffix":
        policy = "fold_right"
    axis = int(shape[0] < shape[1])
    options = dict(policy=policy, direction=direction, return_final=True)

    def fn(x, index, where=None):
        return jt.scan((x, index), axis, FARTHEST, where=where, **options)

    index = _data(shape, "int32", 1)
    _check(machine, fn, _data(shape), index, *([_mask(shape)] * masked))


@pytest.mark.parametrize(
    ("shape", "policy", "masked"),
    _sample(
        ((2, 1), (2, 515), (1, 1024), (129, 2)),
        ("fixed_tree", "fold_left"),
        (False, True),
    ),
)
def test_exclusive_scans_start_from_their_seeds(machine, small, shape, policy, masked):
    axis = int(shape[0] <= shape[1])

    def fn(x, value, index, where=None):
        options = dict(exclusive=True, return_final=True, policy=policy)
        seed = (value, index)
        return jt.scan(x, axis, jt.argmin, init=seed, where=where, **options)

    fibres = shape[1 - axis]
    seeds = [_data((fibres,), seed=2), np.arange(fibres, dtype=np.int32) + 9]
    _check(machine, fn, _data(shape), *seeds, *([_mask(shape)] * masked))


@pytest.mark.parametrize(
    ("dtype", "shape", "exclusive"),
    _sample(
        ("bool", "int8", "uint16", "bfloat16", "float32"),
        ((3, 1), (2, 600), (130, 2)),
        (False, True),
    ),
)
def test_sums_of_every_format(machine, small, dtype, shape, exclusive):
    axis = int(shape[0] <= shape[1])

    def fn(x, where):
        options = dict(policy="fixed_tree", where=where)
        total = jt.reduce(x, axis, jt.add, **options)
        return total, jt.scan(x, axis, jt.add, exclusive=exclusive, **options)

    _check(machine, fn, _data(shape, dtype), _mask(shape))


def test_several_warpgroups_share_a_row(machine):
    total = functools.partial(jt.reduce, axis=1, reducer=jt.add, policy="fixed_tree")
    assert _check(machine, total, _data((1, 2003))) == [(1, 2)]


def test_a_long_row_is_scanned_in_chunks(machine, small):
    scan = functools.partial(jt.scan, axis=1, reducer=jt.welford, policy="fixed_tree")
    assert [blocks for blocks, _ in _check(machine, scan, _data((1, 2003)))] == [
        8,
        1,
        8,
    ]


@pytest.mark.parametrize("direction", ["prefix", "reverse"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float32")])
def test_chains_come_through_a_ring(machine, dtypes, direction):
    # Blocks of 16 after the first 32 places, and 5 places behind the last.
    with jax.enable_x64("float64" in dtypes):
        a, b = (_data((2, 613, 72), d, seed=k) for k, d in enumerate(dtypes))

        def fn(*given):
            kwargs = {"policy": "fold_left", "direction": direction}
            return jt.scan(given, 1, _sum_and_difference, return_final=True, **kwargs)

        _check(machine, fn, a, b)


@pytest.fixture
def striped(small, monkeypatch):
    """Few neighbouring fibres are enough for CTAs of their own."""
    monkeypatch.setattr(_plan, "_ENOUGH_STRIPES", 1)
    monkeypatch.setattr(_plan, "_STRIPE_VALUES", 4)
    monkeypatch.setattr(_plan, "_ENOUGH_THREADS", 1000)


_STRIPED = {
    "sums": (jt.add, ["int32"], {}),
    "sums of pairs": (jt.add, ["int16"], {"acc_dtype": "int32"}),
    "highest": (jt.argmax, ["float32"], {}),
    "exact": (jt.affine, ["int32", "int32"], {"return_final": True}),
    "masked": (jt.argmax, ["float32"], {"masked": True, "return_final": True}),
    "seeded": (jt.maximum, ["float32"], {"init": True, "exclusive": True}),
}


@pytest.mark.parametrize("direction", ["prefix", "reverse", "suffix"])
@pytest.mark.parametrize("shape", [(2, 320, 35), (1, 517, 64), (1, 264, 36)])
@pytest.mark.parametrize("name", _STRIPED)
def test_few_fibres_are_read_once(machine, striped, name, shape, direction):
    reducer, dtypes, options = _STRIPED[name]
    options = {"policy": "ordered_tree", "direction": direction, **options}
    leaves = [_data(shape, d, seed=k) for k, d in enumerate(dtypes)]
    if options.pop("masked", False):
        options["where"] = _mask(shape)
    if options.get("init"):
        options["init"] = _data((shape[0], shape[2]), seed=9)

    def fn(*given):
        given = given if len(given) > 1 else given[0]
        return jt.scan(given, 1, reducer, **options)

    ((blocks, groups),) = _check(machine, fn, *leaves)
    vector = 2 if name == "sums of pairs" and shape[2] == 64 else 1  # 4 bytes a lane
    assert (blocks, groups) == (-(-shape[0] * shape[2] // (32 * vector)), 4)


@pytest.mark.parametrize("policy", ["fold_left", "fold_right"])
@pytest.mark.parametrize(
    ("dtypes", "cols"),
    [
        (("float32",), 516),
        (("bfloat16",), 520),
        (("float64",), 150),
        (("int8",), 272),
        (("float32", "float32"), 132),
        (("float32", "float64"), 132),  # of two sizes: by other ways
    ],
)
def test_rows_of_chains_come_through_a_ring(machine, dtypes, cols, policy):
    with jax.enable_x64("float64" in dtypes):
        leaves = [_data((35, cols), d, seed=k) for k, d in enumerate(dtypes)]
        reducer = jt.add if len(dtypes) == 1 else _sum_and_difference

        def fn(*given):
            given = given if len(given) > 1 else given[0]
            return jt.reduce(given, 1, reducer, policy=policy)

        _check(machine, fn, *leaves)


@pytest.mark.parametrize("missing", ["barrier", "warp_barrier"])
def test_the_machine_sees_a_missing_barrier(machine, small, missing, monkeypatch):
    from jaxtile.pallas_lowering.mosaic_gpu import _thread

    monkeypatch.setattr(_thread, missing, lambda: None)
    policy = "fixed_tree" if missing == "barrier" else "fold_left"
    with pytest.raises(AssertionError, match="race"):
        machine(lambda x: jt.reduce(x, 1, jt.add, policy=policy), _data((3, 1024)))


def test_a_fold_of_many_leaves_fits_shared_memory(machine):
    def merge(a, b):
        return tuple(x + y for x, y in zip(a, b, strict=True))

    seven = jt.Reducer(merge=merge, name="seven")
    leaves = [_data((4, 96), seed=k) for k in range(7)]
    _check(machine, lambda *x: jt.reduce(x, 1, seven, policy="fold_left"), *leaves)


@pytest.mark.parametrize("signs", [(1, 1), (1, -1)])
def test_moments_near_the_largest_float_stay_finite(machine, signs):
    x = np.full((2, 4096), 1e38, np.float32) * np.repeat(signs, 2048).astype("float32")
    (count, mean, m2, *_), _ = machine(
        lambda x: jt.reduce(x, 1, jt.welford, policy="unordered_tree"), x
    )
    assert (count == 4096).all()
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(1), rtol=1e-6)
    assert (m2 == (0 if signs[0] == signs[1] else np.inf)).all()


@pytest.mark.parametrize("power", [3, -3])
def test_an_integer_power_of_narrow_floats_rounds_once(machine, power):
    def merge(a, b):
        return a * 0.5 + (jnp.abs(b) + 0.5) ** power

    powers = jt.Reducer(merge=merge, name="powers")
    x = np.random.default_rng(0).normal(size=(4, 40)).astype(jnp.bfloat16)
    options = dict(policy="fold_left", acc_dtype="bfloat16")
    _check(machine, lambda x: jt.reduce(x, 1, powers, **options), x)


@pytest.mark.parametrize("op", ["div", "rem"])
def test_the_least_integer_divided_by_minus_one_wraps(machine, op):
    """The machine refuses operands for which the instruction is not defined."""
    divide = jt.Reducer(merge=getattr(jax.lax, op), name=op)
    x = np.array([[-(2**31), -1, 3], [7, 0, -1], [-(2**31), -1, -1]], np.int32)
    _check(machine, lambda x: jt.reduce(x, 1, divide, policy="fold_left"), x)


def test_an_integer_exponent_is_refused_before_lowering():
    power = jt.Reducer(merge=lambda a, b: jax.lax.pow(a, b.astype("int32")), name="pow")
    closed = jax.make_jaxpr(lambda x: jt.reduce(x, 1, power, policy="fold_left"))(
        np.ones((4, 40), np.float32)
    )
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive is primitives.reduce_p)
    params = {k: v for k, v in eqn.params.items() if k != "implementation"}
    avals = [v.aval for v in eqn.invars]
    reason = _choice.refusal(primitives.reduce_p, "mosaic_gpu", avals, params)
    assert "integer exponent" in reason
    assert "cast" in reason
