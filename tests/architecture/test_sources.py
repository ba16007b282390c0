"""Size and shape of the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("console", "controlplane", "workers", "migrations", "scripts")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_files_stay_small() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    sizes = {relative(path): len(path.read_text().splitlines()) for path in [*SOURCES, *tests]}
    assert {name: size for name, size in sizes.items() if size >= MAX_FILE_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_stay_short(package: str) -> None:
    long = {
        f"{relative(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        if path.is_relative_to(ROOT / package)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long == {}


def test_nothing_is_imported_by_star() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names)
    ]
    assert found == []


def test_workers_know_neither_controlplane_nor_console() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "workers")
        for node in ast.walk(parse(path))
        for name in imported(node)
        if name.partition(".")[0] in {"controlplane", "console"}
    ]
    assert found == []


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []
