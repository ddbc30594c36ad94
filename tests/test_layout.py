"""The three wings stay apart, every package is installed, and files stay readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
MAX_LINES = 450
# Folder in the repository -> package it installs as. The links in gemcompile/ are skipped.
WINGS = {
    "gemcompile": "gemcompile",
    "passes": "gemcompile.passes",
    "lowering": "gemcompile.lowering",
}


def python_files(folder: str) -> Iterator[Path]:
    """Every Python file below `folder`, without following the links inside gemcompile/."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        parents = path.relative_to(ROOT).parents
        if not any((ROOT / parent).is_symlink() for parent in parents):
            yield path


def imported_modules(path: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it, relative ones resolved."""
    folder = path.parent.relative_to(ROOT)
    package = [*WINGS[folder.parts[0]].split("."), *folder.parts[1:]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def names_wing(names: set[str], wing: str) -> set[str]:
    """Those names that lie in a wing, under its installed name or its folder's."""
    roots = (wing, f"gemcompile.{wing}")
    return {name for name in names if any(f"{name}.".startswith(f"{root}.") for root in roots)}


def test_links_lead_to_the_wings() -> None:
    for wing in ("passes", "lowering"):
        link = ROOT / "gemcompile" / wing
        assert link.resolve() == ROOT / wing, f"gemcompile/{wing} must be a link to ../{wing}"


def test_package_list_names_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join([WINGS[folder], *path.parent.relative_to(ROOT / folder).parts])
        for folder in WINGS
        for path in python_files(folder)
        if path.name == "__init__.py"
    }
    assert set(settings["packages"]) == found


@pytest.mark.parametrize(("wing", "other"), [("passes", "lowering"), ("lowering", "passes")])
def test_wings_do_not_import_each_other(wing: str, other: str) -> None:
    files = list(python_files(wing))
    assert files, f"{wing}/ holds no Python file"
    for path in files:
        assert not names_wing(imported_modules(path), other), path


def test_core_imports_no_wing() -> None:
    for path in python_files("gemcompile"):
        if path == ROOT / "gemcompile" / "backend.py":
            continue
        names = imported_modules(path)
        assert not names_wing(names, "passes") | names_wing(names, "lowering"), path


def test_relative_imports_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "passes").mkdir()
    file = tmp_path / "passes" / "sly.py"
    file.write_text("from .. import lowering\nfrom .attention import x\n")
    names = imported_modules(file)
    assert names_wing(names, "lowering") == {"gemcompile.lowering"}
    assert "gemcompile.passes.attention" in names


@pytest.mark.parametrize("folder", [*WINGS, "tests", "examples", "benchmarks"])
def test_files_stay_readable(folder: str) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files(folder)
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: {long}"
