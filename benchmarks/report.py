"""Benchmark results as JSON, a table and a plot; the tables of README.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMAND = "python benchmarks/cpu_reduce_scan.py"
# What README.md shows between its marks.
TABLES = {
    "benchmarks": "cpu.md",
    "gpu benchmarks": "gpu.md",
    "gpu mma": "gpu_mma.md",
    "gpu order": "gpu_order.md",
    "gpu kernels": "gpu_kernels.md",
}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.M)
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def circumstances(command: str = COMMAND) -> dict[str, Any]:
    """Where, when and with what the figures were taken."""
    changed = _git("status", "--porcelain", "--", "jaxtile", "primitives")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "device": _processor(),
        "cores": cores or os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": np.__version__,
        "commit": _git("rev-parse", "HEAD") + ("+changes" if changed else ""),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _shape(result: dict) -> str:
    return "×".join(map(str, result["shape"]))


def line(result: dict) -> str:
    """One result for the terminal."""
    met = "ok" if result["times_baseline"] >= result["target"] else "below"
    return (
        f"{result['case']:<17} {_shape(result):>10} axis {result['axis']}  "
        f"{result['ours']['median_s'] * 1e3:8.2f} ms  "
        f"{result['times_baseline']:6.2f} x {result['baseline']:<17}"
        f"(target {result['target']}: {met})  "
        f"{result['share_of_copy']:4.0%} of copy"
    )


def table(found: dict) -> str:
    """The Markdown table of a result file, with its circumstances in one sentence."""
    rows = [
        "| op | shape | axis | jaxtile, ms | baseline | baseline, ms "
        "| times as fast | share of copy rate |",
        "|---|---|---|--:|---|--:|--:|--:|",
    ]
    for r in found["cases"]:
        rows.append(
            f"| {r['case']} | {_shape(r)} | {r['axis']} "
            f"| {r['ours']['median_s'] * 1e3:.1f} | `{r['baseline']}` "
            f"| {r['theirs']['median_s'] * 1e3:.1f} | {r['times_baseline']:.2f} "
            f"| {r['share_of_copy']:.0%} |"
        )
    compiled, imported = found["compile"], found["import"]
    rows += [
        "",
        f"Tracing and compiling an affine scan of {compiled['length']} steps: "
        f"{compiled['ours']['median_s']:.2f} s; "
        f"`lax.associative_scan`: {compiled['theirs']['median_s']:.2f} s. "
        f"`import jaxtile` adds {imported['ours']['median_s']:.2f} s to `import jax`.",
        "",
        f"float32, medians of {found['rounds']} rounds on {found['device']}, "
        f"{found['cores']} cores, Python {found['python']}, jax {found['jax']}, "
        f"{found['date']}.",
    ]
    return "\n".join(rows) + "\n"


def _plot(cases: Sequence[dict], path: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = [f"{r['case']}, {_shape(r)}, axis {r['axis']}" for r in cases]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.barh(names, [r["times_baseline"] for r in cases], color="tab:blue")
    axes.plot([r["target"] for r in cases], names, "k|", ms=14, label="target")
    axes.axvline(1, color="gray", lw=0.8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as the jax function")
    axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True


def write(cases: Sequence[dict], extra: dict[str, Any], rounds: int) -> None:
    """Write results/cpu.json, cpu.md and, where matplotlib is there, cpu.png."""
    found = {**circumstances(), "rounds": rounds, "cases": list(cases), **extra}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "cpu.md").write_text(table(found))
    print(table(found))
    if not _plot(cases, RESULTS / "cpu.png"):
        print("matplotlib is not installed: no plot", file=sys.stderr)


def marked(text: str, name: str) -> tuple[str, str, str]:
    """README.md before, between and after the marks of a table."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    inside, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"README.md has no marks for {name}")
    return before + start, inside, end + after


def support_block() -> str:
    """The support table as README.md shows it."""
    import jaxtile as jt

    return jt.support_table().strip() + "\n"


def fill_readme() -> None:
    """Put the current support table and benchmark results between their marks."""
    path = ROOT / "README.md"
    text = path.read_text()
    blocks = {"support": support_block()}
    for block, name in TABLES.items():
        if (RESULTS / name).is_file():
            blocks[block] = (RESULTS / name).read_text()
    for name, block in blocks.items():
        before, _, after = marked(text, name)
        text = before + block + after
    path.write_text(text)
