"""Errors name the value, the worker and the way out, wherever they come from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import Serving

from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings, Timeouts


async def test_too_many_connections_names_the_limit_and_its_option(rig: Any) -> None:
    rig.limits = replace(rig.limits, max_connections=1)
    await rig.start()
    first = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert b"1 client" in answer
    assert b"--max-connections" in answer
    assert b"retry-after: 1\r\n" in answer
    for one in (first[1], writer):
        one.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_where_nobody_takes_requests_the_client_reads_why(
    rig: Any, eventually: Any, path: str
) -> None:
    """And of its own model's workers only."""
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    other = rig.make_view()["workers"][1] | {
        "id": "x1",
        "model": "other",
        "url": "http://127.0.0.1:9",
    }
    models = [*rig.make_view()["models"], {"id": "other", "path": "", "max_model_len": 8192}]
    await rig.publish(workers=[*rig.make_view()["workers"], other], models=models)
    rig.timeouts = replace(rig.timeouts, connect=0.1)
    body = {"prompt": "a", "input": "a", "max_tokens": 1}
    health = rig.gateway.cluster.health
    await rig.fleet.stop()

    async def paused() -> str:
        for model in ("tiny", "other"):
            reply = await rig.client.post(path, json={"model": model, **body})
        reply = await rig.client.post(path, json={"model": "tiny", **body})
        error = reply.json()["error"]
        is_so = (
            error["code"].startswith("no_")
            and len(health.paused(asyncio.get_running_loop().time())) > 1
        )
        return error["message"] if is_so else ""

    message = await eventually(paused, "all workers are paused")
    assert "takes requests: paused after failures: " in message
    assert "d1" in message
    assert "x1" not in message
    assert ("p1" in message) == (path == "/v1/embeddings")
    rows = [row | {"state": "draining"} for row in rig.make_view()["workers"]]
    await rig.publish(workers=rows)
    reply = await rig.client.post(path, json={"model": "tiny", **body})
    assert "takes requests: none is ready" in reply.json()["error"]["message"]


@asynccontextmanager
async def silent(file: Path, status: bytes, refusing: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A gateway whose workers refuse without a word, or that one of the two does."""
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
    well = b'{"choices":[{"text":"ok","finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'
    refused = head % status + b"x-own: 1\r\ncontent-length: 0\r\n\r\n"
    served = head % b"200 OK" + b"content-length: %d\r\n\r\n%b" % (len(well), well)

    def engine(answer: bytes) -> Serving:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    lines = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = lines.partition(b"content-length:")[2].split() or [b"0"]
                    await reader.readexactly(int(length[0]))
                    writer.write(answer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        return Serving.streams(serve)

    engines = {name: engine(refused if name in refusing else served) for name in ("p1", "d1")}
    text = ""
    for name, role in (("p1", "prefill"), ("d1", "decode")):
        await engines[name].start()
        text += f'[[worker]]\nid = "{name}"\nrole = "{role}"\nmodel = "m"\n'
        text += f'url = "{engines[name].url}"\n'
    file.write_text(text)
    timeouts = Timeouts(prefill=15, first_byte=15, whole_reply=15, idle=15, drain=1)
    gateway = Gateway(Settings(port=0, static_view=str(file), timeouts=timeouts))
    await gateway.start()
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=20, verify=False) as client:
        yield client
    await gateway.stop(1.0)
    for one in engines.values():
        await one.stop()


@pytest.mark.parametrize(("refusing", "path", "leg"), [
    ("p1", "/v1/completions", "prefill"),
    ("d1", "/v1/completions", "decode"),
    ("p1 d1", "/v1/embeddings", ""),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_refuses_without_a_word_is_named(
    tmp_path: Path, refusing: str, path: str, leg: str, stream: bool
) -> None:
    async with silent(tmp_path / "w.toml", b"422 No", refusing) as client:
        body = {"model": "m", "prompt": "a", "input": "a", "stream": stream}
        reply = await client.post(path, json=body)
        assert reply.status_code == 422
        assert reply.headers["x-own"] == "1"
        error = reply.json()["error"]
        assert error["worker"] in refusing.split()
        assert error.get("leg", "") == leg
        assert error["worker"] in error["message"]
        assert "422" in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["request_id"] == reply.headers["x-perilune-request-id"]


CUT = "unexpected end of escaped utf-16 surrogate pair"


@pytest.mark.parametrize(("body", "says"), [
    (b'{"content":"\\ud800"}', f"{CUT} (byte 18)"),
    (b'{"content":"ab \\uDBff c"}', f"{CUT} (byte 21)"),
    (b'{"messages":[{"content":"\\ud800"}]}', f"{CUT} (byte 31)"),
    (b'{"content":"\\ud800 and more of it"}', f"{CUT} (byte 18)"),
    (b'{"a":{"content":"\\\\ud800"}', "Input data was truncated"),
    (b'{"a":{"content":"x"}', "Input data was truncated"),
    (b'{"content":"\\ud800', "Input data was truncated"),
])  # fmt: skip
async def test_half_of_a_surrogate_pair_is_called_so(rig: Any, body: bytes, says: str) -> None:
    await rig.start()
    reply = await rig.client.post("/v1/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "malformed_json"
    assert says in reply.json()["error"]["message"], json.dumps(reply.json())
