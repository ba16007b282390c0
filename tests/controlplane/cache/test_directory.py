"""Agent, etcd and control plane together: registered, listed, known after a cold start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from etcd_cluster import EtcdCluster, etcd_binary

from controlplane.loops.auditor import Auditor
from controlplane.loops.directory import DirectoryWatch
from workers.core.ids import NodeId

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("etcd")]
N1 = NodeId("n1")


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    if etcd_binary() is None:
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
    with EtcdCluster(1) as started:
        yield started


async def step_until(step: Callable[[], Any], holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await step()
            await asyncio.sleep(0.05)


async def test_cold_start_from_the_directory_then_the_nodes_own_stream(
    cluster: Any, etcd: EtcdCluster
) -> None:
    plane = cluster.api.plane
    plane.settings = plane.settings.model_copy(update={"directory": etcd.address})
    agent = await cluster.agent(directory=etcd.address, cluster="test")
    worker = await agent.worker()
    chain = worker.chain("a", 20)
    await worker.store(chain)
    index = plane.index_audit.index
    watch, auditor = DirectoryWatch(plane), Auditor(plane)
    try:
        await step_until(
            watch.step, lambda: index.held_lengths(worker.namespace, chain) == {N1: 20}
        )
        await step_until(watch.step, lambda: plane.index_audit.directory.nodes == 1)
        await step_until(watch.step, lambda: plane.index_audit.directory.state == "current")
        status = (await cluster.api.get("/cache/audit"))["directory"]
        assert status == {"state": "current", "reason": "", "nodes": 1, "suspect_nodes": []}
        sequence = index.position(N1)[1]
        await cluster.heartbeat()
        await worker.store(worker.chain("b", 10))
        await step_until(auditor.step, lambda: index.num_blocks(N1) == 30)
        assert index.position(N1)[1] > sequence
        assert plane.index_audit.nodes["n1"].resyncs_total == 0
        etcd.members[0].kill()
        await worker.store(worker.chain("c", 5))  # nothing waits for the store
        await step_until(watch.step, lambda: plane.index_audit.directory.state == "lost")
        await step_until(auditor.step, lambda: index.num_blocks(N1) == 35)
        etcd.members[0].start()
        await step_until(watch.step, lambda: plane.index_audit.directory.state == "current")
        assert plane.index_audit.directory.nodes == 1
    finally:
        await auditor.close()
        await watch.close()
