"""A gateway beside a real node agent: prefix index, leg reports, releases, namespaces."""

from __future__ import annotations

import asyncio
import signal
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
from agent_process import AgentProcess

from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings
from controlplane.gateway.worker_state import WorkerState
from workers.core.stats_messages import WorkerStatus
from workers.engines.emulated.faults import Faults

PROMPT = "the quick brown fox jumps over the lazy dog " * 30


def clear_devices(rig: Any) -> None:
    for api in rig.fleet.apis.values():
        api.worker.device.clear()


async def test_a_second_request_finds_the_first_ones_blocks(
    rig: Any, agent: AgentProcess, eventually: Callable[..., Any]
) -> None:
    rig.agent = agent.address
    await rig.start()
    await eventually(lambda: rig.gateway._agents.num_subscribed == 1)
    await eventually(lambda: rig.gateway.cluster.workers["p1"].namespace)
    first = await rig.complete(prompt=PROMPT, max_tokens=4)
    cold = await rig.control_plane.ended()
    await eventually(lambda: rig.gateway.cluster.index.num_blocks() > 0)
    clear_devices(rig)
    second = await rig.complete(prompt=PROMPT, max_tokens=4)
    assert second.json()["choices"] == first.json()["choices"]
    await eventually(lambda: sum(
        d.decode_leg is not None and d.prefill_leg is not None
        for d in rig.control_plane.decisions().values()) == 2)  # fmt: skip
    warm = next(d for d in rig.control_plane.decisions().values() if d.at > cold.at)
    num_tokens = cold.prompt_tokens
    blocks = (num_tokens - 1) // 64
    assert (cold.hit_tokens, warm.hit_tokens) == (0, blocks * 64)
    assert warm.prefill_candidates[0].own_prefix_tokens == blocks * 64
    assert warm.decode_leg.pool_hit_tokens == blocks * 64
    assert warm.prefill_leg.stored_blocks == 0
    sent = [d.prompt for r in rig.control_plane.reports for d in r.decisions if d.prompt]
    assert {p.block_tokens for p in sent} == {64}
    assert {len(b64decode(p.keys)) // 16 for p in sent} == {num_tokens // 64}
    assert len({p.keys for p in sent}) == 1
    stats = rig.gateway.stats
    await eventually(lambda: stats.prompt_tokens == 2 * num_tokens)
    assert stats.hit_tokens == blocks * 64
    await eventually(lambda: agent.stats().num_owners == 0)  # released at the end
    assert agent.stats().pinned_blocks == 0


async def test_every_prefill_leg_teaches(
    rig: Any,
    agent: AgentProcess,
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However its report and its reply come one after the other."""
    taught: list[int] = []
    monkeypatch.setattr(
        WorkerState, "prefilled", lambda _, uncached, *_more: taught.append(uncached)
    )
    rig.agent, rig.workers = agent.address, ("p1:prefill", "d1:decode")
    await rig.start()
    await eventually(lambda: rig.gateway._agents.num_subscribed == 1)
    await eventually(lambda: rig.gateway.cluster.workers["p1"].namespace)
    for i in range(6):
        assert (await rig.complete(prompt=f"{i} {PROMPT}", max_tokens=1)).status_code == 200
    await eventually(lambda: len(taught) == 6)
    assert all(taught)


async def test_tenants_do_not_share_blocks(
    rig: Any, agent: AgentProcess, eventually: Callable[..., Any]
) -> None:
    rig.agent = agent.address
    await rig.start()
    await eventually(lambda: rig.gateway.cluster.workers["p1"].namespace)
    for salt in (None, "a", "b"):
        fields = {} if salt is None else {"cache_salt": salt}
        assert (await rig.complete(prompt=PROMPT, max_tokens=1, **fields)).status_code == 200
        clear_devices(rig)
    assert agent.stats().hit_tokens_total == 0
    await rig.complete(prompt=PROMPT, max_tokens=1, cache_salt="a")
    assert agent.stats().hit_tokens_total > 0


async def test_a01_a_client_that_leaves_between_the_legs_leaves_no_pin(
    rig: Any, agent: AgentProcess, eventually: Callable[..., Any]
) -> None:
    rig.agent = agent.address
    await rig.start()
    await eventually(lambda: rig.gateway._agents.num_subscribed == 1)
    for name in ("d1", "d2"):
        rig.api(name).faults.set(Faults(hang=True))
    for _ in range(5):
        task = asyncio.create_task(rig.complete(prompt=PROMPT))
        await eventually(lambda: any(rig.api(n).worker.counters.running for n in ("d1", "d2")))
        await eventually(lambda: agent.stats().pinned_blocks > 0)  # who left before may still run
        task.cancel()
        await eventually(lambda: agent.stats().pinned_blocks == 0)
    assert rig.gateway.stats.cancelled == 5


async def test_a_killed_agent_costs_hits_and_nothing_else(
    rig: Any, agent: AgentProcess, eventually: Callable[..., Any]
) -> None:
    rig.agent = agent.address
    await rig.start()
    await eventually(lambda: rig.gateway._agents.num_subscribed == 1)
    index = rig.gateway.cluster.index
    before = (await rig.complete(prompt=PROMPT, max_tokens=3)).json()["choices"]
    await eventually(lambda: index.num_blocks() > 0)
    life = index.position(index.nodes()[0])[0]
    agent.stop(signal.SIGKILL)
    response = await rig.complete(prompt=PROMPT, max_tokens=3)
    assert response.json()["choices"] == before
    agent.start()
    await eventually(lambda: rig.gateway._agents.num_subscribed == 1)
    await eventually(lambda: index.position(index.nodes()[0])[0] > life)  # a new incarnation
    clear_devices(rig)

    async def stores_again() -> bool:
        assert (await rig.complete(prompt=PROMPT, max_tokens=3)).json()["choices"] == before
        clear_devices(rig)
        return agent.stats().used_blocks > 0

    await eventually(stores_again)


async def test_without_a_control_plane_the_agents_list_of_workers_serves(
    rig: Any, agent: AgentProcess, eventually: Callable[..., Any]
) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rows = [
        WorkerStatus(name, role, "tiny", rig.fleet.urls[name], "ready", engine="emulated")
        for name, role in (("p1", "prefill"), ("d1", "decode"))
    ]
    agent.client.report_workers(rows)
    alone = Gateway(Settings(port=0, agents=(agent.address,), models={"tiny": str(rig.folder)}))
    await alone.start()
    try:
        await eventually(lambda: alone.cluster.workers)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
        response = await rig.client.post(f"{alone.url}/v1/completions", json=body)
        assert response.status_code == 200
        assert rig.seen("p1")[0]["max_tokens"] == 1
    finally:
        await alone.stop(1.0)
