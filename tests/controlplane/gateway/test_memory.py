"""Memory that was freed goes back, however it lay among what stays."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from controlplane.gateway.answers import AnswerError
from controlplane.gateway.memory import Collector
from workers.engines.emulated.faults import Faults

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


def _alive() -> Counter[str]:
    """Objects of what a request and its connections are made of."""
    names = ("ClientConnection", "WorkerConnection", "HttpResponseParser", "Request",
             "Asked", "ClientBody", "Running", "Relay", "Reply", "Plan", "LegRequest")  # fmt: skip
    return Counter(kind for o in gc.get_objects() if (kind := type(o).__name__) in names)


async def _ask(port: int, body: bytes, *, upto: int | None) -> None:
    """Over a connection of its own, which is closed after so many bytes of the answer, or all."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await (reader.read() if upto is None else reader.read(upto))
    writer.close()


async def _ten_times_leave_nothing(
    step: Callable[[], Awaitable[None]], rig: Any, eventually: Any
) -> None:
    """Of what requests are made of, with the collector off; the first time may fill caches."""
    await step()
    await eventually(lambda: not rig.gateway.server.connections)
    gc.collect()
    gc.disable()
    try:
        before = _alive()
        for _ in range(10):
            await step()
        await eventually(lambda: not rig.gateway.server.connections)
        await eventually(lambda: max((_alive() - before).values(), default=0) < 5)
    finally:
        gc.enable()


async def test_what_has_ended_leaves_nothing_that_only_the_collector_finds(
    rig: Any, eventually: Any
) -> None:
    """It would find it minutes later: bodies of thousands of requests lay about till then."""
    await rig.start()
    port = rig.gateway.server.port

    def body(stream: bool) -> bytes:
        fields = {"model": "tiny", "prompt": "hello " * 50, "max_tokens": 8, "stream": stream}
        return json.dumps(fields).encode()

    async def all_kinds() -> None:
        for stream in (True, False):
            await _ask(port, body(stream), upto=None)
        await _ask(port, body(True), upto=300)  # leaves in the middle
        await _ask(port, b"{", upto=None)  # an error
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-le")  # and no more
        await writer.drain()
        writer.close()

    await _ten_times_leave_nothing(all_kinds, rig, eventually)


@pytest.mark.parametrize("fault", [Faults(reset=True), Faults(reset_after_chunks=2)])
async def test_what_has_failed_leaves_nothing_that_only_the_collector_finds(
    rig: Any, eventually: Any, fault: Faults
) -> None:
    """It comes the seldomer the fewer objects it finds, and knows nothing of how large bodies are."""
    await rig.start()
    for name in ("d1", "d2"):
        rig.api(name).faults.set(fault)
    fields = {"model": "tiny", "prompt": "hello " * 50, "max_tokens": 8, "stream": True}
    body, health = json.dumps(fields).encode(), rig.gateway.cluster.health

    async def ask() -> None:
        await _ask(rig.gateway.server.port, body, upto=None)
        health.keep(set())  # the next one is sent to both again

    await _ten_times_leave_nothing(ask, rig, eventually)
    assert rig.gateway.stats.failed == 11


async def test_what_is_interrupted_leaves_nothing_that_only_the_collector_finds(
    rig: Any, eventually: Any
) -> None:
    await rig.start()
    for name in ("p1", "p2"):
        rig.api(name).faults.set(Faults(hang=True))
    body, running = (
        json.dumps({"model": "tiny", "prompt": "hello"}).encode(),
        rig.gateway._context.running,
    )

    async def ask() -> None:
        asking = asyncio.ensure_future(_ask(rig.gateway.server.port, body, upto=None))
        (run,) = await eventually(lambda: list(running.values()))
        run.interrupt(AnswerError(503, "enough", "enough"))
        await asking

    await _ten_times_leave_nothing(ask, rig, eventually)
