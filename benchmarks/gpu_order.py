"""Time sort, argsort, topk and the exchange ops on a GPU beside jax and PyTorch.

    python benchmarks/gpu_order.py            # measure, write results/gpu_order.*
    python benchmarks/gpu_order.py sort       # the cases whose name contains it

As benchmarks/gpu_reduce_scan.py; every answer equals jax's before anything is timed.
"""

from __future__ import annotations

import gc
import json
import sys

import jax
import jax.numpy as jnp
import report
from gpu_reduce_scan import ROUNDS, Case, _table, measure
from jax import lax

import jaxtile as jt

ROWS = (65536, 1024)


def _top(k):
    return lambda x: tuple(jt.topk(x, x.ndim - 1, k))


def _lax_top(k):
    return lambda x: tuple(lax.top_k(x, k))


def _torch(name, **params):
    def fn(x):
        import torch  # pyright: ignore[reportMissingImports]

        return getattr(torch, name)(x, **params)

    return fn


def _argsort(x):
    return lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), num_keys=1)[1]


def cases() -> list[Case]:
    """All comparisons."""
    found = []
    for shape, k in [
        ((4096, 32768), 8), ((4096, 32768), 64), ((128, 131072), 64), ((1, 2**24), 64),
        (ROWS, 8),
    ]:  # fmt: skip
        peers = {"lax.top_k": _lax_top(k)}
        found.append(
            Case(f"topk {k}", (shape,), _top(k), peers, 2.5, 1, _torch("topk", k=k),
                 bound=0.0)
        )  # fmt: skip
    for shape, target in ((ROWS, 4.0), ((1024, 65536), 1.3), ((2**26,), 0.95)):
        axis = len(shape) - 1
        found.append(
            Case("sort", (shape,), lambda x, axis=axis: jt.sort(x, axis),
                 {"lax.sort": lambda x: lax.sort(x, is_stable=False)}, target, 2,
                 _torch("sort"), bound=0.0, calls=5)
        )  # fmt: skip
    found.append(
        Case("argsort", (ROWS,), lambda x: jt.argsort(x, 1), {"lax.sort": _argsort}, 2.2,
             2, _torch("argsort", stable=True), bound=0.0, calls=5)
    )  # fmt: skip
    index = jax.random.randint(jax.random.key(3), (65536, 4096), 0, 4096)
    found.append(
        Case("gather along rows", ((65536, 4096),),
             lambda x: jt.gather(x, index, 1, batch="all"),
             {"take_along_axis": lambda x: jnp.take_along_axis(x, index, 1)}, 1.6, 3,
             bound=0.0, calls=5)
    )  # fmt: skip
    ids = jnp.sort(jax.random.randint(jax.random.key(4), (2**26,), 0, 2**16))
    found.append(
        Case("segment_reduce add, sorted", ((2**26,),),
             lambda x: jt.segment_reduce(x, ids, 2**16, jt.add, is_sorted=True),
             {"segment_sum": lambda x: jax.ops.segment_sum(
                 x, ids, 2**16, indices_are_sorted=True)}, 1.0, 2, bound=1e-4, calls=5)
    )  # fmt: skip
    return found


def run(name: str, every: list[Case]) -> None:
    """Measure every case whose name contains the first argument; write them if all.

    Args:
        name: of the script and its results.
        every: all cases.
    """
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    results = []
    for case in every:
        if wanted not in case.name:
            continue
        found = measure(case, None)
        results.append(found)
        print(
            f"{case.name:28s} {case.shapes[0]!s:16s} {found['ours_s'] * 1e3:8.3f} ms  "
            f"{found['times_best']:6.2f} x {found['best_peer']:16s} "
            f"{found['times_first']:6.2f} x the first (target {case.target})  "
            f"{found['share_of_copy']:.0%} of copy",
            flush=True,
        )
        gc.collect()
    found = {**report.circumstances(), "gpu": jax.devices()[0].device_kind}
    found["command"] = f"python benchmarks/{name}.py"
    found = {**found, "rounds": ROUNDS, "cases": results}
    if not wanted:
        (report.RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        (report.RESULTS / f"{name}.md").write_text(_table(found))


if __name__ == "__main__":
    run("gpu_order", cases())
