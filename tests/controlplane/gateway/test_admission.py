"""Turns before prefill: classes, tenants, deadlines; SLOs of tenants and classes; probes."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from controlplane.core.admission import Predicted, Slo, Standing
from controlplane.gateway.admission import Desk, Forecast
from controlplane.gateway.dispatch import Dispatch
from controlplane.gateway.policies import Policies
from controlplane.gateway.stats import Stats
from controlplane.gateway.wire import Decision, Verdict

PROMPT = "the quick brown fox " * 30


def key(rig: Any, name: str, max_priority: str = "") -> dict[str, Any]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {**rig.key(digest, name), "max_priority": max_priority}


def headers(name: str, priority: str = "") -> dict[str, str]:
    found = {"authorization": f"Bearer {name}"}
    return found | ({"x-perilune-priority": priority} if priority else {})


async def ask(rig: Any, tokens: int, first: int = 1, **more: Any) -> Any:
    """A prompt of so many tokens that no other has, by its first one."""
    body = {"model": "tiny", "prompt": [first, *[7] * (tokens - 1)], "max_tokens": 1}
    body |= more.pop("body", {})
    return await rig.client.post("/v1/completions", json=body, **more)


async def one_worker(rig: Any, **admission: Any) -> None:
    """One prefill worker, 1 ms a token, that is given one request at a time."""
    rig.workers = ("p1:prefill", "d1:decode")
    rig.engine = replace(rig.engine, prefill_ms_per_token=1.0)
    policy = rig.policy("admission", window_tokens=1, **admission)
    rig.policies = [*rig.policies, policy]
    await rig.start()


def waiting(rig: Any) -> int:
    return int(rig.gateway.cluster.dispatch.waiting("p1"))


async def started(rig: Any, eventually: Any, *requests: Any) -> list[asyncio.Task[Any]]:
    """Each request on its way, in this order: the first runs, the others wait."""
    tasks = []
    for count, request in enumerate(requests):
        tasks.append(asyncio.create_task(request))
        await eventually(lambda: len(rig.seen("p1")) == 1)
        await eventually(lambda count=count: waiting(rig) == count)
    return tasks


async def test_with_room_nothing_is_awaited(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatch, "wait", None)
    await rig.start()
    assert (await rig.complete(prompt=PROMPT)).status_code == 200
    record = await rig.control_plane.ended()
    assert record.dispatch_wait_seconds is None
    assert record.priority == "standard"
    assert record.admission is None


async def test_classes_go_in_order_and_the_wait_is_in_the_record(rig: Any, eventually: Any) -> None:
    await one_worker(rig)
    asked = [
        ask(rig, 300, 1), ask(rig, 50, 2, headers={"x-perilune-priority": "batch"}),
        ask(rig, 50, 3), ask(rig, 50, 4, headers={"x-perilune-priority": "interactive"}),
    ]  # fmt: skip
    replies = await asyncio.gather(*await started(rig, eventually, *asked))
    assert {reply.status_code for reply in replies} == {200}
    assert [body["prompt"][0] for body in rig.seen("p1")] == [1, 4, 3, 2]
    await eventually(lambda: len(rig.control_plane.decisions()) == 4)
    done = lambda: all(d.e2e_seconds for d in rig.control_plane.decisions().values())  # noqa: E731
    await eventually(done)
    by_class = {d.priority: d for d in rig.control_plane.decisions().values() if d.at}
    batch = by_class["batch"]
    assert batch.dispatch_wait_seconds > 0.1
    queue = next(phase for phase in batch.phases if phase.name == "queue")
    assert queue.measured_seconds == pytest.approx(batch.dispatch_wait_seconds, abs=0.3)
    assert batch.prefill_candidates[0].queue_seconds > 0, "those ahead are in T_queue"


async def test_r32_a_hit_does_not_queue_behind_cold_prefills(
    rig: Any, agent: Any, eventually: Any
) -> None:
    rig.agent, rig.workers = agent.address, ("p1:prefill", "d1:decode")
    rig.engine = replace(rig.engine, prefill_ms_per_token=1.0)
    rig.policies = [rig.policy("admission", window_tokens=1)]
    await rig.start()
    await eventually(lambda: rig.gateway._agents.num_subscribed == 1)
    await eventually(lambda: rig.gateway.cluster.workers["p1"].namespace)
    await rig.complete(prompt=[5] * 300, max_tokens=1)
    await eventually(lambda: rig.gateway.cluster.index.num_blocks() > 0)
    waiting = rig.gateway.cluster.dispatch.waiting
    tasks = []
    for count, prompt in enumerate(([1] * 600, [2] * 600, [3] * 600, [5] * 300)):
        tasks.append(asyncio.create_task(rig.complete(prompt=prompt, max_tokens=1)))
        await eventually(lambda count=count: waiting("p1") == count)
    await asyncio.gather(*tasks)
    assert [body["prompt"][0] for body in rig.seen("p1")] == [5, 1, 5, 2, 3]


async def test_tenants_take_turns(rig: Any, eventually: Any) -> None:
    await one_worker(rig, quantum_tokens=64)
    await rig.publish(client_keys=[key(rig, "many"), key(rig, "few")])
    asked = [ask(rig, 400, i, headers=headers("many")) for i in range(5)]
    asked += [ask(rig, 60, 9, headers=headers("few"))]
    await asyncio.gather(*await started(rig, eventually, *asked))
    assert [body["prompt"][0] for body in rig.seen("p1")].index(9) <= 2


async def test_a_client_that_leaves_while_it_waits_holds_nothing(rig: Any, eventually: Any) -> None:
    await one_worker(rig)
    first, gone, last = await started(
        rig, eventually, ask(rig, 400, 1), ask(rig, 50, 2), ask(rig, 50, 3)
    )
    gone.cancel()
    await eventually(lambda: waiting(rig) == 1)
    assert [(await task).status_code for task in (first, last)] == [200, 200]
    assert [body["prompt"][0] for body in rig.seen("p1")] == [1, 3]
    record = await rig.control_plane.ended("cancelled")
    assert record.prefill_worker == ""


async def test_who_waits_for_a_worker_that_drains_goes_to_another(
    rig: Any, eventually: Any
) -> None:
    await one_worker(rig)
    tasks = await started(rig, eventually, ask(rig, 2000, 1), ask(rig, 50, 2))
    await rig.publish(**rig.make_view(p1="draining"))
    assert [(await task).status_code for task in tasks] == [200, 200]
    assert [body["prompt"][0] for body in rig.seen("p1")] == [1]
    bodies = {body["prompt"][0] for body in rig.seen("d1")}
    assert bodies == {1, 2}, "decode has computed the prompt"


async def test_a_full_queue_turns_the_lowest_class_away(rig: Any, eventually: Any) -> None:
    await one_worker(rig, max_waiting=1)
    batch = {"x-perilune-priority": "batch"}
    first, shed = await started(rig, eventually, ask(rig, 600, 1), ask(rig, 50, 2, headers=batch))
    refused = await ask(rig, 50, 3, headers=batch)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    higher = asyncio.create_task(ask(rig, 50, 4))
    assert (await shed).status_code == 429
    assert [(await task).status_code for task in (first, higher)] == [200, 200]
    stats = rig.gateway.stats
    assert (stats.rejected, stats.shed, stats.failed) == (2, 2, 0)
    record = await rig.control_plane.ended("rejected")
    assert (record.admission.gate, record.http_status) == ("queue_full", 429)


async def test_who_cannot_keep_the_slo_any_more_is_turned_away(rig: Any, eventually: Any) -> None:
    rig.policies = [rig.policy("slo", mode="enforce", max_ttft_ms=1200)]
    await one_worker(rig)  # the worker is slower than predictions say at first
    first, late = await started(rig, eventually, ask(rig, 1500, 1), ask(rig, 50, 2))
    reply = await late
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "slo_ttft")
    assert "no turn at p1 in time" in reply.json()["error"]["message"]
    record = await rig.control_plane.ended("rejected")
    assert record.admission.gate == "deadline"
    assert record.e2e_seconds < 2.5
    assert (await first).status_code == 200


async def test_who_gets_no_decode_slot_in_time_is_turned_away(rig: Any, eventually: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    rig.engine = replace(rig.engine, decode_ms=100)
    slots = rig.policy("scheduling", max_concurrent_per_decode=1)
    rig.policies = [slots, rig.policy("slo", mode="enforce", max_ttft_ms=1000)]
    await rig.start()
    running = asyncio.create_task(ask(rig, 20, 1, body={"max_tokens": 30}))
    await eventually(lambda: rig.gateway.cluster.slots.running("d1"))
    reply = await ask(rig, 20, 2)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "slo_ttft")
    assert "no decode slot in time" in reply.json()["error"]["message"]
    assert (await running).status_code == 200
    record = await rig.control_plane.ended("rejected")
    assert (record.admission.gate, record.decode_worker) == ("deadline", "")


async def test_a_wait_has_its_bound(rig: Any, eventually: Any) -> None:
    rig.policies = [rig.policy("slo", mode="off")]
    await one_worker(rig, max_wait_s=0.2)
    first, late = await started(rig, eventually, ask(rig, 1500, 1), ask(rig, 50, 2))
    reply = await late
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_prefill_turn")
    assert reply.headers["retry-after"]
    assert (await first).status_code == 200


async def test_a_new_window_acts_on_those_who_wait(rig: Any, eventually: Any) -> None:
    await one_worker(rig)
    tasks = await started(rig, eventually, ask(rig, 1500, 1), ask(rig, 50, 2))
    await rig.publish(
        policies=[rig.policy("admission", 2, window_tokens=100_000, window_ms=60_000)]
    )
    await eventually(lambda: len(rig.seen("p1")) == 2)
    await asyncio.gather(*tasks)


async def test_a_class_as_the_key_allows(rig: Any, eventually: Any) -> None:
    await rig.start()
    await rig.publish(client_keys=[key(rig, "a"), key(rig, "b", "interactive")])
    for name, asked in (("a", "interactive"), ("a", "batch"), ("b", "interactive"), ("b", "")):
        assert (await ask(rig, 30, headers=headers(name, asked))).status_code == 200
    await eventually(lambda: len(rig.control_plane.decisions()) == 4)
    rows = sorted(rig.control_plane.decisions().values(), key=lambda d: d.at)
    assert [d.priority for d in rows] == ["standard", "batch", "interactive", "standard"]


@pytest.mark.parametrize(("scope", "refused"), [
    ("tenant:a", {"a"}), ("priority:batch", {"batch"}), ("tenant:a+priority:batch", set()),
])  # fmt: skip
async def test_slos_of_tenants_and_classes(rig: Any, scope: str, refused: set[str]) -> None:
    strict = {**rig.policy("slo", 5, mode="enforce", max_ttft_ms=1), "scope": scope}
    rig.policies = [rig.policy("slo", 2, mode="enforce", max_ttft_ms=60_000), strict]
    await rig.start()
    await rig.publish(client_keys=[key(rig, "a"), key(rig, "b")])
    for name, priority in (("a", ""), ("b", ""), ("b", "batch")):
        reply = await ask(rig, 200, headers=headers(name, priority))
        wanted = 429 if {name, priority} & refused else 200
        assert reply.status_code == wanted, (name, priority)
        if wanted == 429:
            assert f"slo/{scope} revision 5" in reply.json()["error"]["message"]


async def test_probes_are_let_in_and_judged(rig: Any, eventually: Any) -> None:
    slo = rig.policy("slo", mode="enforce", max_ttft_ms=1)
    rig.policies = [slo, rig.policy("admission", probe_share=0.5)]
    await rig.start()
    rig.gateway.cluster.desk._rng = FixedDraw(0.0)  # each distance the shortest: 1 of 0.5 / 0.5
    assert (await rig.complete(prompt=PROMPT, stream=True)).status_code == 200
    record = await rig.control_plane.ended("finished_length")
    verdict = record.admission
    assert (verdict.gate, verdict.probe, verdict.met) == ("ttft", True, False)
    assert verdict.measured_seconds == record.ttft_seconds
    assert verdict.limit_seconds == 0.001
    await rig.publish(policies=[slo, rig.policy("admission", 2, probe_share=0)])
    assert (await rig.complete(prompt=PROMPT, stream=True)).status_code == 429
    stats = rig.gateway.stats
    assert (stats.probes, stats.probes_met, stats.rejected) == (1, 0, 1)
    text = (await rig.client.get("/metrics")).text
    assert "perilune_gateway_probes_total 1" in text
    assert "perilune_gateway_false_reject_ratio 0.0" in text


class FixedDraw(Random):
    """Draws one value for ever."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


def decision(ttft: float, tbt: float | None = None) -> Decision:
    return Decision(
        "r", None, "gw", "finished_stop", model="m", ttft_seconds=ttft, tbt_p95_seconds=tbt,  # type: ignore[arg-type]
    )  # fmt: skip


def judged(desk: Desk, slo: Slo, rank: int = 0, model: str = "m", turn: float = 0.0) -> Any:
    """Of a predicted TTFT of 1 s, `turn` of it for the turn, and a TBT of 30 ms."""
    predicted = Predicted(1.0, turn, 0.03)
    return desk.judge(Policies(slo=slo), model, Standing(rank=rank), predicted, turn, 0.0)


@pytest.mark.parametrize(("percentile", "admitted"), [(50, True), (95, False)])
def test_the_percentile_counts(percentile: float, admitted: bool) -> None:
    """Half of such requests take as long as predicted, half three times as long."""
    slo = Slo("enforce", max_ttft_seconds=2.0, percentile=percentile)
    desk = Desk(Stats(), FixedDraw(0.9))
    assert judged(desk, slo).admitted, "nothing known yet"
    for i in range(101):
        learnt = decision(3.0 if i % 2 else 1.0)
        learnt.admission = Verdict("ttft", 3.0, 2.0)  # which does not move the level
        desk.ended(slo, learnt, 0.0, Forecast(1.0, None), 0.0)
    verdict = judged(desk, slo)
    assert verdict.admitted is admitted
    if not admitted:
        assert verdict.predicted_seconds == pytest.approx(3.0, rel=0.05)
        assert verdict.retry_after_seconds is not None
    assert judged(desk, slo, model="other").admitted


def test_misses_make_it_stricter_and_promises_kept_less_strict() -> None:
    slo = Slo("enforce", max_ttft_seconds=2.0, percentile=90)
    desk = Desk(Stats(), FixedDraw(0.9))
    for i in range(200):  # measured over predicted: 1 to 3
        desk.ended(slo, decision(1.0 + i % 20 / 10), 0.0, Forecast(1.0, None), 0.0)
    strict = judged(desk, slo)
    assert not strict.admitted
    for _ in range(300):
        desk.ended(slo, decision(0.5), 0.0, Forecast(None, None), 0.0)
    assert judged(desk, slo).admitted
    assert strict.predicted_seconds > 2.8


def test_a_wait_is_judged_by_its_median_of_the_class() -> None:
    slo = Slo("enforce", max_ttft_seconds=2.0)
    desk = Desk(Stats(), FixedDraw(0.9))
    for i in range(101):
        desk.waited("m", 0, 0.9, 4.0 if i % 2 else 0.9, 0.0)
        desk.waited("m", 2, 0.9, 4.0, 0.0)
    assert judged(desk, slo, rank=0, turn=0.9).admitted
    assert judged(desk, slo, rank=2, turn=0.9).breaks == "ttft"
    assert judged(desk, slo, rank=2).admitted, "without a wait"


def test_tbt_has_its_percentile_too() -> None:
    slo = Slo("enforce", max_ttft_seconds=9.0, max_tbt_seconds=0.05, percentile=95)
    desk = Desk(Stats(), FixedDraw(0.9))
    for _ in range(30):
        desk.ended(slo, decision(1.0, tbt=0.06), 0.0, Forecast(1.0, 0.03), 0.0)
    assert judged(desk, slo).breaks == "tbt"


def test_requests_that_were_tried_again_teach_nothing() -> None:
    slo = Slo("enforce", max_ttft_seconds=2.0)
    desk = Desk(Stats(), FixedDraw(0.9))
    for _ in range(100):
        retried = decision(9.0)
        retried.retries = 1
        desk.ended(slo, retried, 0.0, Forecast(1.0, None), 0.0)
    assert judged(desk, slo).admitted
