"""Memory that was freed goes back, however it lay among what stays."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from controlplane.gateway.memory import Collector

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


CYCLES = """
import gc, weakref
from controlplane.gateway.memory import (
    FEW, FULL_SECONDS, LONGEST_YOUNG_SECONDS, YOUNG_SECONDS, Collector, calm_collector,
)

class Node:
    pass

def cycle():
    node = Node()
    node.self = node
    return weakref.ref(node)

collector, freed = Collector(), []
calm_collector()
gc.callbacks.append(lambda phase, info: freed.append(info["generation"]) if phase == "stop" else None)
kept = [[i] for i in range(100_000)]
assert freed == [], "a hundred thousand kept objects cost a collection"
gone = cycle()
for now in (1.0, 1.0 + YOUNG_SECONDS / 2):
    collector.tick(now)
assert gone() is not None and freed == []
collector.tick(1.0 + YOUNG_SECONDS)
assert gone() is None and freed == [1]

now = 1.0 + YOUNG_SECONDS
collector.tick(now + YOUNG_SECONDS)
assert freed == [1], "there were few: the next pause is twice as long"
for _ in range(FEW + 1):
    cycle()
collector.tick(now + 2 * YOUNG_SECONDS)
collector.tick(now + 3 * YOUNG_SECONDS)
assert freed == [1, 1, 1], "there were many: the next pause is the shortest"
for seconds in (8, 16, 32, 64, 96, 128):
    collector.tick(now + 4 * YOUNG_SECONDS + seconds)
late = cycle()
collector.tick(now + 4 * YOUNG_SECONDS + 128 + LONGEST_YOUNG_SECONDS)
assert late() is None and 2 not in freed
old = cycle()
collector.tick(2.0 + FULL_SECONDS)
assert old() is None and freed[-1] == 2
"""


def test_cycles_are_collected_on_a_schedule_and_not_by_number() -> None:
    subprocess.run([sys.executable, "-c", CYCLES], timeout=100, check=True)


def test_a_process_whose_collector_was_not_calmed_is_left_alone() -> None:
    collector = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_threshold", lambda: (700, 10, 10))
        patch.setattr(gc, "collect", lambda *_: pytest.fail("collected"))
        collector.tick(1.0)
        collector.tick(1e6)
