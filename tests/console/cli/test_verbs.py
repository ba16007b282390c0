"""The verbs that the packages bring together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from console.cli import run


@pytest.mark.parametrize(
    ("group", "verbs"),
    [
        ("bench", ("evict", "gateway", "index", "pool", "transfer")),
        ("cache", ("list", "pin", "pins", "prefetch", "purge", "replicate", "stat", "unpin")),
        ("get", ("health", "ledger", "nodes", "requests", "running", "transfers", "workers")),
        ("request", ("cancel",)),
    ],
)
def test_a_group_has_the_verbs_of_every_package(
    group: str, verbs: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two packages add to `bench`: neither may push the other's verbs out."""
    for verb in verbs:
        code = run([group, verb, "--help"])
        shown = capsys.readouterr()
        assert code == 0, f"{group} {verb}: {shown.err}"
        assert f"{group} {verb}" in shown.out
    done = subprocess.run(
        [sys.executable, "-m", "console", group, verbs[0], "--help"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{group} {verbs[0]}: {done.stderr}"
