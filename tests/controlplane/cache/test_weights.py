"""R18, B31: weights that changed are never mixed, and the old ones' blocks are purged, visibly."""

from __future__ import annotations

import asyncio

from controlplane.cache.weights import GRACE_SECONDS, replaced_namespaces
from workers.core.stats_messages import NamespaceInfo


def infos(spec_with, *rows):
    return [
        NamespaceInfo(f"{model}/{version}/{extra}".encode(), spec_with(version), list(workers))
        for model, version, extra, workers in rows
    ]


async def _swap(cluster, spec_with):
    """Weights 1 are stored, their worker leaves, one with weights 2 comes."""
    agent = await cluster.agent()
    old = await agent.worker(spec_with("1"), "old")
    await old.store(old.chain("a", 6))
    await old.client.close()
    new = await agent.worker(spec_with("2"), "new")
    await new.store(new.chain("a", 3))
    await _workers_are(cluster, {"new"})
    return old, new


async def _workers_are(cluster, expected):
    """Once the agent has noticed who came and who left."""
    async with asyncio.timeout(30):
        while True:
            await cluster.heartbeat()
            found = (await cluster.api.get("/cache"))["namespaces"]
            if {worker for space in found for worker in space["workers"]} == expected:
                return
            await asyncio.sleep(0.01)


async def test_b31_old_weights_are_purged_with_progress_and_confirmation(cluster, spec_with):
    old, new = await _swap(cluster, spec_with)
    await cluster.runner.step()
    assert (await cluster.api.get("/jobs"))["items"] == []
    cluster.api.clock.advance(GRACE_SECONDS)
    await cluster.heartbeat()
    await cluster.runner.step()
    [queued] = (await cluster.api.get("/jobs"))["items"]
    job = await cluster.finish(queued["id"])
    assert (job["state"], job["automatic"], job["author"]) == ("done", True, "control-plane")
    assert job["target"] == old.namespace.hex()[:12]
    assert (job["result"]["blocks"], job["result"]["confirmed"]) == (6, True)
    assert job["progress"]["done"] == job["progress"]["total"]
    assert "tiny is served with weights 2, nobody serves 1" in job["reason"]
    assert "purge_replaced_weights in cache/default r1" in job["reason"]
    assert await new.held(new.chain("a", 3)) == 3
    [done, begun] = (await cluster.api.get("/audit"))["items"]
    assert (begun["verb"], done["verb"]) == ("cache.purge", "job.done")

    cluster.api.clock.advance(3600)
    await cluster.heartbeat()
    for _ in range(2):
        await cluster.runner.step()
    assert len((await cluster.api.get("/jobs"))["items"]) == 1


async def test_b31_what_a_worker_still_serves_is_left_alone(cluster, spec_with):
    agent = await cluster.agent()
    old = await agent.worker(spec_with("1"), "old")
    await old.store(old.chain("a", 6))
    await agent.worker(spec_with("2"), "new")
    await _workers_are(cluster, {"new", "old"})
    cluster.api.clock.advance(GRACE_SECONDS * 10)
    await cluster.heartbeat()
    await cluster.runner.step()
    assert (await cluster.api.get("/jobs"))["items"] == []
    assert await old.held(old.chain("a", 6)) == 6


async def test_b31_a_worker_that_comes_back_in_time_keeps_its_blocks(cluster, spec_with):
    await _swap(cluster, spec_with)
    await cluster.runner.step()
    cluster.api.clock.advance(GRACE_SECONDS / 2)
    back = await cluster.agents["n1"].worker(spec_with("1"), "back")
    await _workers_are(cluster, {"new", "back"})
    await cluster.runner.step()
    await back.client.close()
    await _workers_are(cluster, {"new"})
    cluster.api.clock.advance(GRACE_SECONDS / 2)
    await cluster.heartbeat()
    await cluster.runner.step()
    assert (await cluster.api.get("/jobs"))["items"] == []


class TestReplaced:
    def test_the_other_version_and_only_where_nobody_serves_it(self, spec_with):
        [found] = replaced_namespaces(
            infos(spec_with, ("m", "1", "a", ()), ("m", "2", "a", ("w1",)))
        )
        assert (found.old_version, found.new_version) == ("1", "2")

    def test_another_namespace_of_the_same_weights_is_not_replaced(self, spec_with):
        rows = (("m", "2", "fp8", ()), ("m", "2", "bf16", ("w1",)))
        assert replaced_namespaces(infos(spec_with, *rows)) == []

    def test_a_model_that_nobody_serves_at_all_stays(self, spec_with):
        rows = (("m", "1", "a", ()), ("m", "2", "a", ()))
        assert replaced_namespaces(infos(spec_with, *rows)) == []

    def test_served_on_another_node(self, spec_with):
        rows = (("m", "1", "a", ()), ("m", "2", "a", ("w1",)), ("m", "1", "a", ("w2",)))
        assert replaced_namespaces(infos(spec_with, *rows)) == []
