"""Reducers with their oracles and makers of data, for the tests of bits."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile as jt
import oracle

LENGTHS = (1, 2, 3, 5, 7, 8, 42, 127, 128, 129)
STRICT = ("fold_left", "fold_right", "fixed_tree")


def rng_of(*key) -> np.random.Generator:
    """A generator whose seed is the name of the case."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def floats(rng, shape):
    """Standard normals."""
    return rng.standard_normal(shape).astype(np.float32)


def near_one(rng, shape):
    """Factors whose products stay in range."""
    return rng.uniform(0.8, 1.2, shape).astype(np.float32)


def special(rng, shape):
    """Many ties, both zeros, infinities and a few NaNs."""
    values = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, 2], np.float32)
    return rng.choice(values, shape, p=[0.02, 0.06, 0.06, 0.2, 0.2, 0.1, 0.1, 0.26])


def ints(rng, shape):
    """The whole range of int32."""
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def flags(rng, shape):
    """Three true in ten."""
    return rng.random(shape) < 0.3


def int16(rng, shape):
    """Small int16 values."""
    return rng.integers(-300, 300, shape).astype(np.int16)


def _last_valid(a, b):
    (af, ai, ax), (bf, bi, bx) = a, b
    return af | bf, jnp.where(bf, bi, ai), ax + bx


MIXED = jt.Reducer(merge=_last_valid, laws=jt.Laws(True), name="last valid, and a sum")
_MIXED = oracle.Op(lambda a, b: (a[0] | b[0], b[1] if b[0] else a[1], a[2] + b[2]))
# Without its finish, so that whole states are compared.
AFFINE = jt.Reducer(
    merge=jt.affine.merge, identity=jt.affine.identity, laws=jt.affine.laws
)
MINUS = jt.Reducer(merge=lambda a, b: a - b, name="minus")
_TWICE = jt.Reducer(merge=lambda a, b: a * b + b, name="user's a * b + b")
TWICE = oracle.Op(lambda a, b: (a[0] * b[0] + b[0],))

# name: reducer, oracle, makers of the element's leaves, a seed
REDUCERS = {
    "add": (jt.add, oracle.ADD, [floats], (0.5,)),
    "multiply": (jt.multiply, oracle.MULTIPLY, [near_one], (1.25,)),
    "maximum": (jt.maximum, oracle.MAXIMUM, [special], (-1.0,)),
    "minimum": (jt.minimum, oracle.MINIMUM, [special], (1.0,)),
    "maximum_number": (jt.maximum_number, oracle.MAXIMUM_NUMBER, [special], (1.0,)),
    "minimum_number": (jt.minimum_number, oracle.MINIMUM_NUMBER, [special], None),
    "argmax": (jt.argmax, oracle.argmax(), [special], None),
    "argmin": (jt.argmin, oracle.argmin(), [special], None),
    "argmax last": (jt.argmax(ties="last"), oracle.argmax("last"), [special], None),
    "argmin ignore": (
        jt.argmin(nan="ignore"),
        oracle.argmin(nan="ignore"),
        [special],
        None,
    ),
    "int add": (jt.add, oracle.ADD, [ints], None),
    "xor": (jt.bitwise_xor, oracle.XOR, [ints], None),
    "welford": (jt.welford, oracle.WELFORD, [floats], (2.0, 0.5, 1.0, 0.0)),
    "affine": (AFFINE, oracle.AFFINE, [near_one, floats], (0.5, 2.0)),
    "mixed": (MIXED, _MIXED, [flags, int16, floats], None),
    "minus": (MINUS, oracle.SUBTRACT, [floats], (0.5,)),
    "user": (_TWICE, TWICE, [near_one], None),
}


def legal(name: str, policy: str) -> bool:
    """Whether the reducer has the laws that the policy needs."""
    return not (policy == "fixed_tree" and name in ("minus", "user"))


def element(leaves):
    """One array, or a tuple of several."""
    return leaves[0] if len(leaves) == 1 else tuple(map(jnp.asarray, leaves))


def seed_of(name: str):
    """The seed as the oracle takes it: float32 scalars."""
    seed = REDUCERS[name][3]
    return None if seed is None else tuple(np.float32(v) for v in seed)


def init_of(seed, shape):
    """The seed as reduce and scan take it."""
    return None if seed is None else element([jnp.full(shape, v) for v in seed])


def shown(got, want, shape):
    """Result leaves beside the oracle's state leaves; a finish may drop the last ones."""
    leaves = jax.tree.leaves(got)
    return list(zip(leaves, stacked(want, shape)[: len(leaves)], strict=True))


def stacked(states, shape) -> list:
    """The oracle's states, leaf by leaf as arrays."""
    return [np.array(leaf).reshape(shape) for leaf in zip(*states, strict=True)]
