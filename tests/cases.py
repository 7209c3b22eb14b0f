"""One table of calls that every transformation is tested on."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxtile as jt

_N, _ROWS = 5, 2


@dataclass(frozen=True)
class Arg:
    """An operand: its name, shape, and what it is filled with.

    Args:
        name: the keyword of the call.
        shape: without batch dimensions.
        kind: "normal", "positive", "near_one", "integer", "place" or "mask".
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "normal"

    def make(self, rng: np.random.Generator, dtype: Any = np.float32, batch=()):
        """Values of the kind; a mask keeps at least one element of a fibre."""
        shape = (*batch, *self.shape)
        if self.kind == "mask":
            mask = rng.random(shape) < 0.6
            mask[..., 1] = True
            return jnp.asarray(mask)
        if self.kind == "integer":
            return jnp.asarray(rng.integers(-9, 9, shape), jnp.int32)
        if self.kind == "place":  # of an axis of five, some outside
            return jnp.asarray(rng.integers(-2, 7, shape), jnp.int32)
        if self.kind == "normal":
            return jnp.asarray(rng.standard_normal(shape), dtype)
        low = 0.5 if self.kind == "positive" else 0.8
        return jnp.asarray(rng.uniform(low, 1.3, shape), dtype)


@dataclass(frozen=True)
class Case:
    """A call of an op.

    Args:
        id: the test's name.
        call: takes the arguments by position and gives a pytree of arrays.
        args: the operands.
        exact: the policy pins the bits, so that no transformation may change them.
        grads: the highest order of derivative to check; 0 where there is none.
        linear: positions of the arguments in which the call is linear together.
    """

    id: str
    call: Callable
    args: tuple[Arg, ...]
    exact: bool = True
    grads: int = 2
    linear: tuple[int, ...] = ()

    def make(self, dtype: Any = np.float32, batch: Any = None) -> list:
        """The operands; `batch[i]` are the batch dimensions of argument i."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        batch = batch or [()] * len(self.args)
        return [a.make(rng, dtype, b) for a, b in zip(self.args, batch, strict=True)]

    def __repr__(self) -> str:
        return self.id


_X = Arg("x", (_ROWS, _N))
_POSITIVE = Arg("x", (_ROWS, _N), "near_one")
_INTEGER = Arg("x", (_ROWS, _N), "integer")
_SEED = Arg("init", (_ROWS,))
_MASK = Arg("where", (_ROWS, _N), "mask")
_A, _B = Arg("a", (_ROWS, _N), "near_one"), Arg("b", (_ROWS, _N))
_ORDERED = "ordered_tree"


def _reduce(reducer, policy="unordered_tree", **params):
    def call(x, *rest):
        named = dict(zip(("init", "where"), rest, strict=False))
        return jt.reduce(x, -1, reducer, policy=policy, **named, **params)

    return call


def _scan(reducer, policy=_ORDERED, **params):
    def call(x, *rest):
        named = dict(zip(("init", "where"), rest, strict=False))
        return jt.scan(x, -1, reducer, policy=policy, **named, **params)

    return call


def _scan_masked(reducer, **params):
    return lambda x, where: jt.scan(x, -1, reducer, where=where, **params)


def _affine(policy=_ORDERED, **params):
    return lambda a, b, h0: jt.linear_recurrence(a, b, -1, h0, policy=policy, **params)


def _affine_state(**params):
    return lambda a, b, where: jt.scan((a, b), -1, jt.affine, where=where, **params)


def _product(x, y):
    return jt.reduce((x, y), -1, jt.product(jt.add, jt.multiply))


_NORM = jt.Reducer(
    merge=lambda a, b: a + b,
    identity=0.0,
    lift=lambda x: x * x,
    finish=jnp.sqrt,
    laws=jt.Laws(associative=True, commutative=True),
    name="norm",
)
_MINUS = jt.Reducer(merge=lambda a, b: a - jnp.sin(b), name="a - sin(b)")
_FIXED, _LEFT, _RIGHT = "fixed_tree", "fold_left", "fold_right"
_FULL = (_X, _SEED, _MASK)
_LINEAR = (0, 1)

REDUCE = [
    Case("reduce-add", _reduce(jt.add), _FULL, exact=False, linear=_LINEAR),
    Case("reduce-add-fixed", _reduce(jt.add, _FIXED), _FULL, linear=_LINEAR),
    Case("reduce-add-left", _reduce(jt.add, _LEFT), (_X, _SEED), linear=_LINEAR),
    Case("reduce-add-int", _reduce(jt.add), (_INTEGER,), grads=0),
    Case("reduce-max", _reduce(jt.maximum), _FULL),
    Case("reduce-min-right", _reduce(jt.minimum, _RIGHT), (_X,)),
    Case("reduce-mul-fixed", _reduce(jt.multiply, _FIXED), (_POSITIVE, _SEED)),
    Case("reduce-argmax", _reduce(jt.argmax), (_X,), grads=1),
    Case("reduce-logaddexp", _reduce(jt.logaddexp), _FULL, exact=False),
    Case("reduce-welford", _reduce(jt.welford, _FIXED), (_X,), grads=1),
    Case("reduce-norm", _reduce(_NORM), (_POSITIVE,), exact=False),
    Case("reduce-user-left", _reduce(_MINUS, _LEFT), _FULL),
    Case("reduce-user-right", _reduce(_MINUS, _RIGHT), (_X, _SEED)),
    Case("reduce-product", _product, (_X, _POSITIVE), exact=False),
]

SCAN = [
    Case("scan-add", _scan(jt.add), _FULL, exact=False, linear=_LINEAR),
    Case(
        "scan-add-suffix",
        _scan(jt.add, _FIXED, direction="suffix", exclusive=True, return_final=True),
        (_X, _SEED),
        linear=_LINEAR,
    ),
    Case("scan-mul", _scan_masked(jt.multiply), (_POSITIVE, _MASK), exact=False),
    Case("scan-max", _scan(jt.maximum), _FULL),
    Case("scan-logaddexp", _scan(jt.logaddexp), (_X,), exact=False),
    Case(
        "scan-welford-exclusive",
        _scan(jt.welford, _FIXED, exclusive=True, direction="reverse"),
        (_X,),
        grads=1,
    ),
    Case("scan-user-left", _scan(_MINUS, _LEFT), (_X, _SEED)),
    Case("scan-user-right", _scan(_MINUS, _RIGHT, direction="suffix"), (_X,)),
    Case("affine", _affine(), (_A, _B, _SEED), exact=False, linear=(1, 2)),
    Case(
        "affine-reverse-left",
        _affine(_LEFT, direction="reverse"),
        (_A, _B, _SEED),
        linear=(1, 2),
    ),
    Case(
        "affine-suffix-final",
        _affine_state(direction="suffix", policy=_FIXED, return_final=True),
        (_A, _B, _MASK),
        grads=1,
    ),
    Case("affine-masked", _affine_state(), (_A, _B, _MASK), exact=False, linear=(1,)),
]

_KEPT = jt.MmaPolicy(allow_reassociation=False)
_PROMOTED = jt.MmaPolicy(promote_every=2)
_MAT_A, _MAT_B, _MAT_C = (
    Arg(name, shape) for name, shape in (("a", (2, 5)), ("b", (5, 3)), ("c", (2, 3)))
)
_MAT = (_MAT_A, _MAT_B, _MAT_C)


def _mma(policy=None, **params):
    return lambda a, b, c=None: jt.mma(a, b, c, policy, **params)


def _gated(a, b, c, s):
    return jt.mma(a, b, c, epilogue=lambda z: s * jnp.tanh(z))


def _int8(a, b):
    a, b = (v.astype(jnp.int8) for v in (a, b))
    return jt.mma(a, b, policy=_KEPT, epilogue=lambda z: z > 3)


MMA = [
    Case("mma", _mma(), _MAT, exact=False, linear=(0, 2)),
    Case("mma-kept", _mma(_KEPT), _MAT, linear=(1, 2)),
    Case("mma-promoted", _mma(_PROMOTED), _MAT, exact=False, grads=1),
    Case("mma-spec", _mma(spec="mk,nk->nm"), (_MAT_A, Arg("b", (3, 5))), exact=False),
    Case("mma-epilogue", _gated, (*_MAT, Arg("s", ())), exact=False),
    Case("mma-kept-gelu", _mma(_KEPT, epilogue=jt.gelu), _MAT, grads=1),
    Case("mma-int8", _int8, (_INTEGER, Arg("b", (_N, 3), "integer")), grads=0),
    Case("matmul", jt.matmul, (Arg("a", (3, 1, 2, 5)), Arg("b", (5,))), exact=False),
    Case(
        "einsum",
        lambda a, b: jt.einsum("iij,jk->ki", a, b, policy=_KEPT),
        (Arg("a", (2, 2, 5)), _MAT_B),
        linear=(0,),
    ),
]

_TO = Arg("index", (_N,), "place")
_TO_EACH = Arg("index", (_ROWS, _N), "place")
_TARGETS = Arg("init", (_ROWS, 4))
_FILL = Arg("fill", ())


def _scatter(reducer, policy="unordered_tree", **params):
    def call(x, index, init=None):
        return jt.scatter(x, index, 1, 4, reducer, init=init, policy=policy, **params)

    return call


def _gather(axis, **params):
    return lambda x, index, fill=None: jt.gather(x, index, axis, fill, **params)


def _reindex(shape, f):
    return lambda x, fill=None: jt.reindex(x, shape, f, fill)


def _chain(x, a, b):
    """Two fills, a transpose and a flip: one affine reindex."""
    return jt.shift(jt.flip(jt.transpose(jt.shift(x, 1, 2, a)), 0), 0, -1, b)


def _general_chain(x, a, b):
    """Squares, which are not affine, of what was shifted."""
    y = jt.reindex(x, (_ROWS, _N), lambda i, j: (i, j * j), a)
    return jt.shift(y, 1, 1, b)


EXCHANGE = [
    Case("gather", _gather(1), (_X, _TO, _FILL), linear=(0, 2)),
    Case("gather-all", _gather(1, batch="all"), (_X, _TO_EACH), grads=1, linear=(0,)),
    Case("gather-one", _gather(0), (_X, Arg("index", (), "place")), linear=(0,)),
    Case("take", lambda x, i: jt.take(x, i, 0), (_X, _TO_EACH), grads=1, linear=(0,)),
    Case(
        "scatter-add", _scatter(jt.add), (_X, _TO, _TARGETS), exact=False, linear=(0, 2)
    ),
    Case(
        "scatter-add-fixed",
        _scatter(jt.add, _FIXED, batch=0),
        (_X, _TO_EACH),
        grads=1,
        linear=(0,),
    ),
    Case("scatter-add-int", _scatter(jt.add), (_INTEGER, _TO), grads=0),
    Case("scatter-max", _scatter(jt.maximum), (_X, _TO, _TARGETS)),
    Case("scatter-min-all", _scatter(jt.minimum, batch="all"), (_X, _TO_EACH), grads=1),
    Case(
        "scatter-mul-fixed", _scatter(jt.multiply, _FIXED), (_POSITIVE, _TO, _TARGETS)
    ),
    Case("scatter-user-right", _scatter(_MINUS, _RIGHT), (_X, _TO)),
    Case("scatter-logaddexp", _scatter(jt.logaddexp), (_X, _TO, _TARGETS), exact=False),
    Case("scatter-welford", _scatter(jt.welford, _FIXED), (_X, _TO), grads=1),
    Case("scatter-argmax", _scatter(jt.argmax), (_X, _TO), grads=1),
    Case(
        "scatter-unique",
        _scatter(None, unique=True),
        (_X, _TO, _TARGETS),
        linear=(0, 2),
    ),
    Case("shift", lambda x, fill: jt.shift(x, 1, 2, fill), (_X, _FILL), linear=(0, 1)),
    Case("diagonal", _reindex(2, lambda i: (i, 4 - 2 * i)), (_X,), linear=(0,)),
    Case(
        "windows",
        _reindex((2, 3, 3), lambda b, i, j: (b, i + j)),
        (_X,),
        grads=1,
        linear=(0,),
    ),
    Case(
        "windows-fill",
        _reindex((2, 3, 4), lambda b, i, j: (b, i + j - 1)),
        (_X, _FILL),
        grads=1,
        linear=(0, 1),
    ),
    Case("broadcast", lambda x: jt.broadcast(x, (3, 2, 5)), (_X,), linear=(0,)),
    Case("reindex-chain", _chain, (_X, _FILL, _FILL), linear=(0, 1, 2)),
    Case("reindex-general", _general_chain, (_X, _FILL, _FILL), linear=(0, 1, 2)),
]


def _sort(x, payload):
    return jt.sort(x, -1, (payload,), descending=True, return_indices=True)


ORDER = [
    Case("sort", lambda x: jt.sort(x, -1), (_X,)),
    Case("sort-payload", _sort, (_X, _POSITIVE)),
    Case("argsort-int", lambda x: jt.argsort(x, -1), (_INTEGER,), grads=0),
    Case("topk", lambda x, p: jt.topk(x, -1, 3, p), (_X, _POSITIVE)),
    Case(
        "topk-counted",
        lambda x, n: jt.topk(x, -1, 3, largest=False, valid_count=n),
        (_X, Arg("valid_count", (_ROWS,), "integer")),
    ),
]


def _values(name, **params):
    return lambda x: jt.quantize(x, name, out_dtype=jnp.float32, **params)


def _blocks(x):
    q = jt.quantize_blocks(x, "float8_e4m3fn", (1, None), scale_format="float32")
    return q.scales, jt.decode_blocks(*q)


def _scaled(x, s):
    named = dict(scales=s[..., None], out_dtype=jnp.float32)
    return jt.quantize_blocks(x, "float4_e2m1fn", (1, None), **named)


# Straight-through derivatives are no limits of differences: other tests have them.
FORMATS = [
    Case("quantize-values", _values("float8_e5m2", rounding="up"), (_X,), grads=0),
    Case("quantize-codes", lambda x: jt.quantize(x, "int8"), (_X,), grads=0),
    Case("quantize-integers", _values("float8_e4m3fnuz"), (_INTEGER,), grads=0),
    Case("quantize-blocks", _blocks, (_X,), grads=0),
    Case("quantize-scaled", _scaled, (_X, Arg("s", (_ROWS,), "positive")), grads=0),
]

CASES = REDUCE + SCAN + MMA + EXCHANGE + ORDER + FORMATS
