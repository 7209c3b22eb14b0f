"""Time sort, argsort and topk on the CPU beside jax.lax and jax.numpy.

    python benchmarks/cpu_order.py                  # measure, write results/cpu_order.*

As in `cpu_reduce_scan.py`: every answer is checked against NumPy before it is timed, and
ours, theirs and a copy take turns. Compile times are those of a cold cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import report
from cpu_reduce_scan import Case, arguments, compiled, in_turn, spread, timed
from jax import lax

import jaxtile as jt

ROUNDS = 5
SQUARE, FLAT, LINE = (4096, 4096), (4, 65536), (2**24,)
COMPILE = (1 << 20, 128)


def _values(shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _place(x, axis, order):
    return np.argsort(x if order > 0 else -x, axis, kind="stable")


def _sort(shape, axis):
    return Case(
        "sort",
        shape,
        axis,
        _values,
        jt.sort,
        lambda x, axis: lax.sort(x, dimension=axis),
        np.sort,
        "lax.sort",
        4.0,
        2,
    )


def _topk(shape, k):
    return Case(
        f"topk of {k}",
        shape,
        len(shape) - 1,
        _values,
        lambda x, axis: jt.topk(x, axis, k).indices,
        lambda x, axis: lax.top_k(x, k)[1],
        lambda x, axis: np.take(_place(x, axis, -1), range(k), axis),
        "lax.top_k",
        1.5,
        1,
    )


CASES = (
    _sort(SQUARE, 1),
    _sort(SQUARE, 0),
    _sort(LINE, 0),
    Case(
        "argsort",
        SQUARE,
        1,
        _values,
        jt.argsort,
        jnp.argsort,
        lambda x, axis: _place(x, axis, 1),
        "jnp.argsort",
        1.5,
        2,
    ),
    _topk(SQUARE, 8),
    _topk(SQUARE, 64),
    _topk(FLAT, 8),
    _topk(LINE, 64),
)


def compile_times(rounds: int) -> dict[str, Any]:
    """Trace and compile a top-k of a long row, ours and lax.top_k, in turn."""
    n, k = COMPILE
    x = jnp.zeros(n)
    calls: Sequence[Callable] = (lambda x: jt.topk(x, 0, k), lambda x: lax.top_k(x, k))
    seconds = in_turn([lambda f=f: compiled(f, x) for f in calls], rounds)
    mine, other = map(spread, seconds)
    return {"n": n, "k": k, "ours": mine, "theirs": other}


def table(found: dict) -> str:
    """The Markdown table of a result file, with its circumstances in one sentence."""
    rows = [
        "| op | shape | axis | jaxtile, ms | baseline | its ms | times as fast | target |",
        "|---|---|---|--:|---|--:|--:|--:|",
    ]
    for r in found["cases"]:
        rows.append(
            f"| {r['case']} | {'×'.join(map(str, r['shape']))} | {r['axis']} "
            f"| {r['ours']['median_s'] * 1e3:.1f} | `{r['baseline']}` "
            f"| {r['theirs']['median_s'] * 1e3:.1f} | {r['times_baseline']:.2f} "
            f"| {r['target']} |"
        )
    c = found["compile"]
    rows += [
        "",
        f"Tracing and compiling the top {c['k']} of {c['n']}: "
        f"{c['ours']['median_s']:.2f} s; `lax.top_k`: {c['theirs']['median_s']:.2f} s.",
        "",
        f"float32, medians of {found['rounds']} rounds on {found['device']}, "
        f"{found['cores']} cores with a load of {found['load_average']:.1f}, Python "
        f"{found['python']}, jax {found['jax']}, {found['date']}.",
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    options = arguments(__doc__, ROUNDS).parse_args()
    results = timed(CASES, options)
    if options.only:
        return
    found = {
        **report.circumstances("python benchmarks/cpu_order.py"),
        "rounds": options.rounds,
        "cases": results,
        "compile": compile_times(options.rounds),
    }
    report.RESULTS.mkdir(exist_ok=True)
    (report.RESULTS / "cpu_order.json").write_text(json.dumps(found, indent=1) + "\n")
    (report.RESULTS / "cpu_order.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
