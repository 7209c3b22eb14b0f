"""mma on meshes of eight CPU devices, as the reference and as a backend's kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile as jt
from fakes import Kernels
from jaxtile.errors import TileShapeError
from oracle import same_bits
from products import STRICT, make

_TALK = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all")
_KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
A, B = (
    np.round(4 * make((8, 16, 24), "float32")),
    np.round(4 * make((8, 24, 6), "float32")),
)
WANT = A @ B
FREE = {
    "batch": (P("rows"), P("rows"), P("rows")),
    "m": (P(None, "rows"), P(), P(None, "rows")),
    "n": (P(), P(None, None, "cols"), P(None, None, "cols")),
    "both": (P("rows", None, None), P("rows", None, "cols"), P("rows", None, "cols")),
    "a alone": (P(("rows", "cols")), P(), P(("rows", "cols"))),
}


@pytest.fixture(params=_KINDS)
def mesh(request):
    """A mesh of 4 by 2 devices, in use."""
    kind = _KINDS[request.param]
    mesh = jax.make_mesh((4, 2), ("rows", "cols"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(params=["reference", "kernel"])
def kernels(request, monkeypatch):
    """A fake backend that serves the CPU, or none."""
    if request.param == "reference":
        return None
    kernels = Kernels(monkeypatch)
    kernels.serve("cpu", "tpu")
    kernels.add("tpu")
    return kernels


def _put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def _run(fn, *args):
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled.as_text(), compiled(*args)


@pytest.mark.parametrize("where", FREE)
@pytest.mark.parametrize("policy", [None, STRICT], ids=["any", "kept"])
def test_batch_and_free_axes_stay_where_they_are(mesh, kernels, where, policy):
    sa, sb, so = FREE[where]
    a, b = _put(mesh, A, sa), _put(mesh, B, sb)
    text, got = _run(lambda a, b: jt.mma(a, b, 1.0, policy), a, b)
    assert not _TALK.search(text), sorted(set(_TALK.findall(text)))
    np.testing.assert_array_equal(got, WANT + 1)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, so), 3)
    if kernels:
        shard = NamedSharding(mesh, sa).shard_shape(A.shape)
        assert kernels.ran[-1][2] == shard


@pytest.mark.parametrize("policy", [None, STRICT], ids=["any", "kept"])
def test_a_sharded_contraction_on_an_auto_mesh(kernels, policy):
    mesh = jax.make_mesh((4, 2), ("rows", "cols"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        a, b = _put(mesh, A, P(None, "cols", "rows")), _put(mesh, B, P(None, "rows"))
        c = jnp.ones((8, 16, 6))
        text, got = _run(
            lambda a, b: jt.mma(a, b, c, policy, epilogue=lambda z: 2 * z), a, b
        )
        np.testing.assert_array_equal(got, 2 * WANT + 2)
        added = policy is None
        assert ("all-reduce" in text) == added
        if kernels:
            assert kernels.ran[-1][2] == (8, 8, 6 if added else 24)


def test_a_sharded_contraction_on_an_explicit_mesh():
    mesh = jax.make_mesh((4, 2), ("rows", "cols"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        a, b = _put(mesh, A, P(None, None, "rows")), _put(mesh, B, P())
        with pytest.raises(
            TileShapeError, match="K not sharded: axis 2.*Reshard first"
        ):
            jt.mma(a, b)
        rows = _put(mesh, A, P("rows"))
        with pytest.raises(TileShapeError, match="one sharding of a batch axis"):
            jt.mma(rows, _put(mesh, B, P("cols")))
        cols = _put(mesh, np.ones((8, 24, 8), np.float32), P(None, None, "rows"))
        with pytest.raises(TileShapeError, match="a mesh axis for one axis"):
            jt.mma(rows, cols)
        out = jax.eval_shape(jt.mma, rows, _put(mesh, B, P()))
        assert out.sharding.spec[0] == "rows"


@pytest.mark.parametrize("policy", [None, STRICT], ids=["any", "kept"])
def test_gradients_of_shared_weights_add_up_across_devices(mesh, policy):
    a, b = _put(mesh, A, P(None, "rows")), _put(mesh, B[0], P())
    spec = "bmk,kn->bmn"

    def loss(a, b):
        return jnp.sum(jnp.tanh(jt.mma(a, b, policy=policy, spec=spec)))

    want = jax.grad(loss, (0, 1))(A, B[0])
    got = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)
    assert got[0].sharding.spec[1] == "rows"
    assert got[1].sharding.is_fully_replicated


def test_gradients_and_shard_map(mesh):
    a, b = _put(mesh, A, P("rows")), _put(mesh, B, P("rows"))

    def loss(a, b):
        return jnp.sum(jt.mma(a, b, epilogue=jnp.tanh))

    want = jax.grad(loss, (0, 1))(A, B)
    got = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    # XLA's tanh was measured within 4 ulp, so 1 - tanh ** 2 is within 8 * 2 ** -24, and two
    # of those apart by twice that, in each term of the sum.
    apart = 2 * 8 * 2.0**-24
    weights = np.abs(B).sum(-1).max(), np.abs(A).sum(-2).max()
    for g, w, weight in zip(got, want, weights, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=apart * weight)
        assert g.sharding.spec[0] == "rows"
    local = jax.shard_map(
        lambda a, b: jt.mma(a, b, policy=STRICT),
        in_specs=(P("rows"), P()),
        out_specs=P("rows"),
        check_vma=True,
    )
    same_bits(
        jax.jit(local)(a, B[:2]),
        np.concatenate([A[i : i + 2] @ B[:2] for i in range(0, 8, 2)]),
    )
