"""The TPU's rules: their order on strings, their bits in an interpreted kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import oracle
import targets
from jaxtile.pallas_lowering.tpu import _blocks, _rows
from jaxtile.pallas_lowering.tpu import reduce as reduce_rule
from jaxtile.pallas_lowering.tpu import scan as scan_rule

RULES = {
    jt.primitives.reduce_p: reduce_rule.reduce_values,
    jt.primitives.scan_p: scan_rule.scan_values,
}
SIZES = (1, 2, 3, 7, 9, 65, 100, 129, 300)
WORDS = oracle.Op(lambda a, b: (f"({a[0]}{b[0]})",))


class _Words:
    """Steps whose merge writes down what it merges."""

    @staticmethod
    def lift(row):
        return row

    @staticmethod
    def join(a, b):
        return WORDS.merge(a, b)


class _Shown:
    """What a sweep shows, each place once."""

    def __init__(self):
        self.begins, self.ends = {}, {}

    def before(self, i, prefix):
        assert i not in self.begins
        self.begins[i] = prefix

    def after(self, i, prefix):
        assert i not in self.ends
        self.ends[i] = prefix


def _letters(n):
    return [(f"x{i}",) for i in range(n)]


@pytest.mark.parametrize("n", SIZES)
def test_tree_pairs_as_fixed_tree_does(n):
    letters = _letters(n)
    found = _rows.tree(_Words, letters.__getitem__, 0, n)
    assert found == oracle.fixed_tree(WORDS, letters)


@pytest.mark.parametrize("seed", [None, ("z",)])
@pytest.mark.parametrize("n", SIZES)
def test_sweep_shows_each_prefix_of_fixed_tree_once(n, seed):
    letters, show = _letters(n), _Shown()
    last = _rows.sweep(_Words, letters.__getitem__, n, seed, show)
    want = oracle.scan(WORDS, letters, "fixed_tree", seed=seed)
    assert [show.ends[i] for i in range(n)] == want
    assert [show.begins[i] for i in range(n)] == [seed, *want[:-1]]
    assert last == want[-1]


@pytest.fixture
def small_blocks(monkeypatch):
    """Loops at small sizes: what is written out takes long to compile on a CPU."""
    monkeypatch.setattr(_blocks, "BLOCK", 8)
    monkeypatch.setattr(_blocks, "WRITTEN_OUT", 8)


def _mixed_merge(a, b):
    later = b[2] > a[2]
    return (
        a[0] * b[0] + b[0],
        a[1] * 3 + b[1],
        jnp.where(later, b[2], a[2]),
        a[3] | b[3],
    )


MIXED = jt.Reducer(
    _mixed_merge,
    lift=lambda x: (x, x.astype(jnp.int32), x.astype(jnp.bfloat16), x > 1),
    laws=jt.Laws(associative=True),
    name="mixed",
)
REDUCERS = {
    "add": jt.add,
    "welford": jt.welford,
    "affine": jt.affine,
    "argmax": jt.argmax,
    "logaddexp": jt.logaddexp,
    "mixed": MIXED,
}


def _values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 3
    return jnp.asarray(x, dtype)


def _same(call, *args):
    got = targets.interpreted(call, RULES, *args)
    want = jax.tree.leaves(jax.jit(call)(*args))
    for a, b in zip(got, want, strict=True):
        oracle.same_bits(a, b)


def _element(name, x):
    return (x, x) if name == "affine" else x


# Every reducer meets every policy and size class; the product of all is a slow sweep.
def _sampled(*choices, count, seed):
    rng = np.random.default_rng(seed)
    return [tuple(c[int(rng.integers(len(c)))] for c in choices) for _ in range(count)]


STATED = ("fixed_tree", "fold_left", "fold_right")
_NAMES = tuple(REDUCERS)
_REDUCES = [(n, p, s) for n in _NAMES for p, s in zip(STATED, (65, 9, 20), strict=True)]
_REDUCES += [("add", "fixed_tree", n) for n in SIZES]


def _reduce_bits(name, policy, n, dtype="float32"):
    x = _values((n, 3), dtype, n)

    def call(x):
        return jt.reduce(_element(name, x), 0, REDUCERS[name], policy=policy)

    _same(call, x)


@pytest.mark.parametrize(("name", "policy", "n"), _REDUCES)
def test_reduce_has_the_bits_of_the_reference(small_blocks, name, policy, n):
    _reduce_bits(name, policy, n)


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("policy", STATED)
@pytest.mark.parametrize("name", _NAMES)
def test_reduce_bits_everywhere(small_blocks, name, policy, n):
    _reduce_bits(name, policy, n)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
@pytest.mark.parametrize("name", ["add", "affine", "argmax"])
def test_reduce_of_other_formats(small_blocks, name, dtype):
    _reduce_bits(name, "fixed_tree", 19, dtype)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((9,), 0),
        ((3, 20), 1),
        ((3, 4, 8), (0, 1)),
        ((3, 4, 8), (0, 2)),
        ((3, 4, 7), (1, 2)),
        ((3, 4, 8), None),
        ((3, 4, 6), 0),
        ((2, 9, 3, 4), (0, 2)),
    ],
)
@pytest.mark.parametrize("policy", ["fixed_tree", "fold_right"])
def test_reduce_along_any_axes(small_blocks, shape, axes, policy):
    x = _values(shape, "float32")
    if axes is None:
        kept = ()
    else:
        gone = (axes,) if isinstance(axes, int) else axes
        kept = tuple(s for d, s in enumerate(shape) if d not in gone)

    def call(x, z, m):
        index = jt.reduce(x, axes, jt.argmax, policy=policy, where=x != x[..., :1])
        return jt.reduce(x, axes, jt.add, policy=policy, init=z, where=m), index[1]

    _same(call, x, _values(kept, "float32", 1), x > -2)


def test_reduce_along_no_axis_and_of_masked_fibres(small_blocks):
    x = _values((4, 3), "float32")
    mask = jnp.zeros((4, 3), bool).at[1].set(True)

    def call(x, m):
        none = jt.reduce(x, (), jt.welford, where=m, policy="fixed_tree")
        return none, jt.reduce(x, 1, jt.add, where=m, policy="fixed_tree")

    _same(call, x, mask)


def test_unordered_tree_is_close(small_blocks):
    x = _values((20, 3), "float32")

    def call(x):
        return jt.reduce(x, 0, jt.welford), jt.reduce(x, 1, jt.add)

    got = targets.interpreted(call, RULES, x)
    for a, b in zip(got, jax.tree.leaves(call(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


_DIRECTIONS = ("prefix", "suffix", "reverse")
_FORMS = (((9,), 0), ((20, 3), 0), ((3, 13), 1), ((12, 2, 3), 0), ((2, 9, 3), 1))
_FLAGS = (False, True)
_CHOICES = (("add", "affine", "mixed"), STATED, _DIRECTIONS, _FORMS, *[_FLAGS] * 4)


def _scan_bits(name, policy, direction, form, masked, seeded, exclusive, final):
    shape, axis = form
    x = _values(shape, "float32")
    seeded = seeded and name == "add"
    exclusive = exclusive and (name != "mixed" or seeded)
    fibre = tuple(s for d, s in enumerate(shape) if d != axis)

    def call(x, m, z):
        named = dict(where=m) if masked else {}
        named |= dict(init=z) if seeded else {}
        return jt.scan(
            _element(name, x),
            axis,
            REDUCERS[name],
            policy=policy,
            direction=direction,
            exclusive=exclusive,
            return_final=final,
            **named,
        )

    _same(call, x, x > -2, _values(fibre, "float32", 1))


@pytest.mark.parametrize("case", _sampled(*_CHOICES, count=24, seed=3), ids=str)
def test_scan_has_the_bits_of_the_reference(small_blocks, case):
    _scan_bits(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", _sampled(*_CHOICES, count=300, seed=4), ids=str)
def test_scan_bits_everywhere(small_blocks, case):
    _scan_bits(*case)


@pytest.mark.parametrize("n", SIZES)
def test_fixed_tree_prefixes_at_every_size(small_blocks, n):
    x = _values((n, 3), "float32", n)
    _same(lambda x: jt.scan(x, 0, jt.add, policy="fixed_tree"), x)


@pytest.mark.parametrize("name", ["welford", "argmax", "logaddexp"])
def test_scan_of_other_reducers(small_blocks, name):
    x = _values((19, 3), "float32")

    def call(x):
        return jt.scan(x, 0, REDUCERS[name], policy="fixed_tree")

    _same(call, x)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_scan_of_other_formats(small_blocks, dtype):
    x = _values((19, 3), dtype)

    def call(x):
        narrow = jt.scan(x, 0, jt.maximum, policy="fold_left")
        return narrow, jt.scan(x, 0, jt.add, policy="fixed_tree", out_dtype=dtype)

    _same(call, x)
