"""Kernels of `jt.kernel` as Mosaic GPU kernels: on a machine in NumPy, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bodies
import body_cases
import jaxtile as jt
import targets
from folds import same_derivatives
from jaxtile import _kernels, _recurrence
from jaxtile.errors import UnsupportedOnBackend
from jaxtile.kernels import mosaic
from jaxtile.pallas_lowering.mosaic_gpu import _runs
from machines import kernels_on_machine

on_machine = pytest.mark.skipif(
    targets.LINE < (0, 11), reason="this jax prints no module of a kernel"
)


@pytest.fixture
def launches(monkeypatch):
    return kernels_on_machine(monkeypatch)


def _lowered(kernel, args, **config):
    def call(*v):
        return kernel(*v, implementation="mosaic_gpu", **config)

    specs = [targets.spec(v.shape, v.dtype) for v in args]
    with targets.mesh("NVIDIA H200", 132, "gpu"):
        return targets.lowered(call, specs, "cuda").as_text()


@on_machine
@pytest.mark.parametrize("name", body_cases.CASES)
def test_what_they_compute(name, launches):
    body_cases.CASES[name].check("mosaic_gpu")
    assert len(launches) == 1


@on_machine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", bodies.FUNCTIONS)
def test_functions(name, dtype, launches):
    body_cases.function(name, jnp.dtype(dtype)).check("mosaic_gpu")
    assert len(launches) == 1


@pytest.mark.parametrize("name", body_cases.CASES)
def test_they_lower(name):
    case = body_cases.CASES[name]
    assert "mosaic_gpu" in _lowered(case.kernel, case.args, **case.config)


@on_machine
@pytest.mark.parametrize(
    ("shape", "block", "warpgroups"),
    [((1, 4096), 1, 1), ((8, 1100), 8, 4), ((2, 2100), 2, 2)],
)
def test_large_tiles_get_more_warps(shape, block, warpgroups, launches):
    def call(x):
        return _kernels.softmax(x, block=block, implementation="mosaic_gpu")

    jax.eval_shape(call, targets.spec(shape))
    assert launches[-1] == (1, warpgroups)


@on_machine
def test_the_number_of_warps_is_as_asked(launches):
    x = bodies.floats(3, 200)
    for warps in (4, 8, 16):
        config = dict(reducer="add", policy="fixed_tree", block=4, num_warps=warps)
        got = bodies.across(x, implementation="mosaic_gpu", **config)
        np.testing.assert_array_equal(got, bodies.across(x, **config))
        assert launches[-1] == (1, warps // 4)
    with pytest.raises(UnsupportedOnBackend, match="num_warps=2. Take one of"):
        _lowered(bodies.across, [x], **{**config, "num_warps": 2})


@on_machine
@pytest.mark.parametrize("cols", [16, 70, 80])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_blocks_that_are_held_are_read_once(name, cols, launches, monkeypatch):
    config = {} if name == "softmax" else {"eps": 1e-6}
    vectors = {"softmax": 0, "layer_norm": 2, "rms_norm": 1}[name]
    x, *rest = [bodies.floats(3, cols), *[bodies.floats(cols)] * vectors]
    call = functools.partial(getattr(_kernels, name), block=1, width=16, **config)
    reads, real = [], mosaic._read
    monkeypatch.setattr(mosaic, "_read", lambda ref: reads.append(ref) or real(ref))
    want, count = call(x, *rest), -(-cols // 16)
    for held in (1, 2, 3, 9):
        del reads[:]
        got = call(x, *rest, implementation="mosaic_gpu", num_held=held)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
        of_x = [v for v in reads if v.view.place == 0]
        alone = min(held, count)
        assert len(of_x) == alone + 2 * (count > alone)


@on_machine
def test_a_batch_is_more_instances_of_one_launch(launches):
    def call(x, w):
        config = {"eps": 1e-6, "block": 8, "implementation": "mosaic_gpu"}
        return _kernels.rms_norm(x, w, **config)

    x, w = bodies.floats(3, 2, 9, 20), bodies.floats(2, 20)
    got = jax.vmap(jax.vmap(call), (0, None))(x, w)
    want = _kernels.rms_norm(x.reshape(-1, 20), jnp.ones(20), eps=1e-6)
    want = want.reshape(x.shape) * w[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert launches[-1] == (3 * 2 * 2, 1)
    got = jax.vmap(jax.vmap(call, (None, 0)), (0, None))(x[:, 0], w)
    want = _kernels.rms_norm(x[:, 0].reshape(-1, 20), jnp.ones(20), eps=1e-6)
    want = want.reshape(3, 1, 9, 20) * w[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert launches[-1] == (3 * 2 * 2, 1)


@on_machine
def test_derivatives(launches):
    def call(x):
        return _kernels.softmax(x, implementation="mosaic_gpu")

    x = bodies.floats(5, 6)
    same_derivatives(call, jax.nn.softmax, x, order=1, rtol=1e-4, atol=1e-6)
    assert launches


@on_machine
def test_a_derivative_of_the_kernels_own(launches):
    """That of the recurrence is a kernel too, with windows and a loop backwards."""
    args = [bodies.floats(2, 17, 6) / 99 for _ in range(3)] + [bodies.floats(6) / 99]

    def pulled(name):
        def call(*args):
            config = {"block": 8, "lanes": 4, "implementation": name}
            return _recurrence.recurrence(*args, **config)

        return jax.jit(lambda *v: jax.vjp(call, *v)[1](v[0]))(*args)

    for got, want in zip(pulled("mosaic_gpu"), pulled("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert len(launches) == 2


@on_machine
@pytest.mark.parametrize(
    ("shape", "dtype", "loads"),
    [
        ((8, 1024), "float32", "vector<4xf32>"),
        ((8, 1024), "bfloat16", "vector<8xbf16>"),
        ((8, 1022), "float32", "vector<2xf32>"),
        ((8, 1021), "float32", "-> f32"),
    ],
)
def test_loads_are_as_wide_as_rows_are_aligned(shape, dtype, loads, monkeypatch):
    texts = []
    real = targets.printed

    def printed(*args):
        texts.append(real(*args))
        return texts[-1]

    monkeypatch.setattr(targets, "printed", printed)
    kernels_on_machine(monkeypatch)
    call = lambda v: _kernels.softmax(v, block=1, implementation="mosaic_gpu")  # noqa: E731
    jax.eval_shape(call, targets.spec(shape, dtype))
    lines = texts[-1].splitlines()
    ways = [v for v in lines if "llvm.load" in v and "ptr<1>" in v]
    assert ways
    assert all(loads in v for v in ways)


@jt.kernel(out=lambda x: x)
def _shared_start(nest, x, y, *, block, times):
    i = nest.parallel(x.shape[0], block)
    start = i.index
    for _ in range(times):
        start = start + start
    window = jt.Window(start * (block >> times), jt.Dim("w"), block)
    y.tile(i).store(jt.Tile(x.tile(window).load().array, (i.dim,)))


def test_what_a_start_is_made_of_is_asked_once(monkeypatch):
    asked, real = [], _runs._divisor

    def counted(*args):
        asked.append(args)
        return real(*args)

    monkeypatch.setattr(_runs, "_divisor", counted)
    _lowered(_shared_start, [bodies.floats(1 << 13)], block=1 << 10, times=10)
    assert 10 < len(asked) < 100


def test_explain_sees_their_ops():
    call = functools.partial(_kernels.softmax, implementation="mosaic_gpu", block=8)
    with targets.mesh("NVIDIA H200", 132, "gpu"):
        report = jt.explain(call)(targets.spec((16, 64)))
    assert [e.op for e in report if e.op == "reduce"] == ["reduce"] * 2
    assert {(e.place, e.implementation) for e in report} == {
        ("in kernel: mosaic_gpu", "mosaic_gpu")
    }
    assert {e.times for e in report} == {2}
    with targets.mesh("NVIDIA H200", 132, "gpu"):  # of four warpgroups, in one run
        report = jt.explain(call)(targets.spec((8, 1100)))
    assert {e.times for e in report} == {1}


@jt.kernel(out=lambda x: x, tuned={"mosaic_gpu": {"block": 2}})
def _tuned(nest, x, y, *, block=8):
    r, c = nest.parallel(x.shape[0], block), jt.Dim("c")
    t = x.tile(r, c).load()
    y.tile(r, c).store(t - jt.reduce(t, c, jt.maximum))


def test_a_kernel_may_be_tuned_for_it():
    x = targets.spec((6, 64))
    with targets.mesh("NVIDIA H200", 132, "gpu"):
        assert "mosaic_gpu" in targets.lowered(_tuned, [x], "cuda").as_text()
        wide = targets.lowered(jax.vmap(_tuned), [targets.spec((3, 6, 64))], "cuda")
        assert "mosaic_gpu" in wide.as_text()
        assert "mosaic_gpu" not in targets.lowered(_tuned, [x], "cpu").as_text()
        report = jt.explain(_tuned, platform="cuda")(x)
    assert {(e.place, e.times) for e in report} == {("in kernel: mosaic_gpu", 3)}


@jt.kernel(out=lambda x: x)
def _ordered(nest, x, y):
    r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
    y.tile(r, c).store(jt.sort(x.tile(r, c).load(), c))


@jt.kernel(out=lambda x: x)
def _plain_sum(nest, x, y):
    r, c = nest.parallel(x.shape[0], 4), jt.Dim("c")
    t = x.tile(r, c).load()
    y.tile(r, c).store(t.array + t.array.sum())


@jt.kernel(out=lambda x: x)
def _doubled(nest, x, y):
    r, c = jt.Dim("r"), jt.Dim("c")
    nest.parallel(1)
    t = x.tile(r, c).load().array
    y.tile(r, c).store(t + t.T)


@pytest.mark.parametrize(
    ("kernel", "shape", "config", "sentence"),
    [
        (_ordered, (8, 16), {}, "got sort: .*Split the kernel"),
        (_plain_sum, (8, 12), {}, "got reduce_sum, which has no thread code. Use jaxt"),
        (_doubled, (12, 12), {}, "two of whose axes lie alike"),
        (bodies.turned, (1024, 512), {"block": 1024}, "above 512. Pick smaller bloc"),
        (_kernels.softmax, (64, 9000), {"block": 8}, "above 65536 elements"),
        (
            bodies.across,
            (2, 40000),
            {"reducer": "add", "policy": "fold_left", "block": 1},
            "shared memory, which it exceeds",
        ),
    ],
)
def test_refusals(kernel, shape, config, sentence):
    with pytest.raises(UnsupportedOnBackend, match=sentence):
        _lowered(kernel, [targets.spec(shape)], **config)


def test_products_are_refused_with_a_way_out():
    args = [targets.spec(s) for s in ((16, 32), (32, 16), (16,))]
    with pytest.raises(UnsupportedOnBackend, match='got mma: .*tion="triton" or'):
        _lowered(_kernels.linear_gelu, args)
