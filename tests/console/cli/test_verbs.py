"""The verbs that the packages bring together."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("group", "verbs"),
    [
        ("bench", ("evict", "gateway", "index", "pool", "transfer")),
        ("cache", ("list", "pin", "pins", "prefetch", "purge", "replicate", "stat", "unpin")),
        ("get", ("nodes", "requests", "transfers", "workers")),
    ],
)
def test_a_group_has_the_verbs_of_every_package(group: str, verbs: tuple[str, ...]) -> None:
    """Two packages add to `bench`: neither may push the other's verbs out."""
    for verb in verbs:
        done = subprocess.run(
            [sys.executable, "-m", "console", group, verb, "--help"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{group} {verb}: {done.stderr}"
