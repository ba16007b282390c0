"""The ledger over REST: filled by reports, judged by probes, bounded."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.ledger import repository, service
from controlplane.ledger.calls import ledger, summary


def verdict(gate="ttft", predicted=2.4, **more):
    return {
        "gate": gate,
        "predicted_seconds": predicted,
        "limit_seconds": 2.0,
        "percentile": 95,
        **more,
    }


def rejected(bodies, name, predicted=2.4, gate="ttft", **more):
    admission = verdict(gate, predicted)
    return bodies["decision"](name, status="rejected", http_status=429, admission=admission, **more)


def probe(bodies, name, predicted, met, **more):
    admission = verdict(
        predicted=predicted, probe=True, met=met, measured_seconds=1.9 if met else 2.5
    )
    return bodies["decision"](name, admission=admission, **more)


async def test_rejected_shed_and_probes_are_told_apart_and_counted(both, bodies):
    await both.report(decisions=[
        bodies["decision"]("fine"),
        rejected(bodies, "r1", priority="batch", retry_after_seconds=3.0),
        rejected(bodies, "r2", gate="deadline", predicted=1.5, priority="batch"),
        probe(bodies, "p1", 2.1, met=True, priority="standard"),
        probe(bodies, "p2", 2.6, met=False, priority="batch"),
        bodies["decision"]("p3", status="running", admission=verdict(probe=True)),
        bodies["decision"]("p4", status="failed", admission=verdict(probe=True)),
    ])  # fmt: skip
    items = (await both.get("/ledger"))["items"]
    kinds = {item["request_id"]: item["kind"] for item in items}
    assert kinds == {"r1": "rejected", "r2": "shed", "p1": "probe", "p2": "probe", "p4": "probe"}
    retries = {item["request_id"]: item["retry_after_seconds"] for item in items}
    assert (retries["r1"], retries["p1"]) == (3.0, None)
    total = await both.get("/ledger/summary")
    assert (total["rejected"], total["shed"], total["probes"]) == (1, 1, 3)
    found = total["false_rejects"]
    assert (found["samples"], found["met"], found["ratio"]) == (2, 1, 0.5)
    assert found["low"] < 0.5 < found["high"]
    batch = next(c for c in total["classes"] if c["priority"] == "batch")
    assert (batch["rejected"], batch["shed"], batch["false_rejects"]["samples"]) == (1, 1, 1)
    assert (await both.get("/ledger", kind="probe", priority="batch"))["items"][0][
        "request_id"
    ] == "p2"
    decision = await both.get("/decisions/r1")
    assert decision["admission"]["predicted_seconds"] == 2.4
    assert decision["priority"] == "batch"


async def test_each_revision_that_turned_requests_away_is_named_and_counted(both, bodies):
    def at(seconds):
        return (both.clock.now() - timedelta(seconds=seconds)).isoformat()

    revisions = {"admission/default": 2, "cache/default": 1, "slo/llama": 3}
    await both.report(decisions=[
        rejected(bodies, "r1", policy_revisions={"slo/default": 2}, at=at(30)),
        rejected(bodies, "r2", policy_revisions=revisions, at=at(20)),
        rejected(bodies, "r3", policy_revisions=revisions, at=at(10)),
        rejected(bodies, "r4", gate="queue_full", policy_revisions=revisions, at=at(5)),
        rejected(bodies, "r5", policy_revisions={}, at=at(40)),
        probe(bodies, "p1", 2.1, met=True, policy_revisions=revisions),
    ])  # fmt: skip
    items = {item["request_id"]: item["policy"] for item in (await both.get("/ledger"))["items"]}
    assert items == {
        "r1": "slo/default r2", "r2": "slo/llama r3", "r3": "slo/llama r3",
        "r4": "admission/default r2", "r5": "", "p1": "slo/llama r3",
    }  # fmt: skip
    causes = (await both.get("/ledger/summary"))["causes"]
    assert [(one["gate"], one["policy"], one["turned_away"]) for one in causes] == [
        ("queue_full", "admission/default r2", 1), ("ttft", "slo/llama r3", 2),
        ("ttft", "slo/default r2", 1), ("ttft", "", 1),
    ]  # fmt: skip
    assert causes[1]["last_at"] > causes[2]["last_at"]


async def test_a_probe_that_ends_later_completes_its_row(both, bodies):
    running = bodies["decision"]("p1", status="running", admission=verdict(probe=True))
    await both.report(decisions=[running])
    assert (await both.get("/ledger"))["items"] == []
    for _ in range(2):
        await both.report(decisions=[probe(bodies, "p1", 2.1, met=False)])
    (item,) = (await both.get("/ledger"))["items"]
    assert (item["met"], item["measured_seconds"]) == (False, 2.5)


async def test_a_rejected_request_is_judged_by_the_probes_like_it(api, bodies):
    near = [probe(bodies, f"near{i}", 2.02, met=True) for i in range(20)]
    far = [probe(bodies, f"far{i}", 4.0, met=False) for i in range(20)]
    here = rejected(bodies, "here", 2.01)
    there = rejected(bodies, "there", 5.0)
    await api.report(decisions=[*near, *far, here, there])
    items = {
        item["request_id"]: item for item in (await api.get("/ledger", kind="rejected"))["items"]
    }
    assert items["here"]["would_have_met"]["ratio"] == 1.0
    assert items["there"]["would_have_met"]["ratio"] == 0.0
    assert items["there"]["would_have_met"]["samples"] == 20


async def test_pages_and_bad_values(api, bodies):
    await api.report(decisions=[rejected(bodies, f"r{i}") for i in range(5)])
    first = await api.get("/ledger", limit=3)
    second = await api.get("/ledger", limit=3, cursor=first["next_cursor"])
    names = [item["request_id"] for page in (first, second) for item in page["items"]]
    assert sorted(names) == [f"r{i}" for i in range(5)]
    for query in ("cursor=x", "window=0", "kind=odd", "limit=501", "model=%00"):
        reply = await api.http.get(f"/api/v1/ledger?{query}")
        assert reply.status_code == 422, query
        assert reply.headers["content-type"] == "application/problem+json"


async def test_bounded_by_age_and_number(both, bodies, monkeypatch):
    old = rejected(bodies, "old", at=(both.clock.now() - timedelta(days=8)).isoformat())
    news = [
        rejected(bodies, f"r{i}", at=(both.clock.now() - timedelta(seconds=i)).isoformat())
        for i in range(4)
    ]
    await both.report(decisions=[old, *news])
    monkeypatch.setattr(service, "KEEP_ROWS", 2)
    async with both.plane.db.write() as tx:
        await both.plane.ledger.prune(tx.session)
    async with both.plane.db.read() as session:
        rows = await repository.page(session, repository.LedgerFilters(), 10, None)
    assert [row.request_id for row in rows] == ["r0", "r1"]


async def test_statistics_count_probes(api, bodies):
    await api.report()
    api.second()
    await api.report(probes_total=4, probes_met_total=1, shed_total=2)
    api.second()
    reply = await api.get("/stats/series", metric="probes,probes_met,shed", window=60, step=1)
    sums = {s["metric"]: sum(v or 0 for v in s["values"]) for s in reply["series"]}
    assert sums == {"probes": 4, "probes_met": 1, "shed": 2}


@pytest.mark.parametrize("call", [ledger("probe", 60, model="m"), summary(60, tenant="t")])
async def test_calls_name_known_parameters(api, call):
    reply = await api.http.get(call.path, params=call.params)
    assert reply.status_code == 200, reply.text
    call.reply.model_validate_json(reply.content)
