"""The policies of mma: named precisions, promoted sums, and what reaches a platform."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from oracle import same_bits
from products import STRICT, chain, close, exact, make

PRECISIONS = {"tf32": 10, "tf32x3": 10, "bf16": 7, "bf16x3": 7, "bf16x6": 7, "f32": 23}


def _rounded(x, fraction):
    """x to so many fraction bits, ties to even, by float64's own rounding of integers."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    scale = 2.0 ** (fraction + 1)
    return np.ldexp(np.round(mantissa * scale) / scale, exponent)


def _parts(x, name):
    fraction, count = PRECISIONS[name], int(name[-1]) if "x" in name else 1
    parts, rest = [], np.asarray(x, np.float64)
    for _ in range({1: 1, 3: 2, 6: 3}[count]):
        parts.append(_rounded(rest, fraction))
        rest = rest - parts[-1]
    return parts


@pytest.mark.parametrize("name", PRECISIONS)
def test_named_precisions_mean_their_parts(name):
    """The products of parts that the name takes, and those only, exact in float64."""
    a, b = make((7, 64), "float32"), make((64, 5), "float32", 1)
    pa, pb = _parts(a, name), _parts(b, name)
    pairs = itertools.product(range(len(pa)), range(len(pb)))
    want = sum(pa[i] @ pb[j] for i, j in pairs if i + j < max(len(pa), 1))
    got = np.asarray(jt.mma(a, b, policy=jt.MmaPolicy(input_precision=name)))
    size = np.abs(a).astype(np.float64) @ np.abs(b)
    assert np.max(np.abs(got - want) / size) < 64 * 2.0**-24
    if name in ("tf32", "bf16"):
        kept = jt.mma(a, b, policy=jt.MmaPolicy(False, name))
        same_bits(kept, chain(pa[0].astype("f"), pb[0].astype("f")))


def test_named_precisions_are_ordered_by_error():
    a, b = make((64, 512), "float32"), make((512, 64), "float32", 1)
    want, error = exact("mk,kn->mn", a, b), {}
    for name in PRECISIONS:
        got = np.asarray(jt.mma(a, b, policy=jt.MmaPolicy(input_precision=name)))
        error[name] = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error["f32"] < 1e-6
    assert error["bf16x6"] < 5e-7
    assert error["tf32x3"] < 1e-6
    assert error["bf16x6"] < error["bf16x3"] / 5 < error["bf16"] / 100
    assert error["bf16x3"] < error["tf32"] / 10
    assert 1e-4 < error["tf32"] < error["bf16"] < 1e-2


@pytest.mark.parametrize("name", PRECISIONS)
def test_named_precisions_keep_what_is_not_finite(name):
    # Its nearest part overflows; what a smaller one leaves is a part of its own.
    top = np.uint32(0x7F7FF800).view(np.float32)
    a = np.array([[np.inf, 0], [np.nan, 1], [top, 0], [-np.inf, 1], [1, 1]], "f")
    b = np.array([[1.0, 1 / 3], [1, 1]], np.float32)
    got = np.asarray(jt.mma(a, b, policy=jt.MmaPolicy(input_precision=name)))
    want = exact("mk,kn->mn", a, b)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-2)


def test_inputs_that_are_narrow_already_are_whole_parts():
    a, b = make((4, 32), "bfloat16"), make((32, 4), "int8", 1)
    for name in PRECISIONS:
        policy = jt.MmaPolicy(input_precision=name)
        close(jt.mma(a, b, policy=policy), "mk,kn->mn", a, b)
        jaxpr = jax.make_jaxpr(jax.jit(functools.partial(jt.mma, policy=policy)))
        text = jax.jit(functools.partial(jt.mma, policy=policy)).lower(a, b).as_text()
        assert text.count("dot_general") == 1, (name, jaxpr)


@pytest.mark.parametrize("every", [1, 3, 8, 16, 40, 100])
@pytest.mark.parametrize("k", [1, 16, 40])
def test_promoted_sums_add_groups_in_order(every, k):
    """Integers below 2^24 are exact, however they are grouped."""
    a, b = make((3, k), "float32"), make((k, 4), "float32", 1)
    policy = jt.MmaPolicy(promote_every=every)
    got = jt.mma(a, b, 1.5, policy)
    close(got, "mk,kn->mn", a, b, c=1.5)
    whole = np.round(a * 8), np.round(b * 8)
    np.testing.assert_array_equal(jt.mma(*whole, policy=policy), whole[0] @ whole[1])


def test_promoted_sums_lower_to_groups():
    policy = jt.MmaPolicy(promote_every=128)
    x = jax.ShapeDtypeStruct((64, 1000), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((1000, 64), jnp.bfloat16)
    text = jax.jit(functools.partial(jt.mma, policy=policy)).lower(x, y).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 3  # the first group, the loop's, and the rest
    assert all("64x128xbf16" in d or "64x104xbf16" in d for d in dots)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float32", None), ("float32", "f32"), ("bfloat16", None), ("float8_e5m2", None)],
)
def test_no_input_loses_digits_on_any_platform(platform, dtype, name):
    x = jax.ShapeDtypeStruct((64, 64), jnp.dtype(dtype))
    call = functools.partial(jt.mma, policy=jt.MmaPolicy(input_precision=name))
    text = jax.jit(call).trace(x, x).lower(lowering_platforms=(platform,)).as_text()
    (dot,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "precision = [HIGHEST, HIGHEST]" in dot
    assert dot.count("f32") == (3 if dtype == "float32" else 1)


def test_tf32_units_serve_inputs_that_are_rounded_already():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    policy = jt.MmaPolicy(input_precision="tf32x3")
    run = jax.jit(functools.partial(jt.mma, policy=policy)).trace(x, x)
    for platform, word in (("cuda", "DEFAULT"), ("tpu", "HIGHEST"), ("cpu", "HIGHEST")):
        text = run.lower(lowering_platforms=(platform,)).as_text()
        dots = [line for line in text.splitlines() if "dot_general" in line]
        assert len(dots) == 3
        assert all(
            (f"[{word}, {word}]" in d) or (word == "DEFAULT" and "HIGH" not in d)
            for d in dots
        )


def test_policies_are_values():
    assert jt.MmaPolicy(promote_every=8) == jt.MmaPolicy(promote_every=8)
    assert hash(STRICT) == hash(jt.MmaPolicy(False))
    traces = []

    @functools.partial(jax.jit, static_argnums=2)
    def run(a, b, policy):
        traces.append(policy)
        return jt.mma(a, b, policy=policy)

    for _ in range(2):
        run(jnp.ones((3, 4)), jnp.ones((4, 5)), jt.MmaPolicy(input_precision="tf32"))
    assert len(traces) == 1


@pytest.mark.parametrize("k", [1, 2])
def test_a_constant_zero_seed_is_added_as_any_other(k):
    kept = jt.MmaPolicy(allow_reassociation=False)
    a, b = jnp.full((1, k), -1.0), jnp.zeros((k, 1))  # every product is -0.0

    def seeded(a, b):
        return [jt.mma(a, b, c, kept) for c in (0.0, jnp.zeros((1, 1)), -0.0)]

    for found in (seeded(a, b), jax.jit(seeded)(a, b)):
        assert [bool(jnp.signbit(z[0, 0])) for z in found] == [False, False, True]
