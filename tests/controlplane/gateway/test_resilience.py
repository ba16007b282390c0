"""Workers that fail, hang, drain or vanish: requests go elsewhere, or say honestly why not."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from controlplane.core import health as health_core
from controlplane.gateway import prober
from controlplane.gateway.settings import Timeouts
from workers.engines.emulated.faults import Faults


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "EVERY_SECONDS", 0.1)
    monkeypatch.setattr(prober, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(prober, "PROBE_SECONDS", 0.3)


def hung() -> Faults:
    """Like a process that is stopped: connections are taken, nothing is answered."""
    return Faults(hang=True, hang_health=True)


@pytest.mark.parametrize("fault", [
    pytest.param(Faults(status=500), id="500"), pytest.param(Faults(reset=True), id="reset"),
    pytest.param(hung(), id="hung"), pytest.param(Faults(empty=True), id="empty"),
])  # fmt: skip
async def test_a07_a_failing_prefill_leg_is_known_at_once(
    rig: Any, quick_probes: None, fault: Faults
) -> None:
    """Never minutes of waiting for KV that does not come: decode computes, the leg is named."""
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rig.api("p1").faults.set(fault)
    response = await asyncio.wait_for(rig.complete(prompt="hello there", max_tokens=3), 10)
    assert response.status_code == 200
    record = await rig.control_plane.ended()
    assert (record.failed_leg, record.retries) == ("prefill", 1)
    assert record.error.startswith("prefill leg on p1")
    assert rig.gateway.stats.worker("p1").failures == 1
    assert rig.gateway.stats.decode_side_prefills == 1


async def test_a07_where_decode_fails_too_the_client_reads_leg_worker_and_id(rig: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    for name in ("p1", "d1"):
        rig.api(name).faults.set(Faults(status=500))
    response = await rig.complete(prompt="hello there")
    error = response.json()["error"]
    assert response.status_code == 502
    assert (error["leg"], error["worker"]) == ("decode", "d1")
    assert error["request_id"] == response.headers["x-perilune-request-id"]
    assert error["request_id"] in error["message"]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a08_an_error_behind_a_200_is_no_answer(rig: Any, leg: str) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rig.api("p1" if leg == "prefill" else "d1").faults.set(Faults(error_body=True))
    response = await rig.complete(prompt="hello there", max_tokens=3)
    if leg == "prefill":
        assert response.status_code == 200
        assert rig.gateway.stats.decode_side_prefills == 1
    else:
        assert response.status_code == 502
        assert "emulated transfer failure" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fault", "stream"),
    [(Faults(empty=True), False), (Faults(empty=True), True), (Faults(end_after_chunks=0), True)],
)
async def test_200_with_nothing_is_never_passed_on(rig: Any, fault: Faults, stream: bool) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rig.api("d1").faults.set(fault)
    response = await rig.complete(prompt="hello there", stream=stream)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "decode_leg_failed"


async def test_a28_a_503_before_the_first_byte_stays_a_status(rig: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rig.api("d1").faults.set(Faults(status=503))
    response = await rig.complete(prompt="hello", stream=True)
    assert response.status_code == 502
    assert response.headers["content-type"] == "application/json"
    assert "answered 503" in response.json()["error"]["message"]


async def test_a30_sixty_requests_pass_a_worker_that_hangs(
    rig: Any, quick_probes: None, eventually: Any
) -> None:
    rig.workers = ("p1:prefill", "p2:prefill", "p3:prefill", "d1:decode")
    rig.policies = [rig.policy("scheduling", max_concurrent_per_decode=100)]
    await rig.start()
    rig.api("p1").faults.set(hung())
    took: list[float] = []

    async def one(i: int) -> int:
        start = time.monotonic()
        response = await rig.complete(prompt=f"number {i}", max_tokens=2)
        took.append(time.monotonic() - start)
        return int(response.status_code)

    assert set(await asyncio.gather(*(one(i) for i in range(60)))) == {200}
    assert sorted(took)[len(took) // 3] < max(took) / 2  # those of the others were not held
    assert rig.gateway.cluster.health.ejected() == ["p1"]
    rig.api("p1").faults.set(Faults())

    async def served_again() -> bool:
        await asyncio.gather(*(rig.complete(prompt="hello") for _ in range(6)))
        return rig.gateway.cluster.health.ejected() == []

    await eventually(served_again, "taken back by itself")


async def test_a30_a_long_generation_is_not_cut(rig: Any, quick_probes: None) -> None:
    """A worker that takes its time but answers its probe is slow, not hung."""
    rig.engine = replace(rig.engine, prefill_ms_per_token=30.0, decode_ms=100.0)
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    response = await rig.complete(prompt="the quick brown fox " * 10, max_tokens=15)
    assert response.status_code == 200
    assert rig.gateway.stats.worker("p1").failures == rig.gateway.stats.worker("d1").failures == 0


async def test_a_stream_of_a_worker_that_hangs_is_ended_with_an_error(
    rig: Any, quick_probes: None
) -> None:
    rig.engine = replace(rig.engine, decode_ms=20.0)
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    events = []
    async for event in rig.events(prompt="hello", max_tokens=1000, ignore_eos=True):
        events.append(event)
        if len(events) == 3:
            rig.api("d1").faults.set(hung())
            rig.api("d1").worker.step = lambda **_: asyncio.sleep(3600)
    error = json.loads(events[-1])["error"]
    assert "hangs" in error["message"]
    assert (error["leg"], error["worker"]) == ("decode", "d1")


async def test_a31_a_dead_worker_costs_a_handful_and_comes_back(rig: Any, eventually: Any) -> None:
    rig.workers = ("p1:prefill", "p2:prefill", "p3:prefill", "d1:decode", "d2:decode")
    rig.policies = [rig.policy("scheduling", placement="round_robin")]
    await rig.start()
    await rig.fleet.stop_worker("p2")
    codes = []
    for i in range(100):
        codes.append((await rig.complete(prompt=f"number {i}", max_tokens=1)).status_code)
    assert codes == [200] * 100
    assert 0 < rig.gateway.stats.worker("p2").failures < 12
    await rig.fleet.restart_worker("p2")
    before = len(rig.api("p2").records)

    async def served() -> bool:
        await asyncio.gather(*(rig.complete(prompt=f"again {i}") for i in range(6)))
        ejected = rig.gateway.cluster.health.ejected()
        return len(rig.api("p2").records) > before and not ejected

    await eventually(served, "p2 serves again")


async def test_a33_after_a_drain_is_acknowledged_nothing_new_goes_there(
    rig: Any, eventually: Any
) -> None:
    rig.engine = replace(rig.engine, decode_ms=10)
    await rig.start()
    stream = asyncio.create_task(rig.stream(prompt="hello", max_tokens=60, ignore_eos=True))
    await eventually(lambda: rig.api("d1").worker.counters.running or
                     rig.api("d2").worker.counters.running)  # fmt: skip
    drained = "d1" if rig.api("d1").worker.counters.running else "d2"
    await rig.publish(**rig.make_view(**{drained: "draining", "p1": "draining"}))
    before = {name: len(rig.api(name).records) for name in (drained, "p1")}
    for i in range(10):
        assert (await rig.complete(prompt=f"number {i}", max_tokens=1)).status_code == 200
    assert {name: len(rig.api(name).records) for name in (drained, "p1")} == before
    assert (await stream)[-1] == "[DONE]"  # what ran there has finished there


async def test_a33_a_decode_worker_that_drains_during_prefill_is_not_given_the_leg(
    rig: Any, eventually: Any
) -> None:
    await rig.start()
    for name in ("p1", "p2"):
        rig.api(name).faults.set(Faults(delay_seconds=0.5))
    request = asyncio.create_task(rig.complete(prompt="hello", max_tokens=2))
    runs = rig.gateway._context.running
    await eventually(lambda: any(run.life.prefill_worker for run in runs.values()))
    planned = next(iter(runs.values())).life.slot_worker
    await rig.publish(**rig.make_view(**{planned: "draining"}))
    assert (await request).status_code == 200
    assert rig.seen(planned) == []
    assert rig.gateway.stats.retries_decode == 0


async def test_a34_the_model_list_asks_no_worker(rig: Any) -> None:
    await rig.start()
    await rig.fleet.stop_worker("p1")
    response = await rig.client.get("/v1/models")
    assert [card["id"] for card in response.json()["data"]] == ["tiny"]


async def test_a43_two_at_once_with_one_client_id(rig: Any) -> None:
    rig.engine = replace(rig.engine, decode_ms=5)
    await rig.start()

    async def one(i: int) -> Any:
        body = {"model": "tiny", "prompt": f"number {i}", "max_tokens": 20}
        return await rig.client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})

    responses = await asyncio.gather(*(one(i) for i in range(8)))
    assert {r.status_code for r in responses} == {200}
    assert {r.headers["x-request-id"] for r in responses} == {"mine"}
    assert len({r.headers["x-perilune-request-id"] for r in responses}) == 8
    sent = [r["headers"]["x-request-id"] for api in rig.fleet.apis.values() for r in api.records]
    assert len(set(sent)) == 16
    assert not any("mine" in name for name in sent)


async def test_a45_the_legs_meet_by_the_transfer_not_by_a_request_id(rig: Any) -> None:
    await rig.start()
    prompt = "the quick brown fox jumps over the lazy dog " * 20
    assert (await rig.complete(prompt=prompt)).status_code == 200
    records = [r for api in rig.fleet.apis.values() for r in api.records]
    assert len({r["headers"]["x-request-id"] for r in records}) == 2
    params = [r["body"]["kv_transfer_params"]["perilune"] for r in records]
    assert params[0]["transfer_id"] == params[1]["transfer_id"]


async def test_a46_no_client_chooses_where_legs_go(rig: Any) -> None:
    await rig.start()
    names = (
        "x-prefiller-host-port", "x-prefill-host-port", "x-data-parallel-host-port",
        "x-perilune-holder", "x-perilune-leg", "x-perilune-transfer-id", "x-kv-transfer-params",
    )  # fmt: skip
    holder = {"node_id": "evil", "endpoint": "tcp:127.0.0.1:9", "incarnation": 1}
    theirs = {"perilune": {"transfer_id": "t", "leg": "prefill", "holder": holder},
              "remote_host": "127.0.0.1", "remote_port": 9}  # fmt: skip
    response = await rig.client.post(
        "/v1/completions", headers=dict.fromkeys(names, "127.0.0.1:9"),
        json={"model": "tiny", "prompt": "hello", "kv_transfer_params": theirs},
    )  # fmt: skip
    assert response.status_code == 200
    assert response.headers["x-perilune-request-id"]
    for api in rig.fleet.apis.values():
        for record in api.records:
            assert not set(names) & record["headers"].keys()
            assert "127.0.0.1:9" not in record["raw"].replace(" ", "")
            assert "remote_port" not in record["raw"]


async def test_a47_a_closed_decode_port_says_which_pool_is_empty(rig: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    await rig.fleet.stop_worker("d1")
    for _ in range(3):  # refused first, then paused
        response = await rig.complete(prompt="hello")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        message = response.json()["error"]["message"]
        assert "decode worker of model tiny takes requests" in message
        assert "d1" in message


async def test_a49_probe_ok_and_requests_failing_is_seen_and_told(
    rig: Any, quick_probes: None, eventually: Any
) -> None:
    await rig.start()
    rig.api("d1").faults.set(Faults(status=502))
    for i in range(12):
        response = await rig.complete(prompt=f"number {i}", max_tokens=1)
        assert response.status_code == 200
    assert rig.gateway.cluster.health.ejected() == ["d1"]

    def told() -> Any:
        load = rig.gateway.export_stats().workers["d1"]
        return load.data_path != "ok" and load.data_path_note.startswith("probe ok, requests fail")

    await eventually(told, "the probe's answer beside the failures")
    assert rig.gateway.export_stats().workers["d2"].data_path == "ok"
    reported = lambda: any(  # noqa: E731
        "probe ok" in report.stats.workers["d1"].data_path_note
        for report in rig.control_plane.reports if "d1" in report.stats.workers
    )  # fmt: skip
    await eventually(reported, "the control plane knows")


async def test_client_errors_eject_nobody(rig: Any) -> None:
    await rig.start()
    for _ in range(10):
        assert (await rig.complete(prompt="x", min_tokens=5, max_tokens=2)).status_code == 400
    assert rig.gateway.cluster.health._workers == {}


async def test_a28_a_request_that_no_engine_can_answer_does_not_stop_all_others(rig: Any) -> None:
    """An odd one may make each engine answer 500; clients send such again at once."""
    rig.workers = ("p1:prefill", "p2:prefill", "d1:decode", "d2:decode")
    await rig.start()
    names = ("p1", "p2", "d1", "d2")
    for name in names:
        rig.api(name).faults.set(Faults(status=500))
    for _ in range(5):
        assert (await rig.complete(prompt="odd")).status_code == 502
    assert rig.gateway.cluster.health.ejected() == []
    for name in names:
        rig.api(name).faults.set(Faults())
    assert (await rig.complete(prompt="usual")).status_code == 200


@pytest.mark.parametrize(("fault", "stream"), [
    pytest.param(Faults(status=500), False, id="500"),
    pytest.param(Faults(reset=True), False, id="reset"),
    pytest.param(Faults(hang=True), False, id="hang"),
    pytest.param(Faults(reset_after_chunks=2), True, id="reset-in-stream"),
])  # fmt: skip
async def test_a_request_that_breaks_every_engine_ejects_one_at_most(
    rig: Any, fault: Faults, stream: bool
) -> None:
    """Whoever repeats it; all the while others are served."""
    rig.workers = ("p1:prefill", "p2:prefill", "d1:decode", "d2:decode", "d3:decode")
    rig.timeouts = Timeouts(prefill=0.7, first_byte=0.7, whole_reply=0.7, idle=0.7, drain=1)
    rig.policies = [rig.policy("scheduling", placement="round_robin")]
    await rig.start()
    for api in rig.fleet.apis.values():
        api.faults.set(structs.replace(fault, only_with="poison"))
    health, worst = rig.gateway.cluster.health, 0
    body = {"prompt": "poison", "max_tokens": 20, "stream": stream, "ignore_eos": True}
    for i in range(2):
        broken = [asyncio.create_task(rig.complete(**body)) for _ in range(4)]
        while not all(task.done() for task in broken):
            assert (await rig.complete(prompt=f"usual {i}", max_tokens=1)).status_code == 200
            worst = max(worst, len(health.ejected()))
        answers = [task.result() for task in broken]
        assert all(r.status_code in (502, 504) or b'"error"' in r.content for r in answers)
    assert worst <= 1
    for api in rig.fleet.apis.values():
        api.faults.set(Faults(reset=True))  # now they are broken for everybody
    await asyncio.gather(*(rig.complete(prompt=f"lost {i}") for i in range(40)))
    assert len(health.ejected()) >= 3


async def test_a54_requests_go_on_while_a_dead_worker_is_still_listed(rig: Any) -> None:
    """Its lease has not run out: the view says ready, connections are refused."""
    await rig.start()

    async def one(i: int) -> int:
        await asyncio.sleep(i * 0.02)
        return int((await rig.complete(prompt=f"number {i}", max_tokens=4)).status_code)

    traffic = asyncio.gather(*(one(i) for i in range(60)))
    await asyncio.sleep(0.3)
    await rig.fleet.stop_worker("d1")
    await rig.fleet.stop_worker("p1")
    codes = await traffic
    assert codes.count(200) >= 58  # one that had begun to decode may break off
    assert rig.gateway.cluster.workers["d1"].row.state == "ready"


@pytest.mark.parametrize("stream", [False, True])
async def test_a54_no_request_is_lost_with_a_decode_worker_while_the_others_are_full(
    rig: Any, eventually: Any, stream: bool
) -> None:
    """Those it had wait for a slot elsewhere, and its slots are for nobody who waits. That wait is
    none for a leg, which would be stuck by then."""
    rig.workers = ("p1:prefill", "d1:decode", "d2:decode")
    rig.policies = [rig.policy("scheduling", max_concurrent_per_decode=2, max_handing_over_s=1.0)]
    await rig.start()
    for name in ("d1", "d2"):
        rig.api(name).faults.set(Faults(delay_seconds=1.5))  # before the first byte
    slots = rig.gateway.cluster.slots
    asked = [
        asyncio.create_task(rig.complete(prompt=f"number {i}", max_tokens=2, stream=stream))
        for i in range(12)
    ]
    full = lambda: slots.running("d1") == slots.running("d2") == 2 and slots.num_waiting == 8  # noqa: E731
    await eventually(full)
    await rig.fleet.stop_worker("d1")
    answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert rig.gateway.stats.retries_decode <= 3  # what it had, and one trial at most


async def test_a54_nobody_with_a_slot_waits_for_the_turn_of_one_who_waits_for_that_slot(
    rig: Any, eventually: Any
) -> None:
    rig.workers = ("p1:prefill", "p2:prefill", "d1:decode")
    rig.policies = [
        rig.policy("scheduling", max_concurrent_per_decode=1),
        rig.policy("admission", window_tokens=1),  # one leg at a time
    ]
    await rig.start()
    cluster = rig.gateway.cluster
    for name in ("p1", "p2"):
        rig.api(name).faults.set(Faults(hang=True))
    first = asyncio.create_task(rig.complete(prompt="number 1", max_tokens=1))
    await eventually(lambda: rig.seen("p1") or rig.seen("p2"))
    dead, other = ("p1", "p2") if rig.seen("p1") else ("p2", "p1")
    second = asyncio.create_task(rig.complete(prompt="number 2", max_tokens=1))
    await eventually(lambda: cluster.slots.num_waiting == 1)
    assert cluster.dispatch.queue(other).num_running == 1  # its turn, and no slot yet
    rig.api(other).faults.set(Faults())
    await rig.fleet.stop_worker(dead)
    answers = await asyncio.wait_for(asyncio.gather(first, second), 20)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert rig.gateway.stats.decode_side_prefills == 0


async def test_the_control_plane_may_be_away(rig: Any) -> None:
    await rig.start()
    await rig.control_plane.stop()
    for i in range(5):
        assert (await rig.complete(prompt=f"number {i}")).status_code == 200
    health = (await rig.client.get("/health")).json()
    assert health["status"] == "ok"
    await rig.control_plane.start()


async def test_a_worker_with_an_old_stream_has_its_trial_when_only_waiting_requests_could_be_it(
    rig: Any, eventually: Any
) -> None:
    rig.workers = ("p1:prefill", "d1:decode", "d2:decode")
    rig.policies = [rig.policy("scheduling", max_concurrent_per_decode=2)]
    await rig.start()
    health, slots = rig.gateway.cluster.health, rig.gateway.cluster.slots
    for name in ("d1", "d2"):
        rig.api(name).faults.set(Faults(hang=True))
    long = [asyncio.create_task(rig.complete(prompt=f"long {i}")) for i in range(3)]
    await eventually(lambda: len(rig.seen("d1", "d2")) == 3)  # a slot is held before that
    sick, full = ("d1", "d2") if slots.running("d1") == 1 else ("d2", "d1")
    health.failed(sick, time.monotonic(), unreachable=True, error="a test's")
    health._workers[sick].open_until = time.monotonic() + 3600
    rig.api(sick).faults.set(Faults())
    waiting = [asyncio.create_task(rig.complete(prompt=f"number {i}")) for i in range(3)]
    await eventually(lambda: slots.num_waiting == 3)
    health._workers[sick].open_until = time.monotonic()
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 15)
    assert {answer.status_code for answer in answers} == {200}
    assert (slots.running(sick), slots.running(full)) == (1, 2)
    for task in long:
        task.cancel()


async def test_trials_are_few_while_a_worker_stays_sick(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-open: of forty requests at once, one at most is the trial."""
    monkeypatch.setattr(health_core, "FIRST_PAUSE_SECONDS", 0.2)
    await rig.start()
    rig.api("d1").faults.set(Faults(status=500))
    for i in range(8):
        await rig.complete(prompt=f"number {i}")
    assert rig.gateway.cluster.health.ejected() == ["d1"]
    await asyncio.sleep(0.25)
    before = len(rig.api("d1").records)
    codes = await asyncio.gather(*(rig.complete(prompt=f"n {i}") for i in range(12)))
    assert {r.status_code for r in codes} == {200}
    assert len(rig.api("d1").records) - before <= 2


async def test_who_waits_for_a_slot_gets_one_of_a_worker_that_was_paused_when_it_came(
    rig: Any, eventually: Any
) -> None:
    """Nothing ends there that would hand a slot on: it was idle."""
    rig.workers = ("p1:prefill", "d1:decode", "d2:decode")
    rig.policies = [rig.policy("scheduling", max_concurrent_per_decode=1)]
    await rig.start()
    health, slots = rig.gateway.cluster.health, rig.gateway.cluster.slots
    for _ in range(3):
        health.failed("d2", time.monotonic(), unreachable=False, error="a test's")
    health._workers["d2"].open_until = time.monotonic() + 3600
    rig.api("d1").faults.set(Faults(delay_seconds=60))
    first = asyncio.create_task(rig.complete(prompt="a long one"))
    await eventually(lambda: slots.running("d1") == 1)
    waiting = [asyncio.create_task(rig.complete(prompt=f"number {i}")) for i in range(3)]
    await eventually(lambda: slots.num_waiting == 3)
    health._workers["d2"].open_until = time.monotonic()
    answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    assert not first.done()
    assert len(rig.api("d2").records) == 3
    first.cancel()
