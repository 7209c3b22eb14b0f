"""sort and topk in kernels: each backend's network against the oracle, and its IR."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import order
import targets
from fibres import rng_of
from jaxtile.pallas_lowering import load_all
from jaxtile.primitives import sort_p, topk_p
from rules import through

load_all()
from jaxtile.pallas_lowering.tpu import sort as tpu_sort  # noqa: E402
from jaxtile.pallas_lowering.triton import sort as triton_sort  # noqa: E402

TRITON = {sort_p: triton_sort.sort_tile, topk_p: triton_sort.topk_tile}

TPU = {sort_p: tpu_sort.sort_block, topk_p: tpu_sort.topk_block}


@pytest.mark.parametrize("dtype", order.FORMATS)
@pytest.mark.parametrize("descending", [False, True])
def test_triton_sorts_any_bits(dtype, descending):
    x = order.anything(rng_of(dtype), (4, 16), jnp.dtype(dtype))
    rules = dict(descending=descending, nan="largest")
    call = lambda x: jt.sort(x, 1, x, return_indices=True, **rules)  # noqa: E731
    values, indices, moved = through(TRITON, call, x, jit=False)
    want = order.argsort(x, 1, **rules)
    order.same(indices, want)
    order.same(values, np.take_along_axis(x, want, 1))
    order.same(moved, values)


def _indices(x, axis):
    return through(TRITON, lambda x: jt.argsort(x, axis), x, jit=False)[0]


@pytest.mark.parametrize("shape", [(32, 2), (2, 32), (8, 4, 2), (1, 1)])
def test_triton_sorts_along_any_axis(shape):
    x = order.anything(rng_of(shape), shape, "float32")
    for axis in range(x.ndim):
        indices = _indices(x, axis)
        order.same(indices, order.argsort(x, axis))


@pytest.mark.parametrize("k", [1, 4, 64])
def test_triton_takes_the_first(k):
    x = order.anything(rng_of(k), (2, 64), "float32")
    count = np.int32([3, k])
    call = lambda x, n: jt.topk(x, 1, k, valid_count=n)  # noqa: E731
    want = call(x, count)
    for got, expected in zip(
        through(TRITON, call, x, count, jit=False), want, strict=True
    ):
        order.same(got, expected)


def _body(call):
    def body(x_ref, *refs):
        values = jax.tree.leaves(call(x_ref[...]))
        for ref, value in zip(refs, values, strict=True):
            ref[...] = value

    return body


def test_triton_lowers_the_network():
    x = targets.spec((4, 256))
    call = lambda x: jt.sort(x, 1, return_indices=True)  # noqa: E731
    text = targets.triton(_body(call), [x, targets.spec(x.shape, "int32")], x)
    # 36 steps of three planes, and no comparison of floats.
    assert text.count('"tt.reduce"') == 108
    assert "arith.cmpf" not in text
    out = [targets.spec((4, 8)), targets.spec((4, 8), "int32")]
    assert "tt.reduce" in targets.triton(_body(lambda x: jt.topk(x, 1, 8)), out, x)


@pytest.mark.parametrize(
    ("backend", "op", "shape", "k", "sentence"),
    [
        ("triton", "sort", (8, 100), None, "not of powers of two"),
        ("triton", "sort", (1, 8192), None, "8192 is above 4096"),
        ("triton", "topk", (8, 128), 3, "k=3 is no power of two"),
        ("tpu", "sort", (4096, 128), None, "above 8; sort smaller blocks"),
        ("tpu", "sort", (8, 8192), None, "8192 is above 4096"),
        ("tpu", "topk", (8, 128), 0, "ask for at least one"),
        ("mosaic_gpu", "sort", (8, 128), None, "sort outside the kernel"),
    ],
)
def test_refusals(backend, op, shape, k, sentence):
    x = targets.spec(shape)
    axis = 0 if shape[0] == 4096 else 1
    answer = jt.supports(op, backend, x, axis, *([] if k is None else [k]))
    assert not answer
    assert sentence in answer.reason


class _Memory:
    """A plain array for what a kernel keeps in vector memory, op by op."""

    def __init__(self, shape, dtype):
        self.array, self.shape = np.zeros(shape, dtype), shape

    def __getitem__(self, at):
        return jnp.asarray(self.array[tuple(map(self._slice, at))])

    def __setitem__(self, at, value):
        self.array[tuple(map(self._slice, at))] = value

    def _slice(self, part):
        if isinstance(part, slice):
            return part
        return slice(part.start, part.start + part.size * part.stride, part.stride)


@pytest.fixture
def memory(monkeypatch):
    """Vector memory, which a TPU has in kernels alone, in the place of scratch."""
    monkeypatch.setattr(tpu_sort.pltpu, "VMEM", _Memory)
    monkeypatch.setattr(tpu_sort.pl, "run_scoped", lambda body, *refs: body(*refs))


def _sorts(run, shape, dtype, axis):
    x = order.anything(rng_of(shape, dtype), shape, dtype)
    rules = dict(descending=axis == 0, nan="largest")
    call = lambda x: jt.sort(x, axis, x, return_indices=True, **rules)  # noqa: E731
    values, indices, moved = run(call, x)
    want = order.argsort(x, axis, **rules)
    order.same(indices, want)
    order.same(values, np.take_along_axis(x, want, axis))
    order.same(moved, values)


@pytest.mark.parametrize("shape", [(5, 5), (8, 100), (3, 129), (7,)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32"])
def test_tpu_sorts_along_lanes(shape, dtype):
    run = lambda call, x: targets.interpreted(call, TPU, x)  # noqa: E731
    _sorts(run, shape, dtype, len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "axis"), [((70, 9), 1), ((200, 129), 1), ((9, 70), 0)]
)
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32"])
@pytest.mark.usefixtures("memory")
def test_tpu_sorts_columns(shape, axis, dtype):
    run = lambda call, x: through(TPU, call, x, jit=False)  # noqa: E731
    _sorts(run, shape, dtype, axis)


def _sorts_alone(x, axis, **rules):
    [got] = through(TPU, lambda x: jt.sort(x, axis, **rules), x, jit=False)
    want = order.argsort(x, axis, **rules)
    order.same(got, np.take_along_axis(x, want, axis))


@pytest.mark.parametrize(
    ("shape", "axis"), [((130, 70), 1), ((300, 9), 1), ((20, 600), 0), ((16, 1), 0)]
)
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32"])
@pytest.mark.usefixtures("memory")
def test_tpu_sorts_values_alone(shape, axis, dtype):
    x = order.anything(rng_of(shape, dtype), shape, dtype)
    _sorts_alone(x, axis, descending=axis == 0)


@pytest.mark.parametrize("nan", order.NANS)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.usefixtures("memory")
def test_tpu_keeps_the_bits_of_values_alone(nan, descending):
    rng = rng_of(nan, descending)
    x = order.anything(rng, (70, 128), "float32")
    nans = rng.integers(0x7F800001, 0x80000000, x.shape, "uint32")
    nans |= rng.integers(0, 2, x.shape, "uint32") << 31
    x = np.where(rng.random(x.shape) < 1 / 4, nans.view("float32"), x)
    x[0], x[1], x[2] = nans[0].view("float32"), -0.0, 0.0
    x[2, ::3] = -0.0
    _sorts_alone(x, 1, descending=descending, nan=nan)


def test_tpu_sorts_many_tiles_in_a_loop():
    run = lambda call, x: targets.interpreted(call, TPU, x)  # noqa: E731
    _sorts(run, (5, 300), "float32", 0)


@pytest.mark.parametrize(
    ("shape", "axis", "k"),
    [
        ((100, 40), 1, 1),
        ((64, 64), 1, 8),
        ((130, 256), 1, 13),
        ((12, 3), 0, 7),  # fewer groups than k
        ((24, 5), 0, 17),  # above what is inserted
    ],
)
@pytest.mark.usefixtures("memory")
def test_tpu_takes_the_first(shape, axis, k):
    x = order.anything(rng_of(shape, k), shape, "float32")
    call = lambda x: jt.topk(x, axis, k)  # noqa: E731
    got = through(TPU, call, x, jit=False)
    for value, want in zip(got, call(x), strict=True):
        order.same(value, want)


def test_tpu_takes_the_first_by_rolls():
    x = order.anything(rng_of("tpu"), (4, 100), "float32")
    got = targets.interpreted(lambda x: jt.topk(x, 1, 3), TPU, x)
    for value, want in zip(got, jt.topk(x, 1, 3), strict=True):
        order.same(value, want)


@targets.needs_libtpu
@pytest.mark.parametrize(
    ("chip", "shape", "axis", "k"),
    [
        ("v5e", (8, 100), 1, 100),
        ("v6e", (8, 100), 1, 100),
        ("tpu7x", (8, 100), 1, 100),
        ("v5e", (5, 5), 0, 5),
        ("v5e", (256, 256), 1, 8),
        ("v5e", (512, 128), 0, 512),
        ("v6e", (300, 100), 1, 100),
        ("tpu7x", (512, 200), 1, 7),
        ("v5e", (64, 300), 0, 3),
    ],
)
def test_libtpu_compiles_the_network(chip, shape, axis, k):
    x = targets.spec(shape)
    out = targets.spec([k if d == axis else n for d, n in enumerate(shape)])
    body = _body(lambda x: jt.topk(x, axis, k))
    targets.compile_for_tpu(body, [out, targets.spec(out.shape, "int32")], x, chip=chip)


@targets.needs_libtpu
@pytest.mark.parametrize(
    ("chip", "shape", "axis", "dtype"),
    [
        ("v5e", (300, 100), 1, "float32"),
        ("v6e", (9, 300), 0, "float32"),
        ("tpu7x", (64, 128), 1, "uint32"),
        ("v5e", (1000, 20), 1, "float32"),  # tiles in a loop
    ],
)
def test_libtpu_compiles_values_alone(chip, shape, axis, dtype):
    x = targets.spec(shape, dtype)
    targets.compile_for_tpu(_body(lambda x: jt.sort(x, axis)), x, x, chip=chip)
