"""Decision records: joined with their legs in any order, searched, paged, bounded, counted once."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.decisions import repository
from controlplane.decisions.join import join, kv_outcome
from controlplane.decisions.schemas import Decision, Leg
from workers.core.messages import LegReport


def leg(role, worker, transfer="t-r1", **changes):
    return {
        "type": "LegReport",
        "transfer_id": transfer,
        "worker_id": worker,
        "kv_role": role,
        "prompt_tokens": 1000,
        **changes,
    }


PREFILL = leg("kv_producer", "p1", device_hit_tokens=100, pool_hit_tokens=400, computed_tokens=500)
DECODE = leg(
    "kv_consumer",
    "d1",
    loaded_blocks=3,
    kv_wait_seconds=0.2,
    kv_wait_by_stage_seconds={"queue": 0.1, "wire": 0.05, "verify": 0.03, "scatter": 0.02},
)


@pytest.mark.parametrize("legs_first", [True, False])
async def test_legs_and_record_join_in_any_order(both, bodies, legs_first):
    record = bodies["decision"]("r1", ttft_seconds=0.5, e2e_seconds=1.3)

    async def legs():
        assert (await both.heartbeat("n1", leg_reports=[PREFILL, DECODE])).status_code == 200

    async def report():
        assert (await both.report(decisions=[record])).json()["stored"] == 1

    steps = [legs, report] if legs_first else [report, legs]
    for step in [*steps, *steps]:
        await step()  # again: both are idempotent
    found = await both.get("/decisions/r1")
    assert found["hit_tokens"] == 500
    assert found["engine_prompt_tokens"] == 1000
    assert found["prefill_leg"]["computed_tokens"] == 500
    assert found["decode_leg"]["loaded_blocks"] == 3
    both.second()
    matrix = await both.get("/transfers/matrix")
    assert [(p["source"], p["destination"], p["transfers"]) for p in matrix["pairs"]] == [
        ("p1", "d1", 1)
    ]
    assert matrix["pairs"][0]["p50_seconds"] == pytest.approx(0.1, abs=0.06)
    overview = await both.get("/overview")
    assert overview["kv_wait_ratio"] == pytest.approx(0.2 / (0.2 + 0.8))


async def test_the_later_record_wins_but_nothing_comes_back_to_life(both, bodies):
    running = bodies["decision"]("r1", status="running")
    final = bodies["decision"]("r1", status="failed", error="decode leg reset")
    await both.report(decisions=[running])
    assert (await both.get("/decisions/r1"))["status"] == "running"
    await both.report(decisions=[running, final])
    await both.report(decisions=[running])
    found = await both.get("/decisions/r1")
    assert (found["status"], found["error"]) == ("failed", "decode leg reset")


async def test_filters_and_pages(both, bodies):
    base = both.clock.now()
    records = []
    for index in range(25):
        changes = {
            "at": (base + timedelta(seconds=index // 2)).isoformat(),
            "status": "rejected" if index % 5 == 0 else "finished_stop",
            "tenant": "acme" if index % 2 else "default",
            "decode_worker": "d2" if index % 3 == 0 else "d1",
        }
        records.append(bodies["decision"](f"r{index:02}", **changes))
    await both.report(decisions=records)
    first = await both.get("/decisions", limit=10)
    assert first["total"] == 25
    assert first["items"][0]["request_id"] == "r24"
    seen, page = [d["request_id"] for d in first["items"]], first
    while page["next_cursor"]:
        page = await both.get("/decisions", limit=10, cursor=page["next_cursor"])
        seen += [d["request_id"] for d in page["items"]]
    assert seen == [f"r{index:02}" for index in reversed(range(25))]
    assert (await both.get("/decisions", status="rejected"))["total"] == 5
    assert (await both.get("/rejections"))["total"] == 5
    assert (await both.get("/decisions", tenant="acme"))["total"] == 12
    assert (await both.get("/decisions", worker="d2"))["total"] == 9
    assert (await both.get("/decisions", worker="p1"))["total"] == 25
    assert (await both.get("/decisions", model="other"))["total"] == 0
    since = (base + timedelta(seconds=10)).isoformat()
    assert (await both.get("/decisions", since=since))["total"] == 5


async def test_history_has_a_bound(both, bodies):
    old = bodies["decision"]("old", at=(both.clock.now() - timedelta(days=8)).isoformat())
    await both.report(decisions=[old, *(bodies["decision"](f"r{i}") for i in range(3))])
    await both.plane.prune()
    assert (await both.get("/decisions"))["total"] == 3
    newer = bodies["decision"]("new", at=(both.clock.now() + timedelta(seconds=1)).isoformat())
    await both.report(decisions=[newer])
    async with both.plane.db.write() as tx:
        await repository.prune(tx.session, both.clock.now() - timedelta(days=1), keep=1)
    assert [d["request_id"] for d in (await both.get("/decisions"))["items"]] == ["new"]


async def test_a_record_of_which_one_field_is_wrong_stores_nothing(api, bodies):
    good, bad = bodies["decision"]("good"), bodies["decision"]("bad", status="lost in space")
    refused = await api.report(decisions=[good, bad])
    assert refused.status_code == 422
    problem = refused.json()
    assert (problem["field"], problem["value"]) == ("decisions.1.status", "lost in space")
    assert (await api.get("/decisions"))["total"] == 0


async def test_a_both_role_worker_is_placed_by_its_id(api, bodies):
    record = bodies["decision"]("r1", prefill_worker="b1", decode_worker="b2")
    legs = [leg("kv_both", "b2", loaded_blocks=1), leg("kv_both", "b1", pool_hit_tokens=7)]
    await api.heartbeat("n1", leg_reports=legs)
    await api.report(decisions=[record])
    found = await api.get("/decisions/r1")
    assert (found["prefill_leg"]["worker_id"], found["decode_leg"]["worker_id"]) == ("b1", "b2")
    assert found["hit_tokens"] == 7


def test_every_field_of_a_leg_report_has_its_place():
    own = {"transfer_id", "kv_role"}
    assert set(Leg.model_fields) == set(LegReport.__struct_fields__) - own
    assert Decision.model_fields["prefill_leg"].default is None


class TestDecodeTime:
    def outcome(self, bodies, **changes):
        leg = {"worker_id": "d1", "loaded_blocks": 1, "kv_wait_seconds": 0.1}
        return kv_outcome(Decision(**bodies["decision"]("r", decode_leg=leg, **changes)))

    def test_runs_from_the_handover_to_the_end(self, bodies):
        phases = [{"name": "handover", "start_seconds": 0.5}]
        outcome = self.outcome(bodies, e2e_seconds=1.5, phases=phases)
        assert (outcome.waited_seconds, outcome.decode_seconds) == (0.1, 1.0)

    def test_is_unknown_rather_than_all_waiting(self, bodies):
        assert self.outcome(bodies, e2e_seconds=1.5).decode_seconds is None
        assert self.outcome(bodies).decode_seconds is None

    def test_is_not_told_of_a_running_request(self, bodies):
        assert self.outcome(bodies, status="running", e2e_seconds=1.0, ttft_seconds=0.5) is None


def test_after_a_retry_the_leg_is_of_the_worker_that_served(bodies):
    decision = Decision(**bodies["decision"]("r", prefill_worker="p2"))
    reports = [
        LegReport(transfer_id="t-r", worker_id=worker, kv_role="kv_producer")
        for worker in ("p1", "p2")
    ]
    assert join(decision, reports).prefill_leg.worker_id == "p2"
