"""Bits of reduce and scan in Mosaic GPU kernels, on a machine of 128 threads in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxtile as jt
import simt
import targets
from jaxtile.pallas_lowering.mosaic_gpu import _layouts
from kernels import Call, Carried

WGMMA = plgpu.Layout.WGMMA
ROW = _layouts.public(_layouts.ROW_OF_WARP)


def _strided(*shape):
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def _picked(shape, *axes):
    """What the rule picks for a tree."""
    return _layouts.public(_layouts.default(shape, axes, False))


def _thread_row(shape):
    """Each thread has rows of its own."""
    return _layouts.public(_layouts.spread(shape, [0]))


def _simulate(call, groups=1):
    body, kwargs = call.body, {}
    if groups > 1:
        kwargs = {"num_threads": groups, "thread_name": "wg"}
    inputs = [targets.spec(v.shape, v.dtype) for v in call.operands()]
    text = targets.mosaic_gpu(body, call.outs(), *inputs, lane=True, **kwargs)
    return _run(text, call.operands(), call.outs())


def _run(text, operands, outs):
    if not text:
        pytest.skip("this jax prints no module of a kernel")
    return simt.Machine(simt.module_of(text)).run(operands, outs)


_reduce = functools.partial(Call, "reduce")
_scan = functools.partial(Call, "scan")
REDUCTIONS = [
    # In registers: lanes and registers, warps, rows of a warp, whole blocks.
    _reduce("welford", (64, 16), 1, "fixed_tree", WGMMA, masked=True),
    _reduce("affine", (64, 16), 0, "fixed_tree", WGMMA, seeded=True),
    _reduce("argmax", (4, 128), 1, "fixed_tree", ROW),
    _reduce("add", (12, 128), 0, "fixed_tree", ROW, masked=True),
    _reduce("add", (640,), None, "fixed_tree", _strided(640)),
    _reduce("farthest", (2, 64, 8), (0, 2), "fixed_tree", WGMMA, masked=True),
    _reduce("maximum", (64, 16), 0, "unordered_tree", WGMMA),
    _reduce("affine", (12, 128), (0, 1), "ordered_tree", ROW),
    # A thread has its fibres wholly.
    _reduce("welford", (128, 5), 1, "fold_left", _thread_row((128, 5))),
    _reduce("affine", (128, 5), 1, "fold_right", _thread_row((128, 5)), seeded=True),
    _reduce("add", (128, 5), 1, "fold_left", _thread_row((128, 5)), masked=True),
    # Through shared memory: folds, odd extents, layouts without digits.
    _reduce("welford", (64, 16), 1, "fold_left", WGMMA, masked=True),
    _reduce("affine", (64, 16), 0, "fold_right", WGMMA, seeded=True),
    _reduce("farthest", (12, 128), (0, 1), "fold_left", ROW),
    _reduce("argmax", (64, 6), 1, "fixed_tree", _strided(64, 6), masked=True),
    _reduce("add", (12, 128), (0, 1), "fixed_tree", ROW, seeded=True),
    _reduce("add", (3, 64, 8), (0, 1, 2), "fixed_tree", WGMMA),
    # Shapes that no power of two divides.
    _reduce("welford", (6, 100), 1, "fixed_tree", _picked((6, 100), 1), masked=True),
    _reduce(
        "farthest", (2, 3, 4, 5), (1, 3), "fixed_tree", _picked((2, 3, 4, 5), 1, 3)
    ),
    # Formats.
    _reduce("add", (64, 16), 1, "fold_left", WGMMA, dtype="bfloat16", masked=True),
    _reduce("multiply", (64, 16), 1, "fixed_tree", WGMMA, dtype="int8"),
    _reduce("minimum", (64, 16), 0, "fold_right", WGMMA, dtype="uint16"),
    _reduce(
        "add",
        (64, 16),
        1,
        "fixed_tree",
        WGMMA,
        dtype="float16",
        options={"acc_dtype": "float16"},
    ),
    _reduce(
        "add",
        (64, 16),
        1,
        "fixed_tree",
        WGMMA,
        dtype="bfloat16",
        options={"out_dtype": "bfloat16"},
    ),
]


@pytest.mark.parametrize("call", REDUCTIONS, ids=str)
def test_reduce_has_the_bits_of_the_reference(call):
    call.check(_simulate(call))


_SUFFIX, _REVERSE = {"direction": "suffix"}, {"direction": "reverse"}
_FINAL = {"return_final": True}
SCANS = [
    _scan("affine", (64, 16), 1, "fixed_tree", WGMMA, options=_FINAL),
    _scan("welford", (64, 16), 0, "fixed_tree", WGMMA, options=_SUFFIX),
    _scan("add", (12, 128), 0, "fixed_tree", ROW, options={"exclusive": True}),
    _scan("affine", (4, 128), 1, "fixed_tree", ROW, seeded=True, options=_REVERSE),
    _scan("argmax", (384,), 0, "fixed_tree", _strided(384), options=_REVERSE),
    _scan("farthest", (64, 16), 1, "fixed_tree", WGMMA, options=_SUFFIX),
    _scan(
        "add",
        (64, 16),
        0,
        "fixed_tree",
        WGMMA,
        masked=True,
        options={"exclusive": True, **_SUFFIX, **_FINAL},
    ),
    _scan("maximum", (64, 16), 1, "unordered_tree", WGMMA, masked=True),
    _scan("affine", (12, 128), 0, "ordered_tree", ROW, seeded=True, options=_SUFFIX),
    # A thread has its fibres wholly.
    _scan("affine", (128, 5), 1, "fold_left", _thread_row((128, 5)), options=_FINAL),
    _scan(
        "affine",
        (128, 5),
        1,
        "fold_right",
        _thread_row((128, 5)),
        seeded=True,
        options={"exclusive": True, **_SUFFIX},
    ),
    *[
        _scan(name, (128, 5), 1, policy, _thread_row((128, 5)), True, options=options)
        for name, policy in (("total", "unordered_tree"), ("affine", "ordered_tree"))
        for options in (_FINAL, {"exclusive": True, **_FINAL, **_SUFFIX})
    ],
    # Shapes that no power of two divides.
    _scan("affine", (3, 5), 0, "fold_left", _picked((3, 5), 0), options=_FINAL),
    _scan("add", (33,), 0, "fixed_tree", _picked((33,), 0), masked=True),
    # Through shared memory.
    _scan("affine", (64, 16), 1, "fold_left", WGMMA, options={**_FINAL, **_REVERSE}),
    _scan("welford", (64, 16), 0, "fold_right", WGMMA, options=_SUFFIX),
    _scan(
        "add",
        (64, 6),
        1,
        "fixed_tree",
        _strided(64, 6),
        masked=True,
        options={"exclusive": True, **_FINAL},
    ),
    _scan("argmax", (64, 6), 1, "fixed_tree", _strided(64, 6), options=_SUFFIX),
    _scan("affine", (64, 6), 0, "ordered_tree", _strided(64, 6), seeded=True),
    _scan("add", (64, 6), 1, "fold_left", _strided(64, 6), dtype="bfloat16"),
]


@pytest.mark.parametrize("call", SCANS, ids=str)
def test_scan_has_the_bits_of_the_reference(call):
    call.check(_simulate(call))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 16), (512,)], ids=str)
def test_map_of_ops_that_plgpu_lacks(shape, dtype):
    def fn(v):
        return jt.map(lambda v: (jnp.floor(v * 2), jnp.copysign(v, jnp.ceil(v))), v)

    def body(x_ref, *outs):
        for value, ref in zip(fn(targets.load_tiled(x_ref)), outs, strict=True):
            targets.store_tiled(ref, value)

    x = (np.random.default_rng(3).normal(size=shape) * 3).astype(jnp.dtype(dtype))
    out = [targets.spec(shape, dtype)] * 2
    text = targets.mosaic_gpu(body, out, out[0], lane=True)
    for got, want in zip(_run(text, [x], out), fn(x), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "call",
    [
        _reduce("logaddexp", (64, 16), 1, "fixed_tree", WGMMA),
        _scan("logaddexp", (64, 16), 1, "fold_left", WGMMA),
    ],
    ids=str,
)
def test_logaddexp_is_close(call):
    call.check(_simulate(call), exact=False)


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_leaves_in_different_layouts(op, policy):
    call = Call(op, "farthest", (16, 64), 1, policy, _strided(16, 64))
    x, index = call.operands()

    def body(x_ref, index_ref, *outs):
        wider = plgpu.Layout.WG_STRIDED((16, 64), vec_size=4)
        values = [
            targets.load_tiled(x_ref, call.layout),
            targets.load_tiled(index_ref, wider),
        ]
        for value, ref in zip(call(*values), outs, strict=True):
            targets.store_tiled(ref, value)

    inputs = [targets.spec(v.shape, v.dtype) for v in (x, index)]
    text = targets.mosaic_gpu(body, call.outs(), *inputs, lane=True)
    call.check(_run(text, [x, index], call.outs()))


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
def test_a_state_is_carried_from_block_to_block(policy):
    carried = Carried(policy, WGMMA)
    inputs = [targets.spec(v.shape, v.dtype) for v in carried.operands()]
    text = targets.mosaic_gpu(carried.body, carried.out, *inputs, lane=True)
    (got,) = _run(text, carried.operands(), [carried.out])
    carried.check(got)


_STAGED = _reduce(
    "add", (256, 32), 1, "fold_left", plgpu.Layout.WG_STRIDED((256, 32), 1)
)
_CROSSING = _reduce("add", (64, 16), 0, "fixed_tree", WGMMA)


_SCANS = [
    _scan("affine", (64, 16), 0, "fixed_tree", WGMMA, options=_FINAL),
    _scan("affine", (64, 64), 1, "fold_right", WGMMA, options=_SUFFIX),
]


@pytest.mark.parametrize("call", [_STAGED, _CROSSING, *_SCANS], ids=str)
def test_two_warpgroups_share_no_scratch(call):
    # Both compute the same and store it: the machine refuses a word that both touch.
    call.check(_simulate(call, groups=2))


@pytest.mark.parametrize("call", [_STAGED, _CROSSING], ids=str)
def test_the_machine_sees_a_missing_barrier(call, monkeypatch):
    from jaxtile.pallas_lowering.mosaic_gpu import _thread

    monkeypatch.setattr(_thread, "warpgroup_barrier", lambda: None)
    with pytest.raises(AssertionError, match="race"):
        _simulate(call)


def test_more_fibres_than_shared_memory_holds_go_in_rounds():
    from jaxtile.pallas_lowering.mosaic_gpu import _stage

    dtypes = ([np.float32], [], [np.float32], [np.float32])
    assert _stage.plan(32, 320, dtypes, True, False).each < 320
    call = _scan("add", (320, 32), 1, "fold_left", WGMMA, options=_FINAL)
    call.check(_simulate(call))


def test_digits_are_minor_to_major():
    from jaxtile.pallas_lowering.mosaic_gpu._lanes import Form

    form = Form(WGMMA.to_mgpu(), (128, 16))
    rows, columns = form.digits((0,)), form.digits((1,))
    assert [(d.place, d.size) for d in rows] == [
        ("lane", 8),
        ("register", 2),
        ("warp", 4),
        ("register", 2),
    ]
    assert [(d.place, d.size, d.stride) for d in columns] == [
        ("register", 2, 0),
        ("lane", 4, 1),
        ("register", 2, 0),
    ]
    assert Form(_strided(64, 6).to_mgpu(), (64, 6)).digits((1,)) is None


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((6, 100), (1,)),
        ((96,), (0,)),
        ((3, 5), ()),
        ((2, 64, 128), (0, 2)),
        ((7,), (0,)),
    ],
)
def test_layouts_that_the_rule_picks_hold_the_block(shape, axes, fold):
    layout = _layouts.default(shape, axes, fold)
    registers = int(np.prod(layout.registers_shape(shape))) * getattr(
        layout, "vec_size", getattr(layout, "vector_length", 1)
    )
    assert registers <= _layouts.MOST_EACH
    assert registers * 128 >= int(np.prod(shape))
    rest = _layouts.without(layout, shape, axes)
    kept = tuple(s for a, s in enumerate(shape) if a not in axes)
    if kept:
        rest.registers_shape(kept)


def test_a_fibre_beyond_shared_memory_has_no_stage():
    from jaxtile.pallas_lowering.mosaic_gpu import _stage

    assert (
        _stage.plan(65536, 1, ([np.float32], [], [], [np.float32]), True, False) is None
    )


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("length", "fibres"), [(128, 64), (5, 1000), (1024, 16)])
def test_stages_overlap_nowhere_and_stay_small(length, fibres, several):
    from jaxtile.pallas_lowering.mosaic_gpu import _stage

    dtypes = ([np.float32, bool], [np.float32], [np.int32, np.int32], [np.float32])
    stage = _stage.plan(length, fibres, dtypes, True, several)
    assert stage.bytes <= (24 if several else 128) * 1024
    assert stage.each == 1 or stage.bytes <= (8 if several else 32) * 1024
    (places, seeds, shown, totals), end = stage.offsets
    area = length * stage.pitch
    own = [(places[0], 4 * area), (places[1], area), (seeds[0], 4 * stage.each)]
    own += [(shown[1], 4 * area), (totals[0], 4 * stage.each)]
    assert shown[0] == places[0]  # of one width, results overwrite what was read
    spans = sorted((start, start + size) for start, size in own)
    assert all(
        a[1] <= b[0] for a, b in zip(spans, [*spans[1:], (end, end)], strict=True)
    )
    assert jax.tree.all([s % 16 == 0 for s, _ in spans])
