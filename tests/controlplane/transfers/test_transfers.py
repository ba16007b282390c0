"""Transfers between nodes: the report, the matrix, the series, the terminal's table."""

from __future__ import annotations

import pytest

from controlplane.transfers.schemas import NodeTransferList
from controlplane.transfers.text import node_transfers
from workers.core.transfer_stats import BUCKET_SECONDS, STAGES

SLOWEST = {
    "transfer_id": "fetch:n1:4.0", "ended_at": 90.0, "num_bytes": 4096, "num_pieces": 2,
    "num_missing": 1, "num_retries": 1, "detail": "timeout",
    "timing": {"queue_wait": 0.1, "setup": 0.2, "wire": 0.3, "verify": 0.4},
}  # fmt: skip


def histogram(stage, num_fast, num_slow=0):
    counts = [0] * (len(BUCKET_SECONDS) + 1)
    counts[5], counts[12] = num_fast, num_slow  # up to 2 ms; up to 0.5 s
    return {"stage": stage, "counts": counts, "sum_seconds": 0.001 * num_fast + 0.4 * num_slow}


def pair(num_transfers=100, transport="tcp", priority="first_token", **changes):
    return {
        "source": "n2", "destination": "n1", "transport": transport, "priority": priority,
        "transfers_total": num_transfers, "bytes_total": num_transfers * 1000,
        "pieces_total": num_transfers, "retries_total": 3, "missing_by_cause": {"timeout": 1},
        "seconds": [histogram(stage, num_transfers - 2, 2) for stage in STAGES],
        "slowest": [SLOWEST], **changes,
    }  # fmt: skip


LINK = {
    "peer": "n2", "transport": "tcp", "state": "idle", "breaker": "open", "window_ops": 256,
    "in_flight_ops": 0, "in_flight_bytes": 0, "opens_total": 1, "small_ops_total": 0,
    "resent_bytes_total": 7, "retries_refused_total": 0, "late_completions_total": 0,
    "last_error": "timed out",
}  # fmt: skip


async def beat(api, *pairs, **transfers):
    changes = {"pairs": list(pairs), "links": [], "alarms": [], "at": 100.0, **transfers}
    assert (await api.heartbeat("n1", transfers=changes)).status_code == 200


class TestReport:
    async def test_a_pair_by_stage_with_its_slowest(self, api):
        alarm = "no transfers with n2 by tcp: timed out"
        await beat(api, pair(), links=[LINK], alarms=[alarm])
        api.clock.advance(2)
        found = await api.get("/transfers/nodes")
        [row] = found["rows"]
        assert (row["source"], row["destination"], row["reported_by"]) == ("n2", "n1", "n1")
        assert (row["transfers"], row["bytes"], row["missing"]) == (100, 100_000, {"timeout": 1})
        stages = {stage["stage"]: stage for stage in row["stages"]}
        assert set(stages) == set(STAGES)
        assert 0.001 <= stages["wire"]["p50_seconds"] <= 0.002
        assert 0.2 <= stages["wire"]["p99_seconds"] <= 0.5
        [slow] = row["slowest"]
        assert slow["age_seconds"] == pytest.approx(12)
        assert slow["total_seconds"] == pytest.approx(1.0)
        assert found["links"][0]["breaker"] == "open"
        assert found["alarms"] == [{"node": "n1", "text": alarm}]

    async def test_why_a_transport_is_chosen_and_which_way_blocks_go(self, api):
        why = "cost of 1 MiB: rdma 0.05 ms, tcp 0.4 ms"
        mode = {
            "source": "n2", "mode": "push", "why": "set for this pair", "num_bytes": 1000,
            "pull_seconds": 0.5, "push_seconds": 0.1, "pushed_total": 3,
        }  # fmt: skip
        link = LINK | {"why": why, "cost_seconds": 4e-4}
        await beat(api, pair(mode="push"), links=[link], modes=[mode])
        found = await api.get("/transfers/nodes")
        assert (found["links"][0]["why"], found["links"][0]["cost_seconds"]) == (why, 4e-4)
        assert found["rows"][0]["mode"] == "push"
        [row] = found["modes"]
        assert (row["source"], row["destination"], row["mode"], row["pushed"]) == (
            "n2", "n1", "push", 3,
        )  # fmt: skip
        assert (await api.get("/transfers/nodes", source="n1"))["modes"] == []
        text = node_transfers(NodeTransferList.model_validate(found))
        assert "n2 to n1: push, set for this pair" in text

    async def test_rows_are_filtered_and_bounded(self, api):
        rows = [pair(1), pair(5, priority="batch"), pair(3, "shm"), pair(2, source="n3")]
        await beat(api, *rows, links=[LINK])
        found = await api.get("/transfers/nodes", limit=2)
        assert ([row["transfers"] for row in found["rows"]], found["total"]) == ([5, 3], 4)
        found = await api.get("/transfers/nodes", source="n3")
        assert ([row["source"] for row in found["rows"]], found["links"]) == (["n3"], [])
        found = await api.get("/transfers/nodes", node="n2", transport="tcp", priority="batch")
        assert [row["transfers"] for row in found["rows"]] == [5]
        assert len(found["links"]) == 1
        found = await api.get("/transfers/nodes", limit=0, links="false")
        assert (found["rows"], found["total"], found["links"]) == ([], 4, [])
        reply = await api.http.get("/api/v1/transfers/nodes", params={"colour": "red"})
        assert reply.status_code == 422

    async def test_histograms_of_another_version_are_refused(self, api):
        odd = pair(seconds=[{"stage": "total", "counts": [1, 2], "sum_seconds": 1.0}])
        reply = await api.heartbeat("n1", transfers={"pairs": [odd]})
        assert reply.status_code == 422
        assert reply.json()["field"] == "pool_stats.transfers.pairs.seconds.counts"

    async def test_as_text(self, api):
        await beat(api, pair(), alarms=["no transfers with n2 by tcp: x"])
        found = NodeTransferList.model_validate(await api.get("/transfers/nodes"))
        text = node_transfers(found)
        assert "1 timeout" in text
        assert "ALARM  n1: no transfers with n2 by tcp: x" in text
        nothing = NodeTransferList(rows=[], total=0, links=[], alarms=[])
        assert "No transfer between nodes" in node_transfers(nothing)


class TestMatrix:
    async def test_node_pairs_stand_beside_worker_pairs(self, api):
        shm = {"shm_bytes_by_pair": {"p1>d1": 1000}}
        await api.heartbeat("n1", **shm)
        api.second()
        moved = {"pairs": [pair(100), pair(10, "shm", "batch")]}
        await api.heartbeat("n1", **shm, transfers=moved)
        api.second()
        pairs = (await api.get("/transfers/matrix"))["pairs"]
        [nodes] = [row for row in pairs if row["kind"] == "node"]
        assert (nodes["source"], nodes["destination"], nodes["path"]) == ("n2", "n1", "tcp")
        assert (nodes["transfers"], nodes["bytes"], nodes["failures"]) == (110, 110_000, 2)
        assert nodes["seconds"] == pytest.approx(106 * 0.001 + 4 * 0.4)
        assert 0 < nodes["p50_seconds"] < nodes["p95_seconds"] <= nodes["p99_seconds"]
        assert all(row["path"] == "shm" for row in pairs if row["kind"] == "worker")

    async def test_only_what_was_moved_since_counts_and_a_restart_is_a_gap(self, api):
        await api.heartbeat("n1")
        api.second()
        for total in (100, 150, 150):
            await beat(api, pair(total))
            api.second()
        [row] = (await api.get("/transfers/matrix"))["pairs"]
        assert row["transfers"] == 150
        await beat(api, pair(10))  # the engine began anew
        api.second()
        await beat(api, pair(15))
        api.second()
        [row] = (await api.get("/transfers/matrix"))["pairs"]
        assert row["transfers"] == 155
