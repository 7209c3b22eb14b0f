"""Time reduce, scan and cast on a GPU beside XLA's own ops and PyTorch.

    python benchmarks/gpu_reduce_scan.py            # measure, write results/gpu.*
    python benchmarks/gpu_reduce_scan.py triton     # results/gpu_triton.*
    python benchmarks/gpu_reduce_scan.py mosaic_gpu "scan add"  # some, write nothing

Every answer is compared with the peer's before anything is timed. Ours, the peers and a
copy take turns in one process, in rotating order; a sample is many calls and one wait,
the figure is the median of the samples. The share of copy is the time that the op's
unavoidable bytes need at the rate of `x * 2`, over the op's time.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax import lax

import jaxtile as jt

ROUNDS, CALLS = 7, 20
ROWS = (65536, 4096)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        name: what the table says.
        shapes: of the float32 operands.
        ours: the jaxtile call.
        peers: the same in jax, by name; the first one's answer is compared.
        target: times as fast as the first peer; of sums, as the best one.
        traffic: elements that must move, in multiples of the first operand's bytes.
        torch: the same in PyTorch, or None.
        draw: `(key, shape) -> operand`.
        bound: the largest relative difference of the answers.
        calls: of one sample.
    """

    name: str
    shapes: tuple
    ours: Callable
    peers: dict[str, Callable]
    target: float
    traffic: float
    torch: Callable | None = None
    draw: Callable = jax.random.normal
    bound: float = 1e-4
    calls: int = CALLS


def _reduce(axis, reducer, policy, pick=None):
    def fn(x):
        found = jt.reduce(x, axis, reducer, policy=policy)
        return found if pick is None else pick(found)

    return fn


def _reference_fold(x):
    return jt.reduce(x, 1, jt.add, policy="fold_left", implementation="reference")


def _scan(axis, reducer, policy="ordered_tree", **params):
    return lambda x: jt.scan(x, axis, reducer, policy=policy, **params)


def _narrow_normal(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def _narrow_cumsum(x):
    return jnp.cumsum(x.astype(jnp.float32), 1).astype(jnp.bfloat16)


def _index(found):
    return found[1]


def _variance(found):
    return found.variance()


def _associative(a, b):
    def merge(p, q):
        return p[0] * q[0], q[0] * p[1] + q[1]

    return lax.associative_scan(merge, (a, b), axis=1)[1]


def _gradient(fn):
    return jax.grad(lambda a, b: jnp.sum(jnp.square(fn(a, b))), (0, 1))


def _recurrence(a, b):
    return jt.linear_recurrence(a, b, 1)


def _loop(x):
    def body(i, total):
        return total + lax.dynamic_index_in_dim(x, i, 1, keepdims=False)

    return lax.fori_loop(0, x.shape[1], body, jnp.zeros(x.shape[0], x.dtype))


def _reductions() -> list[Case]:
    cases = []
    for label, axis in (("rows", 1), ("axis 0", 0), ("all", (0, 1))):
        xla = {"jnp.sum": lambda x, axis=axis: jnp.sum(x, axis)}

        def torch(x, axis=axis):
            return x.sum(axis)

        for policy in ("unordered_tree", "fixed_tree"):
            fn = _reduce(axis, jt.add, policy)
            name = f"reduce add, {label}, {policy}"
            cases.append(Case(name, (ROWS,), fn, xla, 0.98, 1, torch))
    tree, fixed = "ordered_tree", "fixed_tree"
    var = {"jnp.var": lambda x: jnp.var(x, 1)}
    arg = {"jnp.argmax": lambda x: jnp.argmax(x, 1)}
    lse = {"logsumexp": lambda x: jax.nn.logsumexp(x, 1)}
    for policy in (tree, fixed):
        cases += [
            Case(f"reduce welford, rows, {policy}", (ROWS,),
                 _reduce(1, jt.welford, policy, _variance), var, 0.97, 1),
            Case(f"reduce argmax, rows, {policy}", (ROWS,),
                 _reduce(1, jt.argmax, policy, _index), arg, 0.97, 1),
            Case(f"reduce logaddexp, rows, {policy}", (ROWS,),
                 _reduce(1, jt.logaddexp, policy), lse, 1.8, 1),
        ]  # fmt: skip
    loop = {"fori_loop": _loop, "reference": _reference_fold}
    fold = _reduce(1, jt.add, "fold_left")
    cases.append(Case("reduce add, rows, fold_left", (ROWS,), fold, loop, 100, 1))
    return cases


def _scans() -> list[Case]:
    long, line = (1024, 262144), (2**28,)

    def cumsum(axis):
        return {"jnp.cumsum": lambda x: jnp.cumsum(x, axis)}

    def torch(axis):
        return lambda x: x.cumsum(axis)

    top = {"lax.cummax": lambda x: lax.cummax(x, 1)}
    lse = {"lax.cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1)}
    wide: dict[str, Any] = dict(bound=1e-2)
    found = [
        Case("scan add, rows", (ROWS,), _scan(1, jt.add), cumsum(1), 3.0, 2, torch(1),
             **wide),
        Case("scan add, rows, fixed_tree", (ROWS,), _scan(1, jt.add, "fixed_tree"),
             cumsum(1), 2.0, 2, **wide),
        Case("scan add, long rows", (long,), _scan(1, jt.add), cumsum(1), 2.8, 2,
             torch(1), **wide),
        Case("scan add, axis 0", (ROWS,), _scan(0, jt.add), cumsum(0), 2.1, 2, **wide),
        Case("scan add, 1-D", (line,), _scan(0, jt.add), cumsum(0), 2.1, 2, torch(0),
             **wide),
        Case("scan add, rows, bf16", (ROWS,), _scan(1, jt.add, out_dtype=jnp.bfloat16),
             {"jnp.cumsum": _narrow_cumsum}, 3.0, 2, draw=_narrow_normal, bound=1e-2),
        Case("scan maximum, rows", (ROWS,), _scan(1, jt.maximum), top, 3.0, 2),
        Case("scan logaddexp, rows", (ROWS,), _scan(1, jt.logaddexp), lse, 3.0, 2,
             calls=5),
    ]  # fmt: skip
    shape = (8, 4096, 2048)
    both = {"associative_scan": _associative}
    slope = {"associative_scan": _gradient(_associative)}
    decay: dict[str, Any] = dict(
        draw=lambda key, s: jax.random.uniform(key, s, minval=-1.0)
    )
    found += [
        Case("linear_recurrence", (shape, shape), _recurrence, both, 3.0, 3, **decay),
        Case("its gradient", (shape, shape), _gradient(_recurrence), slope, 2.5, 6,
             **decay, bound=1e-3),
    ]  # fmt: skip
    return found


def _casts() -> list[Case]:
    def there_and_back(x):
        return jt.cast(jt.cast(x, jnp.bfloat16), jnp.float32)

    def keep(x):
        return lax.reduce_precision(x, 8, 7)

    def narrow(x):
        return jt.cast(x, jnp.bfloat16)

    return [
        Case("cast f32 to bf16", (ROWS,), narrow,
             {"astype": lambda x: x.astype(jnp.bfloat16)}, 0.95, 1.5),
        Case("cast f32 to bf16 and back", (ROWS,), there_and_back,
             {"reduce_precision": keep}, 0.95, 2),
    ]  # fmt: skip


def _check(case: Case, got, want) -> None:
    """The two answers agree within the case's bound of the larger magnitude."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            same = bool(jnp.all(a == b))
            worst = 0.0 if same else float("inf")
        else:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            scale = jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)
            worst = float(jnp.max(jnp.abs(a - b)) / scale)
        if not worst <= case.bound:
            raise SystemExit(f"{case.name}: the answers differ by {worst:.1e}")


def _sample(fn, args, calls, wait) -> float:
    start, out = time.perf_counter(), None
    for _ in range(calls):
        out = fn(*args)
    wait(out)
    return (time.perf_counter() - start) / calls


@dataclass
class Player:
    """One that takes turns."""

    fn: Callable
    args: tuple
    wait: Callable
    calls: int
    seconds: list = field(default_factory=list)


def _torch_player(case, args):
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    if case.torch is None:
        return None
    moved = tuple(torch.from_dlpack(a) for a in args)
    return Player(case.torch, moved, lambda out: torch.cuda.synchronize(), case.calls)


def measure(case: Case, implementation: str | None) -> dict[str, Any]:
    """Check, then time one case; a cast is always XLA's own conversion, guarded."""
    keys = jax.random.split(jax.random.key(0), len(case.shapes))
    args = tuple(case.draw(k, s) for k, s in zip(keys, case.shapes, strict=True))
    wait = jax.block_until_ready
    with jt.use_implementation(implementation):
        ours = jax.jit(case.ours).lower(*args).compile()
    players = {"ours": Player(ours, args, wait, case.calls)}
    for name, fn in case.peers.items():
        players[name] = Player(jax.jit(fn), args, wait, case.calls)
    players["copy"] = Player(jax.jit(lambda x: x * 2), args[:1], wait, case.calls)
    _check(case, *(players[k].fn(*args) for k in ("ours", next(iter(case.peers)))))
    extra = _torch_player(case, args)
    if extra is not None:
        players["torch"] = extra
        extra.wait(extra.fn(*extra.args))
    names = list(players)
    for turn in range(ROUNDS):
        for k in range(len(names)):
            p = players[names[(turn + k) % len(names)]]
            if turn == 0:
                p.wait(p.fn(*p.args))
            p.seconds.append(_sample(p.fn, p.args, p.calls, p.wait))
    return _result(case, {k: statistics.median(p.seconds) for k, p in players.items()})


def _result(case, medians):
    ours, copy = medians.pop("ours"), medians.pop("copy")
    best = min(medians, key=medians.__getitem__)
    size = float(np.prod(case.shapes[0]))
    return {
        "case": case.name,
        "shape": list(case.shapes[0]),
        "ours_s": ours,
        "copy_s": copy,
        "peers_s": medians,
        "best_peer": best,
        "times_best": medians[best] / ours,
        "times_first": medians[next(iter(medians))] / ours,
        "target": case.target,
        "share_of_copy": case.traffic / 2 * copy / ours,
        "elements_per_s": size / ours,
    }


def _table(found: dict) -> str:
    head = (
        "| op | shape | ours, ms | best peer | its ms | times as fast | as XLA | target "
        "| share of copy rate |\n|---|---|--:|---|--:|--:|--:|--:|--:|\n"
    )
    rows = []
    for r in found["cases"]:
        shape = "×".join(map(str, r["shape"]))
        peer = r["peers_s"][r["best_peer"]] * 1e3
        rows.append(
            f"| {r['case']} | {shape} | {r['ours_s'] * 1e3:.3f} | `{r['best_peer']}` | "
            f"{peer:.3f} | {r['times_best']:.2f} | {r['times_first']:.2f} | "
            f"{r['target']} | "
            f"{r['share_of_copy']:.0%} |"
        )
    where = (
        f"\n\nfloat32 unless it says bf16, medians of {ROUNDS} samples on {found['gpu']}, "
        f"jax {found['jax']}, "
        f"{found['date']}, commit {found['commit'][:10]}: `{found['command']}`.\n"
    )
    return head + "\n".join(rows) + where


def main() -> None:
    """Measure an implementation's cases whose name contains the second argument."""
    implementation, wanted = (*sys.argv[1:], *("mosaic_gpu", "")[len(sys.argv) - 1 :])
    results = []
    for case in [*_reductions(), *_scans(), *_casts()]:
        if wanted not in case.name:
            continue
        own = None if case.name.startswith("cast") else implementation
        found = measure(case, own)
        results.append(found)
        print(
            f"{case.name:34s} {found['ours_s'] * 1e3:8.3f} ms  "
            f"{found['times_best']:7.2f} x {found['best_peer']:17s} "
            f"{found['times_first']:7.2f} x XLA "
            f"(target {case.target})  {found['share_of_copy']:.0%} of copy",
            flush=True,
        )
        gc.collect()
    found = {**report.circumstances(), "gpu": jax.devices()[0].device_kind}
    found["command"] = f"python benchmarks/gpu_reduce_scan.py {implementation}"
    found = {**found, "rounds": ROUNDS, "calls": CALLS, "cases": results}
    if not wanted:
        name = "gpu" if implementation == "mosaic_gpu" else f"gpu_{implementation}"
        (report.RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        (report.RESULTS / f"{name}.md").write_text(_table(found))


if __name__ == "__main__":
    main()
