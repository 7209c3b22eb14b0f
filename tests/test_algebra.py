"""XLA's algebra: rewritings of what was asked for that change bits, none of which happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from oracle import same_bits

_RNG = np.random.default_rng(0)
_POSITIVE = [np.exp(_RNG.normal(size=500)).astype(np.float32) for _ in range(4)]
_SPECIAL = np.array(
    [-0.0, 0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 200, 3e38], np.float32
)

# Each of four arrays; what XLA makes of it on some jax line.
_EXPRESSIONS = {
    "a * (1 / c)": lambda a, b, c, d: a / np.float32(7),
    "a / (b * c)": lambda a, b, c, d: a / b / c,
    "(a * c) / b": lambda a, b, c, d: a / (b / c),
    "(a * d) / (b * c)": lambda a, b, c, d: (a / b) / (c / d),
    "a": lambda a, b, c, d: (a + np.float32(1e3)) - np.float32(1e3),
    "a + (c1 + c2)": lambda a, b, c, d: (a + np.float32(0.1)) + np.float32(0.2),
    "a * (c1 * c2)": lambda a, b, c, d: (a * np.float32(0.1)) * np.float32(0.3),
    "a * (c1 / c2)": lambda a, b, c, d: (a * np.float32(0.1)) / np.float32(0.3),
    "fma(a, b, a * c)": lambda a, b, c, d: a * b + a * c,
    "fma(-a, b, c)": lambda a, b, c, d: c - a * b,
    "a * (b + c)": lambda a, b, c, d: b * a + c * a,
}


def _constant(a, c):
    return jnp.full_like(a, c) if isinstance(a, jax.Array) else np.full_like(a, c)


_CONSTANTS = {
    "a * const": lambda a, b, c, d: a * (_constant(a, 3) / _constant(a, 7)),
    "a - const": lambda a, b, c, d: (a + _constant(a, 5)) - _constant(a, 5),
}


@pytest.mark.parametrize("name", [*_EXPRESSIONS, *_CONSTANTS])
def test_maps_compute_what_is_written(name):
    fn = {**_EXPRESSIONS, **_CONSTANTS}[name]
    want = fn(*_POSITIVE)
    for run in (jt.map, jax.jit(jt.map, static_argnums=0)):
        same_bits(run(fn, *_POSITIVE), want)


@pytest.mark.parametrize("name", _EXPRESSIONS)
@pytest.mark.parametrize("policy", ["fold_left", "fixed_tree"])
def test_regions_compute_what_is_written(name, policy):
    fn, n = _EXPRESSIONS[name], 37
    values = [v[:n] for v in _POSITIVE]

    @jax.jit
    def total(*values):
        @jt.fold(n, init=jnp.float32(0), policy=policy)
        def run(i, s):
            return s + fn(*(v[i] for v in values))

        return run

    each = jax.jit(
        lambda v: jt.reduce(v, 0, jt.add, init=jnp.float32(0), policy=policy)
    )
    same_bits(total(*values), each(fn(*values)))


def test_constants_across_maps():
    def add(v, c):
        return jt.map(lambda a, b: a + b, v, jnp.full_like(v, c))

    x = _POSITIVE[0]
    same_bits(
        jax.jit(lambda v: add(add(v, 1e3), -1e3))(x), (x + np.float32(1e3)) - 1000
    )


@pytest.mark.parametrize("at", ["inside", "outside"])
def test_a_zero_added_to_minus_zero(at):
    def add_zero(v):
        if at == "inside":
            return jt.map(lambda a: a + 0.0, v)
        return jt.map(lambda a, b: a + b, v, jnp.zeros_like(v))

    same_bits(jax.jit(add_zero)(_SPECIAL), _SPECIAL + np.float32(0))


@pytest.mark.parametrize(
    "policy", ["ordered_tree", "fixed_tree", "fold_left", "fold_right"]
)
@pytest.mark.parametrize("op", ["reduce", "scan", "segment_reduce"])
def test_a_constant_zero_as_seed(op, policy):
    x, zero = np.full((3, 4), -0.0, np.float32), jnp.float32(0)

    @jax.jit
    def run(x):
        if op == "segment_reduce":
            seeds = jnp.zeros((2, 4))
            to = jnp.array([0, 1, 1])
            return jt.segment_reduce(x, to, 2, jt.add, init=seeds, policy=policy)
        return getattr(jt, op)(x, 1, jt.add, init=zero, policy=policy)

    assert not np.signbit(run(x)).any()


def test_exponentials_are_computed():
    x, y = np.float32([200, -200, 1]), np.float32([-200, 200, 2])
    product = jax.jit(lambda *v: jt.map(lambda a, b: jnp.exp(a) * jnp.exp(b), *v))(x, y)
    np.testing.assert_allclose(product, [np.nan, np.nan, np.exp(3)], rtol=1e-6)
    log = jax.jit(lambda v: jt.map(lambda a: jnp.log(jnp.exp(a)), v))(x)
    np.testing.assert_allclose(log, [np.inf, -np.inf, 1], rtol=1e-6)


_ZEROS = np.array([0.0, -0.0, 1.5], np.float32)
_ORDERS = ["ordered_tree", "fixed_tree", "fold_left", "fold_right"]


def _both(one, two):
    return jt.Reducer(
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lift=lambda x: (one(x), two(x)),
        laws=jt.Laws(associative=True, identity=False),
        name="both",
    )


@pytest.mark.parametrize("policy", _ORDERS)
@pytest.mark.parametrize("op", ["reduce", "scan", "segment_reduce"])
def test_constant_elements(op, policy):
    @jax.jit
    def run(x):
        pair = jnp.stack([x, jnp.zeros_like(x)])
        if op == "segment_reduce":
            index = jnp.zeros(2, int)
            return jt.segment_reduce(pair, index, 1, jt.add, policy=policy)[0]
        total = getattr(jt, op)(pair, 0, jt.add, policy=policy)
        return total[-1] if op == "scan" else total

    same_bits(run(_ZEROS), _ZEROS + np.float32(0))


@pytest.mark.parametrize("policy", _ORDERS)
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_constants_that_a_lift_makes(op, policy):
    reducer = _both(lambda x: x, jnp.zeros_like)

    @jax.jit
    def run(x, z):
        return getattr(jt, op)(x[None], 0, reducer, init=(z, z), policy=policy)[1]

    got = run(_ZEROS, _ZEROS)
    same_bits(got[0] if op == "scan" else got, _ZEROS + np.float32(0))


@pytest.mark.parametrize("policy", ["fold_left", "fold_right"])
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_the_identity_that_a_fold_starts_from(op, policy):
    if (op, policy) == ("scan", "fold_right"):
        policy = "ordered_tree"
    reducer = jt.Reducer(
        lambda a, b: a + b,
        identity=0.0,
        update=lambda s, v: s + v,
        update_right=lambda v, s: v + s,
        laws=jt.Laws(associative=True),
        name="from zero",
    )
    got = jax.jit(lambda x: getattr(jt, op)(x[None], 0, reducer, policy=policy))(_ZEROS)
    same_bits(got[0] if op == "scan" else got, _ZEROS + np.float32(0))


def test_the_sign_of_a_constant_zero():
    def sign(x):
        return jt.sign(jnp.full_like(x, -0.0))

    assert np.signbit(jax.jit(sign)(_ZEROS)).all()


@pytest.mark.parametrize("name", ["expm1", "log1p", "erf", "rsqrt"])
def test_functions_of_constants(name):
    # XLA folds a function of a constant by another routine than it compiles.
    fn = getattr(jt, name)
    some = _POSITIVE[0][:20]
    got = jax.jit(lambda x: [fn(jnp.full_like(x, c)) for c in some])(_ZEROS)
    same_bits(np.stack(got), np.stack([fn(np.full_like(_ZEROS, c)) for c in some]))


def _chain(x):
    """s * x + x three times over, each step rounded to x's dtype."""
    s, dtype = x, x.dtype
    for _ in range(3):
        product = (s.astype(np.float32) * x.astype(np.float32)).astype(dtype)
        s = (product.astype(np.float32) + x.astype(np.float32)).astype(dtype)
    return s


_LOOPS = {
    "fori": lambda v: jax.lax.fori_loop(0, 3, lambda i, s: s * v + v, v),
    "while": lambda v: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * v + v), (0, v)
    )[1],
    "scan": lambda v: jax.lax.scan(lambda s, _: (s * v + v, None), v, length=3)[0],
    "nested": lambda v: jax.lax.cond(v == v, _LOOPS["scan"], lambda v: v, v),
}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("name", _LOOPS)
def test_loops_inside_functions(name, dtype):
    x = np.minimum(_POSITIVE[0], 4).astype(dtype)
    same_bits(jax.jit(lambda v: jt.map(_LOOPS[name], v))(x), _chain(x))
    reducer = jt.Reducer(lambda a, b: b, lift=_LOOPS[name], name="last of loops")
    got = jax.jit(lambda v: jt.reduce(v, 0, reducer, policy="fold_left"))(x[None])
    wide = x.astype(got.dtype)
    same_bits(got, _chain(wide))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_branches_inside_functions(dtype):
    def fn(v):
        return jax.lax.cond(v > 1, lambda v: v / 7, lambda v: (v + 1e3) - 1e3, v)

    x = _POSITIVE[0].astype(dtype)
    wide, seven = x.astype(np.float32), np.float32(7)
    far = (wide + np.float32(1e3)).astype(dtype).astype(np.float32)
    want = np.where(wide > 1, wide / seven, far - np.float32(1e3)).astype(dtype)
    same_bits(jax.jit(lambda v: jt.map(fn, v))(x), want)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_the_next_float(dtype):
    x = np.array([1.0, -1.0, 0.1, 300.0], dtype)
    word = f"i{x.dtype.itemsize}"
    step = np.where(x > 0, 1, -1).astype(word)  # toward +inf, in the order of the bits
    got = jt.map(lambda v: jnp.nextafter(v, jnp.asarray(np.inf, v.dtype)), x)
    same_bits(got, (x.view(word) + step).view(dtype))
