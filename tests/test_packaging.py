"""The installed tree is the checkout's tree, under the one name jaxtile."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _packages_under(name: str, folder: Path) -> set[str]:
    """The packages at and below `folder`, without those behind links."""
    found = {name} if (folder / "__init__.py").is_file() else set()
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            found |= _packages_under(f"{name}.{child.name}", child)
    return found


def test_packages_are_the_folders_with_an_init_file():
    # One left out works from a checkout and is missing from the wheel.
    found = set()
    for name, folder in SETUPTOOLS["package-dir"].items():
        found |= _packages_under(name, ROOT / folder)
    assert found == set(SETUPTOOLS["packages"])


@pytest.mark.parametrize("folder", ["primitives", "pallas_lowering"])
def test_folder_is_linked_into_jaxtile(folder):
    link = ROOT / "jaxtile" / folder
    assert link.is_symlink(), f"{link} must be a link: git's core.symlinks is off?"
    assert link.readlink() == Path("..", folder)


def test_package_data_exist():
    for package, files in SETUPTOOLS["package-data"].items():
        for file in files:
            assert (ROOT / SETUPTOOLS["package-dir"][package] / file).is_file()


def test_import_defines_each_primitive_once():
    # At the root of a checkout `import primitives` would work, and define all again.
    script = (
        "import sys, jaxtile\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(names & {'primitives', 'pallas_lowering'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
