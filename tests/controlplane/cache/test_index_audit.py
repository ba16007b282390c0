"""The auditor beside a real agent: true claims stay, wrong ones are found, told and mended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from controlplane.gateway.agents import Agents
from controlplane.gateway.cluster import Cluster as GatewayCluster
from controlplane.gateway.settings import Settings as GatewaySettings
from controlplane.gateway.stats import Stats as GatewayStats
from controlplane.gateway.wire import View, ViewNode
from controlplane.index_audit.service import NodeFindings
from controlplane.loops.auditor import Auditor
from workers.core.ids import NodeId
from workers.core.messages import BlocksStored
from workers.core.prefix_index import Claim, PrefixIndex

N1 = NodeId("n1")


@pytest.fixture
async def auditor(cluster: Any) -> AsyncIterator[Auditor]:
    made = Auditor(cluster.api.plane, random.Random(7))
    yield made
    await made.close()


async def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


def believe(index: PrefixIndex, namespace: bytes, keys: list[bytes], tier: str = "dram") -> None:
    """A claim that no event of the node ever made: as if a removal had been lost."""
    node = index._nodes[N1]
    index._take(node, node.columns, [BlocksStored(namespace, b"", keys, tier)])  # type: ignore[arg-type]


async def following(cluster: Any, auditor: Auditor, num_blocks: int) -> None:
    await cluster.heartbeat()
    await auditor.step()
    index = cluster.api.plane.index_audit.index
    await eventually(lambda: N1 in index.nodes() and index.num_blocks(N1) == num_blocks)


async def test_true_claims_are_checked_and_none_is_stale(cluster: Any, auditor: Auditor) -> None:
    agent = await cluster.agent()
    worker = await agent.worker()
    assert await worker.store(worker.chain("a", 40)) == 40
    await following(cluster, auditor, 40)
    for _ in range(3):
        await auditor.step()
    (row,) = (await cluster.api.get("/cache/audit"))["items"]
    assert (row["node_id"], row["state"], row["blocks"]) == ("n1", "following", 40)
    dram, ssd = row["tiers"]
    assert (dram["tier"], ssd["tier"]) == ("dram", "ssd")
    assert dram["checks_total"] == 3 * 32
    assert (dram["stale_total"], dram["stale_rate"]) == (0, 0.0)
    assert (ssd["checks_total"], ssd["stale_rate"]) == (0, None)
    assert row["last_check_at"]
    assert cluster.api.plane.stats.collector.claims_total["n1"] == (96, 0)


async def test_eviction_during_the_checks_is_no_stale_claim(cluster: Any, auditor: Auditor) -> None:
    agent = await cluster.agent()
    worker = await agent.worker()
    await worker.store(worker.chain("a", 40))
    await following(cluster, auditor, 40)
    churning = True

    async def churn() -> None:
        turn = 0
        while churning:
            turn += 1
            await worker.store(worker.chain(f"c{turn}", 60))

    task = asyncio.create_task(churn())
    for _ in range(10):
        await auditor.step()
    churning = False
    await task
    (row,) = (await cluster.api.get("/cache/audit"))["items"]
    assert row["tiers"][0]["checks_total"] > 0
    assert row["tiers"][0]["stale_total"] == 0


async def test_stale_claims_are_found_dropped_and_the_node_is_read_anew(
    cluster: Any, auditor: Auditor
) -> None:
    agent = await cluster.agent()
    worker = await agent.worker()
    await worker.store(worker.chain("a", 10))
    await following(cluster, auditor, 10)
    index = cluster.api.plane.index_audit.index
    phantom = worker.chain("phantom", 10)
    believe(index, worker.namespace, phantom)
    assert index.held_lengths(worker.namespace, phantom) == {"n1": 10}
    for _ in range(20):
        await auditor.step()
    await eventually(lambda: index.num_blocks(N1) == 10)
    assert index.held_lengths(worker.namespace, phantom) == {"n1": 0}
    assert index.held_lengths(worker.namespace, worker.chain("a", 10)) == {"n1": 10}
    (row,) = (await cluster.api.get("/cache/audit"))["items"]
    assert row["tiers"][0]["stale_total"] >= 3
    assert row["last_stale_key"] in {key.hex() for key in phantom}
    assert row["resyncs_total"] == 1
    (node,) = (await cluster.api.get("/nodes"))["items"]
    assert node["index_epoch"] == 1
    text = (await cluster.api.http.get("/metrics")).text
    assert 'perilune_index_stale_total{node="n1",tier="dram"}' in text


async def test_one_key_is_compared_on_demand(cluster: Any, auditor: Auditor) -> None:
    agent = await cluster.agent()
    worker = await agent.worker()
    chain = worker.chain("a", 10)
    await worker.store(chain)
    await following(cluster, auditor, 10)
    index = cluster.api.plane.index_audit.index
    phantom = worker.chain("phantom", 1)[0]
    believe(index, worker.namespace, [phantom])
    asked = {"node_id": "n1", "namespace": worker.namespace.hex()}
    right = await _resync(cluster, **asked, key=chain[3].hex())
    assert right == {"node_id": "n1", "resync": False, "believed": "dram", "found": "dram"}
    wrong = await _resync(cluster, **asked, key=phantom.hex(), reason="looks odd")
    assert wrong == {"node_id": "n1", "resync": True, "believed": "dram", "found": None}
    assert index.tier_of(N1, worker.namespace, phantom) is None
    row = (await cluster.api.get("/audit"))["items"][0]
    assert (row["verb"], row["target"]) == ("cache.resync", f"n1/{phantom.hex()}")
    assert row["reason"] == "looks odd"


async def _resync(cluster: Any, status: int = 200, **body: Any) -> Any:
    reply = await cluster.api.http.post("/api/v1/cache/audit/resync", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_what_cannot_be_asked_says_why(cluster: Any, auditor: Auditor) -> None:
    await _resync(cluster, 404, node_id="n9")
    await _resync(cluster, 422, node_id="n1", key="0" * 32)
    await cluster.agent()
    await cluster.heartbeat()
    away = await _resync(cluster, 503, node_id="n1", namespace="0" * 64, key="0" * 32)
    assert "n1" in away["detail"]
    assert away["way_out"]


async def test_a_resync_reaches_gateways_through_the_view(cluster: Any, auditor: Auditor) -> None:
    agent = await cluster.agent()
    worker = await agent.worker()
    await worker.store(worker.chain("a", 10))
    await following(cluster, auditor, 10)
    gateway = GatewayCluster(GatewaySettings(), GatewayStats())
    agents = Agents("gw-1", (), gateway, lambda _leg: None)
    try:
        endpoint = agent.settings.endpoint
        gateway.apply(View(nodes=[ViewNode("n1", "ready", endpoint)]))
        await eventually(lambda: gateway.index.num_blocks() == 10)
        believe(gateway.index, worker.namespace, worker.chain("phantom", 5))
        assert gateway.index.num_blocks() == 15
        await _resync(cluster, node_id="n1")
        view = await cluster.api.get("/view", gateway="gw-1")
        epoch = view["nodes"][0]["index_epoch"]
        assert epoch == 1
        gateway.apply(View(nodes=[ViewNode("n1", "ready", endpoint, index_epoch=epoch)]))
        await eventually(lambda: gateway.index.num_blocks() == 10)
    finally:
        await agents.close()


async def test_b44_blocks_lost_behind_the_pools_back(cluster: Any, auditor: Auditor) -> None:
    """The SSD tier's claims are checked like the others: a node that lost blocks says so."""
    agent = await cluster.agent()
    worker = await agent.worker()
    await worker.store(worker.chain("a", 10))
    await following(cluster, auditor, 10)
    index = cluster.api.plane.index_audit.index
    believe(index, worker.namespace, worker.chain("on-disk", 4), "ssd")
    for _ in range(15):
        await auditor.step()
    (row,) = (await cluster.api.get("/cache/audit"))["items"]
    assert row["tiers"][1]["stale_total"] >= 3
    await eventually(lambda: index.num_on_disk(N1) == 0)


async def test_a_node_without_an_answer_is_unreachable(cluster: Any, auditor: Auditor) -> None:
    agent = await cluster.agent()
    worker = await agent.worker()
    await worker.store(worker.chain("a", 10))
    await following(cluster, auditor, 10)
    await agent.end()
    del cluster.agents["n1"]
    await eventually(lambda: not auditor._followed["n1"].feed.client.subscribed)
    await auditor.step()
    (row,) = (await cluster.api.get("/cache/audit"))["items"]
    assert row["state"] == "unreachable"
    assert row["blocks"] == 10  # the last that is known


class TestFindings:
    def test_resync_needs_several_stale_claims_and_a_pause(self) -> None:
        found = NodeFindings()
        claim = Claim(N1, b"s" * 32, b"k" * 16, "dram")
        at = datetime(2026, 7, 1, tzinfo=UTC)
        for _ in range(2):
            found.count(claim, stale=True, at=at)
        assert not found.needs_resync(100.0)
        found.count(claim, stale=True, at=at)
        assert found.needs_resync(100.0)
        found.resynced(100.0)
        for _ in range(3):
            found.count(claim, stale=True, at=at)
        assert not found.needs_resync(110.0)
        assert found.needs_resync(131.0)

    def test_few_among_many_do_not(self) -> None:
        found = NodeFindings()
        claim = Claim(N1, b"s" * 32, b"k" * 16, "ssd")
        at = datetime(2026, 7, 1, tzinfo=UTC)
        for i in range(1000):
            found.count(claim, stale=i < 4, at=at)
        assert not found.needs_resync(100.0)
        assert found.tiers["ssd"].stale_rate == pytest.approx(0.004)
