"""The house's rules that a reader relies on."""

import ast
import re
from pathlib import Path

import pytest

from jaxtile import primitives
from jaxtile.pallas_lowering import NAMES, _registry, load_all

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jaxtile", "primitives", "pallas_lowering")
LONGEST_FILE, LONGEST_FUNCTION = 400, 40


def _files(*folders):
    found = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(p.is_symlink() for p in path.parents if p != ROOT)
    ]
    assert found
    return found


def _name(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(autouse=True, scope="module")
def _backends():
    load_all()


def test_every_backend_loads_here():
    assert _registry.FAILED == {}
    assert set(_registry.BACKENDS) == set(NAMES)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("primitive", primitives.ALL, ids=str)
def test_every_primitive_is_lowered_or_refused(primitive, backend):
    found = _registry.BACKENDS[backend]
    assert primitive in found.refusals, (
        f"{found.name} neither lowers nor refuses {primitive}: there is no third state"
    )
    assert found.hooks.knows(primitive)


def test_all_lists_every_primitive_that_is_defined():
    from jaxtile.primitives._define import REFERENCES

    assert set(primitives.ALL) == set(REFERENCES)


def test_private_jax_stays_behind_the_fence():
    inside = {_name(p) for p in _files(*FOLDERS) if "jax._src" in _imports(p)}
    assert inside == {"jaxtile/_jax_private.py"}


def _imports(path):
    return "\n".join(
        line
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import)\s", line)
    )


def test_primitives_know_no_backend_and_backends_no_face():
    for path in _files("primitives"):
        assert "pallas" not in _imports(path), _name(path)
    faces = re.compile(
        r"jaxtile(\.(tile|dims|reduction|casting|elementwise))?\s+import"
    )
    for path in _files("primitives", "pallas_lowering"):
        for line in _imports(path).splitlines():
            assert (
                not faces.search(line)
                or "_jax_private" in line
                or re.search(
                    r"from jaxtile import (errors|formats|policy|_jax_private)", line
                )
            ), f"{_name(path)}: {line}"


@pytest.mark.parametrize("path", _files(*FOLDERS, "tests"), ids=_name)
def test_files_stay_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE


@pytest.mark.parametrize("path", _files("jaxtile", "primitives"), ids=_name)
def test_functions_stay_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= LONGEST_FUNCTION, f"{node.name} has {lines} lines"
