"""Memory that was freed goes back, however it lay among what stays."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from controlplane.gateway.memory import give_large_blocks_back
from workers.process import rss_bytes

assert sys.argv[1] == "off" or give_large_blocks_back()
bytes(24 << 20)  # freed at once: from here on glibc would keep blocks of up to that size
before = rss_bytes()
large, small = [], []
for _ in range(64):
    large.append(b"x" * (1 << 20))
    small.append(bytes(2000))
large.clear()
print(rss_bytes() - before >> 20)
"""


def kept_mib(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return int(done.stdout)


def test_large_blocks_go_back_when_they_are_freed() -> None:
    assert kept_mib("on") < 8
    assert kept_mib("off") > 32, "the C library does so by itself: the module is not needed"
