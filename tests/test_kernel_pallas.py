"""Kernels as Pallas kernels: interpreted against plain jax, and lowered for Triton."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
import targets
from folds import same_derivatives
from jaxtile import _attention, _kernels, _recurrence
from jaxtile.errors import TileShapeError, TileValueError, UnsupportedOnBackend
from jaxtile.pallas_lowering import SERVES

RNG = np.random.default_rng(17)


def _f32(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def _words(*shape, top):
    return jnp.asarray(RNG.integers(0, top, shape), jnp.int32)


def _scaled(m, k, n, groups):
    a, b = (jt.quantize(_f32(*shape), "float8_e4m3fn") for shape in ((m, k), (k, n)))
    return a, b, jnp.exp(_f32(groups, m)), jnp.exp(_f32(groups, n))


CALLS = {
    "softmax": (_kernels.softmax, lambda: (_f32(13, 51),), {}),
    "layer_norm": (
        _kernels.layer_norm,
        lambda: (_f32(9, 20), _f32(20), _f32(20)),
        {"eps": 1e-5},
    ),
    "rms_norm": (_kernels.rms_norm, lambda: (_f32(9, 20), _f32(20)), {"eps": 1e-5}),
    "cross_entropy": (
        _kernels.cross_entropy,
        lambda: (_f32(130, 16), _f32(16, 70), _words(130, top=70)),
        {"block": 32},
    ),
    "attention": (
        _attention.attention,
        lambda: (
            _f32(2, 1, 2, 20, 16),
            _f32(2, 1, 23, 16),
            _f32(2, 1, 23, 16),
            jnp.array([23, 9], jnp.int32),
        ),
        {"block": 16, "causal": True, "scale": 0.3},
    ),
    "recurrence": (
        _recurrence.recurrence,
        lambda: (_f32(2, 21, 6), _f32(2, 21, 6), _f32(2, 21, 6), _f32(6)),
        {"block": 8, "lanes": 4},
    ),
    "linear_gelu": (
        _kernels.linear_gelu,
        lambda: (_f32(20, 40), _f32(40, 19), _f32(19)),
        {"block": 16},
    ),
    "scaled_matmul": (
        _kernels.scaled_matmul(jnp.float32),
        lambda: _scaled(20, 96, 19, 4),
        {"block": 16},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_interpreted_kernels_agree_with_plain_jax(name):
    kernel, make, config = CALLS[name]
    args = make()
    want = kernel(*args, **config)
    got = kernel(*args, implementation="interpret", **config)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CALLS)
def test_kernels_lower_for_triton(name):
    kernel, make, config = CALLS[name]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in make()]
    with targets.mesh("NVIDIA H200", 132, "gpu"):
        text = targets.lowered(
            lambda *v: kernel(*v, implementation="triton", **config), shapes, "cuda"
        ).as_text()
    assert "triton" in text


_TPU = {
    "softmax": (CALLS["softmax"][0], lambda: (_f32(60, 256),), {}),
    "layer_norm": (
        _kernels.layer_norm,
        lambda: (_f32(12, 128), _f32(128), _f32(128)),
        {"eps": 1e-5},
    ),
    "rms_norm": (
        _kernels.rms_norm,
        lambda: (_f32(12, 128), _f32(128)),
        {"eps": 1e-6},
    ),
    "cross_entropy": (
        _kernels.cross_entropy,
        lambda: (_f32(200, 64), _f32(64, 1000), _words(200, top=1000)),
        {},
    ),
    "attention": (
        _attention.attention,
        lambda: (
            _f32(2, 2, 3, 256, 128),
            _f32(2, 2, 200, 128),
            _f32(2, 2, 200, 128),
            jnp.array([200, 130], jnp.int32),
        ),
        {"causal": True, "scale": 0.1},
    ),
    "recurrence": (
        _recurrence.recurrence,
        lambda: (_f32(2, 200, 256), _f32(2, 200, 256), _f32(2, 200, 256), _f32(256)),
        {},
    ),
    "linear_gelu": (
        _kernels.linear_gelu,
        lambda: (_f32(200, 200), _f32(200, 256), _f32(256)),
        {},
    ),
    "scaled_matmul": (
        _kernels.scaled_matmul(jnp.float32),
        lambda: _scaled(200, 384, 256, 3),
        {},
    ),
}

_HEADS, _KEYS = (2, 2, 3, 256, 128), (2, 2, 200, 128)


def _attention_pulled():
    """What the derivatives of attention are given: norms and deltas of one scale."""
    words = jnp.array([200, 130], jnp.int32)
    norms, deltas = _f32(*_HEADS[:-1]) + 8, _f32(*_HEADS[:-1])
    return (
        _f32(*_HEADS),
        _f32(*_KEYS),
        _f32(*_KEYS),
        words,
        _f32(*_HEADS),
        norms,
        deltas,
    )


_CAUSAL = {"causal": True, "scale": 0.1}
_TPU |= {
    "attention_with_norms": (
        _attention.attention_with_norms,
        lambda: _attention_pulled()[:4],
        _CAUSAL,
    ),
    "attention_dq": (_attention.attention_dq, _attention_pulled, _CAUSAL),
    "attention_dkv": (_attention.attention_dkv, _attention_pulled, _CAUSAL),
    "recurrence_back": (
        _recurrence.recurrence_back,
        lambda: (*[_f32(2, 200, 256)] * 3, _f32(256), *[_f32(2, 200, 256)] * 2),
        {"lag": 0},
    ),
}


@pytest.mark.parametrize("name", _TPU)
def test_blocks_of_a_grid_agree_with_plain_jax(name, monkeypatch):
    """The TPU form, interpreted: what lies outside of a block is NaN there."""
    kernel, make, config = _TPU[name]
    args = make()
    want = kernel(*args, **config)
    interpreted = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr("jaxtile.kernels.blocks.pl.pallas_call", interpreted)
    anywhere = "jaxtile.pallas_lowering._choice.elsewhere"
    monkeypatch.setattr(anywhere, lambda name, platform: None)
    got = jax.jit(lambda *v: kernel(*v, implementation="tpu", **config))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@targets.needs_libtpu
@pytest.mark.parametrize("name", _TPU)
def test_kernels_compile_for_tpu(name):
    kernel, make, config = _TPU[name]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in make()]
    call = lambda *v: kernel(*v, implementation="tpu", **config)  # noqa: E731
    for chip in ("v5e", "v6e", "tpu7x"):
        targets.compile_array_for_tpu(call, *shapes, chip=chip)


def test_the_derivative_of_a_kernel_for_tpu_is_one_too(monkeypatch):
    interpreted = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr("jaxtile.kernels.blocks.pl.pallas_call", interpreted)
    anywhere = "jaxtile.pallas_lowering._choice.elsewhere"
    monkeypatch.setattr(anywhere, lambda name, platform: None)
    args = (*[_f32(1, 140, 128)] * 3, _f32(128))

    def pulled(name):
        def call(*v):
            return _recurrence.recurrence(*v, implementation=name)

        return jax.jit(lambda *v: jax.vjp(call, *v)[1](v[0]))(*args)

    for got, want in zip(pulled("tpu"), pulled("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_blocks_that_a_tpu_does_not_take():
    with pytest.raises(
        UnsupportedOnBackend, match="a multiple of 8 there.*blocks of 3"
    ):
        _kernels.softmax(_f32(60, 256), block=3, implementation="tpu")
    with pytest.raises(UnsupportedOnBackend, match="a window, or a traced coordinate"):
        turned(_f32(7, 21), implementation="tpu")


@jt.kernel(out=lambda x: jax.ShapeDtypeStruct((x.shape[1], x.shape[0]), x.dtype))
def turned(nest, x, y, *, block=8):
    i = nest.parallel(x.shape[0])
    c = nest.parallel(x.shape[1], block)
    t = x.tile(jt.Window(i.index, jt.Dim("w"), 3), c, bounds=jt.minimum).load()
    y.tile(c, i).store(jt.reduce(t, t.dim(0), jt.minimum))


def test_windows_points_and_blocks_that_are_no_power_of_two():
    x = _f32(7, 21)
    want = np.stack([np.asarray(x)[i : i + 3].min(0) for i in range(7)], 1)
    for block in (8, 5, 21):
        for name in ("reference", "interpret"):
            got = turned(x, block=block, implementation=name)
            np.testing.assert_array_equal(got, want)


@jt.kernel(out=lambda x, tops: (x, tops))
def levelled(nest, x, tops, y, top):
    """Each block less its maximum, and the maxima of both sorts of blocks."""
    r, c = nest.parallel(x.shape[0], 8), nest.parallel(x.shape[1], 128)
    t = x.tile(r, c).load() - tops.tile(r.blocks, c.blocks).load()
    y.tile(r, c).store(t)
    top.tile(r.blocks, c.blocks).store(jt.reduce(t, (r.dim, c.dim), jt.maximum))


def test_an_axis_of_one_coordinate_for_each_block():
    x, tops = _f32(20, 200), _f32(3, 2)
    wide = np.repeat(np.repeat(tops, 8, 0)[:20], 128, 1)[:, :200]
    want = np.asarray(x) - wide
    most = [[want[i : i + 8, j : j + 128].max() for j in (0, 128)] for i in (0, 8, 16)]
    for name in ("reference", "interpret"):
        y, top = levelled(x, tops, implementation=name)
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(top, most)
    with pytest.raises(TileShapeError, match=r"size 4; got the blocks of .* over 3"):
        levelled(x, _f32(4, 2))


def test_derivatives_and_batches_of_a_pallas_kernel():
    def call(x):
        return _kernels.softmax(x, implementation="interpret")

    x = _f32(5, 6)
    same_derivatives(call, jax.nn.softmax, x, order=1, rtol=1e-4, atol=1e-6)
    got = jax.vmap(call)(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(got[1], jax.nn.softmax(2 * x), rtol=1e-5)


def _fold(nest, x, y, *, policy):
    r = nest.parallel(x.shape[0], 4)

    @nest.reduce(x.shape[1], init=nest.zeros(r, jnp.float32), policy=policy)
    def out(k, s):
        return x.tile(r, k).load() - s

    y.tile(r).store(out)


def test_folds_keep_their_order_in_a_kernel():
    run = jt.kernel(out=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))(_fold)
    x = _f32(6, 5)
    for policy in ("fold_left", "fold_right"):
        want = np.zeros(6, np.float32)
        for j in range(5) if policy == "fold_left" else range(4, -1, -1):
            want = np.asarray(x)[:, j] - want
        for name in ("reference", "interpret"):
            got = run(x, policy=policy, implementation=name)
            np.testing.assert_array_equal(got, want)

    @jt.kernel(out=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
    def fixed(nest, x, y):
        r = nest.parallel(x.shape[0], 4)
        start = nest.zeros(r, jnp.float32)

        @nest.reduce(x.shape[1], init=start, policy="fixed_tree")
        def total(k, s):
            return s + x.tile(r, k).load()

        y.tile(r).store(total)

    fixed(x)
    with pytest.raises(UnsupportedOnBackend, match="a loop over blocks keeps; got pol"):
        fixed(x, implementation="interpret")


def test_what_runs_it():
    x = _f32(5, 6)
    (place,) = {e.place for e in jt.explain(_kernels.softmax)(x)}
    assert place == "array"
    with jt.use_implementation("reference"):
        assert {e.implementation for e in jt.explain(jt.nn.softmax)(x)} == {"reference"}
    report = jt.explain(lambda x: _kernels.softmax(x, implementation="interpret"))(x)
    assert {e.place for e in report} == {"in kernel: interpret"}
    with pytest.raises(TileValueError, match="implementation in .*got 'mosaic'"):
        _kernels.softmax(x, implementation="mosaic")


@pytest.mark.parametrize("name", ["triton", "mosaic_gpu", "tpu"])
def test_a_platform_that_a_kernel_is_not_for(name):
    """It is refused when lowered, so that a kernel for elsewhere can be lowered here."""
    x = jnp.zeros((8, 128))
    call = lambda x: _kernels.softmax(x, implementation=name)  # noqa: E731
    home = next(p for p, names in SERVES.items() if name in names)
    sentence = (
        f"softmax: expected to run where {name} does; got implementation='{name}': it "
        f'runs on {home}, not on cpu. Use implementation=None or "reference"; "interp'
    )
    slope = jax.grad(lambda x: call(x).sum())
    batched = lambda x: jax.vmap(call)(x[None])  # noqa: E731
    for run in (call, jax.jit(call), batched, slope):
        with pytest.raises(UnsupportedOnBackend, match=sentence):
            run(x)
    assert jax.eval_shape(call, x).shape == x.shape
    gpu = name != "tpu"
    device = ("NVIDIA H200", 132, "gpu") if gpu else ("TPU v5 lite", 1, "tpu")
    with targets.mesh(*device):
        text = targets.lowered(call, [targets.spec(x.shape)], home).as_text()
        assert (name if gpu else "tpu_custom_call") in text
        other = "tpu" if gpu else "cuda"
        with pytest.raises(UnsupportedOnBackend, match=f"not on {other}"):
            targets.lowered(call, [targets.spec(x.shape)], other)


def test_arrays_beyond_the_offsets_of_triton():
    @jt.kernel(out=lambda x: x, tuned={"triton": {"block": 4096}})
    def copy(nest, x, y, *, block=8):
        rows = nest.parallel(x.shape[0], block)
        y.tile(rows).store(x.tile(rows).load())

    insist = functools.partial(copy, implementation="triton")
    wraps = jax.ShapeDtypeStruct((2**19 + 1, 2**12), jnp.int8)
    with targets.mesh("NVIDIA H200", 132, "gpu"):
        for fn in (jax.vmap(insist), lambda x: insist(x.reshape(-1))):
            with pytest.raises(UnsupportedOnBackend, match="an offset wraps"):
                jax.eval_shape(fn, wraps)
        for dtype, rows, runs in (
            (jnp.int8, 2**19, True),
            (jnp.int8, 2**19 + 1, False),
            (jnp.float32, 2**19 + 1, True),
        ):
            x = jax.ShapeDtypeStruct((rows * 2**12,), dtype)
            assert ("triton" in targets.lowered(copy, [x], "cuda").as_text()) == runs


def test_stores_that_could_race_within_an_instance():
    @jt.kernel(out=lambda x: x)
    def twice(nest, x, y):
        i, cols = nest.parallel(x.shape[0]), jt.Dim("cols")
        y.tile(i, cols).store(nest.zeros(cols, x.dtype) + x.tile(i, cols).load())

        @nest.serial(x.shape[1], 4)
        def _(k):
            y.tile(i, k).store(2 * x.tile(i, k).load())

    x = _f32(3, 8)
    np.testing.assert_array_equal(twice(x, implementation="interpret"), 2 * x)
    for name in ("triton", "mosaic_gpu"):
        with pytest.raises(UnsupportedOnBackend, match="cut in two ways"):
            jax.eval_shape(lambda v, n=name: twice(v, implementation=n), x)
