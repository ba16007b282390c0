"""Request headers that come in several lines: what is passed on goes on line by line, and no two
lines of what is read may let the gateway and somebody else see different requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator

import pytest
from serving import Serving

from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings, Timeouts
from controlplane.gateway.wire import View, ViewKey, ViewWorker

ANSWER = b'{"choices":[{"text":"ok","finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'
BODY = json.dumps({"model": "m", "prompt": "hi", "input": "hi", "max_tokens": 5}).encode()
HOST = b"host: x"
BAGGAGE = (b"baggage: a=1", b"tracestate: k=1", b"baggage: b=2", b"baggage:", b"tracestate: l=2")
DECIDES = (
    b"authorization", b"content-type", b"expect", b"x-perilune-priority", b"x-perilune-session",
    b"x-perilune-class", b"x-perilune-actor",
)  # fmt: skip
VALUES = {
    b"authorization": b"Bearer pk-a", b"content-type": b"application/json",
    b"expect": b"100-continue",
}  # fmt: skip


class Engine:
    """Answers every request alike, and keeps their heads as they came."""

    def __init__(self) -> None:
        self.heads: list[list[bytes]] = []

    async def start(self) -> Engine:
        self._serving = Serving.streams(self._serve)
        await self._serving.start()
        self.url = self._serving.url
        return self

    async def stop(self) -> None:
        await self._serving.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
                sizes = [line[15:] for line in lines if line.startswith(b"content-length:")]
                await reader.readexactly(int((sizes or [b"0"])[0]))
                if lines[0].startswith(b"POST"):
                    self.heads.append(lines[1:])
                writer.write(head % len(ANSWER) + ANSWER)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def lines(self, *names: bytes) -> list[bytes]:
        """Of its only request."""
        (head,) = self.heads
        return [line for line in head if line.partition(b":")[0] in names]


class Rig:
    """A gateway over one engine a role."""

    def __init__(self) -> None:
        self.prefill, self.decode = Engine(), Engine()
        timeouts = Timeouts(prefill=15, first_byte=15, whole_reply=15, idle=15, drain=1)
        self.gateway = Gateway(Settings(port=0, timeouts=timeouts))

    async def start(self) -> None:
        await self.prefill.start()
        await self.decode.start()
        await self.gateway.start()
        self.show()

    def show(self, *keys: ViewKey) -> None:
        workers = [
            ViewWorker("p1", "n1", "prefill", "m", self.prefill.url, "ready"),
            ViewWorker("d1", "n1", "decode", "m", self.decode.url, "ready"),
        ]
        self.gateway.cluster.apply(View(1, "test", "test", workers=workers, client_keys=list(keys)))

    async def stop(self) -> None:
        await self.gateway.stop(1.0)
        await self.prefill.stop()
        await self.decode.stop()
        assert self.gateway.stats.in_flight == 0

    @property
    def seen(self) -> list[list[bytes]]:
        return self.prefill.heads + self.decode.heads

    async def ask(
        self,
        *lines: bytes,
        host: bytes = HOST,
        path: bytes = b"/v1/completions",
        body: bytes = BODY,
        framing: bytes = b"content-length: %d" % len(BODY),
        piece: int = 1 << 20,
        version: bytes = b"1.1",
    ) -> bytes:
        """What the client reads until the gateway closes, which it is asked to."""
        head = (b"POST %b HTTP/%b" % (path, version), host, framing, *lines, b"connection: close")
        sent = b"\r\n".join(head) + b"\r\n\r\n" + body
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.server.port)
        for start in range(0, len(sent), piece):
            writer.write(sent[start : start + piece])
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            answer = await reader.read(-1)
        writer.close()
        return answer


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.start()
    yield made
    await made.stop()


def status_of(answer: bytes) -> int:
    """Of the only answer that is no 100."""
    assert answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").count(b"HTTP/1.1 ") == 1
    return int(answer.rpartition(b"HTTP/1.1 ")[2][:3])


# --- passed on ---


@pytest.mark.parametrize("piece", [1 << 20, 7])
@pytest.mark.parametrize("stream", [False, True])
async def test_lines_of_a_repeated_header_reach_both_legs_in_order(
    rig: Rig, stream: bool, piece: int
) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 5, "stream": stream}).encode()
    framing = b"content-length: %d" % len(body)
    assert status_of(await rig.ask(*BAGGAGE, body=body, framing=framing, piece=piece)) == 200
    for engine in (rig.prefill, rig.decode):
        assert engine.lines(b"baggage") == [b"baggage: a=1", b"baggage: b=2", b"baggage: "]
        assert engine.lines(b"tracestate") == [b"tracestate: k=1", b"tracestate: l=2"]


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/v1/responses"])
async def test_lines_of_a_repeated_header_reach_the_one_worker_of_a_whole_request(
    rig: Rig, path: bytes
) -> None:
    assert status_of(await rig.ask(*BAGGAGE, path=path)) == 200
    (head,) = rig.seen
    assert [line for line in head if line.startswith(b"baggage")] == [
        b"baggage: a=1", b"baggage: b=2", b"baggage: ",
    ]  # fmt: skip


async def test_lines_survive_an_offer_to_upgrade_and_any_case(rig: Rig) -> None:
    offer = (b"Baggage: a=1", b"connection: Upgrade, x-session-id", b"upgrade: h2c")
    assert status_of(await rig.ask(*offer, b"BAGGAGE: b=2", b"x-session-id: s")) == 200
    for engine in (rig.prefill, rig.decode):
        assert engine.lines(b"baggage") == [b"baggage: a=1", b"baggage: b=2"]
        assert engine.lines(b"x-session-id", b"connection", b"upgrade") == []


async def test_what_engines_are_not_told_stays_away_however_often_it_comes(rig: Rig) -> None:
    names = (b"cookie", b"accept", b"accept-encoding", b"x-forwarded-for", b"x-foo", b"x-api-key")
    lines = [b"%b: %d" % (name, number) for number in (1, 2) for name in names]
    assert status_of(await rig.ask(*lines)) == 200
    for engine in (rig.prefill, rig.decode):
        assert engine.lines(*names) == []


async def test_what_any_line_of_connection_names_is_of_this_hop(rig: Rig) -> None:
    lines = (b"connection: keep-alive, Baggage", b"baggage: a", b"connection: x,tracestate ",
             b"tracestate: b", b"baggage: c", b"x-session-id: kept")  # fmt: skip
    assert status_of(await rig.ask(*lines)) == 200
    for engine in (rig.prefill, rig.decode):
        assert engine.lines(b"baggage", b"tracestate") == []
        assert engine.lines(b"x-session-id") == [b"x-session-id: kept"]


async def test_of_several_request_ids_the_nearest_hops_comes_back(rig: Rig) -> None:
    answer = await rig.ask(b"x-request-id: far", b"x-request-id: near")
    assert status_of(answer) == 200
    assert answer.count(b"\r\nx-request-id: ") == 1
    assert b"\r\nx-request-id: near\r\n" in answer


async def test_repeated_lines_count_for_the_size_of_a_head(rig: Rig) -> None:
    """Also where all of it comes in one packet."""
    assert status_of(await rig.ask(*[b"baggage: abcdefgh"] * 3000)) == 200
    assert len(rig.decode.lines(b"baggage")) == 3000
    for name in (b"baggage", b"x-foo"):
        assert status_of(await rig.ask(*[name + b": abcdefgh"] * 6000)) == 431
    assert len(rig.decode.heads) == 1


# --- read here ---


@pytest.mark.parametrize("name", DECIDES)
async def test_what_the_gateway_reads_must_not_contradict_itself(rig: Rig, name: bytes) -> None:
    value = VALUES.get(name, b"normal")
    for lines in ((value, b"other-secret"), (b"other-secret", value), (b"", value), (value, b"")):
        answer = await rig.ask(*(b"%b: %b" % (name, line) for line in lines))
        assert status_of(answer) == 400
        assert b'"code":"repeated_header"' in answer
        assert b'"message":"%b: ' % name in answer
        assert b"secret" not in answer
    assert rig.seen == []


@pytest.mark.parametrize("name", DECIDES)
async def test_what_is_said_twice_alike_is_said_once(rig: Rig, name: bytes) -> None:
    line = b"%b: %b" % (name, VALUES.get(name, b"normal"))
    assert status_of(await rig.ask(line, line, line + b" ")) == 200
    assert b"\r\n".join(rig.decode.heads[0]).count(b"\r\ncontent-type:") == 1


async def test_no_client_is_accounted_as_one_tenant_and_seen_as_another(rig: Rig) -> None:
    rig.show(*(
        ViewKey(hashlib.sha256(key).hexdigest(), tenant)
        for key, tenant in ((b"pk-a", "acme"), (b"pk-b", "other"))
    ))  # fmt: skip
    ours, theirs = b"authorization: Bearer pk-a", b"Authorization: Bearer pk-b"
    for lines in ((ours, theirs), (theirs, ours), (b"authorization: Bearer none", ours)):
        assert status_of(await rig.ask(*lines)) == 400
    assert status_of(await rig.ask(b"authorization: Bearer pk-a, Bearer pk-b")) == 401
    assert rig.seen == []
    for lines in ((ours,), (ours, ours), (theirs,)):
        assert status_of(await rig.ask(*lines)) == 200


@pytest.mark.parametrize("second", [b"x", b"y"])
async def test_a_request_has_one_host(rig: Rig, second: bytes) -> None:
    answer = await rig.ask(b"Host: " + second)
    assert status_of(answer) == 400
    assert b'"message":"host: ' in answer
    assert rig.seen == []


async def test_codings_of_several_lines_are_one_list(rig: Rig) -> None:
    answer = await rig.ask(b"content-encoding: gzip", b"content-encoding: gzip")
    assert status_of(answer) == 415
    assert b"content-encoding = gzip, gzip" in answer
    assert rig.seen == []


# --- framing ---

LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"


@pytest.mark.parametrize(("lines", "status"), [
    ((LENGTH, b"content-length: 5"), 400),
    ((b"content-length: 5", LENGTH), 400),
    ((LENGTH, LENGTH), 400),
    ((b"content-length: 5, 5",), 400),
    ((LENGTH, CHUNKED), 400),
    ((CHUNKED, LENGTH), 400),
    ((CHUNKED, CHUNKED), 400),
    ((CHUNKED, b"transfer-encoding: identity"), 400),
    ((b"transfer-encoding: chunked, gzip",), 400),
    ((b"transfer-encoding: gzip",), 501),
    ((b"transfer-encoding: identity", CHUNKED), 501),
    ((b"transfer-encoding: gzip, chunked",), 501),
    ((b"transfer-encoding: gzip", b"transfer-encoding: chunked"), 501),
])  # fmt: skip
async def test_a_body_ends_where_everybody_sees_it_end(
    rig: Rig, lines: tuple[bytes, ...], status: int
) -> None:
    """Nothing of it is served, nor what would be a second request behind it."""
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    behind = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = await rig.ask(*lines[1:], framing=lines[0], body=chunk + behind)
    assert status_of(answer) == status
    assert b"ok" not in answer.lower().replace(b"200 ok", b"")
    assert rig.seen == []


async def test_http_1_0_has_no_chunks(rig: Rig) -> None:
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert status_of(await rig.ask(framing=CHUNKED, body=chunk, version=b"1.0")) == 400
    assert rig.seen == []
    assert status_of(await rig.ask(framing=b"Transfer-Encoding: Chunked", body=chunk)) == 200
