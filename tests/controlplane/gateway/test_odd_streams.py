"""Streams that are none, or end before they say anything: tried elsewhere, or told with a status, as
long as nothing has gone out to the client."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from odd_engines import ANSWER, DONE, EVENT, SSE, Rig, as_kind, chunked, cut, until_close

from controlplane.gateway import legs

PING = b": ping\n\n"
TOLD = b'data: {"error":{"message":"boom"}}\n\n'
BOOM = b'{"error":{"message":"boom"}}'


NO_STREAMS = {
    "half an event": (cut(b'data: {"id": 1'), "ended before the reply did"),
    "half an event in parts": (cut(b"da", b'ta: {"id": 1'), "ended before the reply did"),
    "half an event and an end": (chunked(b'data: {"id": 1'), "before its first event"),
    "half an event until it closes": (until_close(b"data: {", SSE[17:]), "before its first event"),
    "a page": (as_kind(b"text/html", b"hello"), "(content-type: text/html)"),
    "a page with blank lines": (as_kind(b"text/html", b"hello\n\n"), "no stream of events"),
    "a page until it closes": (until_close(b"hello", b"content-type: text/html\r\n"), "no stream of events"),
    "an error in JSON": (as_kind(b"application/json", BOOM), "an error: boom"),
    "an error until it closes": (until_close(BOOM), "an error: boom"),
    "an error in JSON of no type": (as_kind(b"", BOOM), "an error: boom"),
    "JSON without choices": (as_kind(b"application/json", b'{"choices":[]}'), "without choices"),
    "a list": (as_kind(b"application/json", b"[]"), "no JSON object"),
    "a comment and no more": (cut(PING), "ended before the reply did"),
    "a comment and an end": (chunked(PING), "before its first event"),
    "a comment and half an event": (cut(PING, b"data: {"), "ended before the reply did"),
    "a comment and an error": (chunked(PING, TOLD, DONE), "failed"),
    "a comment with an error": (chunked(PING + TOLD, DONE), "failed"),
    "comments and an error": (chunked(PING, b": x\r\n\r\n", b"retry: 1\n", TOLD), "failed"),
    "an error with other ends of lines": (chunked(b"event: error\r\n" + TOLD), "failed"),
    "a comment and the mark of the end": (chunked(PING, DONE), "without content"),
    "packed and cut": (
        chunked(gzip.compress(EVENT)[:12], lines=b"content-encoding: gzip\r\n"), "without [DONE]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_STREAMS)
async def test_a_stream_of_which_nothing_has_gone_out_is_tried_elsewhere(
    two: Rig, kind: str
) -> None:
    two.decode.answer, said = NO_STREAMS[kind]
    two.decode.closes = True
    two.second.answer = chunked(EVENT, DONE)
    reply = await two.post(stream=True)
    assert (reply.status_code, reply.content) == (200, EVENT + DONE)
    assert reply.headers["content-type"] == "text/event-stream"
    two.second.answer, two.second.closes = two.decode.answer, True
    reply = await two.post(stream=True)
    assert reply.status_code == 502
    error = reply.json()["error"]
    assert said in error["message"]
    assert (error["leg"], error["code"]) == ("decode", "decode_leg_failed")


@pytest.mark.parametrize("answer", [
    as_kind(b"application/json", ANSWER),
    as_kind(b"application/json; charset=utf-8", b"\n" + ANSWER),
    as_kind(b"", ANSWER),
    as_kind(b"text/plain", ANSWER),
    until_close(ANSWER),
    until_close(ANSWER, b""),
    as_kind(b"application/json\r\ncontent-encoding: gzip", gzip.compress(ANSWER)),
    cut(ANSWER[:9], ANSWER[9:]).replace(b"text/event-stream", b"application/json") + b"0\r\n\r\n",
])  # fmt: skip
async def test_json_in_answer_to_a_stream_comes_whole_however_it_is_framed(
    odd: Rig, answer: bytes
) -> None:
    odd.decode.answer, odd.decode.closes = answer, b"connection: close" in answer
    reply = await odd.post(stream=True)
    assert (reply.status_code, reply.content.strip()) == (200, ANSWER)
    assert "content-length" in reply.headers
    assert odd.gateway.stats.failed == odd.gateway.stats.worker("d1").failures == 0


async def test_json_line_by_line_on_other_routes_is_passed_on(odd: Rig) -> None:
    lines = b'{"token_ids":[1]}\n{"token_ids":[2]}\n'
    odd.decode.answer = as_kind(b"application/jsonl", lines)
    reply = await odd.post("/inference/v1/generate", stream=True)
    assert (reply.status_code, reply.content) == (200, lines)


@pytest.mark.parametrize("begin", [
    PING, b": a\r\n\r\n" + PING, b"retry: 3000\n\n", b"id: 1\n", b"x-own: 1\n\n"
])  # fmt: skip
async def test_what_stands_before_the_first_event_is_passed_on(odd: Rig, begin: bytes) -> None:
    for events in (
        (begin, EVENT, DONE),
        (begin + EVENT, DONE),
        (begin[:1], begin[1:], EVENT + DONE),
    ):
        odd.decode.answer = chunked(*events)
        reply = await odd.post(stream=True)
        assert (reply.status_code, reply.content) == (200, begin + EVENT + DONE)


async def test_a_stop_is_told_with_a_status_while_nothing_of_a_stream_has_gone_out(
    odd: Rig, eventually: Callable[..., Awaitable[Any]]
) -> None:
    """Its engine has begun to answer, with nothing that can be passed on yet."""
    odd.decode.answer = cut(gzip.compress(EVENT)[:12]).replace(
        b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n", 1
    )
    request = asyncio.create_task(odd.post(stream=True))
    begun = lambda: any(one.head_sent for one in odd.gateway.server.connections)  # noqa: E731
    await eventually(begun)
    await odd.gateway.stop(0.05)
    reply = await request
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stopping")


@pytest.mark.parametrize("rest", [EVENT + DONE, DONE, TOLD + DONE, b""])
async def test_a_comment_reaches_the_client_while_its_engine_is_slow(
    two: Rig, rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on its answer has begun: no other worker can be asked."""
    monkeypatch.setattr(legs, "HOLD_SECONDS", 0.05)
    two.decode.answer, two.decode.rest, two.decode.closes = cut(PING), asyncio.Event(), True
    two.decode.more = chunked(rest).partition(b"\r\n\r\n")[2] if rest else b""
    body = {"model": "m", "prompt": "hi", "stream": True}
    async with two.client.stream("POST", "/v1/completions", json=body) as reply:
        pieces = reply.aiter_raw()
        assert await anext(pieces) == PING
        two.decode.rest.set()
        read = b"".join([piece async for piece in pieces])
    if rest.startswith((EVENT, TOLD)):
        assert read == rest
    else:
        assert b'"code":"decode_leg_failed"' in read
        assert DONE not in read
    assert two.gateway.stats.failed == (rest != EVENT + DONE)
    assert two.second.requests == 0
