"""Kernels of `jt.kernel` for the tests of what runs them, and oracles of some."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile as jt

RNG = np.random.default_rng(23)
REDUCERS = {
    "add": jt.add,
    "maximum": jt.maximum,
    "argmax": jt.argmax,
    "mean": jt.Reducer(
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lift=lambda x: (x, jnp.float32(1)),
        finish=lambda s: s[0] / s[1],
        identity=(0.0, 0.0),
        laws=jt.Laws(associative=True, commutative=True),
        name="mean",
    ),
}


def floats(*shape, dtype=np.float32):
    """Values of different sizes, some of them negative."""
    wide = RNG.standard_normal(shape) * 10.0 ** RNG.integers(-2, 3, shape)
    return jnp.asarray(wide, dtype)


def integers(*shape):
    return jnp.asarray(RNG.integers(-1000, 1000, shape), jnp.int32)


def _like(shape):
    """`out=`: the first operand's dtype in another shape, of its sizes."""
    return lambda x, *rest: jax.ShapeDtypeStruct(shape(*x.shape), x.dtype)


@jt.kernel(out=_like(lambda m, n: (m,)))
def across(nest, x, y, *, reducer, policy, block):
    r, c = nest.parallel(x.shape[0], block), jt.Dim("c")
    y.tile(r).store(
        _wanted(jt.reduce(x.tile(r, c).load(), c, REDUCERS[reducer], policy=policy))
    )


@jt.kernel(out=_like(lambda m, n: (n,)))
def down(nest, x, y, *, reducer, policy, block):
    r, c = jt.Dim("r"), nest.parallel(x.shape[1], block)
    y.tile(c).store(
        _wanted(jt.reduce(x.tile(r, c).load(), r, REDUCERS[reducer], policy=policy))
    )


def _wanted(found):
    """The value of `argmax`, or what another reducer gives."""
    return found[0] if isinstance(found, tuple) else found


@jt.kernel(out=_like(lambda b, m, n: (b,)))
def planes(nest, x, y, *, policy):
    b, r, c = nest.parallel(x.shape[0]), jt.Dim("r"), jt.Dim("c")
    total = jt.reduce(x.tile(b, r, c).load(), (r, c), jt.add, policy=policy)
    y.tile(b).store(total)


@jt.kernel(out=lambda x: jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
def places(nest, x, y, *, block):
    r, c = nest.parallel(x.shape[0], block), jt.Dim("c")
    y.tile(r).store(jt.reduce(x.tile(r, c).load(), c, jt.argmax)[1])


@jt.kernel(out=lambda x: x)
def prefixes(nest, x, y, *, policy, block, axis=1, exclusive=False, direction="prefix"):
    whole, blocks = jt.Dim("whole"), nest.parallel(x.shape[1 - axis], block)
    part = (blocks, whole) if axis else (whole, blocks)
    options = dict(policy=policy, exclusive=exclusive, direction=direction)
    y.tile(*part).store(jt.scan(x.tile(*part).load(), whole, jt.add, **options))


@jt.kernel(out=lambda x: x)
def streamed(nest, x, y, *, block, along):
    r = nest.parallel(x.shape[0], block)

    @nest.pipeline(x.shape[1], along, init=nest.zeros(r, jnp.float32))
    def _(c, before):
        found, last = jt.scan(
            x.tile(r, c).load(), c.dim, jt.add, init=before, return_final=True
        )
        y.tile(r, c).store(found)
        return last


@jt.kernel(out=_like(lambda m, n: (m,)))
def summed(nest, x, y, *, block, along):
    r = nest.parallel(x.shape[0], block)

    @nest.reduce(x.shape[1], along, init=nest.zeros(r, x.dtype))
    def total(c, s):
        return s + jt.reduce(x.tile(r, c).load(), c.dim, jt.add)

    y.tile(r).store(total)


@jt.kernel(out=lambda x, ends: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
def between(nest, x, ends, y, *, block):
    """The sum of the blocks of each row that reach below an end of its own."""
    i = nest.parallel(x.shape[0])

    @nest.serial(x.shape[1], block, init=0.0, reverse=True, start=2, stop=ends.at(i))
    def total(c, s):
        return s / 2 + jt.reduce(x.tile(i, c).load(), c.dim, jt.add).array

    y.tile(i).store(total)


def between_oracle(x, ends, block):
    out = np.zeros(len(x))
    for i, row in enumerate(x):
        for k in reversed(range(2 // block, -(-int(ends[i]) // block))):
            out[i] = out[i] / 2 + row[block * k : block * (k + 1)].sum()
    return out


@jt.kernel(out=lambda x: (x, jax.ShapeDtypeStruct(x.shape[:1], x.dtype)))
def suffixes(nest, x, y, first, *, block, along):
    """The sums from each place on, and those from the first: stored in every turn."""
    r = nest.parallel(x.shape[0], block)

    @nest.pipeline(x.shape[1], along, init=nest.zeros(r, jnp.float32), reverse=True)
    def _(c, after):
        options = {"init": after, "direction": "reverse", "return_final": True}
        found, last = jt.scan(x.tile(r, c).load(), c.dim, jt.add, **options)
        y.tile(r, c).store(found)
        first.tile(r).store(last)
        return last


def suffixes_oracle(x):
    return np.cumsum(x[:, ::-1], 1)[:, ::-1], x.sum(1)


@jt.kernel(out=lambda x: x)
def halved(nest, x, y, *, block):
    """Halved until the largest of the block is below 1."""
    r, c = nest.parallel(x.shape[0], block), jt.Dim("c")

    def large(t):
        return jt.reduce(jt.reduce(abs(t), c, jt.maximum), r.dim, jt.maximum).array >= 1

    y.tile(r, c).store(jax.lax.while_loop(large, lambda t: t / 2, x.tile(r, c).load()))


def halved_oracle(x, block):
    out = x.copy()
    for k in range(0, len(x), block):
        while np.abs(out[k : k + block]).max() >= 1:
            out[k : k + block] /= 2
    return out


@jt.kernel(out=lambda x, w: (x, jax.ShapeDtypeStruct(x.shape, jnp.bool_)))
def mixed(nest, x, w, y, above, *, block):
    b, r, c = nest.parallel(x.shape[0]), nest.parallel(x.shape[1], block), jt.Dim("c")
    t, scale = x.tile(b, r, c).load(), w.tile(c).load()
    here = nest.coordinates(r) + 0 * jt.cast(t, jnp.int32)
    even = here % 2 == 0
    y.tile(b, r, c).store(jt.ite(even, t * scale, -t) + w.at(0))
    above.tile(b, r, c).store(t > scale)


@jt.kernel(out=lambda x: x)
def mapped(nest, x, y, *, fn):
    r = nest.parallel(x.shape[0], 40)
    y.tile(r).store(fn(x.tile(r).load()))


def _third(v):
    return (v // 3).astype(jnp.float32)


FUNCTIONS = {
    "exp": (jt.exp, np.exp),
    "exp2": (jt.exp2, np.exp2),
    "expm1": (jt.expm1, np.expm1),
    "log": (lambda t: jt.log(abs(t)), lambda x: np.log(np.abs(x))),
    "log1p": (lambda t: jt.log1p(abs(t)), lambda x: np.log1p(np.abs(x))),
    "log2": (lambda t: jt.log2(abs(t)), lambda x: np.log2(np.abs(x))),
    "sqrt": (lambda t: jt.sqrt(abs(t)), lambda x: np.sqrt(np.abs(x))),
    "rsqrt": (lambda t: jt.rsqrt(abs(t)), lambda x: 1 / np.sqrt(np.abs(x))),
    "sin": (jt.sin, np.sin),
    "cos": (jt.cos, np.cos),
    "tan": (jt.tan, np.tan),
    "tanh": (jt.tanh, np.tanh),
    "erf": (jt.erf, np.vectorize(math.erf)),
    "sign": (jt.sign, np.sign),
    "floor": (jt.floor, np.floor),
    "ceil": (jt.ceil, np.ceil),
    "round": (jt.round, np.rint),
    "square": (jt.square, np.square),
    "power": (lambda t: jt.power(abs(t), 1.5), lambda x: np.abs(x) ** 1.5),
    "sigmoid": (jt.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "silu": (jt.silu, lambda x: x / (1 + np.exp(-x))),
    "softplus": (jt.softplus, lambda x: np.logaddexp(x, 0)),
    "relu": (jt.relu, lambda x: np.maximum(x, 0)),
    "several": (
        lambda t: jt.map(lambda v: jnp.clip(jnp.where(v > 1, -v, v**3), -2, 2), t),
        lambda x: np.clip(np.where(x > 1, -x, x**3), -2, 2),
    ),
    "quotients": (
        lambda t: jt.map(lambda v: _third(v.astype(jnp.int32)).astype(v.dtype), t),
        lambda x: np.trunc(x) // 3,
    ),
}


def mixed_oracle(x, w):
    even = np.arange(x.shape[1])[None, :, None] % 2 == 0
    return np.where(even, x * w, -x) + w[0], x > w


@jt.kernel(out=lambda x, m: x)
def centred(nest, x, m, y, *, block):
    r, c = nest.parallel(x.shape[0], block), jt.Dim("c")
    t, counted = x.tile(r, c).load(), m.tile(r, c).load()
    total = jt.reduce(t, c, jt.add, where=counted, policy="fixed_tree")
    y.tile(r, c).store(jt.ite(counted, t - total, 0.0))


def centred_oracle(x, m):
    return np.where(m, x - np.where(m, x, 0).sum(1, keepdims=True), 0)


@jt.kernel(out=lambda x, s: (jax.ShapeDtypeStruct((), x.dtype), x))
def scaled(nest, x, s, total, y):
    nest.parallel(1)
    c = jt.Dim("c")
    t = x.tile(c).load() * s.at()
    y.tile(c).store(t)
    total.tile().store(jt.reduce(t, c, jt.add, policy="fixed_tree"))


@jt.kernel(out=lambda x: (jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn), x))
def coded(nest, x, codes, y, *, block):
    r = nest.parallel(x.shape[0], block)
    q = jt.quantize(x.tile(r).load(), "float8_e4m3fn")
    codes.tile(r).store(q)
    y.tile(r).store(jt.decode(q))


def coded_oracle(x):
    found = np.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float64)
    return found, found


@jt.kernel(out=lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32))
def decoded(nest, x, y, *, block):
    r = nest.parallel(x.shape[0], block)
    y.tile(r).store(jt.decode(x.tile(r).load()))


@jt.kernel(out=_like(lambda m, n: (n, m)))
def turned(nest, x, y, *, block):
    r, c = nest.parallel(x.shape[0], block), nest.parallel(x.shape[1], block)
    y.tile(c, r).store(x.tile(r, c).load())


@jt.kernel(out=lambda x, y: jax.ShapeDtypeStruct((x.shape[0], y.shape[0]), x.dtype))
def outer(nest, x, y, z, *, block):
    r, c = nest.parallel(x.shape[0], block), nest.parallel(y.shape[0], block)
    nothing = nest.zeros((r, c), x.dtype)
    z.tile(r, c).store((nothing + x.tile(r).load()) * y.tile(c).load())


@jt.kernel(out=_like(lambda m, n: (m, n)))
def smoothed(nest, x, y, *, block):
    i, c = nest.parallel(x.shape[0]), nest.parallel(x.shape[1], block)
    window = jt.Window(i.index - 1, jt.Dim("w"), 3)
    t = x.tile(window, c, bounds=jt.minimum).load()
    y.tile(i, c).store(jt.reduce(t, t.dim(0), jt.minimum))


def smoothed_oracle(x):
    padded = np.pad(x, ((1, 1), (0, 0)), constant_values=np.inf)
    return np.minimum(np.minimum(padded[:-2], padded[1:-1]), padded[2:])
