"""Whole-array kernels on a mesh of GPUs: each runs on its own shard, nothing moves."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile as jt
from on_device import on_cpu
from oracle import same_bits

pytestmark = pytest.mark.gpu

_TALK = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all")
_FIXED = {"policy": "fixed_tree"}
_CALLS = {
    "reduce": lambda x: jt.reduce(x, 1, jt.add, **_FIXED),
    "argmax": lambda x: jt.reduce(x, 1, jt.argmax, **_FIXED),
    "welford": lambda x: jt.reduce(x, 1, jt.welford, **_FIXED),
    "scan": lambda x: jt.scan(x, 1, jt.add, init=x[:, 0], return_final=True, **_FIXED),
    "fold": lambda x: jt.scan(x, 1, jt.add, policy="fold_left"),
}


def _mesh(kind):
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if len(gpus) < 2:
        pytest.skip("one GPU")
    return jax.sharding.Mesh(np.array(gpus[:2]), ("rows",), axis_types=(kind,))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("name", _CALLS)
def test_each_gpu_runs_the_kernel_on_its_own_rows(name, kind):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, 5003), dtype=np.float32)
    mesh, fn = _mesh(kind), _CALLS[name]
    compiled = jax.jit(fn).lower(jax.device_put(x, NamedSharding(mesh, P("rows"))))
    text = compiled.compile().as_text()
    assert not _TALK.search(text), sorted(set(_TALK.findall(text)))
    assert "mosaic_gpu" in text
    got = jax.jit(fn)(jax.device_put(x, NamedSharding(mesh, P("rows"))))
    want = on_cpu(lambda v: fn(v), x)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert len(g.sharding.device_set) == 2
        same_bits(np.asarray(g), w)


@pytest.mark.parametrize("reducer", [jt.add, jt.maximum], ids=lambda r: r.name)
def test_the_parts_of_a_sharded_axis_merge(reducer):
    x = np.arange(64 * 512, dtype=np.int32).reshape(64, 512) % 1009
    mesh = _mesh(AxisType.Auto)
    fn = jax.jit(lambda v: jt.reduce(v, 1, reducer))
    given = jax.device_put(x, NamedSharding(mesh, P(None, "rows")))
    text = fn.lower(given).compile().as_text()
    assert not re.search(r"all-gather[^=]*= s32\[64,512\]", text)
    same_bits(np.asarray(fn(given)), on_cpu(lambda v: jt.reduce(v, 1, reducer), x))
