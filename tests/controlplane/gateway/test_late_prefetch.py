"""What decode's node was told to fetch ahead is cancelled where nobody will ask for it there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from heartbeats import ControlPlane
from reported import ended
from two_nodes import BLOCK_TOKENS, TwoNodes, prompt

from controlplane.nodes.schemas import HeartbeatReply
from workers.engines.emulated.faults import Faults

WORKERS = {
    "p1": ("prefill", "n1"), "p2": ("prefill", "n2"), "d1": ("decode", "n2"), "d2": ("decode", "n1"),
}  # fmt: skip
LEAST_GBPS = 0.0001
PAGE_BYTES = (4096, 4096)
BLOCKS = 40  # of four pages: over a minute under that cap
PROMPT = prompt(1, BLOCKS * BLOCK_TOKENS + 10)
Eventually = Callable[..., Any]


@pytest.fixture
async def nodes(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TwoNodes]:
    """What is told to travel between them takes long."""
    monkeypatch.setattr("workers.engines.emulated.pool.PAGE_BYTES", PAGE_BYTES)
    control_plane = ControlPlane()
    policy = {"cap_gbps": LEAST_GBPS}
    control_plane.reply = HeartbeatReply(transfer_policy_revision=1, transfer_policy=policy)
    more = (
        "--control-plane",
        control_plane.url,
        "--heartbeat-seconds",
        "0.1",
        "--transports",
        "tcp",
    )
    made = TwoNodes(tmp_path, tokenizer_folder, WORKERS, more)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
        control_plane.close()


async def prefetching(nodes: TwoNodes, eventually: Eventually) -> asyncio.Task[None]:
    """A request whose leg 1 hangs at p1, while n2 fetches for its leg 2 at d1."""
    await nodes.ready(eventually)
    for agent in nodes.agents.values():
        capped = lambda one=agent: one.stats().transfers.policy_revision == 1  # noqa: E731
        await eventually(capped, "the cap acts")
    await nodes.compute("p1", PROMPT)
    await eventually(lambda: nodes.knows("n1", BLOCKS), "the index knows n1's blocks")
    nodes.set("cost", p2="draining", d2="draining")
    nodes.fleet.apis["p1"].faults.set(Faults(hang=True, times=1))
    asked = asyncio.create_task(nodes.ask(PROMPT))
    await eventually(lambda: nodes.agents["n2"].stats().pending_blocks > BLOCKS // 2, "n2 fetches")
    assert nodes.gateway.stats.prefetched_blocks == BLOCKS
    return asked


async def nothing_is_left(nodes: TwoNodes, eventually: Eventually) -> None:
    for agent in nodes.agents.values():
        await eventually(lambda one=agent: one.stats().pending_blocks == 0, "nothing is fetched")
        await eventually(lambda one=agent: one.stats().pinned_blocks == 0, "pins are released")


async def test_r15_a_client_that_leaves_ends_what_was_fetched_for_it(
    nodes: TwoNodes, eventually: Eventually
) -> None:
    asked = await prefetching(nodes, eventually)
    asked.cancel()
    await nothing_is_left(nodes, eventually)
    assert nodes.agents["n2"].stats().used_blocks < BLOCKS
    assert nodes.gateway.stats.prefetches_cancelled == 1


async def test_r15_decode_that_moves_ends_what_was_fetched_to_the_node_it_left(
    nodes: TwoNodes, eventually: Eventually
) -> None:
    asked = await prefetching(nodes, eventually)
    nodes.set("cost", p2="draining", d1="draining")
    worker = nodes.gateway.cluster.workers["p1"].upstream
    await eventually(lambda: len(worker.waiting) == 1, "leg 1 is out")
    for reply in list(worker.waiting):  # leg 1 breaks off, and is computed by decode
        reply._connection.abort()
    await asked
    stats = nodes.gateway.stats
    await eventually(lambda: stats.prefetches_cancelled == 1, "n2 is told")
    (record,) = await ended(nodes.gateway.records, 1)
    assert record.decode_worker == "d2"
    await nothing_is_left(nodes, eventually)
    assert nodes.agents["n2"].stats().used_blocks < BLOCKS
