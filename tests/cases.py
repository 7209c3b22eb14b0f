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
        kind: "normal", "positive", "near_one", "integer" or "mask".
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

CASES = REDUCE + SCAN + ORDER
