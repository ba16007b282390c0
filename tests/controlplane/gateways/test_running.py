"""Requests in flight over REST: gateways that answer, fall silent, or are somebody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from serving import Serving

from controlplane.gateways import asking
from controlplane.gateways.running import SHARED_SECONDS, SILENT_PAUSE_SECONDS


class Gateway:
    """Speaks what a gateway's operators' pages speak, over a socket."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self.status = 200
        self.hangs = False
        self.seen: list[str] = []
        self.headers: list[str] = []

    async def start(self) -> None:
        self._serving = Serving.streams(self._serve)
        await self._serving.start()
        self.url = self._serving.url

    async def stop(self) -> None:
        await self._serving.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.seen.append(head.split("\r\n")[0].rsplit(" ", 1)[0])
            self.headers.append(head.lower())
            if self.hangs:
                await reader.read()
                return
            body = json.dumps(self._reply(self.seen[-1])).encode()
            start = f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{start}connection: close\r\n\r\n".encode() + body)
            await writer.drain()
        finally:
            writer.close()

    def _reply(self, asked: str) -> dict[str, Any]:
        if asked.startswith("POST"):
            return self.rows[0] if self.rows else {}
        return {
            "gateway": self.name,
            "running": len(self.rows) + 3,
            "requests": self.rows,
            "workers": [],
            "something_new": 1,
        }


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "request_id": name, "tenant": "acme", "model": "m", "state": "prefilling",
        "age_seconds": 4.0, "waits_for": "the prefill leg on worker p1", "worker": "p1",
        "wait_seconds": 3.0, "bound_seconds": 330.0, "at_bound": "end", "stuck": False,
        "a_newer_field": 1, **changes,
    }  # fmt: skip


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway("gw-1")
    await made.start()
    yield made
    await made.stop()


async def report(api: Any, gateway: Gateway, name: str = "gw-1") -> None:
    body = {
        "url": gateway.url, "pid": 1, "view_revision": 0,
        "stats": (await _stats(api)), "decisions": [],
    }  # fmt: skip
    reply = await api.http.post(f"/api/v1/gateways/{name}/report", json=body)
    assert reply.status_code == 200, reply.text


async def _stats(api: Any) -> dict[str, Any]:
    from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS  # noqa: PLC0415

    empty = {"counts": [0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1), "sum_seconds": 0.0}
    at = api.clock.now().isoformat()
    return {"started_at": at, "ttft": empty, "tbt": empty, "queue": empty}


async def test_what_runs_is_listed_with_what_matters_first(api: Any, gateway: Gateway) -> None:
    gateway.rows = [
        row("old", age_seconds=500, wait_seconds=1.0),
        row("late", wait_seconds=300.0),
        row("free", bound_seconds=None, wait_seconds=900.0, at_bound=""),
        row("stuck", stuck=True, wait_seconds=331.0, state="decoding"),
    ]
    await report(api, gateway)
    found = await api.get("/requests")
    assert [item["request_id"] for item in found["items"]] == ["stuck", "late", "old", "free"]
    assert {item["gateway"] for item in found["items"]} == {"gw-1"}
    assert (found["total"], found["stuck"]) == (7, 1)
    assert found["by_state"] == {"decoding": 1, "prefilling": 3}
    (said,) = found["gateways"]
    assert (said["answers"], said["age_seconds"], said["problem"]) == (True, 0.0, "")
    assert f"bearer {'test-token-0123456789'}" in gateway.headers[0]
    assert len((await api.get("/requests", limit=2))["items"]) == 2
    assert len(gateway.seen) == 1, "those who ask at once share an answer"
    api.clock.advance(SHARED_SECONDS)
    await api.get("/requests")
    assert len(gateway.seen) == 2


async def test_a_silent_gateway_is_said_with_since_when_and_what_it_said_last(
    api: Any, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ASK_SECONDS", 0.3)
    gateway.rows = [row("r1")]
    await report(api, gateway)
    await api.get("/requests")
    gateway.hangs = True
    api.clock.advance(2)
    since = api.clock.now()
    first = await api.get("/requests")
    asked = len(gateway.seen)
    api.clock.advance(SILENT_PAUSE_SECONDS - 1)
    later = await api.get("/requests")
    assert len(gateway.seen) == asked, "it is left alone for a while"
    for found, age in ((first, 2.0), (later, 6.0)):
        (said,) = found["gateways"]
        assert (said["answers"], said["age_seconds"]) == (False, age)
        assert said["silent_since"] == since.isoformat().replace("+00:00", "Z")
        assert "no answer within" in said["problem"]
        assert [item["request_id"] for item in found["items"]] == ["r1"]
    gateway.hangs, gateway.rows = False, []
    api.clock.advance(2)
    back = await api.get("/requests")
    assert (back["items"], back["gateways"][0]["answers"]) == ([], True)


def falls_silent(api: Any) -> None:
    """For longer than this process holds against nobody."""
    for _ in range(12):
        api.second()


async def test_a_gateway_that_reports_again_is_asked_again_at_once(
    api: Any, gateway: Gateway
) -> None:
    gateway.rows = [row("r1")]
    await report(api, gateway)
    falls_silent(api)
    (said,) = (await api.get("/requests"))["gateways"]
    assert (said["state"], said["answers"]) == ("lost", False)
    assert "has stopped reporting" in said["problem"]
    assert gateway.seen == []
    await report(api, gateway)
    found = await api.get("/requests")
    (said,) = found["gateways"]
    assert (said["state"], said["answers"], said["problem"]) == ("ready", True, "")
    assert [item["request_id"] for item in found["items"]] == ["r1"]
    falls_silent(api)
    await gateway.stop()
    await api.get("/requests")
    await report(api, gateway)
    (said,) = (await api.get("/requests"))["gateways"]
    assert said["problem"].startswith("no answer ("), "and what is said is of now"


async def test_another_gateway_at_its_address_is_not_believed(api: Any, gateway: Gateway) -> None:
    gateway.rows = [row("r1")]
    await report(api, gateway, "gw-2")
    found = await api.get("/requests")
    assert found["items"] == []
    assert "leads to gateway gw-1" in found["gateways"][0]["problem"]
    assert found["gateways"][0]["age_seconds"] is None


@pytest.mark.parametrize(("status", "words"), [(401, "answers 401"), (500, "answers 500")])
async def test_a_gateway_that_refuses_is_named_with_its_answer(
    api: Any, gateway: Gateway, status: int, words: str
) -> None:
    gateway.status = status
    await report(api, gateway)
    assert words in (await api.get("/requests"))["gateways"][0]["problem"]


async def cancel(api: Any, name: str, **body: Any) -> Any:
    headers = {"X-Perilune-Actor": "ana"}
    return await api.http.post(f"/api/v1/requests/{name}/cancel", json=body, headers=headers)


async def test_a_cancel_is_on_the_trail_before_it_is_done(both: Any, gateway: Gateway) -> None:
    gateway.rows = [row("r1", stuck=True)]
    await report(both, gateway)
    reply = await cancel(both, "r1", reason="hangs")
    assert reply.status_code == 200, reply.text
    assert reply.json()["cancelled"]["gateway"] == "gw-1"
    assert gateway.seen[-1] == "POST /debug/requests/r1/cancel"
    assert "x-perilune-actor: ana" in gateway.headers[-1]
    (said,) = [r for r in (await both.get("/audit"))["items"] if r["verb"] == "request.cancel"]
    assert (said["actor"], said["target"], said["reason"]) == ("ana", "r1", "hangs")


async def test_a_cancel_that_fails_says_so_on_the_trail_too(api: Any, gateway: Gateway) -> None:
    gateway.rows = [row("r1")]
    await report(api, gateway)
    gateway.status = 404
    reply = await cancel(api, "r1", gateway="gw-1")
    assert (reply.status_code, reply.headers["content-type"]) == (409, "application/problem+json")
    await gateway.stop()
    reply = await cancel(api, "r1", gateway="gw-1")
    assert reply.status_code == 503
    assert "unknown" in reply.json()["detail"]
    verbs = [r["verb"] for r in (await api.get("/audit"))["items"]]
    assert verbs.count("request.cancel_failed") == 2


async def test_who_and_what_can_be_cancelled(api: Any, gateway: Gateway) -> None:
    await report(api, gateway)
    assert (await cancel(api, "nowhere")).status_code == 404
    assert (await cancel(api, "r1", gateway="gw-9")).status_code == 404
    assert (await api.anonymous.post("/api/v1/requests/r1/cancel", json={})).status_code == 401
    assert not [r for r in (await api.get("/audit"))["items"] if "cancel" in r["verb"]]
