"""Prefill and decode on two hosts, either of which is replaced: the other serves on with the new one.

The engines are emulated; agents, gateway, control plane and every block between hosts are real.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from live_cluster import wait_for
from net_cluster import NetCluster, net_cluster, until_moved

from workers.data_dir import default_data_dir
from workers.models.resolve import resolve_model

pytestmark = [
    pytest.mark.netns, pytest.mark.heavy, pytest.mark.xdist_group("netns"),
    pytest.mark.timeout(300),
]  # fmt: skip

REPLACED_SECONDS = 90.0
ANSWER_SECONDS = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    model_folder = Path(resolve_model("smollm2", default_data_dir()).source)
    folder = tmp_path_factory.mktemp("net")
    with net_cluster(folder, model_folder, "emulated", num_hosts=4) as made:
        made.wait_serving(60)
        yield made


@pytest.fixture(scope="module")
def prompts() -> Iterator[str]:
    """Each one new, of a few blocks."""
    return (f"Report {number}: " + f"the {number}th line says this. " * 60 for number in count())


def ask_until(cluster: NetCluster, prompts: Iterator[str], done: Any, seconds: float) -> list[str]:
    """Ask on until `done`. Each answer is one, or an error that says why; none takes long."""
    refused: list[str] = []
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s; refused: {refused[-3:]}"
        began = time.monotonic()
        reply = cluster.complete(next(prompts))
        assert time.monotonic() - began < ANSWER_SECONDS
        if reply.status_code != 200:
            refused.append(reply.text)
            assert reply.json()["error"]["message"], reply.text
        else:
            assert reply.json()["choices"][0]["text"]
        time.sleep(0.2)
    return refused


def test_blocks_come_from_the_other_host(cluster: NetCluster, prompts: Iterator[str]) -> None:
    record = until_moved(cluster, prompts)
    assert record["prefill_leg"]["worker_id"] == "p1"
    assert record["decode_leg"]["worker_id"] == "d1"


@pytest.mark.parametrize("worker_id", ["d1", "p1"])
def test_c11_a_worker_that_is_replaced(
    cluster: NetCluster, prompts: Iterator[str], worker_id: str
) -> None:
    """Killed, it comes back as another process; until then it is not ready, with the reason."""
    until_moved(cluster, prompts)
    old = cluster.worker(worker_id)
    os.kill(old["pid"], signal.SIGKILL)
    wait_for(lambda: cluster.worker(worker_id)["state"] != "ready", 20, "readiness to go")
    assert "SIGKILL" in cluster.worker(worker_id)["last_error"]

    def replaced() -> bool:
        row = cluster.worker(worker_id)
        return bool(row["state"] == "ready" and row["pid"] not in (0, old["pid"]))

    refused = ask_until(cluster, prompts, replaced, REPLACED_SECONDS)
    if worker_id == "p1":
        assert not refused, "the decode worker can prefill by itself"
    until_moved(cluster, prompts)


@pytest.mark.parametrize(("node_id", "role"), [("n2", "decode"), ("n1", "prefill")])
def test_c11_a_host_that_is_replaced_at_another_address(
    cluster: NetCluster, prompts: Iterator[str], node_id: str, role: Any
) -> None:
    """Agent, slab and worker of the same names on another host: another incarnation, other keys."""
    until_moved(cluster, prompts)
    old = cluster.nodes[node_id]
    worker_id = old.share.worker_id
    spare = next(
        host for host in cluster.hosts[1:]
        if host not in [node.host for node in cluster.nodes.values()]
    )  # fmt: skip
    old.end()
    refused = ask_until(
        cluster, prompts, lambda: worker_id not in cluster.ready_workers(), REPLACED_SECONDS
    )
    row = cluster.worker(worker_id)
    assert row["state"] != "ready"
    new = cluster.start_node(node_id, role, spare)

    def replaced() -> bool:
        found = cluster.worker(worker_id)
        return bool(found["state"] == "ready" and found["url"] == new.url)

    refused += ask_until(cluster, prompts, replaced, REPLACED_SECONDS)
    if role == "prefill":
        assert not refused, "the decode worker can prefill by itself"
    record = until_moved(cluster, prompts)
    assert record["decode_leg"]["pool_hit_tokens"] > 0


def test_a_cut_of_ten_seconds_costs_no_answer(cluster: NetCluster, prompts: Iterator[str]) -> None:
    """The prefill host is unplugged: decode computes by itself, and blocks move again afterwards."""
    until_moved(cluster, prompts)
    host = cluster.nodes["n1"].host
    host.cut()
    cut_at = time.monotonic()
    try:
        refused = ask_until(cluster, prompts, lambda: time.monotonic() - cut_at > 10, 60)
    finally:
        host.join()
    assert not refused
    until_moved(cluster, prompts)


def test_c18_a_stopped_host_slows_no_answer_for_long(
    cluster: NetCluster, prompts: Iterator[str]
) -> None:
    """The prefill host's agent hangs: within seconds requests go around what it holds."""
    until_moved(cluster, prompts)
    pid = cluster.nodes["n1"].agent_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        slowest = 0.0
        while time.monotonic() - began < 8:
            asked_at = time.monotonic()
            reply = cluster.complete(next(prompts))
            slowest = max(slowest, time.monotonic() - asked_at)
            assert reply.status_code == 200, reply.text
    finally:
        os.kill(pid, signal.SIGCONT)
    assert slowest < 10.0
    until_moved(cluster, prompts)
