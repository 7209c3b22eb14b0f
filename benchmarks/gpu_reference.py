"""The reference under jit on a GPU beside jax's own forms.

Checks each result first, runs both in turn, and prints the median times and the share of
the measured copy rate. No kernel of ours runs here: it shows what `implementation=None`
gives on a platform without whole-array kernels.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxtile as jt

ROWS, COLS = 16384, 4096


def _cases(x, p):
    flat = x.reshape(-1)
    return [
        (
            "scan add axis 1",
            lambda v: jt.scan(v, 1, jt.add),
            lambda v: jnp.cumsum(v, 1),
            x,
        ),
        (
            "scan add axis 0",
            lambda v: jt.scan(v, 0, jt.add),
            lambda v: jnp.cumsum(v, 0),
            x,
        ),
        ("scan add 1-D", lambda v: jt.scan(v, 0, jt.add), jnp.cumsum, flat),
        (
            "scan max axis 1",
            lambda v: jt.scan(v, 1, jt.maximum),
            lambda v: lax.cummax(v, 1),
            x,
        ),
        (
            "scan mul axis 1",
            lambda v: jt.scan(v, 1, jt.multiply),
            lambda v: jnp.cumprod(v, 1),
            p,
        ),
        (
            "scan logaddexp axis 1",
            lambda v: jt.scan(v, 1, jt.logaddexp),
            lambda v: lax.cumlogsumexp(v, 1),
            x,
        ),
        (
            "reduce add axis 1",
            lambda v: jt.reduce(v, 1, jt.add),
            lambda v: jnp.sum(v, 1),
            x,
        ),
        (
            "reduce add axis 0",
            lambda v: jt.reduce(v, 0, jt.add),
            lambda v: jnp.sum(v, 0),
            x,
        ),
        (
            "reduce max axis 1",
            lambda v: jt.reduce(v, 1, jt.maximum),
            lambda v: jnp.max(v, 1),
            x,
        ),
        (
            "reduce argmax axis 1",
            lambda v: jt.reduce(v, 1, jt.argmax)[1],
            lambda v: jnp.argmax(v, 1),
            x,
        ),
        (
            "reduce logaddexp axis 1",
            lambda v: jt.reduce(v, 1, jt.logaddexp),
            lambda v: jax.nn.logsumexp(v, 1),
            x,
        ),
        (
            "reduce welford axis 1",
            lambda v: jt.reduce(v, 1, jt.welford).variance(),
            lambda v: jnp.var(v, 1),
            x,
        ),
    ]


def _time(fn, x, repeat=5):
    start = time.perf_counter()
    jax.block_until_ready([fn(x) for _ in range(repeat)])
    return (time.perf_counter() - start) / repeat * 1e3


def _measure(ours, theirs, x, rounds=7):
    a, b = [], []
    for _ in range(rounds):
        a.append(_time(ours, x))
        b.append(_time(theirs, x))
    return statistics.median(a), statistics.median(b)


def main() -> int:
    """Print the table, write it as JSON to the path given, and fail on a wrong result."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((ROWS, COLS)), jnp.float32)
    p = jnp.exp(x * 1e-3)
    copy, _ = _measure(jax.jit(lambda v: v + 1), jax.jit(lambda v: v * 2), x)
    bad, rows = 0, []
    for name, ours, theirs, arg in _cases(x, p):
        ours, theirs = jax.jit(ours), jax.jit(theirs)
        got, want = (
            np.asarray(ours(arg), np.float64),
            np.asarray(theirs(arg), np.float64),
        )
        wide = 64 * np.finfo(np.float32).eps * np.abs(want).max() * np.log2(arg.size)
        close = np.abs(got - want).max() <= wide
        bad += not close
        a, b = _measure(ours, theirs, arg)
        rows.append(
            {
                "case": name,
                "ours_ms": a,
                "jax_ms": b,
                "ratio": b / a,
                "right": bool(close),
            }
        )
        print(
            f"{name:26s} ours {a:8.3f} ms  jax {b:8.3f} ms  {b / a:6.2f}x  {close}",
            flush=True,
        )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit,
        "shape": [ROWS, COLS],
        "copy_ms": copy,
        "command": "python benchmarks/gpu_reference.py",
        "rows": rows,
    }
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
