"""Whatever a request held is given back, whoever left, died or hung; and what hangs is named."""

from __future__ import annotations

import asyncio
import json
import random
from asyncio.timeouts import Timeout
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from agent_process import AgentProcess
from msgspec.structs import replace as changed

from controlplane.gateway import decode as decode_module
from controlplane.gateway import prefill as prefill_module
from controlplane.gateway import walk as walk_module
from controlplane.gateway import watch
from controlplane.gateway.answers import CancelledByOperatorError
from controlplane.gateway.app import Gateway
from controlplane.gateway.running import Running
from controlplane.gateway.settings import Settings
from workers.core.ids import transfer_owner
from workers.core.messages import Done, PinPrefix
from workers.engines.emulated.faults import Faults
from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.worker import WorkerSpec

PROMPT = "the quick brown fox jumps over the lazy dog " * 30
Eventually = Callable[..., Any]


async def follow(rig: Any, agent: AgentProcess, eventually: Eventually) -> None:
    rig.agent = agent.address
    await rig.start()
    await eventually(lambda: rig.gateway._agents.num_subscribed == 1)


async def nothing_pinned(agent: AgentProcess, eventually: Eventually) -> None:
    await eventually(lambda: agent.stats().pinned_blocks == 0, "no pins are left")
    assert agent.stats().num_owners == 0


async def test_a01_fifty_clients_that_leave_between_the_legs_leave_no_pin(
    rig: Any, agent: AgentProcess, eventually: Eventually
) -> None:
    await follow(rig, agent, eventually)
    for name in ("d1", "d2"):
        rig.api(name).faults.set(Faults(hang=True))
    for start in range(0, 50, 10):
        tasks = [
            asyncio.create_task(rig.complete(prompt=f"{i} {PROMPT}"))
            for i in range(start, start + 10)
        ]
        busy = lambda: sum(  # noqa: E731
            rig.api(name).worker.counters.running for name in ("d1", "d2")
        )
        await eventually(lambda busy=busy: busy() == 10, "all wait for decode")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda busy=busy: busy() == 0, "all are gone")
    await nothing_pinned(agent, eventually)
    assert rig.gateway.stats.cancelled == 50


async def test_a02_a_cancel_in_the_gap_between_the_legs_is_owned_by_the_gateway(
    rig: Any, agent: AgentProcess, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = asyncio.Event()

    async def sleeping_decode(run: Running, prefilled: Any) -> None:
        inside.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(walk_module, "decode", sleeping_decode)
    await follow(rig, agent, eventually)
    task = asyncio.create_task(rig.complete(prompt=PROMPT))
    await asyncio.wait_for(inside.wait(), 20)
    assert agent.stats().pinned_blocks > 0
    task.cancel()
    await nothing_pinned(agent, eventually)
    metrics = (await rig.client.get("/metrics")).text
    assert "perilune_gateway_cancelled_total 1\n" in metrics
    assert rig.decode_bodies() == []


@pytest.mark.parametrize(("leg", "name"), [("prefill", "p1"), ("decode", "d1")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_leg_that_is_sent_is_taken_back_where_its_books_cannot_be_kept(
    rig: Any,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    leg: str,
    name: str,
    stream: bool,
) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    await rig.complete(prompt=PROMPT)  # since then there is a connection to send on at once

    def broken(*_: object) -> None:
        raise RuntimeError("no books")

    module = {"prefill": prefill_module, "decode": decode_module}[leg]
    monkeypatch.setattr(module, "begin", broken)
    rig.api(name).faults.set(Faults(hang=True))
    answer = await rig.complete(prompt=PROMPT, stream=stream)
    assert answer.status_code == 500
    counters = rig.api(name).worker.counters
    await eventually(lambda: counters.requests == 2, "it was sent")
    await eventually(lambda: counters.running == 0, "and taken back")
    assert rig.gateway.stats.in_flight == 0


async def test_a03_what_a_prefill_pins_after_its_client_left_is_released_too(
    rig: Any, agent: AgentProcess, eventually: Eventually
) -> None:
    """The engine may notice late that its client has gone, and pin the blocks all the same."""
    await follow(rig, agent, eventually)
    await rig.complete(prompt=PROMPT, max_tokens=1)
    await nothing_pinned(agent, eventually)
    for name in ("p1", "p2"):
        rig.api(name).faults.set(Faults(hang=True))
    task = asyncio.create_task(rig.complete(prompt=PROMPT))
    await eventually(lambda: any(
        run.life.prefill_worker for run in rig.gateway._context.running.values()))  # fmt: skip
    (transfer_id,) = rig.gateway._context.running
    task.cancel()
    await eventually(lambda: rig.gateway.stats.in_flight == 0)
    pool = rig.fleet._pools["p1"]
    late = rig.prefill_bodies()[-1]["kv_transfer_params"]["perilune"]["transfer_id"]
    assert late == transfer_id
    hashes = pool._hashes(
        list(rig.fleet.apis["p1"]._prompts.encode(PROMPT, add_special_tokens=True)), ""
    )
    body = PinPrefix(transfer_owner(late), pool._namespace, hashes)
    pinned = (await pool._client.call(body, Done)).count
    assert pinned > 0
    await nothing_pinned(agent, eventually)


async def test_an_interrupt_in_the_turn_in_which_a_wait_ends_is_not_lost(
    rig: Any, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Both cancel the request's task, and the wait takes a cancellation for its own."""
    rig.timeouts = replace(rig.timeouts, slot=0.3)
    rig.policies = [rig.policy("scheduling", max_concurrent_per_decode=1)]
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rig.api("d1").faults.set(Faults(hang=True))
    first = asyncio.create_task(rig.complete(prompt="hello"))
    await eventually(lambda: rig.seen("d1"), "the slot is taken")
    ends, interrupted = Timeout._on_timeout, []  # type: ignore[attr-defined]

    def end_and_interrupt(timeout: Timeout) -> None:
        ends(timeout)
        cluster, running = rig.gateway.cluster, rig.gateway._context.running
        for request_id, run in list(running.items()):
            if cluster.waits_for_slot(request_id) and not interrupted:
                interrupted.append(request_id)
                run.interrupt(CancelledByOperatorError("enough", request_id))

    monkeypatch.setattr(Timeout, "_on_timeout", end_and_interrupt)
    reply = await rig.complete(prompt="hello again")
    assert interrupted
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "cancelled_by_operator")
    assert rig.gateway.cluster.slots.num_waiting == 0
    assert rig.gateway.stats.in_flight == 1
    first.cancel()


async def test_a05_prefill_workers_that_die_and_clients_that_leave_do_not_fill_the_pool(
    rig: Any, tmp_path: Path, eventually: Eventually
) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    agent = AgentProcess(tmp_path, slab_bytes=1 << 20)
    try:
        agent.start()
        await follow(rig, agent, eventually)
        rng = random.Random(5)
        for i in range(12):
            rig.api("d1").faults.set(Faults(hang=True))
            prompt = f"{rng.random()} {PROMPT}"
            task = asyncio.create_task(rig.complete(prompt=prompt))
            await eventually(lambda: rig.api("d1").worker.counters.running == 1, f"round {i}")
            await rig.fleet.stop_worker("p1")
            task.cancel()
            await eventually(lambda: rig.gateway.stats.in_flight == 0)
            await rig.fleet.restart_worker("p1")
            rig.api("d1").faults.set(Faults())
            rig.gateway.cluster.health._workers.clear()
        await nothing_pinned(agent, eventually)
        # An end that is told again, late, is of no consequence.
        for _ in range(3):
            ours = rig.seen("p1")[0]["kv_transfer_params"]["perilune"]
            rig.gateway._agents.release(ours["transfer_id"])
        response = await rig.complete(prompt=PROMPT, max_tokens=3)
        assert response.status_code == 200
        assert agent.stats().used_blocks > 0
    finally:
        agent.close()


async def test_a40_the_index_holds_what_nodes_hold_and_no_more(
    rig: Any, tmp_path: Path, eventually: Eventually
) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    agent = AgentProcess(tmp_path, slab_bytes=1 << 20)
    try:
        agent.start()
        await follow(rig, agent, eventually)
        slots = agent.stats().capacity_blocks
        rounds = slots // 5 * 3  # far more blocks than there are slots
        for start in range(0, rounds, 8):
            await asyncio.gather(*(
                rig.complete(prompt=f"{i} {PROMPT}", max_tokens=1)
                for i in range(start, start + 8)))  # fmt: skip
            assert rig.gateway.cluster.index.num_blocks() <= slots
        used = agent.stats().used_blocks
        assert used > slots // 2
        await eventually(
            lambda: rig.gateway.cluster.index.num_blocks() == agent.stats().used_blocks
        )
    finally:
        agent.close()


async def test_a41_what_left_the_cluster_leaves_the_gateway(
    rig: Any, agent: AgentProcess, eventually: Eventually
) -> None:
    await rig.start()
    await rig.follow(agent)
    cluster, stats = rig.gateway.cluster, rig.gateway.stats
    for i in range(10):
        await rig.complete(prompt=f"{i} {PROMPT}", max_tokens=1)
    rig.control_plane.publish(nodes=[], workers=[])
    await eventually(lambda: not cluster.workers and not rig.gateway._agents._followed)
    assert cluster.index.num_blocks() == 0
    assert cluster.index.nodes() == []
    assert (stats.workers, cluster.health._workers) == ({}, {})
    assert cluster.paths.holders == {} == cluster.paths.costs
    assert rig.gateway._context.running == {}


async def test_a48_no_request_is_served_by_another_models_worker(
    rig: Any, eventually: Eventually
) -> None:
    await rig.start()
    engine = replace(rig.engine, model="other", model_path=str(rig.folder))
    others = ("op1:prefill", "od1:decode", "od2:decode")
    specs = [WorkerSpec(*spec.split(":"), port=0) for spec in others]  # type: ignore[arg-type]
    fleet = Fleet(specs, engine, None)
    await fleet.start()
    try:
        rows = [rig._worker(spec, {}) for spec in rig.workers]
        for spec in others:
            name, role = spec.split(":")
            rows.append({**rows[0], "id": name, "role": role, "model": "other",
                         "url": fleet.urls[name]})  # fmt: skip
        models = [*rig.control_plane.view["models"],
                  {"id": "other", "path": str(rig.folder), "max_model_len": 8192}]  # fmt: skip
        await rig.publish(workers=rows, models=models)

        async def flap() -> None:
            rng = random.Random(48)
            while True:
                shown = [{**row, "state": rng.choice(["ready", "draining", "ready"])}
                         for row in rows]  # fmt: skip
                rig.control_plane.publish(workers=shown)
                await asyncio.sleep(0.01)

        async def one(i: int) -> int:
            model = "tiny" if i % 2 else "other"
            body = {"model": model, "prompt": f"number {i}", "max_tokens": 2}
            return int((await rig.client.post("/v1/completions", json=body)).status_code)

        flapping = asyncio.create_task(flap())
        codes = []
        for start in range(0, 200, 20):
            codes += await asyncio.gather(*(one(i) for i in range(start, start + 20)))
        flapping.cancel()
        assert set(codes) <= {200, 503}
        assert codes.count(200) > 100
        seen = [r["body"]["model"] for api in fleet.apis.values() for r in api.records]
        assert set(seen) == {"other"}
        assert {body["model"] for body in rig.seen()} == {"tiny"}
    finally:
        await fleet.stop()


async def test_a48_a_worker_that_serves_another_model_by_now_is_refused_and_counted(
    rig: Any, eventually: Eventually
) -> None:
    rig.workers = ("p1:prefill", "d1:decode", "d2:decode")
    await rig.start()
    rig.api("p1").faults.set(Faults(delay_seconds=0.4))
    request = asyncio.create_task(rig.complete(prompt="hello", max_tokens=2))
    runs = rig.gateway._context.running
    await eventually(lambda: any(run.life.prefill_worker for run in runs.values()))
    planned = next(iter(runs.values())).life.slot_worker
    state = rig.gateway.cluster.workers[planned]
    state.row = changed(state.row, model="other")
    assert (await request).status_code == 200
    assert rig.seen(planned) == []
    assert rig.gateway.stats.model_mismatch == 1


async def test_a50_the_mode_follows_from_the_workers_however_the_gateway_starts(
    rig: Any, tmp_path: Path, eventually: Eventually
) -> None:
    await rig.start()
    by_view = (await rig.client.get("/health")).json()["modes"]
    assert by_view == {"tiny": "prefill and decode apart"}
    file = tmp_path / "workers.toml"
    file.write_text("".join(
        f'[[worker]]\nurl = "{rig.fleet.urls[name]}"\nrole = "{role}"\nmodel = "tiny"\n'
        for name, role in (spec.split(":") for spec in rig.workers)))  # fmt: skip
    static = Gateway(Settings(port=0, static_view=str(file)))
    await static.start()
    try:
        health = (await rig.client.get(f"{static.url}/health")).json()
        assert health["modes"] == by_view
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        assert (await rig.client.post(f"{static.url}/v1/completions", json=body)).is_success
    finally:
        await static.stop(0.5)
    await rig.publish(workers=[rig._worker("p1:both", {})])
    modes = (await rig.client.get("/health")).json()["modes"]
    assert modes == {"tiny": "one worker a request"}


async def test_where_only_prefill_workers_are_it_is_said_what_is_missing(rig: Any) -> None:
    rig.workers = ("p1:prefill", "p2:prefill")
    await rig.start()
    health = await rig.client.get("/health")
    assert (health.status_code, health.json()["modes"]) == (503, {"tiny": "no decode worker"})
    refused = await rig.complete(prompt="hello", max_tokens=2)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "no_decode_worker")
    assert "add a worker of role decode or both" in error["message"]
    await rig.publish(
        workers=[rig._worker("p1:prefill", {}), rig._worker("p2:decode", {"p2": "draining"})]
    )
    error = (await rig.complete(prompt="hello", max_tokens=2)).json()["error"]
    assert error["message"].endswith("none is ready"), "there is one, which comes back"


# --- the watchdog ---


def strict(rig: Any, **bounds: float) -> None:
    usual = {
        "max_waiting_s": 1.0,
        "max_prefilling_s": 1.0,
        "max_silence_s": 1.0,
        "max_reply_s": 1.0,
    }
    rig.policies = [rig.policy("scheduling", **{**usual, **bounds})]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stuck_request_is_named_and_ended(rig: Any, leg: str, stream: bool) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    strict(rig, max_prefilling_s=1.0 if leg == "prefill" else 60.0)
    await rig.start()
    rig.api("p1" if leg == "prefill" else "d1").faults.set(Faults(hang=True))
    response = await rig.complete(prompt="hello", stream=stream)
    assert response.status_code == 504
    error = response.json()["error"]
    assert error["code"] == "stuck"
    assert (error["leg"], error["worker"]) == (leg, "p1" if leg == "prefill" else "d1")
    assert error["request_id"] in error["message"]
    metrics = (await rig.client.get("/metrics")).text
    state = "prefilling" if leg == "prefill" else "decoding"
    assert f'perilune_gateway_stuck_requests_total{{state="{state}"}} 1\n' in metrics
    record = await rig.control_plane.ended("failed")
    assert (record.http_status, record.failed_leg) == (504, leg)


async def test_a_stuck_stream_gets_an_error_event(rig: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    strict(rig, max_prefilling_s=60.0)
    await rig.start()
    events = []
    async for event in rig.events(prompt="hello", max_tokens=1000, ignore_eos=True):
        events.append(event)
        if len(events) == 3:
            rig.api("d1").worker.step = lambda **_: asyncio.sleep(3600)
    error = json.loads(events[-1])["error"]
    assert "the next piece of the decode leg on worker d1" in error["message"]
    assert "[DONE]" not in events


async def test_a_request_that_waits_for_a_slot_too_long_is_ended(
    rig: Any, eventually: Eventually
) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    strict(rig, max_concurrent_per_decode=1, max_reply_s=60.0, max_prefilling_s=60.0)
    await rig.start()
    rig.api("d1").faults.set(Faults(hang=True, times=1))
    first = asyncio.create_task(rig.complete(prompt="hello"))
    await eventually(lambda: rig.api("d1").worker.counters.running == 1)
    response = await rig.complete(prompt="hello")
    assert response.status_code == 504
    assert "a decode slot of model tiny" in response.json()["error"]["message"]
    first.cancel()


async def test_where_the_policy_says_report_nothing_is_ended(
    rig: Any, eventually: Eventually
) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    strict(rig, watchdog="report")
    await rig.start()
    rig.api("p1").faults.set(Faults(delay_seconds=2.5))
    request = asyncio.create_task(rig.complete(prompt="hello", max_tokens=1))
    await eventually(lambda: rig.gateway.stats.stuck.get("prefilling") == 1)
    headers = {"authorization": "Bearer secret"}
    listing = (await rig.client.get("/debug/requests", headers=headers)).json()
    (row,) = listing["requests"]
    assert row["stuck"]
    await eventually(lambda: rig.gateway.stats.stuck_now == 1)
    assert row["waits_for"] == "the prefill leg on worker p1"
    assert (row["worker"], row["state"], row["bound_seconds"]) == ("p1", "prefilling", 1.0)
    assert {worker["id"] for worker in listing["workers"]} == {"p1", "d1"}
    assert (await request).status_code == 200
    assert rig.gateway.stats.stuck == {"prefilling": 1}
    await eventually(lambda: rig.gateway.stats.stuck_now == 0)


async def test_what_requests_wait_for_is_the_operators_to_see(rig: Any) -> None:
    await rig.start()
    assert (await rig.client.get("/debug/requests")).status_code == 401
    wrong = {"authorization": "Bearer nonsense"}
    assert (await rig.client.get("/debug/requests", headers=wrong)).status_code == 401


async def test_a_walk_that_does_not_end_when_told_is_closed_from_outside(
    rig: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bug would do; its slot must not stay taken for ever."""
    release = asyncio.Event()

    async def stubborn(run: Running) -> Any:
        while True:
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
            raise RuntimeError("at last")

    monkeypatch.setattr(walk_module, "prefill", stubborn)
    monkeypatch.setattr(watch, "FORCE_SECONDS", 0.3)
    rig.workers = ("p1:prefill", "d1:decode")
    strict(rig)
    await rig.start()
    request = asyncio.create_task(rig.complete(prompt="hello"))
    await eventually(lambda: rig.gateway.cluster.slots.running("d1") == 1)
    await eventually(lambda: rig.gateway.cluster.slots.running("d1") == 0, "closed from outside")
    assert rig.gateway._context.running == {}
    (outcome,) = await asyncio.gather(request, return_exceptions=True)
    assert isinstance(outcome, httpx2.HTTPError)
    release.set()
    await eventually(lambda: rig.gateway.stats.in_flight == 0)
