"""The notebooks run, and what is committed of them is their output; the demo runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.notebook

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 120  # of one cell; a whole notebook takes less than 60 on a quiet machine

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _read(path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_notebooks_are_found():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@each_notebook
def test_notebook_runs(path):
    from nbclient import NotebookClient

    notebook, _ = _read(path)
    where = {"metadata": {"path": str(ROOT)}}
    # A failing cell raises CellExecutionError, which shows the cell and its traceback.
    NotebookClient(notebook, timeout=SECONDS, resources=where).execute()


@each_notebook
def test_notebook_is_committed_executed_in_order(path):
    _, code = _read(path)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}


@each_notebook
def test_first_cell_only_imports(path):
    _, code = _read(path)
    assert all(
        isinstance(node, ast.Import | ast.ImportFrom)
        for node in ast.parse(code[0].source).body
    )


@each_notebook
def test_notebook_names_no_machine(path):
    text = path.read_text()
    found = re.search(r"/(home|root|tmp|work|usr|opt|Users)/|site-packages", text)
    assert found is None, f"a machine's path: {text[found.start() - 40 : found.end()]}"


@each_notebook
def test_notebook_asserts_its_claims(path):
    _, code = _read(path)
    assert sum("assert " in cell.source for cell in code) >= len(code) // 2


def test_the_demo_finds_all_that_it_claims():
    found = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
