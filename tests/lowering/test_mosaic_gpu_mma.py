"""mma of whole arrays through Mosaic GPU: what lowers, what is refused, chains' bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets
from jaxtile import primitives
from jaxtile.errors import UnsupportedOnBackend
from jaxtile.pallas_lowering import load_all

load_all()

from jaxtile.pallas_lowering.mosaic_gpu import whole_mma  # noqa: E402
from machines import on_machine  # noqa: E402

pytestmark = pytest.mark.skipif(
    targets.LINE < (0, 11), reason="its pipelines need jax 0.11"
)

_OWN = {"implementation": "mosaic_gpu"}
_STRICT = jt.MmaPolicy(allow_reassociation=False)
_PROMOTED = jt.MmaPolicy(promote_every=128)
_PARTS = jt.MmaPolicy(input_precision="bf16x6", promote_every=128)


def _lowered(fn, *specs):
    with targets.mesh("NVIDIA H200", 132, "gpu"):
        return targets.lowered(fn, specs, "cuda").as_text()


@pytest.mark.parametrize(
    ("dtype", "params"),
    [
        ("bfloat16", {}),
        ("float16", {"epilogue": jax.nn.gelu, "out_dtype": "float16"}),
        ("bfloat16", {"policy": _PROMOTED}),
        ("bfloat16", {"policy": jt.MmaPolicy(promote_every=64)}),
        ("float8_e4m3fn", {"policy": _PROMOTED}),
        ("float8_e5m2", {}),
        ("float32", {"policy": _PARTS}),
        ("float32", {"policy": _STRICT, "epilogue": jnp.tanh}),
    ],
    ids="bf16 half promoted promoted64 e4m3fn e5m2 parts strict".split(),
)
@pytest.mark.parametrize("seeded", [False, True])
def test_ragged_products_lower(dtype, params, seeded):
    a, b = targets.spec((300, 1000), dtype), targets.spec((1000, 130), dtype)
    seeds = [targets.spec((300, 130))] * seeded
    text = _lowered(lambda *v: jt.mma(*v, **params, **_OWN), a, b, *seeds)
    assert text.count("mosaic_gpu") >= 1


@pytest.mark.parametrize("spec", ["mk,kn->mn", "km,nk->nm", "bmk,kbn->mbn"])
def test_axes_in_any_order_lower(spec):
    sizes = {"b": 2, "m": 128, "k": 192, "n": 256}
    left, right = (
        targets.spec([sizes[c] for c in side], "bfloat16")
        for side in spec.split("->")[0].split(",")
    )
    policy = jt.MmaPolicy(promote_every=64)
    text = _lowered(
        lambda a, b: jt.einsum(spec, a, b, policy=policy, **_OWN), left, right
    )
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("dtype", "params", "sentence"),
    [
        ("float32", {}, "no tensor core kernel that rounds no input"),
        ("int8", {}, "sums in float32, not int32"),
        ("float32", {"policy": jt.MmaPolicy(input_precision="tf32")}, "has no kernel"),
        (
            "bfloat16",
            {"policy": jt.MmaPolicy(promote_every=96)},
            "promote_every is one",
        ),
        (
            "float32",
            {"policy": jt.MmaPolicy(input_precision="bf16x6")},
            "add promote_every=128",
        ),
    ],
    ids=str,
)
def test_a_refusal_says_what_to_do(dtype, params, sentence):
    x = targets.spec((128, 128), dtype)
    with pytest.raises(UnsupportedOnBackend, match=sentence):
        _lowered(lambda a, b: jt.mma(a, b, **params, **_OWN), x, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("shape", "seeded"), [((9, 21, 140), True), ((130, 3, 5), False)]
)
def test_chains_have_the_bits_of_the_reference(monkeypatch, shape, seeded, dtype):
    m, k, n = shape
    rng = np.random.default_rng(m)
    a, b = (rng.normal(size=s).astype(jnp.dtype(dtype)) for s in ((m, k), (k, n)))
    a[0], b[:, 0] = -0.0, 0.0
    args = [a, b, *([rng.normal(size=(m, n)).astype("f4")] * seeded)]

    def fn(*v):
        return jt.mma(*v, policy=_STRICT)

    run = on_machine(monkeypatch, {primitives.mma_p: whole_mma.run})
    (got,), launches = run(fn, *args)
    assert len(launches) == 1
    want = np.asarray(jax.jit(lambda *v: fn(*v))(*args))
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
