"""Replicate from agent to agent, and by the relay where the two do not reach one another."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from controlplane.cache import direct
from workers.cluster_secret import load_secret


@pytest.fixture
def make_node(cluster, free_port, tmp_path, monkeypatch):
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    secret = load_secret(tmp_path)

    async def make(name, **changes):
        network = {"tcp_host": "127.0.0.1", "tcp_port": free_port(), "secret": secret}
        agent = await cluster.agent(name, **{**network, **changes})
        worker = await agent.worker()
        await cluster.heartbeat(name)
        return worker

    return make


async def replicate(cluster, keys, **more):
    body = {"source": "n1", "destination": "n2", "key": keys[-1].hex(), **more}
    job = await cluster.run("replicate", **body)
    assert (job["state"], job["error"]) == ("done", "")
    assert job["progress"]["done"] == job["progress"]["total"]
    return job["result"]


async def test_blocks_go_from_agent_to_agent(cluster, make_node):
    here, there = await make_node("n1"), await make_node("n2")
    keys = here.chain("a", 20)
    await here.store(keys, tenant="acme")
    result = await replicate(cluster, keys)
    assert (result["blocks"], result["direct"], result["bytes"]) == (20, 20, 20 * 16384)
    assert await there.load(keys) == await here.load(keys)
    for worker in (here, there):
        await worker.client.release("load:w:1")
        assert (await worker.client.stats()).pinned_blocks == 0
    [pair] = (await there.client.stats()).transfers.pairs
    assert (pair.source, pair.priority, pair.bytes_total) == ("n1", "batch", 20 * 16384)
    [row] = (await cluster.api.get("/cache/chains", node="n2"))["items"]
    assert row["tenant"] == "acme"
    again = await replicate(cluster, keys)
    assert (again["blocks"], again["held_already"]) == (0, 20)


async def test_what_cannot_be_fetched_is_relayed(cluster, make_node, monkeypatch):
    """The source says an address where nobody listens."""
    here, there = await make_node("n1"), await make_node("n2")
    node = cluster.api.plane.nodes.find("n1")
    monkeypatch.setattr(direct, "POLL_SECONDS", 0.005)
    node.stats = msgspec.structs.replace(node.stats, endpoint="tcp:127.0.0.1:1")
    keys = here.chain("a", 6)
    await here.store(keys)
    result = await replicate(cluster, keys)
    assert (result["blocks"], result["direct"]) == (6, 0)
    assert await there.held(keys) == 6


async def test_the_rate_holds_for_it_too(cluster, make_node):
    here = await make_node("n1")
    await make_node("n2")
    keys = here.chain("a", 8)
    await here.store(keys)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    result = await replicate(cluster, keys, mib_per_second=0.25)
    assert result["direct"] == 8
    assert loop.time() - begun > 0.4  # 128 KiB at 256 KiB/s


async def test_a_damaged_block_ends_the_chain(cluster, make_node):
    here, there = await make_node("n1"), await make_node("n2")
    keys = here.chain("a", 4)
    await here.store(keys)
    for slot in range(here.slab.num_slots):
        header = here.slab.read_header(slot)
        if header is not None and header.key == keys[2]:
            here.slab.payload(slot)[0:1] = b"\xff"
    job = await cluster.run("replicate", source="n1", destination="n2", key=keys[-1].hex())
    assert (job["result"]["blocks"], job["result"]["missing"]) == (2, 2)
    assert await there.held(keys) == 2
