"""Memory of process trees: a slab counts once, however many processes map it."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

from workers.bench.rss import PeakRss, tree_rss_bytes

MIB = 1 << 20
MAPPER = (
    "import mmap, sys, time\n"
    "file = open(sys.argv[1], 'r+b')\n"
    "memory = mmap.mmap(file.fileno(), 0)\n"
    "memory[:] = bytes([1]) * len(memory)\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)


def test_shared_memory_counts_once(
    python_child: Callable[..., subprocess.Popen[bytes]],
) -> None:
    path = Path("/dev/shm") / f"perilune-test-{uuid.uuid4().hex[:12]}"
    try:
        path.touch(0o600)
        os.truncate(path, 200 * MIB)
        children = [python_child(MAPPER, str(path)) for _ in range(2)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        total = tree_rss_bytes([child.pid for child in children])
        assert 200 * MIB < total < 300 * MIB
        assert tree_rss_bytes([children[0].pid]) > 200 * MIB
    finally:
        path.unlink()


def test_the_peak_stays_and_who_is_gone_counts_nothing() -> None:
    with PeakRss([os.getpid()], every_seconds=0.01) as rss:
        held = b"x" * (64 * MIB)
    assert rss.peak_bytes > 0
    assert len(held)
    assert tree_rss_bytes([2**22 + 1]) == 0
