"""Time reduce and scan on the CPU beside jax.numpy and jax.lax.

    python benchmarks/cpu_reduce_scan.py            # measure, write results/cpu.*
    python benchmarks/cpu_reduce_scan.py --readme   # put the results into README.md

Every function's answer is checked before it is timed. Ours, theirs and a copy of the
same array take turns, in rotating order, within one process; the figures are medians.
The share of copy is the traffic that an op cannot avoid (a scan reads and writes its
array, a reduction reads it) over its time, as a part of the rate at which `x + z` moves
bytes. That copy writes a new array, which costs more than reading one: a reduction may
exceed 100 %.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax import lax

import jaxtile as jt

ROUNDS = 7
SQUARE, LINE = (4096, 4096), (2**24,)
COMPILE_LENGTH = 16384


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        name: what the tables say.
        shape, axis: of the float32 operand, and where it is reduced or scanned.
        data: draws the operand.
        ours, theirs: `(x, axis) -> array`; argmax gives the index.
        oracle: the same in NumPy, on float64.
        baseline: the name of `theirs`.
        target: the speed to reach, as a multiple of theirs.
        traffic: arrays of the operand's size that must move.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    data: Callable
    ours: Callable
    theirs: Callable
    oracle: Callable
    baseline: str
    target: float
    traffic: int


def _normal(shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _near_one(shape):
    return np.exp(_normal(shape) / 64)


def _scan_with(reducer):
    return lambda x, axis: jt.scan(x, axis, reducer)


def _reduce_with(reducer):
    return lambda x, axis: jt.reduce(x, axis, reducer)


def _argmax(x, axis):
    return jt.reduce(x, axis, jt.argmax)[1]


def _logsumexp(x, axis):
    return np.logaddexp.reduce(x, axis)


def _scan(name, shape, axis, reducer, theirs, oracle, baseline, target, data=_normal):
    ours = _scan_with(reducer)
    return Case(
        f"scan {name}", shape, axis, data, ours, theirs, oracle, baseline, target, 2
    )


def _reduction(name, ours, theirs, oracle, baseline):
    return Case(
        f"reduce {name}",
        SQUARE,
        1,
        _normal,
        ours,
        theirs,
        oracle,
        baseline,
        target=0.9,
        traffic=1,
    )


CASES = (
    _scan("add", SQUARE, 1, jt.add, jnp.cumsum, np.cumsum, "jnp.cumsum", 2.5),
    _scan("add", SQUARE, 0, jt.add, jnp.cumsum, np.cumsum, "jnp.cumsum", 2.5),
    _scan("add", LINE, 0, jt.add, jnp.cumsum, np.cumsum, "jnp.cumsum", 2.5),
    _scan(
        "maximum",
        SQUARE,
        1,
        jt.maximum,
        lax.cummax,
        np.maximum.accumulate,
        "lax.cummax",
        2.0,
    ),
    _scan(
        "multiply",
        SQUARE,
        1,
        jt.multiply,
        jnp.cumprod,
        np.cumprod,
        "jnp.cumprod",
        2.0,
        _near_one,
    ),
    _scan(
        "logaddexp",
        SQUARE,
        1,
        jt.logaddexp,
        lax.cumlogsumexp,
        np.logaddexp.accumulate,
        "lax.cumlogsumexp",
        2.0,
    ),
    _reduction("add", _reduce_with(jt.add), jnp.sum, np.sum, "jnp.sum"),
    _reduction("maximum", _reduce_with(jt.maximum), jnp.max, np.max, "jnp.max"),
    _reduction("argmax", _argmax, jnp.argmax, np.argmax, "jnp.argmax"),
    _reduction(
        "logaddexp",
        _reduce_with(jt.logaddexp),
        jax.nn.logsumexp,
        _logsumexp,
        "jax.nn.logsumexp",
    ),
)


def wrong(case: Case, x: np.ndarray, got: jax.Array) -> str | None:
    """Why an answer is not the oracle's within rounding, or None.

    A sum of n terms may be off by its depth times the sum of magnitudes; the bound is
    sqrt(n) times the accumulated magnitude, in units of float32's epsilon.
    """
    want = case.oracle(x.astype(np.float64), case.axis)
    if want.shape != got.shape:
        return f"shape {got.shape} instead of {want.shape}"
    if np.issubdtype(got.dtype, np.integer):
        return None if np.array_equal(want, got) else "other indices"
    n = x.shape[case.axis]
    scale = np.maximum(np.abs(want), 1)
    if case.oracle in (np.cumsum, np.sum):
        scale = np.maximum(scale, n)
    off = float(np.max(np.abs(np.asarray(got, np.float64) - want) / scale))
    bound = np.finfo(np.float32).eps * max(n**0.5, 16)
    return None if off <= bound else f"off by {off:.2e}, bound {bound:.2e}"


def in_turn(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of each call, one list a call; who goes first rotates."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for k in range(len(calls)):
            which = (turn + k) % len(calls)
            start = time.perf_counter()
            calls[which]()
            seconds[which].append(time.perf_counter() - start)
    return seconds


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and extremes of some timings."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return {"median_s": middle, "min_s": low, "max_s": high}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Check, then time one case."""
    host = case.data(case.shape)
    x, zero = jnp.asarray(host), jnp.float32(0)
    ours = jax.jit(lambda v: case.ours(v, case.axis))
    theirs = jax.jit(lambda v: case.theirs(v, axis=case.axis))
    # The zero is an argument: a constant one would be simplified away.
    copy = jax.jit(lambda v, z: v + z)
    for who, answer in (("jaxtile", ours(x)), (case.baseline, theirs(x))):
        reason = wrong(case, host, answer)
        if reason is not None:
            where = f"{case.name} {case.shape} axis {case.axis}"
            raise SystemExit(f"{where}, {who}: {reason}")
    copy(x, zero).block_until_ready()
    calls = [
        lambda: ours(x).block_until_ready(),
        lambda: theirs(x).block_until_ready(),
        lambda: copy(x, zero).block_until_ready(),
    ]
    mine, other, moved = map(spread, in_turn(calls, rounds))
    rate = 2 * host.nbytes / moved["median_s"]
    return {
        "case": case.name,
        "shape": list(case.shape),
        "axis": case.axis,
        "baseline": case.baseline,
        "ours": mine,
        "theirs": other,
        "copy": moved,
        "times_baseline": other["median_s"] / mine["median_s"],
        "target": case.target,
        "share_of_copy": case.traffic * host.nbytes / mine["median_s"] / rate,
    }


def _affine_pair(x, y):
    return y[0] * x[0], y[0] * x[1] + y[1]


def compiled(fn: Callable, *args: Any) -> float:
    """Seconds to trace and compile a function with a cold cache."""
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(fn).lower(*args).compile()
    return time.perf_counter() - start


def compile_time(rounds: int) -> dict[str, Any]:
    """Trace and compile an affine scan, ours and lax.associative_scan, in turn."""
    a, b = jnp.full(COMPILE_LENGTH, 0.5), jnp.ones(COMPILE_LENGTH)

    def ours(a, b):
        return jt.scan((a, b), 0, jt.affine)

    def theirs(a, b):
        return lax.associative_scan(_affine_pair, (a, b))[1]

    if not jnp.allclose(ours(a, b), theirs(a, b)):
        raise SystemExit("affine scan: jaxtile and lax.associative_scan differ")
    calls = [lambda: compiled(ours, a, b), lambda: compiled(theirs, a, b)]
    mine, other = map(spread, in_turn(calls, rounds))
    return {"length": COMPILE_LENGTH, "ours": mine, "theirs": other, "target_s": 0.6}


def import_time(rounds: int) -> dict[str, Any]:
    """What `import jaxtile` adds to `import jax`, each time in a new interpreter."""
    script = (
        "import time, jax; start = time.perf_counter(); import jaxtile; "
        "print(time.perf_counter() - start)"
    )
    root = Path(__file__).resolve().parents[1]
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", script],
                cwd=root,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(rounds)
    ]
    return {"ours": spread(seconds), "target_s": 0.7}


def arguments(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """What a script that times cases on the CPU takes, by its docstring and its rounds."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=rounds, help="timings of each call")
    add("--only", default="", help="time only cases whose name contains this; no files")
    return parser


def timed(cases: Sequence[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of the cases that are asked for, each printed when it is there."""
    jax.config.update("jax_platforms", "cpu")
    results = []
    for case in cases:
        if options.only in case.name:
            results.append(measure(case, options.rounds))
            print(report.line(results[-1]), flush=True)
    return results


def main() -> None:
    parser = arguments(__doc__, ROUNDS)
    parser.add_argument(
        "--readme", action="store_true", help="refill the tables of README.md"
    )
    options = parser.parse_args()
    if options.readme:
        report.fill_readme()
        return
    results = timed(CASES, options)
    if options.only:
        return
    extra = {"compile": compile_time(5), "import": import_time(5)}
    report.write(results, extra, options.rounds)


if __name__ == "__main__":
    main()
