"""Two kernels, one wire: nothing of loopback helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).with_name("two_vms.py")


@pytest.mark.rdma
@pytest.mark.heavy
@pytest.mark.xdist_group("vm")
@pytest.mark.timeout(420)
def test_blocks_go_there_and_back(preload: Path) -> None:
    python = f"PYTHONDONTWRITEBYTECODE=1 {sys.executable} {SCRIPT}"
    reply = subprocess.run(
        [sys.executable, ROOT / "scripts/rdma-vm/vm.py", "--pair", "--timeout", "380",
         "--preload", preload, f"{python} hold", f"{python} pull 10.98.0.1"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if reply.returncode == 2 and os.environ.get("PERILUNE_NO_SKIPS") != "1":
        pytest.skip(reply.stderr)
    assert reply.returncode == 0, reply.stdout + reply.stderr
    assert "A| holder: 64 blocks came back as they went" in reply.stdout
    assert "B| puller: 64 blocks pulled" in reply.stdout
