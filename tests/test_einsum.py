"""einsum against NumPy, whose sums of small integers are exact in any order."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import PolicyError, TileTypeError
from oracle import same_bits
from products import STRICT, chain, make

SPECS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),
    ("ba,ca", (2, 3), (4, 3)),
    (" ij , jk -> ik ", (2, 3), (3, 4)),
    ("ii", (3, 3)),
    ("ii->i", (3, 3)),
    ("iii->", (3, 3, 3)),
    ("ijij->ij", (2, 3, 2, 3)),
    ("ij->ji", (2, 3)),
    ("ij->", (2, 3)),
    ("ij->j", (2, 3)),
    ("...->...", (2, 3)),
    ("i...->...", (2, 3)),
    ("...ij,...jk->...ik", (5, 1, 2, 3), (4, 3, 2)),
    ("i,j,k->kij", (2,), (3,), (4,)),
    ("ij,jk,kl,lm->im", (2, 3), (3, 4), (4, 5), (5, 2)),
    ("iij,jk->ik", (3, 3, 2), (2, 4)),
    ("ij,kl->", (2, 3), (4, 5)),
    ("ij,jk->k", (2, 3), (3, 4)),
    ("i,i->i", (1,), (3,)),
    ("ij,jk->ik", (2, 1), (3, 4)),
    (",ij->ij", (), (2, 3)),
    (",->", (), ()),
    ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5)),
    ("a,a,a,a->a", (4,), (4,), (1,), (4,)),
    ("ab,ab,c->c", (2, 3), (2, 3), (4,)),
    ("ij,jk->ik", (0, 3), (3, 2)),
    ("ij,jk->ik", (2, 0), (0, 2)),
]


def _small(shapes):
    rng = np.random.default_rng(len(shapes))
    return [rng.integers(-4, 5, s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize(("spec", "shapes"), [(s, r) for s, *r in SPECS])
def test_specs(spec, shapes):
    xs = _small(shapes)
    want = np.einsum(spec.replace(" ", ""), *xs)
    for optimize, policy in (("auto", None), (False, STRICT)):
        got = jt.einsum(spec, *xs, optimize=optimize, policy=policy)
        assert (got.shape, got.dtype) == (want.shape, np.float32)
        np.testing.assert_array_equal(got, want)


def test_axes_by_numbers():
    x, y = _small([(2, 3), (3, 4)])
    for rest in (([0, 2],), ()):
        np.testing.assert_array_equal(jt.einsum(x, [0, 1], y, [1, 2], *rest), x @ y)
    got = jt.einsum(x, [..., 1], y, [1, 2], [..., 2])
    np.testing.assert_array_equal(got, x @ y)


def test_a_product_of_two_is_one_mma_and_nothing_else():
    x, y = _small([(2, 3), (3, 4)])
    jaxpr = jax.make_jaxpr(lambda x, y: jt.einsum("ij,jk->ki", x, y))(x, y)
    assert [e.primitive.name for e in jaxpr.jaxpr.eqns] == ["tile_mma"]


def test_the_order_of_every_step_is_kept():
    a, b = make((3, 41), "float32"), make((41, 2), "float32", 1)
    got = jt.einsum("mk,kn->n", a, b, policy=STRICT, optimize=False)
    ones = np.ones((1, 3), np.float32)
    same_bits(got, chain(chain(ones, a), b)[0])


def test_accumulators_and_one_rounding_at_the_end():
    half = jnp.full((300,), 1.0, jnp.bfloat16)
    assert jt.einsum("i->", half).dtype == np.float32
    assert float(jt.einsum("i->", half)) == 300
    assert jt.einsum("i,i->", half, half, out_dtype=jnp.bfloat16) == 300
    fp8 = np.full((4, 300), 0.5, ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(jt.einsum("ij->i", fp8), np.full(4, 150))
    np.testing.assert_array_equal(jt.einsum("ij->ji", fp8), np.full((300, 4), 0.5))
    codes = np.full((3, 3), 100, np.int8)
    assert int(jt.einsum("ij,jk,kl->", codes, codes, codes)) == 81 * 10**6
    with pytest.raises(PolicyError, match="int32 under 'tf32'"):
        jt.einsum(
            "i,i", codes[0], codes[0], policy=jt.MmaPolicy(input_precision="tf32")
        )


def test_export_with_symbolic_sizes():
    m, k, n = jax.export.symbolic_shape("m, k, n")
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((m, k), (k, n), (n, m))]
    spec = "ij,jk,kl->il"
    made = jax.export.export(jax.jit(lambda *xs: jt.einsum(spec, *xs)))(*shapes)
    xs = _small([(2, 3), (3, 4), (4, 2)])
    np.testing.assert_array_equal(made.call(*xs), np.einsum(spec, *xs))
    rows = jax.export.export(jax.jit(lambda x: jt.einsum("ij->i", x)))(shapes[0])
    np.testing.assert_array_equal(rows.call(xs[0]), xs[0].sum(1))


def test_nan_off_the_diagonal_stays_there():
    x = np.full((3, 3), np.nan, np.float32)
    np.fill_diagonal(x, [1, 2, 3])
    assert float(jt.einsum("ii", x)) == 6
    grad = jax.grad(lambda v: jt.einsum("ii", v))(x)
    np.testing.assert_array_equal(grad, np.eye(3))


M, K = jt.dims("m k")
X, Y = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
ERRORS = [
    (lambda: jt.einsum("ij,jk->iz", X, Y), "'ij,jk->iz'; got ValueError"),
    (lambda: jt.einsum("ij,jk", X, Y.T), "sizes 3 and 4 of 'j'"),
    (lambda: jt.einsum("i,jk", X, Y), r"'i' for an operand of shape \(2, 3\)"),
    (lambda: jt.einsum("ij", X, Y), "a spec that fits the operands, not 'ij'"),
    (lambda: jt.einsum("ii", X), "sizes 2 and 3 of 'i'"),
    (lambda: jt.einsum("ij"), "a spec that fits the operands"),
    (
        lambda: jt.einsum("ij,jk", jt.tile(X, (M, K)), Y),
        "got a tile. jaxtile.mma goes by",
    ),
    (lambda: jt.einsum("ij,jk", X > 0, Y), "got bool"),
    (
        lambda: jt.einsum("ij,jk,kl", X, Y, Y.T, optimize="best"),
        "optimize as opt_einsum",
    ),
    (lambda: jt.einsum("ij,jk", X, Y, optimize="best"), "optimize as opt_einsum"),
    (lambda: jt.einsum("ij->i", X, optimize=3), "optimize as opt_einsum"),
    (
        lambda: jt.einsum("ij,jk,kl", X, Y, Y.T, optimize=[(0, 0), (0, 1)]),
        "step .0, 0. of 3",
    ),
    (lambda: jt.einsum("ij,jk,kl", X, Y, Y.T, optimize={}), "leaves 3 operands"),
    (lambda: jt.einsum("ij,jk", X, Y, policy="kept"), "an MmaPolicy"),
    (lambda: jt.einsum("ij,jk", X, "y"), "expected arrays"),
]


@pytest.mark.parametrize(("call", "sentence"), ERRORS, ids=[s[:25] for _, s in ERRORS])
def test_errors(call, sentence):
    with pytest.raises(TileTypeError, match=sentence):
        call()
