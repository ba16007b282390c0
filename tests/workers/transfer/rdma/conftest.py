"""Tests in `vm/` run inside a VM with Soft-RoCE: here they are collected, and their reports shown.

The first of them boots one VM that runs all that were selected, with this Python and this checkout
(scripts/rdma-vm). Inside, the same conftest writes the reports down.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
VM_FOLDER = HERE / "vm"
VM = ROOT / "scripts" / "rdma-vm" / "vm.py"
INSIDE = os.environ.get("IN_RDMA_VM") == "1"
GROUP = "vm"
SECONDS = 900
# Loaded one by one over 9p these take longer than the tests: they are laid ready in one archive.
MODULES = (
    "pytest", "pytest_asyncio.plugin", "pytest_timeout", "asyncio", "concurrent.futures", "ctypes",
    "json", "subprocess", "uuid", "ssl", "msgspec", "blake3", "xxhash", "psutil", "numpy",
    "pyverbs.qp", "pyverbs.device", "pyverbs.cq", "pyverbs.addr", "pyverbs.mr", "pyverbs.pd",
    "pyverbs.wr", "workers.transfer.engine", "workers.transfer.tcp_server",
    "workers.transfer.rdma.transport", "workers.transfer.rdma.server", "workers.agent.main",
    "workers.client", "workers.core.doctor_pairs", "hypothesis", "stringprep", "zlib",
)  # fmt: skip
_LIST_FILES = """
import importlib, os, sys
sys.path.append("/usr/lib/python3/dist-packages")
for name in sys.argv[1:]:
    try: importlib.import_module(name)
    except ImportError: pass
import _pytest.config
for name in _pytest.config.default_plugins: importlib.import_module(f"_pytest.{name}")
for module in list(sys.modules.values()):
    for kind in ("__file__", "__cached__"):
        file = getattr(module, kind, None)
        if file and os.path.isabs(file) and os.path.exists(file): print(file)
"""
_results: dict[str, list[pytest.TestReport]] = {}
_outcome: list[str] = []  # how the VM's run went, once it did


def _in_vm(path: Path) -> bool:
    return VM_FOLDER in path.parents


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _in_vm(item.path):
            item.add_marker(pytest.mark.rdma)
            item.add_marker(pytest.mark.heavy)
            if not INSIDE:
                item.add_marker(pytest.mark.xdist_group(GROUP))
                item.add_marker(pytest.mark.timeout(SECONDS + 60))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Show what became of it in the VM."""
    if INSIDE or not _in_vm(item.path):
        return None
    if not _outcome:
        _outcome.append(_run_all(item.session))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _results.get(_plain_id(item)) or [_no_report(item)]:
        report.nodeid = item.nodeid
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # as the protocol that this replaces
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if INSIDE and _in_vm(ROOT / report.nodeid.partition("::")[0]):
        _write(report)


def _write(report: pytest.TestReport) -> None:
    with (Path(os.environ["OUT"]) / "reports").open("a") as file:
        file.write(json.dumps(report._to_json(), default=str) + "\n")


def _plain_id(item: pytest.Item) -> str:
    """Without the group that xdist puts behind it here, and not in the VM."""
    return item.nodeid.removesuffix(f"@{GROUP}")


def _run_all(session: pytest.Session) -> str:
    names = [_plain_id(item) for item in session.items if _in_vm(item.path)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        preload = _preload(folder)
        (folder / "out").mkdir()
        (folder / "out" / "tests").write_text("\n".join(names))
        command = [
            sys.executable, VM, "--timeout", str(SECONDS), "--out", folder,
            "--preload", preload, _command(),
        ]  # fmt: skip
        reply = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, stdin=subprocess.DEVNULL
        )
        for report in _read(folder / "out" / "reports"):
            _results.setdefault(report.nodeid, []).append(report)
    return f"status {reply.returncode}\n{reply.stdout[-6000:]}\n{reply.stderr[-3000:]}"


def _command() -> str:
    """For the VM's bash. No plugin that is not needed: each costs seconds."""
    variables = {
        name: value for name, value in os.environ.items() if name.startswith("PERILUNE_")
    } | {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    variables.pop("PERILUNE_COUNTS_IN", None)
    variables.pop("PERILUNE_COUNTS_OUT", None)
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return (
        f"export {exports}; xargs -d '\\n' -a $OUT/tests {sys.executable} -X faulthandler -m pytest "
        "-q -p pytest_asyncio.plugin -p pytest_timeout -p no:cacheprovider --durations 8 "
        "-c pyproject.toml --rootdir ."
    )


@pytest.fixture
def preload(tmp_path: Path) -> Path:
    """An archive of the modules, for other VMs."""
    return _preload(tmp_path)


def _preload(folder: Path) -> Path:
    listing = subprocess.run(
        [sys.executable, "-c", _LIST_FILES, *MODULES], capture_output=True, text=True, check=True,
        cwd=ROOT,
    )  # fmt: skip
    target = folder / "modules.tar"
    with tarfile.open(target, "w") as archive:
        for file in sorted(set(listing.stdout.split("\n")) - {""}):
            archive.add(file, file)
    return target


def _read(file: Path) -> Iterator[pytest.TestReport]:
    for line in file.read_text().splitlines() if file.exists() else []:
        yield pytest.TestReport._from_json(json.loads(line))


def _no_report(item: pytest.Item) -> pytest.TestReport:
    """It did not run: skipped where the machine has no VM, else failed."""
    text = _outcome[0]
    missing = text.startswith("status 2\n") and os.environ.get("PERILUNE_NO_SKIPS") != "1"
    file, line, _ = item.location
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="skipped" if missing else "failed",
        longrepr=(file, line or 0, text) if missing else f"no report from the VM: {text}",
        when="call",
    )
