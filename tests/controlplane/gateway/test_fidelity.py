"""What clients send reaches the engines, and what engines answer reaches clients, byte for byte."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest

from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Limits, Settings, Timeouts
from controlplane.gateway.wire import View, ViewKey, ViewWorker
from workers.engines.emulated.http import Exchange, Server

Script = Callable[[Exchange], Awaitable[None]]
PIXEL = "data:image/png;base64,iVBORw0KGgo="
PREFILLED = {
    "id": "x", "choices": [], "kv_transfer_params": {"perilune": {"num_blocks": 3}},
    "usage": {"prompt_tokens": 900, "total_tokens": 901, "completion_tokens": 1,
              "prompt_tokens_details": {"cached_tokens": 256}},
}  # fmt: skip
WHOLE = (
    b'{"id": "cmpl-1", "choices" : [ {"index":0,"text":" \\u00e9\\ud83d\\ude00","logprobs":'
    b'{"token_logprobs":[-1.50e-1,-0.0]},"finish_reason":"stop","stop_reason":9} ],\n'
    b' "usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":256}}, "odd":1e2}'
)
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    *[b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n'] * 50,
    b": keep-alive\n\n",
    b'data: {"choices": [{"index":0, "delta":{"reasoning":"hm","tool_calls":[{"index":0,'
    b'"id":"c","function":{"name":"f","arguments":"{\\"usage\\": 1}"}}]},"logprobs":{"content":'
    b'[{"token":"a","logprob":-0.50,"bytes":[97],"top_logprobs":[]}]}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"text"},"finish_reason":"stop",'
    b'"stop_reason":128009}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":900,"completion_tokens":700,'
    b'"prompt_tokens_details":{"cached_tokens":256}}}\n\n',
    b"data: [DONE]\n\n",
]


class Engine:
    """Answers leg 1 as engines do, and all else by its script."""

    def __init__(self) -> None:
        self.seen: list[Exchange] = []
        self.script: Script = self.whole
        self.server = Server(self._handle)

    async def whole(self, exchange: Exchange) -> None:
        exchange.send(200, WHOLE)

    async def stream(self, exchange: Exchange) -> None:
        exchange.start()
        for event in EVENTS:
            await exchange.chunk(event)
        exchange.end()

    async def _handle(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        if b'"leg":"prefill"' in exchange.body:
            exchange.send(200, PREFILLED)
        else:
            await self.script(exchange)

    def bodies(self) -> list[dict[str, Any]]:
        return [exchange.json() for exchange in self.seen]


class Pair:
    """A gateway over a prefill and a decode engine, and a client of it."""

    def __init__(self, limits: Limits) -> None:
        self.prefill, self.decode = Engine(), Engine()
        self.gateway = Gateway(Settings(port=0, limits=limits, timeouts=Timeouts(drain=1)))

    async def start(self) -> None:
        for engine in (self.prefill, self.decode):
            await engine.server.start("127.0.0.1", 0)
        await self.gateway.start()
        self.show()
        self.client = httpx2.AsyncClient(base_url=self.gateway.url, timeout=20, verify=False)

    def show(self, keys: tuple[ViewKey, ...] = ()) -> None:
        workers = [
            ViewWorker(
                f"{role}-1", "n1", role, "m", f"http://127.0.0.1:{engine.server.port}", "ready"
            )  # type: ignore[arg-type]
            for role, engine in (("prefill", self.prefill), ("decode", self.decode))
        ]
        self.gateway.cluster.apply(View(1, "test", "test", workers=workers, client_keys=list(keys)))

    async def stop(self) -> None:
        await self.client.aclose()
        await self.gateway.stop(drain_seconds=1.0)
        for engine in (self.prefill, self.decode):
            await engine.server.stop()
        assert self.gateway.stats.in_flight == 0
        assert not self.gateway._passing.busy

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx2.Response:
        return await self.client.post(path, json={"model": "m", "prompt": "hello", **body})

    async def chat(self, **body: Any) -> httpx2.Response:
        messages = body.pop("messages", [{"role": "user", "content": "hello"}])
        return await self.client.post(
            "/v1/chat/completions", json={"model": "m", "messages": messages, **body}
        )


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair(Limits(max_body_bytes=200_000))
    await made.start()
    yield made
    await made.stop()


async def test_a20_a_whole_reply_comes_byte_for_byte_with_its_type_and_length(pair: Pair) -> None:
    async def script(exchange: Exchange) -> None:
        exchange.extra_headers |= {"endpoint-load-metrics": "JSON {}", "server": "secret"}
        exchange.send(200, WHOLE, "application/json; charset=utf-8")

    pair.decode.script = script
    reply = await pair.post(max_tokens=5)
    assert reply.content == WHOLE
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert int(reply.headers["content-length"]) == len(WHOLE)
    assert reply.headers["endpoint-load-metrics"] == "JSON {}"
    assert "server" not in reply.headers


async def test_a20_a_body_that_is_put_right_keeps_its_type_and_has_its_own_length(
    pair: Pair,
) -> None:
    async def script(exchange: Exchange) -> None:
        exchange.send(200, WHOLE.replace(b":256}", b":899}"))

    pair.decode.script = script
    reply = await pair.post()
    assert reply.content == WHOLE
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["content-length"]) == len(WHOLE)


async def test_a17_odd_chunks_and_stop_reasons_come_as_they_are_and_usage_is_the_engines(
    pair: Pair,
) -> None:
    pair.decode.script = pair.decode.stream
    reply = await pair.chat(stream=True, stream_options={"include_usage": True})
    assert reply.content == b"".join(EVENTS)
    assert pair.gateway.stats.output_tokens == 700  # the usage frame's, not the chunks'


async def test_a21_log_probabilities_stay_beside_reasoning_and_tool_calls(pair: Pair) -> None:
    pair.decode.script = pair.decode.stream
    tools = [{"type": "function", "function": {"name": "f"}}]
    bare = await pair.chat(stream=True, logprobs=True)
    reply = await pair.chat(stream=True, logprobs=True, tools=tools)
    assert reply.content == bare.content
    events = [
        json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")
    ]
    (choice,) = [e["choices"][0] for e in events if e["choices"] and "logprobs" in e["choices"][0]]
    assert set(choice["delta"]) == {"reasoning", "tool_calls"}
    assert choice["logprobs"]["content"][0]["token"] == "a"


async def test_a18_log_probabilities_stay_off_leg_1_and_come_from_leg_2(pair: Pair) -> None:
    sent = {"logprobs": True, "top_logprobs": 5, "max_completion_tokens": 9, "min_tokens": 4}
    assert (await pair.chat(**sent)).content == WHOLE
    (first,), (second,) = pair.prefill.bodies(), pair.decode.bodies()
    assert not {"logprobs", "top_logprobs", "min_tokens"} & first.keys()
    assert first["max_completion_tokens"] == 1
    assert {name: second[name] for name in sent} == sent


@pytest.mark.parametrize("body", [
    {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0},
    {"use_beam_search": True, "n": 2}, {"truncate_prompt_tokens": -1}, {"prompt_embeds": "AAAA"},
])  # fmt: skip
async def test_a19_what_two_legs_cannot_do_one_worker_does(
    pair: Pair, body: dict[str, Any]
) -> None:
    assert (await pair.post(**body)).status_code == 200
    assert pair.prefill.seen == []
    (sent,) = pair.decode.bodies()
    assert {name: sent[name] for name in body} == body


def with_image(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


async def test_a22_decode_gets_one_form_of_the_prompt_the_clients(pair: Pair) -> None:
    assert (await pair.chat(messages=with_image(PIXEL))).status_code == 200
    (second,) = pair.decode.bodies()
    assert second["messages"] == with_image(PIXEL)
    assert not {"prompt", "prompt_token_ids", "prompt_embeds", "multi_modal_data"} & second.keys()


async def test_a23_an_image_of_the_body_is_in_both_legs(pair: Pair) -> None:
    assert (await pair.chat(messages=with_image(PIXEL))).status_code == 200
    (first,), (second,) = pair.prefill.bodies(), pair.decode.bodies()
    assert first["messages"] == second["messages"] == with_image(PIXEL)


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "http://10.1.2.3/a.png"}},
    {"type": "video_url", "video_url": "https://example.test/a.mp4"},
])  # fmt: skip
async def test_a24_an_image_elsewhere_is_fetched_by_one_engine_only(
    pair: Pair, part: dict[str, Any]
) -> None:
    assert (await pair.chat(messages=[{"role": "user", "content": [part]}])).status_code == 200
    assert (len(pair.prefill.seen), len(pair.decode.seen)) == (0, 1)


async def test_a36_headers_of_one_hop_are_ours(pair: Pair) -> None:
    body = json.dumps({"model": "m", "prompt": "hello"}).encode()
    head = (
        b"POST /v1/completions?x=1 HTTP/1.1\r\nhost: outside.example\r\nexpect: 100-continue\r\n"
        b"connection: keep-alive, x-odd\r\nx-odd: 1\r\ntransfer-encoding: chunked\r\n"
        b"x-long: " + b"y" * 8000 + b"\r\ntraceparent: 00-1-2-01\r\nx-session-id: s1\r\n"
        b"x-perilune-target: http://127.0.0.1:9\r\nauthorization: Bearer secret\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.gateway.server.port)
    writer.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    for engine in (pair.prefill, pair.decode):
        (seen,) = engine.seen
        assert seen.headers["host"] == f"127.0.0.1:{engine.server.port}"
        assert int(seen.headers["content-length"]) == len(seen.body)
        assert seen.headers["traceparent"] == "00-1-2-01"
        assert seen.headers["x-session-id"] == "s1"
        gone = {"expect", "connection", "transfer-encoding", "x-long", "authorization"}
        assert not (gone | {"x-perilune-target"}) & seen.headers.keys()


class TestCompressed:
    @pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
    async def test_a37_a_packed_reply_is_unpacked_label_and_all(
        self, pair: Pair, pack: Callable[[bytes], bytes]
    ) -> None:
        async def script(exchange: Exchange) -> None:
            exchange.extra_headers["content-encoding"] = "gzip"
            exchange.send(200, pack(WHOLE.replace(b":256}", b":899}")))

        pair.decode.script = script
        reply = await pair.post()
        assert "content-encoding" not in reply.headers
        assert reply.content == WHOLE

    @pytest.mark.parametrize("size", [7, 300, 100_000])
    async def test_a37_a_packed_stream_is_unpacked(self, pair: Pair, size: int) -> None:
        packed = gzip.compress(b"".join(EVENTS[:60])) + gzip.compress(b"".join(EVENTS[60:]))

        async def script(exchange: Exchange) -> None:
            exchange.extra_headers["content-encoding"] = "gzip"
            exchange.start()
            for start in range(0, len(packed), size):
                await exchange.chunk(packed[start : start + size])
            exchange.end()

        pair.decode.script = script
        reply = await pair.chat(stream=True)
        assert "content-encoding" not in reply.headers
        assert reply.content == b"".join(EVENTS)

    async def test_a37_what_we_cannot_unpack_keeps_label_and_bytes(self, pair: Pair) -> None:
        async def script(exchange: Exchange) -> None:
            exchange.extra_headers["content-encoding"] = "br"
            if exchange.json().get("stream"):
                exchange.start()
                await exchange.chunk(b"\x01\x02\n\n")
                await exchange.chunk(b"\x03")
                exchange.end()
            else:
                exchange.send(200, b"\x01\x02\x03")

        pair.decode.script = script
        for stream, expected in ((True, b"\x01\x02\n\n\x03"), (False, b"\x01\x02\x03")):
            body = {"model": "m", "prompt": "x", "stream": stream}
            async with pair.client.stream("POST", "/v1/completions", json=body) as reply:
                assert reply.headers["content-encoding"] == "br"
                assert b"".join([piece async for piece in reply.aiter_raw()]) == expected

    async def test_a_damaged_stream_ends_with_an_error(self, pair: Pair) -> None:
        async def script(exchange: Exchange) -> None:
            exchange.extra_headers["content-encoding"] = "gzip"
            exchange.start()
            packed = gzip.compress(b"".join(EVENTS))
            await exchange.chunk(packed[:40] + b"\xff" * 40)
            exchange.end()

        pair.decode.script = script
        reply = await pair.chat(stream=True)
        assert b'"error"' in reply.content
        assert b"data: [DONE]" not in reply.content

    @pytest.mark.parametrize(("encoding", "pack", "status"), [
        ("gzip", gzip.compress, 200), ("deflate", zlib.compress, 200), ("identity", bytes, 200),
        ("gzip", bytes, 400), ("br", bytes, 415),
        ("gzip", lambda body: gzip.compress(body)[:-9], 400),
        ("gzip", lambda body: gzip.compress(body + b" " * 5_000_000), 413),
    ])  # fmt: skip
    async def test_packed_requests(
        self, pair: Pair, encoding: str, pack: Callable[[bytes], bytes], status: int
    ) -> None:
        body = json.dumps({"model": "m", "prompt": "hello"}).encode()
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        reply = await pair.client.post("/v1/completions", content=pack(body), headers=headers)
        assert reply.status_code == status
        if status == 200:
            assert pair.decode.bodies()[0]["prompt"] == "hello"
            assert "content-encoding" not in pair.decode.seen[0].headers
        else:
            assert pair.decode.seen == pair.prefill.seen == []
            assert set(reply.json()["error"]) >= {"message", "code"}


async def test_a_client_that_reads_slowly_holds_the_engine_back(pair: Pair) -> None:
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        exchange.start()
        for _ in range(600):  # 60 MB
            await exchange.chunk(b"data: " + b"x" * 100_000 + b"\n\n")
            sent += 100_000
        await exchange.chunk(b"data: [DONE]\n\n")
        exchange.end()

    pair.decode.script = script
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", pair.gateway.server.port, limit=4096
    )
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    before = -1
    while sent != before or not sent:
        before = sent
        await asyncio.sleep(0.3)
    assert sent < 30_000_000  # sockets hold some; the gateway next to nothing
    (connection,) = pair.gateway.server.connections
    assert connection._transport is not None
    assert connection._transport.get_write_buffer_size() < 1_000_000
    total = 0
    async with asyncio.timeout(30):
        while data := await reader.read(1 << 20):
            total += len(data)
            if data.endswith(b"0\r\n\r\n"):
                break
    assert total > 60_000_000
    writer.close()


class TestOtherRoutes:
    @pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/v1/rerank", "/v1/score?a=1"])
    async def test_one_worker_answers_and_its_answer_is_the_clients(
        self, pair: Pair, path: str
    ) -> None:
        async def script(exchange: Exchange) -> None:
            exchange.send(200, b'{"data": [1.50]}')

        pair.decode.script = pair.prefill.script = script
        raw = b'{"model":"m", "input": [1.0, 2e3]}'
        reply = await pair.client.post(
            path, content=raw, headers={"content-type": "application/json"}
        )
        assert (reply.status_code, reply.content) == (200, b'{"data": [1.50]}')
        assert reply.headers["x-request-id"]
        (seen,) = pair.decode.seen + pair.prefill.seen
        assert bytes(seen.body) == raw
        assert seen.path == path.partition("?")[0]

    async def test_a_refusal_is_passed_on_and_a_dead_worker_passed_over(self, pair: Pair) -> None:
        async def script(exchange: Exchange) -> None:
            exchange.send(404, {"error": {"message": "no embeddings", "code": 404}})

        pair.decode.script = script
        await pair.prefill.server.stop()
        for _ in range(3):
            reply = await pair.post("/v1/embeddings", input="x")
            assert reply.json() == {"error": {"message": "no embeddings", "code": 404}}
        await pair.decode.server.stop()
        reply = await pair.post("/v1/embeddings", input="x")
        assert reply.status_code in (502, 503)
        assert reply.json()["error"]["message"]
        assert (await pair.post("/v1/embeddings", model="other")).status_code == 404

    async def test_forms_name_their_model_in_a_part(self, pair: Pair) -> None:
        reply = await pair.client.post(
            "/v1/audio/transcriptions", data={"model": "m"}, files={"file": ("a.wav", b"\0\1RIFF")}
        )
        assert reply.content == WHOLE
        (seen,) = pair.decode.seen + pair.prefill.seen
        assert b"\0\1RIFF" in seen.body
        assert seen.headers["content-type"].startswith("multipart/form-data; boundary=")
        reply = await pair.client.post(
            "/v1/audio/translations", data={"model": "n"}, files={"file": ("a.wav", b"RIFF")}
        )
        assert reply.status_code == 404

    @pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
    async def test_streams_of_other_protocols_end_without_done(self, pair: Pair, path: str) -> None:
        events = [b'event: a\ndata: {"type":"a"}\n\n', b'event: z\ndata: {"type":"z"}\n\n']

        async def script(exchange: Exchange) -> None:
            exchange.start()
            for event in events:
                await exchange.chunk(event)
            exchange.end()

        pair.decode.script = script
        for _ in range(2):
            reply = await pair.client.post(path, json={"model": "m", "input": "x", "stream": True})
            assert reply.content == b"".join(events)
        assert pair.prefill.seen == []
        assert pair.gateway.stats.failed == 0

    async def test_tenants_are_kept_apart_wherever_blocks_are_shared(self, pair: Pair) -> None:
        pair.show((ViewKey(hashlib.sha256(b"pk").hexdigest(), "acme"),))
        headers = {"authorization": "Bearer pk"}
        for path in ("/v1/responses", "/v1/embeddings", "/tokenize"):
            reply = await pair.client.post(path, json={"model": "m", "input": "x"}, headers=headers)
            assert reply.status_code == 200
            assert (await pair.post(path)).status_code == 401
        salts = {
            exchange.path: exchange.json().get("cache_salt")
            for exchange in pair.decode.seen + pair.prefill.seen
        }
        assert salts["/tokenize"] is None
        assert salts["/v1/responses"] == salts["/v1/embeddings"] is not None

    @pytest.mark.parametrize(("method", "path", "status"), [
        ("GET", "/v1/responses/resp_1", 404), ("POST", "/v1/responses/resp_1/cancel", 404),
        ("GET", "/v1/embeddings", 405), ("POST", "/reset_prefix_cache", 404),
        ("POST", "/v1/load_lora_adapter", 404), ("POST", "/sleep", 404),
    ])  # fmt: skip
    async def test_what_is_of_one_worker_or_its_operator_is_not_reached(
        self, pair: Pair, method: str, path: str, status: int
    ) -> None:
        reply = await pair.client.request(method, path, json={"model": "m"})
        assert reply.status_code == status
        assert pair.decode.seen == pair.prefill.seen == []
