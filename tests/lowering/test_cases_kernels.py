"""A report from the field about what kernels take, by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
import targets
from jaxtile.errors import UnsupportedOnBackend
from oracle import same_bits

_SHAPE = (64, 128)
_CALLS = {
    "scan add": lambda x: jt.scan(x, 1, jt.add),
    "scan maximum": lambda x: jt.scan(x, 0, jt.maximum),
    "scan minimum": lambda x: jt.scan(x, 1, jt.minimum),
    "scan multiply": lambda x: jt.scan(x, 0, jt.multiply),
    "scan logaddexp": lambda x: jt.scan(x, 1, jt.logaddexp),
    "carry and emit": lambda x: jt.scan(x, 0, jt.add, policy="fold_left"),
    "sort": lambda x: jt.sort(x, 1),
    "topk": lambda x: jt.topk(x, 1, 8).values,
    "flip": lambda x: jt.flip(x, 1),
}
# What says no, before anything is lowered.
_REFUSED = {("mosaic_gpu", name) for name in ("sort", "topk", "flip")}


def _kernel(name):
    def body(x_ref, o_ref):
        o_ref[...] = _CALLS[name](x_ref[...])

    return body


def _out(name):
    return jax.eval_shape(_CALLS[name], targets.spec(_SHAPE))


def _lowered(target, name):
    x, out = targets.spec(_SHAPE), _out(name)
    if target == "mosaic_gpu":

        def body(x_ref, o_ref):
            targets.store_tiled(o_ref, _CALLS[name](targets.load_tiled(x_ref)))

        return targets.mosaic_gpu(body, out, x)
    return getattr(targets, target)(_kernel(name), out, x)


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("target", ["triton", "tpu", "mosaic_gpu"])
def test_c19_kernels_take_it_or_say_why_not(target, name):
    if (target, name) in _REFUSED:
        with pytest.raises(UnsupportedOnBackend, match=f"in a {target} kernel: .*;"):
            _lowered(target, name)
    else:
        _lowered(target, name)


@pytest.mark.parametrize("name", _CALLS)
def test_c19_a_kernel_gives_what_the_array_form_gives(name):
    x = np.random.default_rng(19).standard_normal(_SHAPE).astype(np.float32)
    run = pl.pallas_call(_kernel(name), out_shape=_out(name), interpret=True)
    same_bits(jax.jit(run)(x), jax.jit(_CALLS[name])(x))


def test_c19_a_slice_of_a_cumsum():
    def body(x_ref, o_ref):
        o_ref[...] = jt.scan(x_ref[...], 0, jt.add)[:2]

    out = jax.ShapeDtypeStruct((2,), jnp.int32)
    run = pl.pallas_call(body, out_shape=out, interpret=True)
    np.testing.assert_array_equal(run(jnp.arange(4)), [0, 1])
