"""Time mma on a GPU beside the same expressions under XLA.

    python benchmarks/gpu_mma.py            # measure, write results/gpu_mma.*
    python benchmarks/gpu_mma.py seed       # the cases whose name contains it

Every answer is compared with float64 on a few rows before anything is timed: the error is
the norm of the difference over the norm. Ours and XLA take turns in rotating order; the
figure is the median of the samples.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from gpu_reduce_scan import ROUNDS, Player, _sample
from jax import lax

import jaxtile as jt

BF16, F8 = jnp.bfloat16, jnp.float8_e4m3fn
SQUARE = (8192, 8192, 8192)
_ROWS = 16


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        name: what the table says.
        shape: (m, k, n), or (batch, m, k, n).
        dtype: of the operands.
        ours: the jaxtile call.
        peer: the same under XLA.
        target: times as fast as the peer.
        bound: the largest relative error of ours.
        seeded: there is a float32 seed.
        finish: of the float64 oracle.
        calls: of one sample.
    """

    name: str
    shape: tuple
    dtype: Any
    ours: Callable
    peer: Callable
    target: float
    bound: float
    seeded: bool = False
    finish: Callable = lambda z: z
    calls: int = 10


def _mma(out=None, **params):
    policy = jt.MmaPolicy(**{k: params.pop(k) for k in list(params) if k in _POLICY})

    def fn(*args):
        return jt.mma(*args, policy=policy, out_dtype=out, **params)

    return fn


_POLICY = ("input_precision", "promote_every", "allow_reassociation")


def _dot(a, b, **params):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32, **params)


def _loop(a, b):
    def body(i, z):
        x = lax.dynamic_index_in_dim(a, i, 1)
        return z + x * lax.dynamic_index_in_dim(b, i, 0)

    return lax.fori_loop(0, a.shape[1], body, jnp.zeros((a.shape[0], b.shape[1])))


def _int8(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.int32)


def _gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def cases() -> list[Case]:
    """All comparisons."""
    own = {"implementation": "mosaic_gpu"}
    exact = dict(promote_every=128, **own)
    return [
        Case("seed, bf16 out", SQUARE, BF16, _mma(BF16, **own),
             lambda a, b, c: (_dot(a, b) + c).astype(BF16), 1.03, 3e-3, True),
        Case("seed and gelu, bf16 out", SQUARE, BF16,
             _mma(BF16, epilogue=jax.nn.gelu, **own),
             lambda a, b, c: jax.nn.gelu(_dot(a, b) + c).astype(BF16), 1.03, 3e-3,
             True, _gelu),
        Case("bf16", SQUARE, BF16, _mma(BF16), jnp.matmul, 0.98, 3e-3),
        Case("bf16, this kernel", SQUARE, BF16, _mma(BF16, **own), jnp.matmul, 0.98, 3e-3),
        Case("bf16, batched", (64, 1024, 1024, 1024), BF16, _mma(BF16), jnp.matmul,
             0.95, 3e-3),
        Case("bf16, skinny", (16, 8192, 8192), BF16, _mma(BF16), jnp.matmul, 0.95, 3e-3,
             calls=50),
        Case("bf16, sums promoted every 128", SQUARE, BF16, _mma(BF16, **exact),
             jnp.matmul, 0.78, 3e-3),
        Case("the same, f32 out", SQUARE, BF16, _mma(**exact), _dot, 0.78, 3e-7),
        Case("f32 as bf16x6, promoted, against HIGHEST", SQUARE, jnp.float32,
             _mma(input_precision="bf16x6", **exact),
             lambda a, b: _dot(a, b, precision="highest"), 1.6, 9.5e-7, calls=3),
        Case("e4m3fn, sums promoted every 128", SQUARE, F8, _mma(**exact), _dot, 0.8,
             1e-3),
        Case("int8", SQUARE, jnp.int8, _mma(), _int8, 0.9, 0.0),
        Case("strict order of K", (4096, 512, 4096), jnp.float32,
             _mma(allow_reassociation=False, **own), _loop, 20, 1e-5, calls=3),
    ]  # fmt: skip


def _operand(key, shape, dtype):
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -128, 128, jnp.int8)
    return jax.random.normal(key, shape).astype(dtype)


def _error(case: Case, got, args) -> float:
    """Of the first rows, against float64."""

    def wide(v):
        return np.asarray(v).astype(np.float64)

    a, b, *c = args
    seed = wide(c[0][..., :_ROWS, :]) if c else 0.0
    want = case.finish(wide(a[..., :_ROWS, :]) @ wide(b) + seed)
    found = wide(got[..., :_ROWS, :])
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def measure(case: Case) -> dict[str, Any]:
    """Check, then time one case."""
    *batch, m, k, n = case.shape
    shapes = [(*batch, m, k), (*batch, k, n), (*batch, m, n)][: 2 + case.seeded]
    keys = jax.random.split(jax.random.key(0), 3)
    kinds = (case.dtype, case.dtype, jnp.float32)
    args = tuple(map(_operand, keys, shapes, kinds))
    players = {
        name: Player(jax.jit(fn), args, jax.block_until_ready, case.calls)
        for name, fn in (("ours", case.ours), ("xla", case.peer))
    }
    errors = {name: _error(case, p.fn(*args), args) for name, p in players.items()}
    if not errors["ours"] <= case.bound:
        raise SystemExit(f"{case.name}: error {errors['ours']:.1e} above {case.bound}")
    names = list(players)
    for turn in range(ROUNDS):
        for name in names[turn % 2 :] + names[: turn % 2]:
            p = players[name]
            p.seconds.append(_sample(p.fn, p.args, p.calls, p.wait))
    ours, xla = (statistics.median(p.seconds) for p in players.values())
    return {
        "case": case.name,
        "shape": list(case.shape),
        "ours_s": ours,
        "xla_s": xla,
        "times": xla / ours,
        "target": case.target,
        "error": errors["ours"],
        "xla_error": errors["xla"],
        "flops_per_s": 2 * float(np.prod(case.shape)) / ours,
    }


def _table(found: dict) -> str:
    head = (
        "| mma | shape | ours, ms | XLA, ms | times as fast | target | TFLOP/s | error | "
        "XLA's error |\n|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    rows = [
        f"| {r['case']} | {'×'.join(map(str, r['shape']))} | {r['ours_s'] * 1e3:.3f} | "
        f"{r['xla_s'] * 1e3:.3f} | {r['times']:.2f} | {r['target']} | "
        f"{r['flops_per_s'] / 1e12:.0f} | {r['error']:.1e} | {r['xla_error']:.1e} |"
        for r in found["cases"]
    ]
    where = (
        f"\n\nMedians of {ROUNDS} samples on {found['gpu']}, jax {found['jax']}, "
        f"{found['date']}, commit {found['commit'][:10]}: `{found['command']}`.\n"
    )
    return head + "\n".join(rows) + where


def main() -> None:
    """Measure every case whose name contains the first argument."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    results = []
    for case in cases():
        if wanted not in case.name:
            continue
        r = measure(case)
        results.append(r)
        print(
            f"{r['case']:42s} {r['ours_s'] * 1e3:8.3f} ms {r['times']:6.2f} x XLA "
            f"(target {r['target']})  error {r['error']:.1e}, XLA {r['xla_error']:.1e}",
            flush=True,
        )
    found = {**report.circumstances(), "gpu": jax.devices()[0].device_kind}
    found["command"] = "python benchmarks/gpu_mma.py"
    found = {**found, "rounds": ROUNDS, "cases": results}
    if not wanted:
        (report.RESULTS / "gpu_mma.json").write_text(json.dumps(found, indent=1) + "\n")
        (report.RESULTS / "gpu_mma.md").write_text(_table(found))


if __name__ == "__main__":
    main()
