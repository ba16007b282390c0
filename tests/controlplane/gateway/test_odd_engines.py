"""Engines that answer oddly: what is no answer fails before the client reads anything; what is one
comes as it is, whatever stands around it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from odd_engines import ANSWER, DONE, EVENT, Rig, chunked, until_close, whole

from controlplane.gateway.upstream import MAX_HEAD_BYTES
from controlplane.gateway.worker_connection import MAX_FIELD_BYTES

Eventually = Callable[..., Awaitable[Any]]


NO_ANSWERS = {
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", "answered 204"),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", "answered 304"),
    "elsewhere": (
        whole(b"", b"302 Found", b"location: http://10.9.9.9/\r\n"),
        "answered 302, pointing to http://10.9.9.9/",
    ),
    "blanks": (whole(b" \n"), "answered 200 with nothing"),
    "null": (whole(b"null"), "answered 200 with nothing"),
    "an empty object": (whole(b"{}"), "answered 200 with nothing"),
    "a page": (whole(b"<html>log in</html>"), "what is no JSON"),
    "an error after a blank": (whole(b'\n{ "error": {"message": "boom"}}'), "an error: boom"),
    "an error of another kind": (whole(b'{"object": "error", "message": "boom"}'), "boom"),
    "another protocol": (
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        "another protocol",
    ),
    "a header without end": (
        b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * (MAX_FIELD_BYTES + 1),
        "a head or trailer of more than",
    ),
    "headers without end": (
        b"HTTP/1.1 200 OK\r\n" + b"set-cookie: a\r\n" * (MAX_FIELD_BYTES // 15 + 1),
        "a head or trailer of more than",
    ),
    "hints without end": (
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * (MAX_FIELD_BYTES // 40 + 2),
        "a head or trailer of more than",
    ),
}


@pytest.mark.parametrize("kind", NO_ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_answer_is_a_failed_leg(odd: Rig, kind: str, stream: bool) -> None:
    odd.decode.answer, said = NO_ANSWERS[kind]
    reply = await odd.post(stream=stream)
    assert reply.status_code == 502
    error = reply.json()["error"]
    assert said in error["message"]
    assert (error["leg"], error["worker"]) == ("decode", "d1")
    assert "location" not in reply.headers


@pytest.mark.parametrize("kind", NO_ANSWERS)
async def test_what_is_no_answer_to_leg_1_leaves_the_prompt_to_decode(odd: Rig, kind: str) -> None:
    odd.prefill.answer, _ = NO_ANSWERS[kind]
    reply = await odd.post()
    assert (reply.status_code, reply.content) == (200, ANSWER)


@pytest.mark.parametrize("kind", NO_ANSWERS)
async def test_what_is_no_answer_of_one_worker_is_asked_of_another(odd: Rig, kind: str) -> None:
    answer, _ = NO_ANSWERS[kind]
    odd.decode.answer = odd.prefill.answer = answer
    reply = await odd.post("/v1/embeddings", input="x")
    assert reply.status_code == 502
    assert odd.decode.requests == odd.prefill.requests == 1
    odd.decode.answer = whole(ANSWER)
    reply = await odd.post("/v1/embeddings", input="x")
    assert (reply.status_code, reply.content) == (200, ANSWER)


NO_PLAIN_ANSWERS = {
    "only the end": DONE,
    "only a comment": b": ping\n\n",
    "a comment and the end": b": ping\r\n\r\n" + DONE,
    "an error event": b'data: {"error": {"message": "boom","code":500}}\n\n' + DONE,
    "an event without data": b"id: 1\nevent: error\n\n",
    "an empty list": b"[]",
    "a list": b'[{"text":"x"}]',
    "a text": b'"a text of some length"',
    "no choices": b'{"id":"c","object":"text_completion","choices":[]}',
    "choices that are null": b'{"id":"c","object":"text_completion","choices":null}',
    "choices left out": b'{"id":"c","object":"text_completion","usage":{"prompt_tokens":3}}',
    "no choices and little else": b'{"choices": [ ]}',
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", NO_PLAIN_ANSWERS)
async def test_a_plain_request_is_tried_elsewhere_after_what_is_no_answer(
    two: Rig, kind: str, path: str
) -> None:
    body = NO_PLAIN_ANSWERS[kind]
    messages = [{"role": "user", "content": "hi"}]
    for answer in (whole(body), until_close(body)):
        two.decode.answer, two.decode.closes = answer, b"connection: close" in answer
        reply = await two.post(path, messages=messages)
        assert (reply.status_code, reply.content) == (200, ANSWER)
    assert two.second.requests == two.gateway.stats.worker("d1").failures == 2
    two.second.answer = whole(body)
    reply = await two.post(path, messages=messages)
    assert reply.status_code == 502
    assert reply.json()["error"]["leg"] == "decode"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/score"])
@pytest.mark.parametrize("body", [b'{"id":"r","choices":[],"output":[]}', b"[]"])
async def test_other_routes_may_answer_without_choices(odd: Rig, path: str, body: bytes) -> None:
    odd.decode.answer = odd.prefill.answer = whole(body)
    reply = await odd.post(path, input="x")
    assert (reply.status_code, reply.content) == (200, body)


async def test_events_with_an_answer_in_them_are_one(odd: Rig) -> None:
    odd.decode.answer = whole(b": ping\n\n" + EVENT + DONE)
    reply = await odd.post()
    assert (reply.status_code, reply.content) == (200, b": ping\n\n" + EVENT + DONE)


@pytest.mark.parametrize("length", [0, 20, len(ANSWER) - 1])
async def test_half_of_an_answer_that_ends_with_its_connection_is_none(
    odd: Rig, length: int
) -> None:
    """Such a reply has no length that would show it."""
    head = b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n"
    odd.decode.closes = True
    odd.decode.answer = head + ANSWER[:length]
    assert (await odd.post()).status_code == 502
    odd.decode.answer = head + ANSWER
    reply = await odd.post()
    assert (reply.status_code, reply.content) == (200, ANSWER)


async def test_numbers_and_texts_that_only_python_writes_are_passed_on(odd: Rig) -> None:
    body = b'\n{"choices":[{"text":"\\ud800","logprobs":[-Infinity, NaN]}]}'
    odd.decode.answer = whole(body)
    reply = await odd.post()
    assert (reply.status_code, reply.content) == (200, body)


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_of_several_lines_reach_the_client_line_by_line(
    odd: Rig, stream: bool
) -> None:
    lines = b"Set-Cookie: a=1; Path=/\r\nvary: x\r\nset-cookie: b=2\r\nVary: y\r\n"
    odd.decode.answer = whole(ANSWER).replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n", 1)
    for _ in range(2):  # the second time its head is known
        reply = await odd.post(stream=stream)
        assert (reply.status_code, reply.content) == (200, ANSWER)
        assert reply.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2"]
        assert reply.headers.get_list("vary") == ["x", "y"]


async def test_a_reply_of_very_many_lines_comes_whole(odd: Rig) -> None:
    num_lines = MAX_FIELD_BYTES // 10
    odd.decode.answer = whole(ANSWER, lines=b"vary:\r\n" * num_lines)
    body = b'{"model":"m","prompt":"hi","max_tokens":5}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d"
    reader, writer = await asyncio.open_connection("127.0.0.1", odd.gateway.server.port)
    writer.write(head % len(body) + b"\r\n\r\n" + body)
    async with asyncio.timeout(20):
        reply = await reader.read(-1)
    writer.close()
    assert reply.count(b"\r\nvary: ") == num_lines
    assert reply.endswith(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
async def test_codings_of_several_lines_keep_their_labels(odd: Rig, stream: bool) -> None:
    body = gzip.compress(gzip.compress(ANSWER))
    lines = b"content-encoding: gzip\r\n" * 2
    odd.decode.answer = whole(body, lines=lines)
    reply = await odd.post(stream=stream)
    assert reply.status_code == 200
    assert reply.headers.get_list("content-encoding") == ["gzip", "gzip"]
    assert json.loads(reply.content) == json.loads(ANSWER)


async def test_what_an_engines_connection_names_is_not_the_clients(odd: Rig) -> None:
    lines = b"Connection: keep-alive, X-Hop\r\nx-hop: 1\r\nconnection: x-other\r\nx-other: 2\r\n"
    odd.decode.answer = whole(ANSWER, lines=lines + b"x-kept: 3\r\n")
    for _ in range(2):
        reply = await odd.post()
        assert reply.headers["x-kept"] == "3"
        assert not {"x-hop", "x-other"} & reply.headers.keys()


async def test_long_heads_are_not_remembered(odd: Rig) -> None:
    heads = odd.gateway.cluster.workers["d1"].upstream.heads
    odd.decode.answer = whole(ANSWER)
    assert (await odd.post()).content == ANSWER
    assert len(heads) == 1
    lines = b"set-cookie: %b\r\n" % (b"a" * MAX_HEAD_BYTES)
    odd.decode.answer = whole(ANSWER).replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n", 1)
    assert (await odd.post()).content == ANSWER
    assert len(heads) == 1


async def test_nothing_of_early_hints_trailers_or_a_second_reply_is_the_answers(odd: Rig) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-type: x/early\r\n\r\n"
    odd.decode.answer = early + whole(ANSWER)
    reply = await odd.post()
    assert (reply.content, reply.headers["content-type"]) == (ANSWER, "application/json")
    assert "link" not in reply.headers
    body = b"%x\r\n%b\r\n0\r\ncontent-type: x/late\r\nx-late: 1\r\n\r\n" % (len(ANSWER), ANSWER)
    kind = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    odd.decode.answer = b"HTTP/1.1 200 OK\r\n" + kind + body
    reply = await odd.post()
    assert (reply.content, reply.headers["content-type"]) == (ANSWER, "application/json")
    assert "x-late" not in reply.headers
    odd.decode.answer = whole(ANSWER) + whole(b'{"choices":[{"text":"of nobody"}]}')
    for _ in range(2):
        assert (await odd.post()).content == ANSWER


async def test_a_trailer_without_end_ends_its_leg(odd: Rig) -> None:
    body = b"%x\r\n%b\r\n0\r\n" % (len(ANSWER), ANSWER)
    kind = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    odd.decode.answer = b"HTTP/1.1 200 OK\r\n" + kind + body + b"x-late: 1\r\n" * MAX_FIELD_BYTES
    reply = await odd.post()
    assert reply.status_code == 502
    assert "a head or trailer of more than" in reply.text


async def test_an_answer_that_is_no_stream_comes_whole_though_one_was_asked_for(odd: Rig) -> None:
    odd.decode.answer = whole(ANSWER)
    reply = await odd.post(stream=True)
    assert (reply.status_code, reply.content) == (200, ANSWER)
    assert reply.headers["content-type"] == "application/json"


async def test_a_stream_that_calls_itself_something_else_is_passed_on_as_it_comes(odd: Rig) -> None:
    answer = chunked(EVENT, DONE).replace(b"text/event-stream", b"application/json")
    head, _, rest = answer.partition(b"\r\n\r\n")
    odd.decode.answer = head + b"\r\n\r\n" + rest[: len(EVENT) + 6]  # and no more
    body = {"model": "m", "prompt": "hi", "stream": True}
    async with odd.client.stream("POST", "/v1/completions", json=body) as reply:
        assert await anext(reply.aiter_raw()) == EVENT


@pytest.mark.parametrize("first", [
    b'data: {"error": {"message": "boom"}}\n\n',
    b'data: { "error": {"message": "boom"}}\n\n',
    b'data:{"error":{"message":"boom"}}\n\n',
    b'event: error\ndata: {"error": {"message": "boom"}}\n\n',
    b"data:[DONE]\n\n",
])  # fmt: skip
async def test_a_stream_that_begins_with_its_failure_has_a_status(odd: Rig, first: bytes) -> None:
    odd.decode.answer = chunked(first, DONE)
    reply = await odd.post(stream=True)
    assert reply.status_code == 502
    assert reply.json()["error"]["leg"] == "decode"


@pytest.mark.parametrize("blanks", ["", " ", "  "])
async def test_an_event_whose_error_is_null_is_no_failure(odd: Rig, blanks: str) -> None:
    event = f'data: {{"error":{blanks}null, "choices": [{{"index": 0, "text": "x"}}]}}\n\n'.encode()
    odd.decode.answer = chunked(event, EVENT, event, DONE)
    reply = await odd.post(stream=True)
    assert (reply.status_code, reply.content) == (200, event + EVENT + event + DONE)
    assert odd.gateway.stats.failed == odd.gateway.stats.worker("d1").failures == 0


@pytest.mark.parametrize(("code", "failures"), [(500, 1), (400, 0)])
async def test_a_stream_that_the_engine_ends_with_an_error_has_failed(
    odd: Rig, eventually: Eventually, code: int, failures: int
) -> None:
    """Its client has read so; so must who reads records and figures."""
    told = b'data: {"error": {"message": "boom", "code": %d}}\n\n' % code
    odd.decode.answer = chunked(EVENT, told, DONE)
    reply = await odd.post(stream=True)
    assert reply.content == EVENT + told + DONE
    stats = odd.gateway.stats
    await eventually(lambda: stats.failed == 1)
    assert stats.worker("d1").failures == failures
    record = odd.gateway.records._buffer[-1].decision
    assert (record.status, record.failed_leg) == ("failed", "decode" if failures else "")
    assert "boom" in record.error


async def test_a_text_with_the_mark_of_the_end_is_not_the_end(odd: Rig) -> None:
    text = b'data: {"choices":[{"text":"data: [DONE]","finish_reason":null}]}\n\n'
    odd.decode.answer = chunked(text)
    reply = await odd.post(stream=True)
    assert reply.content.startswith(text)
    last = json.loads(reply.content[len(text) :].removeprefix(b"data: "))
    assert "without [DONE]" in last["error"]["message"]


@pytest.mark.parametrize("done", [DONE, b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
async def test_a_stream_that_has_said_done_is_whole_though_its_connection_breaks(
    odd: Rig, done: bytes
) -> None:
    odd.decode.answer = chunked(EVENT, done).removesuffix(b"0\r\n\r\n")
    odd.decode.closes = True
    reply = await odd.post(stream=True)
    assert reply.content == EVENT + done
    assert odd.gateway.stats.failed == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
async def test_a_stream_whose_compression_breaks_off_says_so(
    odd: Rig, path: str, damage: str
) -> None:
    packed = gzip.compress(EVENT + DONE)
    lines = b"content-encoding: gzip\r\n"
    odd.decode.answer = chunked(packed, lines=lines)
    assert (await odd.post(path, stream=True)).content == EVENT + DONE
    broken = packed[: len(packed) // 2] if damage == "cut" else b"no gzip at all"
    odd.decode.answer = chunked(broken, lines=lines)
    reply = await odd.post(path, stream=True)
    assert b'"code":"decode_leg_failed"' in reply.content


async def test_a_request_that_one_worker_answers_whole_is_told_of_a_stop_too(
    odd: Rig, eventually: Eventually
) -> None:
    odd.decode.answer = odd.prefill.answer = b""
    request = asyncio.create_task(odd.post("/v1/embeddings", input="x"))
    await eventually(lambda: odd.decode.requests + odd.prefill.requests)
    await odd.gateway.stop(0.05)
    reply = await request
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stopping")
