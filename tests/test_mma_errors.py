"""The roles of dims in mma, and the sentences with which it refuses."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import PolicyError, TileShapeError, TileTypeError, TileValueError
from products import make

M, K, N, B = jt.dims("m k n b")


def _tile(dims, sizes=None, seed=0):
    sizes = sizes or {M: 3, K: 4, N: 5, B: 2}
    return jt.tile(make([sizes[d] for d in dims], "float32", seed), dims)


def test_tiles_have_their_roles_by_identity():
    a, b, c = _tile((B, K, M)), _tile((N, B, K), seed=1), _tile((M, B, N), seed=2)
    got = jt.mma(a, b, c)
    assert got.dims == (M, B, N)
    want = np.einsum("bkm,nbk->mbn", a.array, b.array) + np.asarray(c.array)
    np.testing.assert_allclose(got.array, want, rtol=1e-5, atol=1e-5)
    free = jt.mma(a, b, spec=[N, M, B])
    assert free.dims == (N, M, B)
    np.testing.assert_allclose(
        free.array, np.einsum("bkm,nbk->nmb", a.array, b.array), rtol=1e-5, atol=1e-5
    )
    seeded = jt.mma(a, b, 2.0, spec=[N, M, B])
    np.testing.assert_allclose(seeded.array, free.array + 2, rtol=1e-6)
    batch = jt.mma(a, b, spec=(M, B, N, K))
    np.testing.assert_array_equal(
        batch.array, np.einsum("bkm,nbk->mbnk", a.array, b.array)
    )


def test_matmul_of_tiles():
    a, b = _tile((B, M, K)), _tile((B, K, N), seed=1)
    got = jt.matmul(a, b)
    assert got.dims == (B, M, N)
    np.testing.assert_allclose(got.array, np.matmul(a.array, b.array), rtol=1e-5)
    vector = jt.matmul(a, _tile((K,)))
    assert vector.dims == (B, M)
    assert jt.matmul(_tile((K,)), _tile((K, N))).dims == (N,)
    assert jt.matmul(_tile((M, K)), b).dims == (B, M, N)
    with pytest.raises(TileShapeError, match="matmul: expected a's last dim in b's"):
        jt.matmul(a, _tile((B, N, K)))


def _tile_errors():
    a, b, other = _tile((M, K)), _tile((K, N)), jt.Dim("k")
    wide = {M: 3, K: 4, N: 6, B: 2}
    return [
        (lambda: jt.mma(a, b), "c a tile of the result's dims, or else spec="),
        (lambda: jt.mma(a, b, np.zeros((3, 5), "f")), "c a tile of the result's dims"),
        (lambda: jt.mma(a, b, _tile((M, N)), spec=(M, N)), "got c a tile and a spec"),
        (lambda: jt.mma(a, np.ones((4, 5), "f")), "two tiles, or two arrays"),
        (lambda: jt.mma(a, b, spec=N), r"got m in a alone, of a \(m, k\).* Reduce along m"),
        (lambda: jt.mma(a, b, spec=M), "got n in b alone"),
        (lambda: jt.mma(a, b, spec=(M, N, B)), "got b of the result in neither"),
        (lambda: jt.mma(a, jt.tile(b.array, (other, N)), spec=(M, N)), "got k in a alone"),
        (lambda: jt.mma(a, _tile((K, N), {**wide, K: 7}), spec=(M, N)),
         "one size of dim k in a and in b; got 4 and 7"),
        (lambda: jt.mma(a, b, _tile((M, N), wide)), "one size of dim n in b and in c"),
        (lambda: jt.mma(a, b, spec=(M, M, N)), "distinct dims"),
        (lambda: jt.mma(a, b, spec="mk,kn->mn"), "spec the dims of the result, for tiles"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "sentence"), _tile_errors(), ids=[s for _, s in _tile_errors()]
)
def test_every_other_pattern_of_dims_is_refused(call, sentence):
    with pytest.raises((TileShapeError, TileTypeError), match=sentence):
        call()


X, Y = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
ERRORS = [
    (lambda: jt.mma(X, X), TileShapeError, "one size of K in a and in b; got 4 and 3"),
    (lambda: jt.mma(X[0], Y), TileShapeError, "a of at least two axes.*jaxtile.matmul"),
    (lambda: jt.matmul(X, 2.0), TileShapeError, "b of at least one axis"),
    (lambda: jt.matmul(np.ones((2, 3, 4), "f"), np.ones((3, 4, 5), "f")),
     TileShapeError, "one size of batch axis -3 in a and in b; got 2 and 3"),
    (lambda: jt.mma(X, Y, np.ones((3, 4), "f")), TileShapeError,
     r"c that broadcasts to \(3, 5\); got \(3, 4\)"),
    (lambda: jt.mma(X, Y, jt.tile(X, (M, K))), TileShapeError, r"a tile of \(m, k\)"),
    (lambda: jt.mma(X, Y, spec="mk,kn"), TileShapeError, "a spec with two operands"),
    (lambda: jt.mma(X, Y, spec="mk,kn->mz"), TileShapeError, "'z' of the result"),
    (lambda: jt.mma(X, Y, spec="mk,kn->n"), TileShapeError, "'m', of one operand alone"),
    (lambda: jt.mma(X, Y, spec="mm,kn->mkn"), TileShapeError, "a letter once"),
    (lambda: jt.mma(X, Y, spec="mkl,kn->mnl"), TileShapeError, "each of the 2 axes of a"),
    (lambda: jt.mma(X, Y, spec="...k,kn->...n"), TileShapeError, "jaxtile.einsum takes"),
    (lambda: jt.mma(X, Y, spec=(M, N)), TileTypeError, "spec a string of letters"),
    (lambda: jt.mma(X > 0, Y), TileTypeError, "got bool. Say what a sum of bools is"),
    (lambda: jt.mma(X.astype(ml_dtypes.float8_e8m0fnu), Y), TileTypeError,
     "float8_e8m0fnu, a format of scales"),
    (lambda: jt.mma(X, Y, acc_dtype="int32"), TileTypeError, "acc_dtype a float"),
    (lambda: jt.mma(X, Y, acc_dtype="float8_e5m2"), TileTypeError, "arithmetic format"),
    (lambda: jt.mma(X, Y, out_dtype="float8_e5m2"), TileTypeError, "arithmetic format"),
    (lambda: jt.mma(X, Y, out_dtype="float64"), TileTypeError, "jax_enable_x64"),
    (lambda: jt.mma(X.astype("b"), Y.astype("b"), 0.5), TileTypeError, "c of dtype int32"),
    (lambda: jt.mma(X, Y, X[:, :1].astype(ml_dtypes.float8_e5m2)), TileTypeError,
     "storage format float8_e5m2"),
    (lambda: jt.mma(X, Y, acc_dtype=jnp.ones(2)), TileTypeError, "got an array"),
    (lambda: jt.mma(X, Y, policy="fold_left"), TileTypeError, "expected an MmaPolicy"),
    (lambda: jt.mma(X, Y, epilogue=3), TileTypeError, "epilogue to be a function"),
    (lambda: jt.mma(X, Y, epilogue=lambda z: (z, z)), TileTypeError, "returns one scalar"),
    (lambda: jt.mma(X, Y, epilogue=lambda z: float(z)), TileTypeError, "jax can trace"),
    (lambda: jt.mma(X, Y, epilogue=lambda z: jnp.ones(3)), TileShapeError, "scalars"),
    (lambda: jt.mma(X, Y, implementation="cutlass"), TileValueError, "implementation in"),
    (lambda: jt.mma(X, Y, acc_dtype="bfloat16", policy=jt.MmaPolicy(promote_every=4)),
     PolicyError, "at least float32 under promote_every"),
    (lambda: jt.mma(X.astype("b"), Y.astype("b"),
                    policy=jt.MmaPolicy(input_precision="tf32")),
     PolicyError, "int32 under 'tf32'"),
    (lambda: jt.MmaPolicy(input_precision="fp8"), TileValueError, "input_precision in"),
    (lambda: jt.MmaPolicy(allow_reassociation=1), TileTypeError, "True or False"),
    (lambda: jt.MmaPolicy(promote_every=0), TileValueError, "at least 1"),
    (lambda: jt.MmaPolicy(promote_every=2.0), TileTypeError, "an integer"),
    (lambda: jt.MmaPolicy(False, "bf16x3"), PolicyError, "one product in each step"),
    (lambda: jt.MmaPolicy(False, None, 8), PolicyError, "but not both"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kind", "sentence"), ERRORS, ids=[sentence for *_, sentence in ERRORS]
)
def test_errors_say_what_and_the_way_out(call, kind, sentence):
    with pytest.raises(kind, match=sentence):
        call()
