"""quantize and decode in kernels: the IR of each backend, and bits where they can run."""

import jax.numpy as jnp
import numpy as np
import pytest

import codes
import jaxtile as jt
import simt
import targets
from storage import CALLS, F32, HELD, SHAPES, kernel

each = pytest.mark.parametrize("name", CALLS)


# Where a call is lowered for lanes, 8 and 32 bits are loaded in layouts that differ.
@pytest.mark.parametrize("name", [n for n in CALLS if n != "decode-scaled"])
def test_mosaic_gpu_has_the_bits_of_the_reference(name):
    body, out, specs, operands, want = kernel(name, "mosaic_gpu")
    text = targets.mosaic_gpu(body, (out,), *specs, lane=True)
    if not text:
        pytest.skip("this jax prints no module of a kernel")
    (got,) = simt.Machine(simt.module_of(text)).run(operands, (out,))
    nan = np.isnan(want.astype(F32))
    np.testing.assert_array_equal(np.isnan(got.astype(F32)), nan)
    np.testing.assert_array_equal(codes.raw(got)[~nan], codes.raw(want)[~nan])


@each
def test_mosaic_gpu_lowers_in_warpgroup_semantics(name):
    body, out, specs, *_ = kernel(name, "mosaic_gpu")
    targets.mosaic_gpu(body, (out,), *specs)


@each
def test_triton_rounds_on_integers(name):
    body, out, specs, *_ = kernel(name, "triton")
    text = targets.triton(body, out, *specs)
    assert "fp_to_fp" not in text
    assert "truncf" not in text


@targets.needs_libtpu
@each
def test_libtpu_compiles_it(name):
    body, out, specs, *_ = kernel(name, "tpu")
    assert targets.compile_for_tpu(body, out, *specs) is not None


@pytest.mark.parametrize("backend", SHAPES)
def test_supports_says_what_no_kernel_takes(backend):
    x = targets.spec(SHAPES[backend])
    for name in codes.ALL:
        answer = jt.supports("quantize", backend, x, name)
        assert bool(answer) == (name in HELD)
        if name not in HELD:
            assert f"hold no {name}; convert outside" in answer.reason
        assert jt.supports("quantize", backend, x, name, out_dtype=F32)
    named = dict(scales=targets.spec((x.shape[0], 1)))
    scaled = jt.supports("quantize_blocks", backend, x, "int8", (1, None), **named)
    assert "broadcast them to x's shape first" in scaled.reason
    packed = jt.supports("pack", backend, targets.spec(x.shape, jnp.dtype("int4")))
    assert "no 4-bit elements; do it outside the kernel" in packed.reason
    half = jt.supports("quantize", "tpu", targets.spec(x.shape, "float16"), "int8")
    assert "float16 is not computed with there" in half.reason


def test_a_kernel_refuses_by_the_same_sentence():
    def body(x_ref, o_ref):
        o_ref[...] = jt.quantize(x_ref[...], "float8_e4m3fnuz")

    shape = SHAPES["tpu"]
    out = targets.spec(shape, jnp.dtype("float8_e4m3fnuz"))
    sentence = "quantize in a tpu kernel: its vectors hold no float8_e4m3fnuz"
    with pytest.raises(jt.errors.UnsupportedOnBackend, match=sentence):
        targets.tpu(body, out, targets.spec(shape))
