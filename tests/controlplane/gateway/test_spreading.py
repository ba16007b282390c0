"""Blocks go ahead of need between two real agents: to decode's node at leg 1, hot ones to others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from two_nodes import MODEL, TwoNodes, prompt

from workers.engines.emulated.worker import ENGINE_BLOCK_TOKENS


@pytest.fixture
async def nodes(tmp_path: Path, tokenizer_folder: Path) -> AsyncIterator[TwoNodes]:
    made = TwoNodes(tmp_path, tokenizer_folder)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def test_decode_is_told_to_fetch_when_leg_one_goes_out(
    nodes: TwoNodes, eventually: Callable[..., Any]
) -> None:
    await nodes.ready(eventually)
    nodes.set("cost", p2="draining")
    await nodes.compute("p1", prompt(1))
    await eventually(lambda: nodes.knows("n1", 8), "the index knows n1's blocks")
    await nodes.ask(prompt(1))
    assert nodes.gateway.stats.prefetched_blocks == 8
    await eventually(lambda: nodes.agents["n2"].stats().used_blocks >= 8, "they came")
    await nodes.ask(prompt(1))
    assert nodes.gateway.stats.prefetched_blocks == 8  # n2 holds them now
    for agent in nodes.agents.values():
        await eventually(lambda one=agent: one.stats().pinned_blocks == 0, "pins are released")
    workers = nodes.gateway.cluster.workers
    assert workers["d1"].kv_capacity_tokens == 100 * ENGINE_BLOCK_TOKENS  # its engine said so


async def test_hot_blocks_are_copied_to_the_node_that_was_chosen_without_them(
    nodes: TwoNodes, eventually: Callable[..., Any]
) -> None:
    await nodes.ready(eventually)
    await nodes.compute("p1", prompt(20))
    await eventually(lambda: nodes.knows("n1", 8), "the index knows n1's blocks")
    cluster, spreader = nodes.gateway.cluster, nodes.gateway._context.spreader
    scheduler = nodes.gateway._context.scheduler
    cluster.paths.costs["n1"]["n2"] = cluster.paths.costs["n2"]["n1"].__class__(10.0, 10.0)
    loop_time = 0.0
    cluster.workers["p1"].prefill_queue.start("other", 1e-6, 10, loop_time)
    for number in range(3):
        plan = scheduler.plan(MODEL, [prompt(20)], None, loop_time)
        worker = cluster.workers["p2"]  # placed far behind the holder, without a transfer
        spreader.dispatched(plan, f"r{number}", "", worker, "")
    assert nodes.gateway.stats.replicated_blocks == 8
    await eventually(lambda: nodes.agents["n2"].stats().used_blocks >= 8, "they came")
    cluster.workers["p1"].prefill_queue.end("other", loop_time)
    for agent in nodes.agents.values():
        await eventually(lambda one=agent: one.stats().pinned_blocks == 0, "pins are released")
