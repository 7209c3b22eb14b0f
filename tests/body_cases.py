"""Calls of the kernels of `bodies` and of `jaxtile.nn`, each with a NumPy oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bodies
import layers
from jaxtile import _kernels, _recurrence


def _recurred(x, decay, gate, rate):
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
    x = jnp.asarray(3 * bodies.RNG.standard_normal(shape) + 1, dtype)
    w, b = (jnp.asarray(bodies.RNG.standard_normal(n), dtype) for _ in range(2))
    rtol = 1e-5 if dtype == np.float32 else 8e-3
    kernel, args, oracle = {
        "softmax": (_kernels.softmax, (x,), layers.softmax),
        "layer_norm": (_kernels.layer_norm, (x, w, b), layers.layer_norm),
        "rms_norm": (_kernels.rms_norm, (x, w), layers.rms_norm),
    }[name]
    eps = {"layer_norm": {"eps": 1e-5}, "rms_norm": {"eps": 1e-6}}.get(name, {})
    return Case(kernel, args, oracle, {**config, **eps}, False, rtol)


def _across(shape, reducer="add", policy="fixed_tree", kernel=bodies.across, **config):
    oracle = {"add": np.sum, "mean": np.mean}.get(reducer, np.max)
    axis = 1 if kernel is bodies.across else 0
    args = (bodies.floats(*shape),)
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

    x = bodies.floats(*shape) if dtype == np.float32 else bodies.integers(*shape)
    config = dict(policy=policy, axis=axis, block=block, **options)
    same = policy not in ("ordered_tree", "unordered_tree") or dtype != np.float32
    return Case(bodies.prefixes, (x,), oracle, config, same)


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
        ("softmax", (3, 300), np.float32, {"block": 2, "width": 128}),
        ("layer_norm", (2, 300), np.float32, {"block": 1, "width": 128}),
        ("rms_norm", (2, 300), jnp.bfloat16, {"block": 1, "width": 128}),
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
    "sum of columns": _across((37, 21), kernel=bodies.down),
    "fold of columns": _across(
        (30, 70), kernel=bodies.down, policy="fold_left", block=32
    ),
    "tree of planes": Case(
        bodies.planes,
        (bodies.floats(3, 5, 12),),
        lambda x: x.sum((1, 2)),
        {"policy": "fixed_tree"},
    ),
    "fold of planes": Case(
        bodies.planes,
        (bodies.floats(2, 5, 12),),
        lambda x: x.sum((1, 2)),
        {"policy": "fold_left"},
    ),
    "places": Case(
        bodies.places, (bodies.floats(6, 99),), lambda x: x.argmax(1), {"block": 4}
    ),
    "prefixes": _prefixes((9, 51), "fixed_tree"),
    "prefixes of long rows": _prefixes((2, 600), "fixed_tree", block=1),
    "prefixes by a fold": _prefixes((5, 45), "fold_left"),
    "exclusive prefixes": _prefixes((5, 45), "fixed_tree", exclusive=True),
    "prefixes from behind": _prefixes((5, 45), "fixed_tree", **_BACK),
    "prefixes of integers": _prefixes((6, 45), "ordered_tree", np.int32, **_BACK),
    "prefixes up": _prefixes((40, 9), "fixed_tree", axis=0, exclusive=True, **_BACK),
    "prefixes down": _prefixes((21, 45), "ordered_tree", axis=0, block=16),
    "prefixes in blocks": Case(
        bodies.streamed,
        (bodies.floats(5, 45),),
        lambda x: np.cumsum(x, 1),
        {"block": 4, "along": 16},
        False,
    ),
    "sums in blocks": Case(
        bodies.summed,
        (bodies.floats(5, 45),),
        lambda x: x.sum(1),
        {"block": 4, "along": 16},
        False,
    ),
    "blocks between ends": Case(
        bodies.between,
        (bodies.floats(5, 45), jnp.array([45, 3, 17, 0, 40], jnp.int32)),
        lambda x, ends: bodies.between_oracle(x, ends, 8),
        {"block": 8},
        False,
    ),
    "suffixes in blocks": Case(
        bodies.suffixes,
        (bodies.floats(5, 45),),
        bodies.suffixes_oracle,
        {"block": 4, "along": 16},
        False,
    ),
    "halved": Case(
        bodies.halved,
        (bodies.floats(5, 45),),
        lambda x: bodies.halved_oracle(x, 2),
        {"block": 2},
        False,
    ),
    "recurrence": Case(
        _recurrence.recurrence,
        (
            bodies.floats(2, 21, 6),
            bodies.floats(2, 21, 6) / 99,
            bodies.floats(2, 21, 6) / 99,
            bodies.floats(6) / 99,
        ),
        _recurred,
        {"block": 8, "lanes": 4},
        False,
    ),
    "mixed": Case(
        bodies.mixed,
        (bodies.floats(2, 5, 12), bodies.floats(12)),
        bodies.mixed_oracle,
        {"block": 4},
    ),
    "centred": Case(
        bodies.centred,
        (bodies.floats(7, 37), bodies.floats(7, 37) > 0),
        bodies.centred_oracle,
        {"block": 3},
    ),
    "scaled": Case(
        bodies.scaled,
        (bodies.floats(37), jnp.float32(3)),
        lambda x, s: ((x * s).sum(), x * s),
    ),
    "coded": Case(
        bodies.coded, (bodies.floats(75),), bodies.coded_oracle, {"block": 32}
    ),
    "decoded": Case(
        bodies.decoded,
        (bodies.floats(75).astype(jnp.float8_e4m3fn),),
        lambda x: x,
        {"block": 32},
    ),
    "turned": Case(
        bodies.turned, (bodies.floats(13, 35),), lambda x: x.T, {"block": 8}
    ),
    "turned integers": Case(
        bodies.turned, (bodies.integers(12, 64),), lambda x: x.T, {"block": 32}
    ),
    "outer": Case(
        bodies.outer, (bodies.floats(13), bodies.floats(35)), np.outer, {"block": 8}
    ),
    "smoothed": Case(
        bodies.smoothed, (bodies.floats(7, 21),), bodies.smoothed_oracle, {"block": 5}
    ),
}
CASES = {**ROWS, **OTHERS}


def function(name, dtype):
    """A call of `mapped`."""
    fn, oracle = bodies.FUNCTIONS[name]
    x = jnp.asarray(np.linspace(-4.1, 4.3, 97), dtype)
    rtol = 2e-6 if dtype == np.float32 else 8e-3
    return Case(bodies.mapped, (x,), oracle, {"fn": fn}, False, rtol)
