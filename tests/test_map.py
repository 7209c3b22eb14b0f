"""map, ite and the lifted functions, against NumPy loops that round after each op."""

import math
import operator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxtile import activations, elementwise
from jaxtile.elementwise import ite
from jaxtile.elementwise import map as tile_map
from jaxtile.errors import NoDerivativeError, TileError, TileShapeError, TileTypeError

FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
OPS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def normals(dtype, n=200, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n).astype(dtype) for _ in range(3)]


def chain(x, y, z):
    return ((x * y + z) * x - y * z) / (x * x + z)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_op_rounds_in_every_fusion(dtype):
    args = normals(dtype)
    # NumPy and ml_dtypes round each op, and fuse none.
    want = chain(*args)
    eager = tile_map(chain, *args)
    assert eager.dtype == dtype
    np.testing.assert_array_equal(bits(eager), bits(want))
    np.testing.assert_array_equal(bits(jax.jit(chain_of)(*args)), bits(want))
    fused = jax.jit(lambda *a: chain_of(*(v + v for v in a)))
    doubled = [v + v for v in args]
    np.testing.assert_array_equal(bits(fused(*args)), bits(chain(*doubled)))
    wide = jax.jit(lambda *a: chain_of(*a).astype(np.float32) * 2)
    np.testing.assert_array_equal(wide(*args), want.astype(np.float32) * 2)


def chain_of(*args):
    return tile_map(chain, *args)


TREES = st.recursive(
    st.sampled_from([0, 1, 2]),
    lambda kids: st.tuples(st.sampled_from(sorted(OPS)), kids, kids),
    max_leaves=8,
)


def run(tree, args):
    if isinstance(tree, int):
        return args[tree]
    op, left, right = tree
    return OPS[op](run(left, args), run(right, args))


@settings(max_examples=15)
@given(TREES, st.sampled_from(FLOATS))
def test_any_expression_equals_the_loop(tree, dtype):
    args = normals(dtype, 50, 1)
    got = jax.jit(lambda *a: tile_map(lambda *v: run(tree, v), *a))(*args)
    np.testing.assert_array_equal(bits(got), bits(run(tree, args)))


@settings(max_examples=15)
@given(st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), max_size=3))
def test_arrays_broadcast_as_numpys(left, right):
    x, y = np.ones(left, np.float32), np.full(right, 2, np.float32)
    try:
        want = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        with pytest.raises(TileShapeError, match=r"map: expected shapes that broad"):
            tile_map(operator.add, x, y)
        return
    got = tile_map(operator.add, x, y)
    assert got.shape == want
    np.testing.assert_array_equal(got, np.full(want, 3))


def test_pytrees_and_several_results():
    x = np.arange(4, dtype=np.int32)
    got = tile_map(
        lambda d, s: {"sum": d["a"] + d["b"], "twice": s * 2}, {"a": x, "b": 1}, x
    )
    np.testing.assert_array_equal(got["sum"], x + 1)
    np.testing.assert_array_equal(got["twice"], x * 2)


def test_python_scalars_stay_weak_and_numpy_scalars_do_not():
    x = jnp.ones(2, jnp.bfloat16)
    assert tile_map(operator.mul, x, 2.0).dtype == jnp.bfloat16
    assert tile_map(operator.mul, x, np.float32(2)).dtype == jnp.float32
    assert jax.jit(lambda s: tile_map(operator.mul, x, s))(2.0).dtype == jnp.bfloat16
    assert tile_map(operator.add, 1, 2) == 3


def test_equal_functions_share_one_computation():
    traces = []

    def make(scale):
        def f(x):
            traces.append(1)
            return x * scale

        return f

    for _ in range(3):
        tile_map(make(2.0), jnp.ones(3))
    first = len(traces)
    tile_map(make(2.0), jnp.ones(3))
    assert len(traces) == first
    np.testing.assert_array_equal(tile_map(make(3.0), jnp.ones(3)), np.full(3, 3))
    negative = tile_map(make(-0.0), jnp.ones(3))
    assert np.all(np.signbit(negative))


def test_closed_over_scalars_are_operands():
    x = jnp.arange(1.0, 4.0)

    def f(s, n):
        return tile_map(lambda v: v * s + n, x).sum()

    with jax.checking_leaks():
        got = jax.jit(jax.grad(f))(2.0, jnp.int32(1))
    assert got == 6.0
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, 1), [9.0, 15.0, 21.0])
    for scale in (2.0, 5.0):
        array = jnp.float32(scale)
        np.testing.assert_array_equal(tile_map(lambda v: v * array, x), x * scale)  # noqa: B023


def test_a_closed_over_array_is_refused():
    x = jnp.ones(3)
    with pytest.raises(TileShapeError, match=r"traced array of shape \(3,\)"):
        jax.jit(lambda y: tile_map(lambda v: v + y.sum() * y[0] + y, x).sum())(x)


def f_smooth(x, y):
    return jnp.sin(x) * y + jnp.exp(x * y), 3.0 * x - y


@pytest.mark.usefixtures("x64")
def test_derivatives_to_third_order():
    x, y = jnp.linspace(0.1, 1.0, 4), jnp.linspace(1.0, 2.0, 4)
    both = lambda x, y: tile_map(f_smooth, x, y)  # noqa: E731
    check_grads(both, (x, y), order=3, modes=("fwd", "rev"))


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_equal_jaxs(order):
    x, y = jnp.linspace(0.1, 1.0, 4), jnp.linspace(1.0, 2.0, 4)
    ours = lambda v, w: sum(tile_map(f_smooth, v, w))  # noqa: E731
    plain = lambda v, w: sum(f_smooth(v, w))  # noqa: E731
    for _ in range(order):
        ours, plain = jax.grad(ours), jax.grad(plain)
    np.testing.assert_allclose(jax.vmap(ours)(x, y), jax.vmap(plain)(x, y), rtol=1e-5)


def test_a_constant_derivative_saves_no_residual():
    x = jnp.ones(3)
    pull = jax.make_jaxpr(
        lambda x: jax.vjp(lambda v: tile_map(lambda a: 2 - a, v), x)[1](x)
    )
    assert "region=d_" not in str(pull(x))
    np.testing.assert_array_equal(
        jax.grad(lambda v: tile_map(lambda a: 2 - a, v).sum())(x), -np.ones(3)
    )


def test_derivatives_of_narrow_mixed_and_integer_operands():
    x = jnp.array([1.5, 2.5], jnp.bfloat16)
    n = jnp.array([2, 3])
    f = lambda x: tile_map(lambda v, k: v.astype(jnp.float32) * k, x, n).sum()  # noqa: E731
    grad = jax.grad(f)(x)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [2, 3])
    assert (
        jax.grad(lambda x: tile_map(lambda v: v > 0, x).sum() * 1.0)(x).dtype == x.dtype
    )


def test_a_guarded_branch_keeps_its_gradient_finite():
    f = lambda x: tile_map(lambda v: jnp.where(v > 0, jnp.log(v), 0.0), x).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(f)(jnp.array([0.0, 2.0])), [0, 0.5])


def test_a_custom_jvp_is_used_and_a_custom_vjp_refused():
    @jax.custom_jvp
    def f(x):
        return x * 1.0

    f.defjvp(lambda p, t: (f(*p), 7.0 * t[0]))
    grad = jax.grad(lambda x: tile_map(f, x).sum())
    np.testing.assert_array_equal(grad(jnp.ones(2)), [7, 7])

    @jax.custom_vjp
    def g(x):
        return x

    g.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    with pytest.raises(NoDerivativeError, match=r"custom_vjp\. Use jax\.custom_jvp"):
        jax.grad(lambda x: tile_map(g, x).sum())(jnp.ones(2))


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (None, 1)])
def test_vmap_over_every_operand(axes):
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    y = x * 2 + 1
    got = jax.vmap(lambda a, b: tile_map(lambda a, b: a * 10 + b, a, b), axes)(x, y)
    want = jax.vmap(lambda a, b: a * 10 + b, axes)(x, y)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (1, 1)])
def test_every_shape(shape):
    x = np.ones(shape, np.float32)
    np.testing.assert_array_equal(tile_map(lambda v: v + 1, x), x + 1)


ERRORS = [
    (lambda: tile_map(3, jnp.ones(2)), TileTypeError, "a function as the first"),
    (lambda: tile_map(abs, "x"), TileTypeError, "arrays, tiles or numbers"),
    (lambda: tile_map(lambda: 1), TileTypeError, "at least one array"),
    (
        lambda: tile_map(lambda v: jnp.ones(3) * v, jnp.ones(2)),
        TileShapeError,
        "scalars to",
    ),
    (lambda: elementwise.exp([1.0]), TileTypeError, "exp: expected arrays, tiles"),
    (lambda: elementwise.exp(1j), TileTypeError, "exp: expected arrays, tiles"),
    (lambda: activations.gelu(None), TileTypeError, "gelu: expected arrays, tiles"),
    (lambda: ite(jnp.ones(2), 1, 2), TileTypeError, "ite: expected a bool condition"),
    (lambda: ite(1, 1, 2), TileTypeError, "ite: expected a bool condition"),
    (lambda: ite("a", 1, 2), TileTypeError, "ite: expected arrays, tiles or numbers"),
    (lambda: ite(jax.random.key(0), 1, 2), TileTypeError, "ite: .*got dtype key<fry>"),
    (
        lambda: elementwise.exp(),
        TileTypeError,
        r"the arguments of exp\(x\); got missing",
    ),
    (lambda: elementwise.power(1), TileTypeError, r"arguments of power\(x, y\)"),
    (lambda: elementwise.exp(y=1), TileTypeError, "exp: .*Pass x"),
    (lambda: elementwise.sign(True), TileTypeError, r"that sign takes, not \(bool\)"),
    (lambda: elementwise.power(2, -1), TileTypeError, "power: .*negative powers"),
    (
        lambda: elementwise.power(jnp.arange(3), -1),
        TileTypeError,
        r"power: expected operands that power takes, not \(int32, int\)",
    ),
    (lambda: activations.gelu(1.0, "yes"), TileTypeError, "gelu: .*True or False"),
    (lambda: activations.gelu(1.0, None), TileTypeError, "gelu: .*got None"),
]
BAD_FUNCTIONS = [
    (lambda: 1, "takes 0 positional arguments"),
    (lambda v, w: v, "missing 1 required"),
    (np.sin, "TracerArrayConversionError.*not NumPy"),
    (math.sin, "ConcretizationTypeError|TypeError"),
    (lambda v: v if v > 0 else -v, "TracerBoolConversionError.*jnp.where"),
    (lambda v: "a", "TypeError: .*<class 'str'>"),
    (lambda v: v.real_part, "AttributeError"),
    (lambda v: {}[1], "KeyError: 1"),
    (lambda v: v[0], "IndexError"),
    (lambda v: v + 2**40, "OverflowError"),
    (lambda v: None, "a function that returns scalars; got None"),
    (lambda v: [], "a function that returns scalars; got None, or an empty"),
    (lambda v: 1j * v, "one of float16, .*got dtype complex64"),
    (lambda v: jax.debug.print("{v}", v=v) or v, "without side effects; got debug_"),
    (lambda v: jax.jit(_print)(v), "without side effects; got debug_"),
    (lambda v: jax.lax.cond(v > 0, _print, _print, v), "without side effects"),
    (lambda v: jax.pure_callback(np.sin, v, v), "side effects; got pure_callback"),
]


def _print(v):
    jax.debug.print("{v}", v=v)
    return v


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("fn", "sentence"), BAD_FUNCTIONS)
def test_functions_that_cannot_be_mapped(fn, sentence, keep):
    scale = jnp.float32(1)  # closing over an array takes another way through the trace
    call = (lambda *v: (scale, fn(*v))[1]) if keep else fn
    with pytest.raises(TileTypeError, match=f"(?s)^map: expected .*{sentence}"):
        tile_map(call, jnp.ones(2))


def test_what_a_function_raises_of_its_own_is_not_hidden():
    class Own(Exception):
        pass

    def fn(v):
        raise Own

    with pytest.raises(Own):
        tile_map(fn, jnp.ones(2))
    with pytest.raises(TileShapeError, match="^ite: expected shapes that broadcast"):
        tile_map(
            lambda v: ite(np.ones(2, bool), v, np.ones(3, np.float32)), jnp.ones(2)
        )


@pytest.mark.parametrize(("call", "kind", "sentence"), ERRORS)
def test_errors(call, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        call()
    assert isinstance(caught.value, TileError)
    assert "; got " in str(caught.value)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int4"])
def test_storage_formats_are_refused(name):
    x = jnp.ones(4).astype(getattr(jnp, name))
    with pytest.raises(TileTypeError, match=f"map: .*storage format {name}.*decode"):
        tile_map(operator.add, x, x)


def test_ite_selects_bits_and_sends_the_cotangent_to_one_side():
    c = jnp.array([True, False, True])
    a, b = jnp.array([-0.0, 1.0, math.nan]), jnp.array([5.0, -0.0, 6.0])
    np.testing.assert_array_equal(bits(ite(c, a, b)), bits(np.where(c, a, b)))
    da, db = jax.grad(lambda a, b: ite(c, a, b).sum(), (0, 1))(a, b)
    np.testing.assert_array_equal(da, [1, 0, 1])
    np.testing.assert_array_equal(db, [0, 1, 0])
    assert ite(c, jnp.bfloat16(1), 0.0).dtype == jnp.bfloat16


NUMPY = {
    **{n: getattr(np, n) for n in "exp exp2 expm1 log log1p log2 sqrt sin cos".split()},
    **{n: getattr(np, n) for n in "tan tanh abs sign floor ceil square".split()},
    "round": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", sorted(NUMPY))
def test_lifted_functions(name, dtype):
    fn = getattr(elementwise, name, None) or getattr(activations, name)
    x = np.concatenate([np.linspace(0.06, 6, 50), [0.5, 1.5, 2.5]]).astype(dtype)
    if name not in ("log", "log2", "sqrt", "rsqrt", "log1p"):
        x = np.concatenate([x, -x])
    got = fn(x)
    assert got.dtype == dtype
    want = NUMPY[name](x.astype(np.float64))
    # One rounding: half a unit in the last place, and float32's own error.
    half = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}[dtype.name]
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=half * 1.01 + 3e-6, atol=1e-6
    )


def test_gelu_both_ways():
    x = np.linspace(-3, 3, 20)
    exact = x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    got = activations.gelu(x.astype(np.float32), approximate=False)
    np.testing.assert_allclose(got, exact, atol=1e-6)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    got = activations.gelu(x.astype(np.float32))
    np.testing.assert_allclose(got, x / 2 * (1 + np.tanh(inner)), atol=1e-6)


def test_predicates_power_and_integers():
    x = np.array([1.0, math.nan, math.inf], np.float32)
    np.testing.assert_array_equal(elementwise.isnan(x), np.isnan(x))
    np.testing.assert_array_equal(elementwise.isfinite(x), np.isfinite(x))
    n = np.array([-2, 3], np.int32)
    np.testing.assert_array_equal(elementwise.power(n, 2), n**2)
    np.testing.assert_array_equal(elementwise.abs(n), [2, 3])
    for fn in (elementwise.exp, elementwise.rsqrt, elementwise.floor, activations.silu):
        assert fn(n).dtype == jnp.float32
