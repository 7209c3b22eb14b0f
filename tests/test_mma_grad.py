"""Derivatives and batches of mma: what they are, beside the tables of every transform."""

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import NoDerivativeError, PolicyError, UnsupportedOnBackend
from oracle import same_bits
from products import STRICT, chain, make

A, B, C = (
    make((3, 5), "float32"),
    make((5, 4), "float32", 1),
    make((3, 4), "float32", 2),
)


def _ops(jaxpr):
    return [e for e in jaxpr.jaxpr.eqns if e.primitive.name.startswith("tile_")]


@pytest.mark.parametrize("policy", [STRICT, jt.MmaPolicy(promote_every=2)])
def test_derivatives_are_mma_of_the_same_policy_and_accumulator(policy):
    a, b = (v.astype(jnp.bfloat16) for v in (A, B))

    def loss(a, b, c):
        y = jt.mma(a, b, c, policy, out_dtype=jnp.bfloat16)
        return jnp.sum(y.astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(a, b, C)
    made = [e for e in _ops(jaxpr) if e.primitive.name == "tile_mma"]
    assert len(made) == 3
    assert {e.params["policy"] for e in made} == {policy}
    assert {e.params["acc"] for e in made} == {np.dtype("float32")}
    assert [str(e.params["out"]) for e in made] == ["bfloat16"] * 3
    forward = jax.make_jaxpr(lambda *t: jax.jvp(loss, (a, b, C), t))(a, b, C)
    made = [e for e in _ops(forward) if e.primitive.name == "tile_mma"]
    assert [str(e.params["out"]) for e in made] == ["bfloat16", "float32", "bfloat16"]


def test_cotangents_of_a_chain_are_chains():
    ct = make((3, 4), "float32", 3)
    _, pull = jax.vjp(functools.partial(jt.mma, policy=STRICT), A, B, C)
    da, db, dc = pull(ct)
    same_bits(da, chain(ct, B.T))
    same_bits(db, chain(A.T, ct))
    same_bits(dc, ct)


def test_a_cotangent_narrows_once_to_its_operand():
    """All sums are exact in float32, so that the cotangent is one rounding of each."""
    a, b = A.astype(jnp.bfloat16), np.round(4 * B).astype(jnp.bfloat16)
    ct = np.round(2**10 * make((3, 4), "float32", 3)) / np.float32(2**10)
    _, pull = jax.vjp(jt.mma, a, b)
    da, _ = pull(ct)
    exact = ct.astype(np.float64) @ b.T.astype(np.float64)
    assert np.any(exact != exact.astype(jnp.bfloat16))
    same_bits(da, exact.astype(np.float32).astype(jnp.bfloat16))


def test_mixed_integers_have_no_tangent():
    a, codes = A.astype(jnp.bfloat16), make((5, 4), "int8", 1)
    da = jax.grad(lambda v: jt.mma(v, codes, C).sum())(a)
    assert da.dtype == jnp.bfloat16
    y, dy = jax.jvp(jt.mma, (codes.T, codes), (np.zeros((4, 5), jax.dtypes.float0),
                    np.zeros((5, 4), jax.dtypes.float0)))  # fmt: skip
    assert y.dtype == np.int32
    assert dy.dtype == jax.dtypes.float0


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_the_cotangent_of_a_storage_format_stays_in_its_range(kind):
    dtype = getattr(ml_dtypes, kind)
    largest = float(ml_dtypes.finfo(dtype).max)
    a = np.ones((4, 1), dtype)
    ct = np.array([[1.07], [1e6], [-3e38], [0.0]], np.float32)
    _, pull = jax.vjp(lambda a: jt.mma(a, np.ones((1, 1), np.float32)), a)
    (da,) = pull(ct)
    assert da.dtype == dtype
    want = np.clip(ct, -largest, largest).astype(dtype)
    same_bits(np.asarray(da).view(np.uint8), want.view(np.uint8))


def test_what_is_not_linear_has_no_transpose():
    with pytest.raises(NoDerivativeError, match="mma: .*got an epilogue. Use jax.vjp"):
        jax.linear_transpose(lambda a: jt.mma(a, B, epilogue=lambda z: 2 * z), A)(C)
    with pytest.raises(NoDerivativeError, match="both operands unknown"):
        jax.linear_transpose(jt.matmul, A, B)(C)


def test_a_seed_alone_moves():
    dy = jax.jvp(lambda c: jt.mma(A, B, c), (C,), (2 * C,))[1]
    np.testing.assert_array_equal(dy, 2 * C)
    dc = jax.grad(lambda c: jt.mma(A, B, c, epilogue=jnp.sin).sum())(C)
    np.testing.assert_allclose(dc, np.cos(A @ B + C), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [None, STRICT], ids=["any", "kept"])
@pytest.mark.parametrize("batched", list(itertools.product([0, 1], repeat=4))[1:])
def test_every_subset_of_operands_batches(policy, batched):
    """One mma, where no scalar is batched, whatever the axes; equal to a loop."""
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (5, 4), (3, 4), ()]
    places = [min(i, len(s)) if b else None for i, (s, b) in
              enumerate(zip(shapes, batched, strict=True))]  # fmt: skip
    args = [
        np.round(4 * rng.standard_normal(s if p is None else (*s[:p], 2, *s[p:])))
        for s, p in zip(shapes, places, strict=True)
    ]
    args = [np.asarray(v, np.float32) for v in args]

    def call(a, b, c, s):
        return jt.mma(a, b, c, policy, epilogue=lambda z: z * s)

    got = jax.vmap(call, places)(*args)
    for i in range(2):
        row = [
            v if p is None else np.take(v, i, p)
            for v, p in zip(args, places, strict=True)
        ]
        np.testing.assert_array_equal(got[i], (row[0] @ row[1] + row[2]) * row[3])
    if not batched[3] and any(batched[:2]):
        jaxpr = jax.make_jaxpr(jax.vmap(call, places))(*args)
        assert len(_ops(jaxpr)) == 1


@pytest.mark.parametrize("policy", [None, STRICT], ids=["any", "kept"])
def test_export_with_symbolic_sizes(policy):
    def run(a, b):
        return jt.matmul(a, b, policy), jax.grad(lambda a: jt.matmul(a, b).sum())(a)

    m, n, k = jax.export.symbolic_shape("m, n, k")
    a, b = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, k), (k, n)))
    exported = jax.export.export(jax.jit(run))(a, b)
    again = jax.export.deserialize(exported.serialize())
    got = again.call(A, B)
    np.testing.assert_allclose(got[0], A @ B, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], np.tile(B.sum(1), (3, 1)), rtol=1e-5, atol=1e-5)
    groups = jax.jit(functools.partial(jt.mma, policy=jt.MmaPolicy(promote_every=4)))
    with pytest.raises(
        PolicyError, match="a K whose size is known.*Export with K an int"
    ):
        jax.export.export(groups)(a, b)


def test_an_implementation_insists():
    np.testing.assert_array_equal(
        jt.mma(A, B, implementation="reference"), jt.matmul(A, B)
    )
    with pytest.raises(UnsupportedOnBackend, match="no whole-array kernel for mma yet"):
        jt.mma(A, B, implementation="triton")


def test_explain_counts_products():
    x, y = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 16), (16, 4)))
    (entry,) = jt.explain(functools.partial(jt.mma, epilogue=jt.gelu))(x, y)
    assert (entry.op, entry.implementation) == ("mma", "reference")
    assert entry.flops == 2 * 8 * 16 * 4
    assert entry.bytes == 2 * (8 * 16 + 16 * 4) + 4 * 8 * 4
