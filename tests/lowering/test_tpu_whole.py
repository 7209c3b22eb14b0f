"""The TPU's whole-array kernels: their bits when interpreted, and libtpu on all forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import oracle
import rules
import targets
from jaxtile.pallas_lowering.tpu import _blocks, _grid
from jaxtile.pallas_lowering.tpu import whole_reduce as reduce_kernel
from jaxtile.pallas_lowering.tpu import whole_scan as scan_kernel

RULES = {
    jt.primitives.reduce_p: reduce_kernel.reduce_array,
    jt.primitives.scan_p: scan_kernel.scan_array,
}
STATED = ("fixed_tree", "fold_left", "fold_right")


@pytest.fixture
def interpreted(monkeypatch):
    """Small blocks, so that small arrays take several, loop, and leave a tail."""
    monkeypatch.setattr(_blocks, "BLOCK", 8)
    monkeypatch.setattr(_blocks, "WRITTEN_OUT", 8)
    monkeypatch.setattr(_grid, "_WORDS", 16 * 128)
    monkeypatch.setattr(_grid, "INTERPRET", True)


def _values(shape, dtype="float32", seed=0):
    x = np.random.default_rng(seed).normal(size=shape) * 3
    return jnp.asarray(x, dtype)


def _same(call, *args):
    got = jax.jit(rules.replaced(RULES, call))(*args)
    want = jax.tree.leaves(jax.jit(call)(*args))
    for a, b in zip(got, want, strict=True):
        oracle.same_bits(a, b)


_SHAPES = [
    ((5,), 0),
    ((65, 5), 0),
    ((32, 5), 0),
    ((5, 300), 1),
    ((2, 33, 130), 1),
    ((3, 5, 7), (0, 2)),
    ((7, 9), None),
]


@pytest.mark.parametrize("policy", STATED)
@pytest.mark.parametrize(("shape", "axes"), _SHAPES)
def test_reduce_has_the_bits_of_the_reference(interpreted, shape, axes, policy):
    x = _values(shape)

    def call(x):
        index = jt.reduce(x, axes, jt.argmax, policy=policy, where=x > -2)
        return jt.reduce(x, axes, jt.add, policy=policy), index

    _same(call, x)


def test_reduce_is_seeded_masked_and_narrowed_in_the_kernel(interpreted):
    x, z = _values((65, 5), "bfloat16"), _values((5,))

    def call(x, z):
        named = dict(where=x > 0, out_dtype="bfloat16")
        seeded = jt.reduce(x, 0, jt.add, init=z, policy="fixed_tree", **named)
        left = jt.reduce(x, 0, jt.add, init=z, policy="fold_left", **named)
        return seeded, left, jt.reduce(x > 9, 0, jt.logical_or, policy="fixed_tree")

    _same(call, x, z)


@pytest.mark.parametrize(
    ("shape", "axes"), [((1000,), 0), ((2, 300), 1), ((3, 20, 30), (1, 2)), ((256,), 0)]
)
def test_few_fibres_are_reduced_in_aligned_parts(monkeypatch, shape, axes):
    monkeypatch.setattr(_grid, "INTERPRET", True)
    x = _values(shape)

    def call(x):
        named = dict(policy="fixed_tree", where=x > -3)
        total = jt.reduce(x, axes, jt.add, policy="fixed_tree", out_dtype="bfloat16")
        return total, jt.reduce(x, axes, jt.argmax, **named)

    _same(call, x)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("direction", ["prefix", "suffix", "reverse"])
@pytest.mark.parametrize("n", [7, 40, 65])
def test_fixed_tree_scans_have_the_bits_of_the_reference(
    interpreted, n, direction, exclusive
):
    x, z = _values((n, 3)), _values((3,))

    def call(x, z):
        named = dict(policy="fixed_tree", direction=direction, return_final=True)
        named |= dict(where=x > -2) if direction != "reverse" else {}
        named |= dict(init=z) if direction != "prefix" else {}
        return jt.scan(x, 0, jt.add, exclusive=exclusive, **named)

    _same(call, x, z)


@pytest.mark.parametrize("direction", ["prefix", "suffix", "reverse"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((40, 3), 0), ((3, 300), 1), ((2, 33, 130), 1), ((2, 20, 3), 1)]
)
def test_chains_have_the_bits_of_the_reference(interpreted, shape, axis, direction):
    policy = "fold_right" if direction == "suffix" else "fold_left"
    exclusive = direction == "reverse"

    def call(x):
        named = dict(policy=policy, direction=direction, exclusive=exclusive)
        return jt.scan((x, x), axis, jt.affine, return_final=True, **named)

    _same(call, _values(shape))


def test_scan_of_indices_flags_and_narrow_values(interpreted):
    def call(x):
        index = jt.scan(x, 0, jt.argmax, policy="fixed_tree", direction="suffix")
        flags = jt.scan(x > 1, 0, jt.logical_or, policy="fold_left")
        return (
            index,
            flags,
            jt.scan(x, 0, jt.add, policy="fixed_tree", out_dtype=x.dtype),
        )

    _same(call, _values((21, 3), "bfloat16"))


def test_refusals_say_why():
    x = targets.spec((64, 128))
    half, insist = targets.spec((64, 128), "float16"), dict(implementation="tpu")
    with pytest.raises(jt.errors.UnsupportedOnBackend, match="quadratic|of its own"):
        jax.eval_shape(
            lambda x: jt.scan(x, 0, jt.add, policy="fold_right", **insist), x
        )
    with pytest.raises(jt.errors.UnsupportedOnBackend, match="no axis"):
        jax.eval_shape(lambda x: jt.reduce(x, (), jt.add, **insist), x)
    with pytest.raises(jt.errors.UnsupportedOnBackend, match="float16 is not computed"):
        jax.eval_shape(lambda x: jt.reduce(x, 0, jt.add, **insist), half)


_LARGE = [
    ((128, 2048), 0),
    ((300, 300), 0),
    ((1000, 3000), 1),
    ((3, 1000, 300), 1),
    ((50, 100, 3), 1),
    ((100000,), 0),
]


@targets.needs_libtpu
@pytest.mark.parametrize("policy", ["unordered_tree", "fixed_tree", "fold_left"])
@pytest.mark.parametrize(("shape", "axis"), _LARGE)
def test_libtpu_compiles_every_form(shape, axis, policy):
    dtype = ("float32", "bfloat16", "int32")[(len(shape) + len(policy)) % 3]
    order = "ordered_tree" if policy == "unordered_tree" else policy
    named = dict(implementation="tpu")

    def call(x):
        moments = jt.reduce(x, axis, jt.argmax, policy=policy, where=x > 0, **named)
        sums = jt.scan(x, axis, jt.add, policy=order, direction="reverse", **named)
        return moments, sums

    compiled = targets.compile_array_for_tpu(call, targets.spec(shape, dtype))
    # A long lone fibre is reduced in parts of 128: parts, their states, and tails.
    kernels = 6 if len(shape) == 1 and policy != "fold_left" else 2
    found = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    assert found == kernels


def _runs(call, shape):
    (entry,) = jt.explain(call, platform="tpu")(targets.spec(shape))
    return entry.implementation


def test_what_xla_does_as_well_is_left_to_it():
    wide, few = (64, 4096), (4096, 8)
    fixed = dict(policy="fixed_tree")
    assert _runs(lambda x: jt.reduce(x, 0, jt.add), wide) == "reference"
    assert _runs(lambda x: jt.reduce(x, 0, jt.add, **fixed), wide) == "tpu"
    assert _runs(lambda x: jt.reduce(x, 0, jt.add, policy="fold_left"), wide) == "tpu"
    assert _runs(lambda x: jt.scan(x, 0, jt.add), wide) == "tpu"
    assert _runs(lambda x: jt.scan(x, 0, jt.add), few) == "reference"
    assert _runs(lambda x: jt.scan(x, 0, jt.add, policy="fold_left"), few) == "tpu"
