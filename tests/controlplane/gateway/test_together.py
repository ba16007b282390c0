"""Connectors whose legs meet: both are sent at once, and what happens to one is told to the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from foreign_engines import Fabric, ForeignEngine
from reported import ended

from controlplane.core.health import FailedLeg
from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings, Timeouts
from workers.engines.emulated.http import Exchange

MODEL = "foreign"
Eventually = Callable[..., Awaitable[Any]]


class Rig:
    """Mooncake engines, and a gateway over a static file that lists them."""

    def __init__(
        self, gateway: Gateway, client: httpx2.AsyncClient, engines: dict[str, ForeignEngine]
    ) -> None:
        self.gateway, self.client, self.engines = gateway, client, engines

    async def complete(self, **more: Any) -> httpx2.Response:
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 8, **more}
        return await self.client.post("/v1/completions", json=body)

    def transfers(self, name: str) -> list[str]:
        """Transfer ids that this engine was told, "" where none."""
        bodies = self.engines[name].bodies
        return [(body.get("kv_transfer_params") or {}).get("transfer_id", "") for body in bodies]

    def both_open(self, prefill: str = "p1", decode: str = "d2") -> bool:
        return bool(self.engines[prefill].running and self.engines[decode].running)


def table(name: str, engine: ForeignEngine) -> str:
    lines = [f'id = "{name}"', f'url = "{engine.url}"', f'role = "{engine.role}"',
             f'model = "{MODEL}"', 'handshake = "mooncake"']  # fmt: skip
    if engine.role == "prefill":
        lines.append(f'bootstrap = "{engine.bootstrap}"')
    return "[[worker]]\n" + "\n".join(lines) + "\n"


@asynccontextmanager
async def running(
    folder: Path, eventually: Eventually, *roles: str, policy: str = ""
) -> AsyncIterator[Rig]:
    """At the end nothing is held any more, on either side."""
    async with AsyncExitStack() as stack:
        fabric = Fabric()
        engines: dict[str, ForeignEngine] = {}
        for number, role in enumerate(roles, 1):
            engine = await ForeignEngine(fabric, role, "mooncake").start()  # type: ignore[arg-type]
            stack.push_async_callback(engine.stop)
            engines[f"{role[0]}{number}"] = engine
        file = folder / "workers.toml"
        file.write_text("".join(table(name, one) for name, one in engines.items()) + policy)
        timeouts = Timeouts(prefill=15, first_byte=15, idle=15, drain=1)
        gateway = Gateway(Settings(port=0, static_view=str(file), timeouts=timeouts))
        await gateway.start()
        stack.push_async_callback(gateway.stop, 1.0)
        client = httpx2.AsyncClient(base_url=gateway.url, timeout=20, verify=False)
        stack.push_async_callback(client.aclose)
        producers = [name for name, one in engines.items() if one.role == "prefill"]
        known = lambda: all(gateway._bootstraps.get(name) for name in producers)  # noqa: E731
        await eventually(known, "the producers' engine ids")
        yield Rig(gateway, client, engines)
        await eventually(lambda: gateway.stats.in_flight == 0, "no request is left")
        for one in engines.values():  # a leg 1 that leg 2's engine waits for runs to its end
            one.gate.set()
        await eventually(lambda: not any(one.running for one in engines.values()), "no leg is left")
        assert fabric.wrong == []
        cluster = gateway.cluster
        cluster.slots.check_integrity()
        assert not cluster.slots._holders
        cluster.dispatch.check_integrity()
        assert cluster.dispatch.num_held == 0
        assert all(not len(one.prefill_queue) for one in cluster.workers.values())


async def last_decision(rig: Rig, count: int = 1) -> Any:
    return (await ended(rig.gateway.records, count))[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_leg_1_waits_for_leg_2_and_leg_2_comes(
    tmp_path: Path, eventually: Eventually, stream: bool
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        for engine in rig.engines.values():
            engine.is_strict = True
        for _ in range(3):
            reply = await rig.complete(stream=stream)
            assert reply.status_code == 200, reply.text
        assert rig.transfers("p1") == rig.transfers("d2")
        assert len(set(rig.transfers("p1"))) == 3
        assert rig.gateway.stats.decode_side_prefills == 0
        decision = await last_decision(rig, 3)
        assert (decision.prefill_worker, decision.decode_worker) == ("p1", "d2")
        bars = {phase.name: phase for phase in decision.phases}
        assert bars["prefill"].measured_seconds is not None
        assert bars["handover"].note == "the decode leg went out with the prefill leg"
        if not stream:  # there leg 1 may be cut off: its answer is not waited for
            assert decision.engine_prompt_tokens == 32


@pytest.mark.parametrize("stream", [False, True])
async def test_a07_a_failed_leg_1_ends_leg_2_and_both_go_out_again_elsewhere(
    tmp_path: Path, eventually: Eventually, stream: bool
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode", "prefill") as rig:
        rig.engines["p1"].fail_with = rig.engines["p3"].fail_with = 500
        began = time.monotonic()
        reply = await rig.complete(stream=stream)
        assert reply.status_code == 200, reply.text
        assert time.monotonic() - began < 8  # a meeting that nobody comes to takes longer
        came = rig.transfers("d2")
        came.remove("")  # alone, if perhaps not read as the last
        sent = [*rig.transfers("p1"), *rig.transfers("p3")]
        assert len(set(sent)) == 2
        assert {*came} <= {*sent}  # a leg 2 whose leg 1 failed at once may not have gone out
        stats = rig.gateway.stats
        assert (stats.retries_prefill, stats.retries_decode) == (2, 0)
        assert stats.decode_side_prefills == 1
        assert stats.worker("d2").failures == 0
        assert [stats.worker(name).failures for name in ("p1", "p3")] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_leg_2_ends_leg_1_and_both_go_out_again_elsewhere(
    tmp_path: Path, eventually: Eventually, stream: bool
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode", "decode") as rig:
        rig.engines["d2"].fail_with = 500
        rig.engines["p1"].gate.clear()
        asked = asyncio.create_task(rig.complete(stream=stream))
        await eventually(lambda: len(rig.engines["p1"].bodies) == 2, "leg 1 came again")
        rig.engines["p1"].gate.set()
        reply = await asked
        assert reply.status_code == 200, reply.text
        assert {*rig.transfers("p1")} == {rig.transfers("d2")[0], rig.transfers("d3")[0]}
        assert len(set(rig.transfers("p1"))) == 2
        assert rig.gateway.stats.retries_decode == 1
        assert rig.gateway.stats.worker("p1").failures == 0
        assert rig.gateway.cluster.health.is_sound is False  # of d2, and of it alone
        assert not rig.gateway.cluster.health.is_paused("p1", time.monotonic())


@pytest.mark.parametrize("stream", [False, True])
async def test_leg_2_that_answers_nothing_while_leg_1_runs_sends_both_out_again(
    tmp_path: Path, eventually: Eventually, stream: bool
) -> None:
    async def says_nothing(exchange: Exchange, _: dict[str, Any]) -> None:
        exchange.send(200, {"id": "cmpl-1", "object": "text_completion", "choices": []})

    async with running(tmp_path, eventually, "prefill", "decode", "decode") as rig:
        rig.engines["d2"]._decode = says_nothing  # type: ignore[method-assign]
        rig.engines["p1"].gate.clear()
        asked = asyncio.create_task(rig.complete(stream=stream))
        await eventually(lambda: len(rig.engines["p1"].bodies) == 2, "leg 1 came again")
        rig.engines["p1"].gate.set()
        reply = await asked
        assert (reply.status_code, b"choices" in reply.content) == (200, True)
        assert rig.transfers("p1")[1:] == rig.transfers("d3")
        assert len(set(rig.transfers("p1"))) == 2
        stats = rig.gateway.stats
        assert (stats.retries_decode, stats.worker("d2").failures) == (1, 1)
        assert stats.worker("p1").failures == stats.worker("d3").failures == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_where_no_decode_worker_is_left_the_client_is_told(
    tmp_path: Path, eventually: Eventually, stream: bool
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        rig.engines["d2"].fail_with = 500
        rig.engines["p1"].gate.clear()
        reply = await rig.complete(stream=stream)
        assert reply.status_code == 502
        error = reply.json()["error"]
        assert (error["leg"], error["worker"]) == ("decode", "d2")


@pytest.mark.parametrize("leg", ["p1", "d2"])
async def test_what_one_engine_refuses_the_client_reads_and_the_other_leg_ends(
    tmp_path: Path, eventually: Eventually, leg: str
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        other = rig.engines["d2" if leg == "p1" else "p1"]
        other.gate.clear()
        rig.engines[leg].fail_with = 422
        reply = await rig.complete()
        assert (reply.status_code, reply.json()["error"]["message"]) == (422, "as told")
        assert rig.gateway.stats.client_errors == 1
        assert sum(worker.failures for worker in rig.gateway.stats.workers.values()) == 0


@pytest.mark.parametrize("late", ["p1", "d2"])
async def test_a_length_that_both_refuse_is_told_in_the_clients_own_numbers(
    tmp_path: Path, eventually: Eventually, late: str
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        for name, engine in rig.engines.items():
            engine.fail_with, engine.says = 400, name
        rig.engines[late].gate.clear()
        asked = asyncio.create_task(rig.complete())
        await eventually(lambda: rig.engines[late].running)
        await asyncio.sleep(0.05)
        rig.engines[late].gate.set()
        reply = await asked
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "d2")
        assert len(rig.engines["p1"].bodies) == len(rig.engines["d2"].bodies) == 1


async def test_a28_leg_2_that_breaks_off_after_its_first_byte_is_said_and_ends_leg_1(
    tmp_path: Path, eventually: Eventually
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode", "decode") as rig:
        for name in ("d2", "d3"):
            rig.engines[name].cuts_stream = True
        reply = await rig.complete(stream=True)
        assert reply.status_code == 200
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert "decode_leg_failed" in events[-1]
        assert "[DONE]" not in reply.text
        assert len(rig.engines["p1"].bodies) == 1  # no token twice


async def test_leg_1_that_fails_after_the_first_byte_harms_no_answer_and_is_counted(
    tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        prefill, decode = rig.engines["p1"], rig.engines["d2"]
        decode.stream_gate.clear()
        meet = prefill._meet

        async def hands_over_and_fails(transfer_id: str) -> None:
            await meet(transfer_id)
            prefill.fabric.meeting(transfer_id).set_result(None)
            await asyncio.wait_for(first_byte.wait(), 10)
            await prefill_fails()

        async def prefill_fails() -> None:
            raise ConnectionResetError

        monkeypatch.setattr(prefill, "_meet", hands_over_and_fails)
        first_byte = asyncio.Event()
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 8, "stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert "t0" in await anext(lines)
            first_byte.set()
            stats = rig.gateway.stats
            await eventually(lambda: stats.worker("p1").failures == 1, "leg 1's end is seen")
            decode.stream_gate.set()
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        decision = await last_decision(rig)
        assert decision.status == "finished_stop"
        assert "prefill leg on p1" in decision.error
        assert decision.retries == 0


async def test_leg_1_that_ends_after_the_first_byte_clears_its_request_of_suspicion(
    tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the workers on which it failed before were held to be innocent of that for minutes."""
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        prefill, decode, first_byte = rig.engines["p1"], rig.engines["d2"], asyncio.Event()
        decode.stream_gate.clear()
        meet = prefill._meet

        async def hands_over_and_answers_late(transfer_id: str) -> None:
            await meet(transfer_id)
            prefill.fabric.meeting(transfer_id).set_result(None)
            await asyncio.wait_for(first_byte.wait(), 10)

        monkeypatch.setattr(prefill, "_meet", hands_over_and_answers_late)
        fields = {"model": MODEL, "prompt": "a b c", "max_tokens": 8, "stream": True}
        body, health = json.dumps(fields).encode(), rig.gateway.cluster.health
        leg = FailedLeg(hash(body), "prefill")
        for name in ("p1", "p8"):
            health.failed(name, time.monotonic(), unreachable=False, leg=leg)
        async with rig.client.stream("POST", "/v1/completions", content=body) as response:
            lines = response.aiter_lines()
            assert "t0" in await anext(lines)
            assert len(health.suspects) == 1
            first_byte.set()
            await eventually(lambda: not len(health.suspects), "leg 1's end is seen")
            decode.stream_gate.set()
            assert "data: [DONE]" in [line async for line in lines]


@pytest.mark.parametrize("stream", [False, True])
async def test_a52_a_client_that_leaves_ends_leg_2_and_leg_1_runs_out(
    tmp_path: Path, eventually: Eventually, stream: bool
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        rig.engines["p1"].gate.clear()
        asked = asyncio.create_task(rig.complete(stream=stream))
        await eventually(rig.both_open, "both legs are open")
        asked.cancel()
        await eventually(lambda: rig.gateway.stats.cancelled == 1, "its leaving is noticed")
        await eventually(lambda: not rig.engines["d2"].running, "leg 2 is cut off")
        assert rig.engines["p1"].running == 1  # else decode's blocks wait for a timer
        rig.engines["p1"].gate.set()
        await eventually(lambda: rig.gateway.stats.staged_released == 1, "leg 1 has ended")


async def test_the_watchdog_names_both_legs(tmp_path: Path, eventually: Eventually) -> None:
    policy = "[policy.scheduling]\nmax_prefilling_s = 1.0\n"
    async with running(tmp_path, eventually, "prefill", "decode", policy=policy) as rig:
        rig.engines["p1"].gate.clear()
        reply = await rig.complete()
        assert reply.status_code == 504
        error = reply.json()["error"]
        assert (error["code"], error["leg"], error["worker"]) == ("stuck", "prefill", "p1")
        assert "for which the decode leg waits on worker d2" in error["message"]


@pytest.mark.parametrize(("message", "open_legs"), [("1 validation error: n", 0), ("as told", 1)])
async def test_leg_1_is_cut_off_where_leg_2_was_never_read(
    tmp_path: Path, eventually: Eventually, message: str, open_legs: int
) -> None:
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        rig.engines["p1"].gate.clear()
        rig.engines["d2"].fail_with, rig.engines["d2"].says = 400, message
        assert (await rig.complete()).status_code == 400
        await eventually(lambda: rig.engines["p1"].running == open_legs, "leg 1 is as it has to be")


FATES = ("serves", "fails", "refuses", "dies")


@pytest.mark.parametrize(("prefill", "decode"), [*product(FATES, FATES)])
async def test_whatever_becomes_of_either_leg_the_client_is_answered_and_nothing_is_left(
    tmp_path: Path, eventually: Eventually, prefill: str, decode: str
) -> None:
    """Both orders: the gate of the leg that is to be later is opened once the other is over."""
    async with running(tmp_path, eventually, "prefill", "decode") as rig:
        for engine, fate in (("p1", prefill), ("d2", decode)):
            rig.engines[engine].fail_with = {"fails": 500, "refuses": 422}.get(fate, 0)
            rig.engines[engine].dies = fate == "dies"
        statuses = set()
        for late in ("p1", "d2", ""):
            gate = rig.engines[late].gate if late else asyncio.Event()
            gate.clear()
            asked = asyncio.create_task(rig.complete(stream=late == "p1"))
            await asyncio.wait((asked,), timeout=0.2)
            gate.set()
            statuses.add((await asked).status_code)
            rig.gateway.cluster.health.keep(set())  # begins anew
        assert rig.gateway.stats.requests == 3
        if decode == "serves":
            assert statuses <= ({422} if prefill == "refuses" else {200})
        else:
            assert not statuses & {200}
