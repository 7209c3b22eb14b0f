"""Kernels of `jt.kernel` for the tests of what runs them, each with a NumPy oracle."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile as jt
from jaxtile import _kernels

_RNG = np.random.default_rng(23)
_REDUCERS = {
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
    wide = _RNG.standard_normal(shape) * 10.0 ** _RNG.integers(-2, 3, shape)
    return jnp.asarray(wide, dtype)


def integers(*shape):
    return jnp.asarray(_RNG.integers(-1000, 1000, shape), jnp.int32)


def _like(shape):
    """`out=`: the first operand's dtype in another shape, of its sizes."""
    return lambda x, *rest: jax.ShapeDtypeStruct(shape(*x.shape), x.dtype)


@jt.kernel(out=_like(lambda m, n: (m,)))
def across(nest, x, y, *, reducer, policy, block):
    r, c = nest.parallel(x.shape[0], block), jt.Dim("c")
    y.tile(r).store(
        _wanted(jt.reduce(x.tile(r, c).load(), c, _REDUCERS[reducer], policy=policy))
    )


@jt.kernel(out=_like(lambda m, n: (n,)))
def down(nest, x, y, *, reducer, policy, block):
    r, c = jt.Dim("r"), nest.parallel(x.shape[1], block)
    y.tile(c).store(
        _wanted(jt.reduce(x.tile(r, c).load(), r, _REDUCERS[reducer], policy=policy))
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


def function(name, dtype):
    """A call of `mapped`."""
    fn, oracle = FUNCTIONS[name]
    x = jnp.asarray(np.linspace(-4.1, 4.3, 97), dtype)
    rtol = 2e-6 if dtype == np.float32 else 8e-3
    return Case(mapped, (x,), oracle, {"fn": fn}, False, rtol)


def _mixed(x, w):
    even = np.arange(x.shape[1])[None, :, None] % 2 == 0
    return np.where(even, x * w, -x) + w[0], x > w


@jt.kernel(out=lambda x, m: x)
def centred(nest, x, m, y, *, block):
    r, c = nest.parallel(x.shape[0], block), jt.Dim("c")
    t, counted = x.tile(r, c).load(), m.tile(r, c).load()
    total = jt.reduce(t, c, jt.add, where=counted, policy="fixed_tree")
    y.tile(r, c).store(jt.ite(counted, t - total, 0.0))


def _centred(x, m):
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


def _coded(x):
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


def _smoothed(x):
    padded = np.pad(x, ((1, 1), (0, 0)), constant_values=np.inf)
    return np.minimum(np.minimum(padded[:-2], padded[1:-1]), padded[2:])


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _layer_norm(x, w, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def _rms_norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def _recurrence(x, decay, gate, rate):
    h, out = np.zeros((x.shape[0], x.shape[2])), np.zeros(x.shape)
    for t in range(x.shape[1]):
        a = np.exp(-8 * np.log1p(np.exp(rate)) / (1 + np.exp(-decay[:, t])))
        h = a * h + np.sqrt(1 - a * a) * x[:, t] / (1 + np.exp(-gate[:, t]))
        out[:, t] = h
    return out


@dataclass(frozen=True)
class Case:
    """A call of a kernel.

    Args:
        kernel, args, config: the call's.
        oracle: of float64 arrays; results in the order of the kernel's.
        same: the bits are those of plain jax.
        rtol: against the oracle, of the sum of the magnitudes where that is larger.
    """

    kernel: Any
    args: tuple
    oracle: Callable
    config: dict = field(default_factory=dict)
    same: bool = True
    rtol: float = 1e-5

    def run(self, implementation):
        found = self.kernel(*self.args, implementation=implementation, **self.config)
        return list(map(np.asarray, jax.tree.leaves(found)))

    def check(self, implementation):
        """Run it, and compare."""
        self.compare(self.run(implementation), lambda: self.run("reference"))

    def compare(self, found, reference):
        """Compare with the oracle, and with plain jax where the order is stated."""
        exact = [
            np.asarray(a, a.dtype if a.dtype == bool else np.float64) for a in self.args
        ]
        wants = jax.tree.leaves(self.oracle(*exact))
        for got, want in zip(found, wants, strict=True):
            assert got.shape == want.shape
            size = np.abs(exact[0]).max() if got.dtype != bool else 0
            np.testing.assert_allclose(
                np.asarray(got, np.float64), want, rtol=self.rtol, atol=self.rtol * size
            )
        if self.same:
            for got, want in zip(found, reference(), strict=True):
                np.testing.assert_array_equal(_bits(got), _bits(want))


def _bits(x):
    return x.view(f"u{x.dtype.itemsize}") if x.dtype != bool else x


def _rows(name, shape, dtype=np.float32, **config):
    n = shape[-1]
    x = jnp.asarray(3 * _RNG.standard_normal(shape) + 1, dtype)
    w, b = (jnp.asarray(_RNG.standard_normal(n), dtype) for _ in range(2))
    rtol = 1e-5 if dtype == np.float32 else 8e-3
    kernel, args, oracle = {
        "softmax": (_kernels.softmax, (x,), _softmax),
        "layer_norm": (_kernels.layer_norm, (x, w, b), _layer_norm),
        "rms_norm": (_kernels.rms_norm, (x, w), _rms_norm),
    }[name]
    eps = {"layer_norm": {"eps": 1e-5}, "rms_norm": {"eps": 1e-6}}.get(name, {})
    return Case(kernel, args, oracle, {**config, **eps}, False, rtol)


def _across(shape, reducer="add", policy="fixed_tree", kernel=across, **config):
    oracle = {"add": np.sum, "mean": np.mean}.get(reducer, np.max)
    axis = 1 if kernel is across else 0
    args = (floats(*shape),)
    options = {"reducer": reducer, "policy": policy, "block": 8, **config}
    # XLA divides by a constant as it likes.
    same = (policy != "unordered_tree" and reducer != "mean") or oracle is np.max
    return Case(kernel, args, lambda x: oracle(x, axis), options, same)


def _prefixes(shape, policy, dtype=np.float32, axis=1, block=8, **options):
    def oracle(x):
        back = options.get("direction", "prefix") != "prefix"
        x = np.flip(x, axis) if back else x
        total = np.cumsum(x, axis) - (x if options.get("exclusive") else 0)
        return np.flip(total, axis) if back else total

    x = floats(*shape) if dtype == np.float32 else integers(*shape)
    config = dict(policy=policy, axis=axis, block=block, **options)
    same = policy not in ("ordered_tree", "unordered_tree") or dtype != np.float32
    return Case(prefixes, (x,), oracle, config, same)


_BACK = {"direction": "reverse"}
ROWS = {
    f"{name} {shape} {np.dtype(dtype).name}": _rows(name, shape, dtype, **config)
    for name, shape, dtype, config in [
        ("softmax", (13, 51), np.float32, {}),
        ("softmax", (3, 700), jnp.bfloat16, {"block": 1}),
        ("softmax", (5, 256), np.float32, {"block": 2}),
        ("softmax", (9, 1100), np.float32, {}),
        ("layer_norm", (2, 8200), np.float32, {"block": 1}),
        ("layer_norm", (9, 20), np.float32, {}),
        ("layer_norm", (2, 1024), np.float32, {"block": 1}),
        ("layer_norm", (6, 131), jnp.bfloat16, {"block": 4}),
        ("rms_norm", (5, 513), np.float32, {"block": 1}),
        ("rms_norm", (12, 64), jnp.bfloat16, {}),
        ("rms_norm", (1, 1), np.float32, {}),
    ]
}
OTHERS = {
    "sum": _across((13, 51)),
    "sum of long rows": _across((3, 1030), block=1),
    "sum, any order": _across((5, 77), policy="unordered_tree"),
    "sum by a fold": _across((9, 37), policy="fold_left"),
    "sum by a fold of long rows": _across((3, 300), policy="fold_right", block=1),
    "tree in many warps": _across((3, 9000), block=3),
    "fold in many warps": _across((8, 1100), policy="fold_left"),
    "prefixes in many warps": _prefixes((6, 1100), "fixed_tree"),
    "largest": _across((7, 130), reducer="maximum", policy="unordered_tree"),
    "first largest": _across((7, 130), reducer="argmax"),
    "mean": _across((6, 67), reducer="mean", block=4),
    "sum of columns": _across((37, 21), kernel=down),
    "fold of columns": _across((30, 70), kernel=down, policy="fold_left", block=32),
    "tree of planes": Case(
        planes, (floats(3, 5, 12),), lambda x: x.sum((1, 2)), {"policy": "fixed_tree"}
    ),
    "fold of planes": Case(
        planes, (floats(2, 5, 12),), lambda x: x.sum((1, 2)), {"policy": "fold_left"}
    ),
    "places": Case(places, (floats(6, 99),), lambda x: x.argmax(1), {"block": 4}),
    "prefixes": _prefixes((9, 51), "fixed_tree"),
    "prefixes of long rows": _prefixes((2, 600), "fixed_tree", block=1),
    "prefixes by a fold": _prefixes((5, 45), "fold_left"),
    "exclusive prefixes": _prefixes((5, 45), "fixed_tree", exclusive=True),
    "prefixes from behind": _prefixes((5, 45), "fixed_tree", **_BACK),
    "prefixes of integers": _prefixes((6, 45), "ordered_tree", np.int32, **_BACK),
    "prefixes up": _prefixes((40, 9), "fixed_tree", axis=0, exclusive=True, **_BACK),
    "prefixes down": _prefixes((21, 45), "ordered_tree", axis=0, block=16),
    "prefixes in blocks": Case(
        streamed,
        (floats(5, 45),),
        lambda x: np.cumsum(x, 1),
        {"block": 4, "along": 16},
        False,
    ),
    "sums in blocks": Case(
        summed, (floats(5, 45),), lambda x: x.sum(1), {"block": 4, "along": 16}, False
    ),
    "recurrence": Case(
        _kernels.recurrence,
        (
            floats(2, 21, 6),
            floats(2, 21, 6) / 99,
            floats(2, 21, 6) / 99,
            floats(6) / 99,
        ),
        _recurrence,
        {"block": 8, "lanes": 4},
        False,
    ),
    "mixed": Case(mixed, (floats(2, 5, 12), floats(12)), _mixed, {"block": 4}),
    "centred": Case(
        centred, (floats(7, 37), floats(7, 37) > 0), _centred, {"block": 3}
    ),
    "scaled": Case(
        scaled, (floats(37), jnp.float32(3)), lambda x, s: ((x * s).sum(), x * s)
    ),
    "coded": Case(coded, (floats(75),), _coded, {"block": 32}),
    "decoded": Case(
        decoded, (floats(75).astype(jnp.float8_e4m3fn),), lambda x: x, {"block": 32}
    ),
    "turned": Case(turned, (floats(13, 35),), lambda x: x.T, {"block": 8}),
    "turned integers": Case(turned, (integers(12, 64),), lambda x: x.T, {"block": 32}),
    "outer": Case(outer, (floats(13), floats(35)), np.outer, {"block": 8}),
    "smoothed": Case(smoothed, (floats(7, 21),), _smoothed, {"block": 5}),
}
CASES = {**ROWS, **OTHERS}
