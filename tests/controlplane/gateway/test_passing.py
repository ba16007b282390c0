"""Requests that one worker answers whole have a decision record each, like all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from foreign_engines import Fabric, ForeignEngine
from reported import ended, reported

from controlplane.decisions.schemas import Decision
from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings, Timeouts

MODEL = "foreign"
Eventually = Callable[..., Awaitable[Any]]


class Rig:
    """Two engines, and a gateway over a static file that lists them."""

    def __init__(
        self, gateway: Gateway, client: httpx2.AsyncClient, engines: list[ForeignEngine]
    ) -> None:
        self.gateway, self.client, self.engines = gateway, client, engines

    async def post(self, path: str = "/v1/embeddings", **more: Any) -> httpx2.Response:
        body = {"model": MODEL, "input": "a b c", **more}
        return await self.client.post(path, json=body, headers={"x-request-id": "mine"})

    async def records(self, count: int = 1) -> list[Decision]:
        """Of requests that have ended; as the control plane would read them."""
        taken = await ended(self.gateway.records, count)
        return [Decision.model_validate_json(msgspec.json.encode(one)) for one in taken]


@asynccontextmanager
async def running(folder: Path, policy: str = "") -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        engines, text = [], ""
        for number in (1, 2):
            engine = await ForeignEngine(Fabric(), "both", "none").start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
            text += f'[[worker]]\nid = "w{number}"\nurl = "{engine.url}"\nrole = "both"\n'
            text += f'model = "{MODEL}"\n'
        file = folder / "workers.toml"
        file.write_text(text + policy)
        timeouts = Timeouts(prefill=15, first_byte=15, idle=15, drain=1)
        gateway = Gateway(Settings(port=0, static_view=str(file), timeouts=timeouts))
        await gateway.start()
        stack.push_async_callback(gateway.stop, 1.0)
        client = httpx2.AsyncClient(base_url=gateway.url, timeout=20, verify=False)
        stack.push_async_callback(client.aclose)
        yield Rig(gateway, client, engines)
        assert gateway.records.num_joining == 0
        assert not gateway._passing.busy


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/v1/rerank"])
async def test_an_answer_is_recorded_with_its_route_worker_times_and_bytes(
    tmp_path: Path, path: str
) -> None:
    async with running(tmp_path) as rig:
        reply = await rig.post(path)
        assert reply.status_code == 200
        (record,) = await rig.records()
        assert record.request_id == reply.headers["x-perilune-request-id"]
        assert record.client_request_id == "mine"
        assert (record.api, record.route, record.model) == ("other", path, MODEL)
        assert (record.status, record.http_status) == ("finished_stop", 200)
        assert record.decode_worker in ("w1", "w2")
        assert record.prefill_worker == ""
        assert record.reply_bytes == len(reply.content)
        assert record.request_bytes is not None
        assert record.request_bytes > 30
        whole = sum(phase.measured_seconds or 0.0 for phase in record.phases)
        assert record.e2e_seconds == pytest.approx(whole, abs=0.05)
        assert [phase.name for phase in record.phases] == ["admitted", "reply"]


async def test_a_refusal_and_a_failure_are_recorded_with_their_words(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for engine in rig.engines:
            engine.fail_with = 422
        assert (await rig.post()).status_code == 422
        for engine in rig.engines:
            engine.fail_with = 500
        assert (await rig.post()).status_code == 502
        refused, failed = await rig.records(2)
        assert (refused.status, refused.http_status, refused.retries) == ("failed", 422, 0)
        assert "as told" in refused.error
        assert (failed.status, failed.http_status, failed.retries) == ("failed", 502, 2)
        assert f"request {failed.request_id} failed on worker" in failed.error


async def test_a_worker_that_was_passed_over_is_in_the_record_of_the_one_that_served(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        rig.engines[0].fail_with = 500
        for _ in range(2):
            assert (await rig.post()).status_code == 200
        first = (await rig.records(2))[0]
        assert (first.decode_worker, first.retries) == ("w2", 1)
        assert "on w1" in first.error


async def test_a_client_that_left_is_recorded_so(tmp_path: Path, eventually: Eventually) -> None:
    async with running(tmp_path) as rig:
        for engine in rig.engines:
            engine.gate.clear()
        asked = asyncio.create_task(rig.post())
        busy = lambda: sum(engine.running for engine in rig.engines) == 1  # noqa: E731
        await eventually(busy, "it is being served")
        (record,) = reported(rig.gateway.records)
        assert record.status == "running"
        asked.cancel()
        (record,) = await rig.records()
        assert record.status == "cancelled"


async def test_the_records_policy_samples_them_too(tmp_path: Path) -> None:
    async with running(tmp_path, "[policy.records]\nsample_one_in = 5\n") as rig:
        for _ in range(10):
            assert (await rig.post()).status_code == 200
        for engine in rig.engines:
            engine.fail_with = 422
        assert (await rig.post()).status_code == 422
        records = await rig.records(3)
        well = [record for record in records if record.status == "finished_stop"]
        assert [record.sampled_one_in for record in well] == [5, 5]
        assert [record.http_status for record in records if record.status == "failed"] == [422]
        assert rig.gateway.records.sampler.sampled_out == 8
        assert well[0].policy_revisions == {"records/default": 1}


async def test_routes_that_generate_say_which_they_are(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        assert (await rig.post("/v1/responses")).status_code == 200
        (record,) = await rig.records()
        assert (record.api, record.route) == ("other", "/v1/responses")
