"""README.md shows the current support table and the committed benchmark results."""

import re
import sys
from pathlib import Path

import pytest

import jaxtile as jt
import targets

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
REFILL = "run `python benchmarks/cpu_reduce_scan.py --readme`"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import report

    yield report
    del sys.modules["report"]


@pytest.mark.skipif(
    targets.LINE < (0, 11), reason="some kernels need jax 0.11, as the table says"
)
def test_support_table_is_current(report):
    _, shown, _ = report.marked(README.read_text(), "support")
    assert shown.strip() == jt.support_table().strip(), REFILL


def test_benchmark_tables_are_the_committed_ones(report):
    for block, name in report.TABLES.items():
        _, shown, _ = report.marked(README.read_text(), block)
        assert shown == (RESULTS / name).read_text(), f"{name}: {REFILL}"


def test_links_of_the_documents_exist():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} links to {target}"
