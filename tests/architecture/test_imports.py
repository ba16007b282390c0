"""Who may import what: the contracts of pyproject.toml, and what a bare import drags in."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "vllm", "fastapi", "sqlalchemy", "textual", "transformers", "uvicorn"}


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that ran `statement`."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    reply = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(reply.stdout.split())


def test_import_contracts_hold() -> None:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    reply = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert reply.returncode == 0, reply.stdout + reply.stderr


@pytest.mark.parametrize("module", ["console.cli", "workers.commands", "console.commands"])
def test_command_line_loads_nothing_heavy(module: str) -> None:
    assert modules_after(f"import {module}") & HEAVY == set()


def test_building_the_whole_command_line_loads_nothing_heavy() -> None:
    assert modules_after("import console.cli; console.cli.build_app()") & HEAVY == set()


@pytest.mark.parametrize("core", ["workers.core", "controlplane.core", "console.viewmodel"])
def test_cores_load_no_framework(core: str) -> None:
    package = ROOT / core.replace(".", "/")
    names = sorted(path.stem for path in package.glob("*.py") if path.stem != "__init__")
    statement = "\n".join(f"import {core}.{name}" for name in names) or f"import {core}"
    forbidden = HEAVY | {"httpx2", "structlog"}
    assert modules_after(statement) & forbidden == set()
