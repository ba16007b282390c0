"""CASES E01 to E05, server side; heartbeats, incarnations, removal by hand."""

from __future__ import annotations

import pytest

from controlplane.nodes.service import MAX_LOST_NODES
from controlplane.nodes.state import Grace, node_state


class TestStates:
    @pytest.mark.parametrize(
        ("age", "state"),
        [
            (0, "ready"),
            (2.9, "ready"),
            (3.0, "stale"),
            (9.9, "stale"),
            (10.0, "lost"),
            (1e9, "lost"),
        ],
    )
    def test_follows_the_age(self, age, state):
        assert node_state(age) == state

    def test_grace_after_a_stall_of_our_own(self):
        grace = Grace(0.0)
        assert all(grace.look(float(now)) for now in (2, 4, 6, 8))
        assert grace.look(10.5) is False
        assert grace.look(30.0) is True, "we stood still for 19 s: nobody could be heard"
        assert grace.look(30.5) is True
        assert grace.look(33.1) is False


async def _silence(api, seconds):
    """Time passes in steps that the sweeper would see."""
    for _ in range(int(seconds)):
        api.clock.advance(1)
        api.plane.sweep()


async def test_e01_one_state_per_node_when_dead_ones_overflow(api):
    await _silence(api, 11)  # the grace of the start is over
    for index in range(MAX_LOST_NODES + 30):
        assert (await api.heartbeat(f"n{index:04}", stats=False)).status_code == 200
        if index % 50 == 0:
            await _silence(api, 1)
    await _silence(api, 12)
    await api.heartbeat("n0229", stats=False)
    items = (await api.get("/nodes"))["items"]
    ids = [node["id"] for node in items]
    assert len(ids) == len(set(ids))
    lost = {node["id"] for node in items if node["state"] == "lost"}
    assert len(lost) == MAX_LOST_NODES - 1, "one of them is back"
    assert "n0229" not in lost
    assert "n0000" not in ids, "the one lost longest is dropped first"


async def test_e02_a_restart_is_no_new_row(api):
    for incarnation in range(1, 7):
        assert (await api.heartbeat("n1", incarnation)).status_code == 200
    items = (await api.get("/nodes"))["items"]
    assert [(n["id"], n["restarts"], n["incarnation"]) for n in items] == [("n1", 5, 6)]


async def test_e03_a_node_without_numbers_breaks_nothing(api):
    await api.heartbeat("bare", stats=False)
    await api.heartbeat("full")
    bare, full = (await api.get("/nodes"))["items"]
    assert (bare["used_blocks"], bare["capacity_blocks"], bare["block_tokens"]) == (
        None,
        None,
        None,
    )
    assert full["used_blocks"] == 10
    overview = await api.get("/overview")
    assert overview["capacity_bytes"] == 100 * 1024
    assert (await api.http.get("/metrics")).status_code == 200


async def test_e04_a_silent_node_is_stale_then_lost_and_can_be_removed(api, bodies):
    await _silence(api, 11)
    await api.heartbeat("n1", workers=[bodies["worker"]("p1")])
    seen = []
    for _ in range(12):
        await _silence(api, 1)
        seen.append((await api.get("/nodes/n1"))["state"])
    assert seen[1] == "ready"
    assert seen[4] == "stale"
    assert seen[-1] == "lost"
    assert (await api.get("/workers/p1"))["state"] == "lost"
    removed = await api.http.delete("/api/v1/nodes/n1", params={"reason": "rack is gone"})
    assert removed.status_code == 204
    assert (await api.get("/nodes"))["items"] == []
    assert (await api.get("/workers"))["items"] == []
    row = (await api.get("/audit"))["items"][0]
    assert (row["verb"], row["target"], row["reason"]) == ("node.remove", "n1", "rack is gone")


async def test_e05_a_dead_node_shows_its_age_and_leaves_the_totals(api):
    await _silence(api, 11)
    await api.heartbeat("n1")
    await api.heartbeat("n2")
    for _ in range(60):
        await api.heartbeat("n2")
        await _silence(api, 1)
    node = await api.get("/nodes/n1")
    assert node["state"] == "lost"
    assert node["heartbeat_age_seconds"] == pytest.approx(60)
    assert node["used_blocks"] == 10, "kept, with its age: the console greys it"
    overview = await api.get("/overview")
    assert overview["capacity_bytes"] == 100 * 1024, "n2's alone"
    assert overview["attention"][0]["severity"] == "critical"
    assert "n1" in overview["attention"][0]["text"]


async def test_an_older_life_is_refused_with_both_named(api):
    await api.heartbeat("n1", 20)
    refused = await api.heartbeat("n1", 10)
    assert refused.status_code == 409
    problem = refused.json()
    assert problem["field"] == "incarnation"
    assert "20" in problem["detail"]
    assert "10" in problem["detail"]
    assert (await api.get("/nodes/n1"))["incarnation"] == 20


async def test_a_ready_node_is_not_removed(api):
    await api.heartbeat("n1")
    refused = await api.http.delete("/api/v1/nodes/n1")
    assert refused.status_code == 409
    assert "Stop its agent" in refused.json()["way_out"]
    assert (await api.get("/audit"))["items"] == []


async def test_a_restarted_control_plane_knows_its_nodes(both, run_api, bodies):
    await both.heartbeat("n1", 5, workers=[bodies["worker"]("p1")])
    await both.heartbeat("n1", 6, workers=[bodies["worker"]("p1")])
    await both.plane.save()
    async with run_api(both.plane.settings) as second:
        node = await second.get("/nodes/n1")
        assert (node["incarnation"], node["restarts"]) == (6, 1)
        assert node["state"] in {"ready", "stale"}
        assert node["used_blocks"] is None, "numbers of another life are not shown as ours"
        assert (await second.get("/workers/p1"))["state"] == "ready"
        await second.heartbeat("n1", 6)
        assert (await second.get("/nodes/n1"))["restarts"] == 1


async def test_nobody_is_lost_only_because_the_control_plane_was_away(both, run_api):
    await both.heartbeat("n1")
    await both.plane.save()
    async with run_api(both.plane.settings) as second:
        second.clock.advance(0)
        second.plane.nodes.find("n1").seen -= 3600
        second.plane.sweep()
        assert (await second.get("/nodes/n1"))["state"] == "stale"
        await _silence(second, 11)
        assert (await second.get("/nodes/n1"))["state"] == "lost"


async def test_a_heartbeat_that_cannot_be_read_changes_nothing(api, bodies):
    await api.heartbeat("n1", 1)
    body = {"incarnation": 2, "pool_stats": bodies["pool"]("n1", 2, used_blocks="many")}
    refused = await api.http.post("/api/v1/nodes/n1/heartbeat", json=body)
    assert refused.status_code == 422
    assert refused.json()["field"] == "pool_stats.used_blocks"
    assert (await api.get("/nodes/n1"))["incarnation"] == 1


async def test_namespaces_come_as_hex(api, bodies):
    spec = {
        "model_id": "m",
        "weights_version": "1",
        "kv_dtype": "bf16",
        "page_layout": "LBHNC",
        "isa": "vec",
        "page_bytes": [64, 64],
        "engine_block_tokens": 32,
        "block_tokens": 256,
        "tp_size": 1,
        "rank_layout": "tp1",
    }
    digest = "ab" * 32
    namespaces = [{"digest": digest, "spec": spec, "workers": ["p1"]}]
    workers = [bodies["worker"]("p1")]
    response = await api.heartbeat("n1", namespaces=namespaces, workers=workers)
    assert response.status_code == 200, response.text
    node = await api.get("/nodes/n1")
    assert (node["namespaces"], node["block_tokens"]) == ([digest], 256)
    worker = await api.get("/workers/p1")
    assert (worker["namespace"], worker["block_tokens"]) == (digest, 256)
    reply = response.json()
    assert reply["cache_policy_revision"] == 1
    assert reply["cache_policy"]["lease_seconds"] == 30.0


async def test_c06_a_node_that_lacks_the_transport_it_must_have_is_not_ready(api):
    reason = "rdma = 17179869184: the locked-memory limit is 8 MiB. `ulimit -l unlimited`"
    await api.heartbeat("n1", transfers={"not_ready": reason, "problem": reason})
    await api.heartbeat("n2", transfers={"problem": reason})
    first, second = (await api.get("/nodes"))["items"]
    assert (first["state"], first["not_ready"]) == ("not_ready", reason)
    assert (second["state"], second["transfer_problem"]) == ("ready", reason)
    assert 'perilune_nodes{state="not_ready"} 1.0' in (await api.http.get("/metrics")).text
    await _silence(api, 11)
    assert (await api.get("/nodes"))["items"][0]["state"] == "lost"
    await api.heartbeat("n1", transfers={})
    assert (await api.get("/nodes"))["items"][0]["state"] == "ready"
