"""Reduce and scan inside Mosaic GPU kernels on a GPU: bits, races, close logarithms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets
from kernels import Call, Carried

pytestmark = pytest.mark.gpu

_reduce = functools.partial(Call, "reduce")
_scan = functools.partial(Call, "scan")
_SUFFIX, _REVERSE = {"direction": "suffix"}, {"direction": "reverse"}
_FINAL, _EXCLUSIVE = {"return_final": True}, {"exclusive": True}
_MATRIX = [
    (name, 1, policy)
    for name in ("add", "welford", "affine", "argmax")
    for policy in ("fixed_tree", "fold_left")
]
_MATRIX += [("welford", 0, "fixed_tree"), ("affine", 0, "fixed_tree")]


def _layout(name, shape):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxtile.pallas_lowering.mosaic_gpu import _layouts

    return {
        "none": lambda: None,
        "wgmma": lambda: plgpu.Layout.WGMMA,
        "strided": lambda: plgpu.Layout.WG_STRIDED(shape, vec_size=1),
        "row of warp": lambda: _layouts.public(_layouts.ROW_OF_WARP),
        "row of thread": lambda: _layouts.public(_layouts.spread(shape, [0])),
    }[name]()


def _run(call, lane=False):
    kernel = targets.mosaic_gpu_kernel(call.body, call.outs(), lane)
    with jax.default_device(jax.devices("gpu")[0]):
        return [np.asarray(v) for v in jax.jit(kernel)(*call.operands())]


def _exact(call):
    call.check(_run(call))


@pytest.mark.parametrize(("name", "axis", "policy"), _MATRIX)
def test_reduce_has_the_bits_of_the_cpu(name, axis, policy):
    _exact(_reduce(name, (64, 128), axis, policy))


@pytest.mark.parametrize(("name", "axis", "policy"), _MATRIX)
def test_scan_has_the_bits_of_the_cpu(name, axis, policy):
    _exact(_scan(name, (64, 32), axis, policy))


@pytest.mark.parametrize(
    "call",
    [
        _reduce("affine", (64, 32), 0, "fold_right", seeded=True),
        _reduce("farthest", (64, 32), 1, "fixed_tree", masked=True),
        _reduce("welford", (6, 100), 1, "fixed_tree", masked=True),
        _reduce("add", (96,), None, "fixed_tree"),
        _reduce("add", (2, 64, 32), (0, 2), "fixed_tree", masked=True, seeded=True),
        _reduce("add", (128, 16), 1, "fold_left", masked=True),
        _reduce("welford", (64, 128), None, "unordered_tree"),
        _reduce("affine", (64, 32), 1, "ordered_tree"),
        _scan("add", (64, 32), 1, "fixed_tree", masked=True, options=_EXCLUSIVE),
        _scan("affine", (64, 32), 1, "fixed_tree", seeded=True, options=_SUFFIX),
        _scan("affine", (64, 32), 0, "fold_right", seeded=True, options=_SUFFIX),
        _scan("welford", (6, 100), 1, "fold_left", options={**_REVERSE, **_FINAL}),
        _scan("affine", (64, 32), 1, "fixed_tree", options={**_REVERSE, **_FINAL}),
        _scan("add", (96,), 0, "fixed_tree", masked=True, options=_SUFFIX),
        _scan("affine", (2, 64, 32), 2, "ordered_tree", options=_SUFFIX),
        _scan("maximum", (64, 32), 0, "unordered_tree", masked=True),
    ],
    ids=str,
)
def test_masks_seeds_directions_and_shapes(call):
    _exact(call)


@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
def test_a_state_is_carried_from_block_to_block(policy):
    carried = Carried(policy)
    kernel = targets.mosaic_gpu_kernel(carried.body, carried.out)
    with jax.default_device(jax.devices("gpu")[0]):
        carried.check(np.asarray(jax.jit(kernel)(*carried.operands())))


@pytest.mark.parametrize("name", ["wgmma", "strided", "row of warp", "row of thread"])
@pytest.mark.parametrize("op", ["reduce", "scan"])
@pytest.mark.parametrize("policy", ["fixed_tree", "fold_left"])
def test_layouts_in_lane_semantics(op, name, policy):
    shape = {"row of warp": (4, 256), "row of thread": (128, 12)}.get(name, (64, 24))
    call = Call(op, "add", shape, 1, policy, _layout(name, shape))
    call.check(_run(call, lane=True))


@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("op", "policy"), [("reduce", "fixed_tree"), ("scan", "fold_left")]
)
def test_formats(op, policy, dtype):
    with jax.enable_x64(dtype == "float64"):
        _exact(Call(op, "add", (64, 16), 1, policy, dtype=dtype))


@pytest.mark.parametrize(
    ("op", "policy"), [("reduce", "fixed_tree"), ("scan", "fold_left")]
)
def test_logaddexp_within_two_ulp(op, policy):
    x = np.random.default_rng(3).uniform(1, 9, (64, 8)).astype(np.float32)
    fn = jt.reduce if op == "reduce" else jt.scan

    def body(x_ref, o_ref):
        y = fn(targets.load_tiled(x_ref), 1, jt.logaddexp, policy=policy)
        targets.store_tiled(o_ref, y)

    wide = x.astype(np.float64)
    want = np.logaddexp.accumulate(wide, axis=1)
    want = want[:, -1] if op == "reduce" else want
    kernel = targets.mosaic_gpu_kernel(body, targets.spec(want.shape))
    with jax.default_device(jax.devices("gpu")[0]):
        got = np.asarray(jax.jit(kernel)(x))
    ulps = np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))
    assert ulps.max() <= 2, (
        f"{ulps.max()} ulp at {np.unravel_index(ulps.argmax(), x.shape)}"
    )


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "warpgroup"])
@pytest.mark.parametrize(
    "call",
    [
        _reduce("welford", (64, 64), 0, "fixed_tree", _layout("wgmma", None)),
        _reduce("affine", (64, 64), 1, "fold_left", _layout("wgmma", None)),
        _scan("affine", (64, 64), 0, "fixed_tree", _layout("wgmma", None)),
        _scan("add", (64, 64), 1, "fold_left", _layout("wgmma", None)),
    ],
    ids=str,
)
def test_two_warpgroups_do_not_race(call, lane):
    rounds, blocks = 50, 132
    first = [np.stack([v, v[::-1]]) for v in call.operands()]
    halves = [_Given(call, [v[k] for v in first]) for k in (0, 1)]
    wants = [np.stack(w) for w in zip(*(h.reference() for h in halves), strict=True)]
    n = len(first)
    result = call.layout if call.op == "scan" else call.seed_layout()

    def body(*refs):
        group, block = jax.lax.axis_index("wg"), jax.lax.axis_index("g")
        values = [targets.load_tiled(r.at[group], call.layout) for r in refs[:n]]
        wanted = [targets.load_tiled(r.at[group], result) for r in refs[n:-1]]

        def step(_, bad):
            for got, want in zip(call(*values), wanted, strict=True):
                wrong = jnp.where(got == want, 0, 1).astype(jnp.int32)
                bad = bad + jt.reduce(wrong, None, jt.add)
            return bad

        refs[-1][block, group] = jax.lax.fori_loop(0, rounds, step, jnp.int32(0))

    kernel = targets.mosaic_gpu_kernel(
        body,
        targets.spec((blocks, 2), "int32"),
        lane,
        grid=(blocks,),
        grid_names=("g",),
        num_threads=2,
        thread_name="wg",
    )
    with jax.default_device(jax.devices("gpu")[0]):
        wrong = np.asarray(jax.jit(kernel)(*first, *wants))
    assert not wrong.any(), f"{(wrong > 0).sum()} of {wrong.size} groups: {wrong.max()}"


class _Given:
    """A call on other operands than its own."""

    def __init__(self, call, operands):
        self.call, self.given = call, operands

    def reference(self):
        with jax.default_device(jax.devices("cpu")[0]):
            return [np.asarray(v) for v in jax.jit(self.call.__call__)(*self.given)]
