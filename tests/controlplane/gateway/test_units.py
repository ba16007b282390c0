"""Parts alone: bodies, relay, chunks, histograms, salts, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import Serving

from controlplane.gateway import metrics
from controlplane.gateway.bodies import LegParams, decode_leg, legs_salt, ours, parse, prefill_leg
from controlplane.gateway.metrics import Extra, render
from controlplane.gateway.relay import Relay
from controlplane.gateway.stats import LatencyHistogram, Stats
from controlplane.gateway.upstream import Upstream, UpstreamError
from controlplane.gateway.wire import WorkerLoad
from controlplane.gateway.worker_connection import WorkerConnection

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = ["max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stream", "logprobs",
         "stream_options", "tool_choice", "kv_transfer_params", "cache_salt", "echo", "other"]  # fmt: skip


class TestBodies:
    @given(st.dictionaries(st.sampled_from(NAMES), json_values), st.booleans(), st.booleans())
    def test_legs_hold_what_they_must_whatever_the_client_sends(
        self, fields: dict[str, Any], chat: bool, salted: bool
    ) -> None:
        body = parse(json.dumps(fields).encode(), chat=chat)
        salt = "s" * 64 if salted else None
        first = json.loads(prefill_leg(body, ours(LegParams("t", "prefill")), salt))
        assert first["kv_transfer_params"] == {"perilune": {"transfer_id": "t", "leg": "prefill"}}
        assert first.get("stream") is not True
        assert not {"min_tokens", "best_of", "stream_options", "logprobs", "echo"} & first.keys()
        assert {"max_tokens", "max_completion_tokens"} & first.keys()
        raw = decode_leg(body, ours(LegParams("t", "decode", 3)), salt)
        second = json.loads(raw)
        assert second["kv_transfer_params"]["perilune"]["num_blocks"] == 3
        names = [name for name, _ in json.loads(raw, object_pairs_hook=list)]
        assert len(names) == len(set(names))  # nothing twice
        for name, value in fields.items():
            if name not in ("kv_transfer_params", "cache_salt"):
                assert second[name] == value

    def test_spliced_bodies_keep_odd_shapes(self) -> None:
        for raw in (b"{}", b" {} ", b'\n{\n"a":1}', b'{"a":{}}'):
            second = json.loads(
                decode_leg(parse(raw, chat=False), ours(LegParams("t", "decode", 0)), None)
            )
            assert second.pop("kv_transfer_params")
            assert second == json.loads(raw)

    def test_salts_separate_tenants_and_their_own_salts(self) -> None:
        assert legs_salt("default", None) is None
        salts = {
            legs_salt(tenant, salt)
            for tenant in ("default", "a", "ab")
            for salt in (None, "b", "", "bb")
        }
        assert len(salts) == 9  # "" counts as none; (a, bb) is not (ab, b)
        assert legs_salt("a", None) == legs_salt("a", None)


class FakeClient:
    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.ended = 0

    def write(self, data: bytes, head: bytes = b"") -> None:
        self.out.append(head + data)

    def raw_writer(self) -> Callable[[bytes], object]:
        return self.out.append

    def finish(self, data: bytes = b"", head: bytes = b"") -> None:
        self.out.append(head + data)
        self.ended += 1

    def close_after(self) -> None: ...


def make_relay(cached: int | None = None) -> tuple[Relay, FakeClient, Any]:
    client, reply = FakeClient(), SimpleNamespace(complete=False, last_byte_at=0.0)
    details = None if cached is None else {"cached_tokens": cached}
    return Relay(client, reply, b"", details), client, reply  # type: ignore[arg-type]


STREAM = b"".join(b'data: {"i":%d}\n\n' % i for i in range(6)) + b"data: [DONE]\n\n"


class TestRelay:
    @given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
    def test_events_come_out_whole_however_they_come_in(self, cuts: list[int]) -> None:
        relay, client, reply = make_relay()
        edges = [0, *sorted(set(cuts)), len(STREAM)]
        pieces = [STREAM[a:b] for a, b in pairwise(edges)]
        for i, piece in enumerate(pieces):
            reply.complete = i == len(pieces) - 1
            relay.take(piece)
        relay.end()
        assert b"".join(client.out) == STREAM
        assert all(part.endswith(b"\n\n") for part in client.out if part)
        assert client.ended == 1
        assert relay.is_done

    def test_a_torn_event_is_dropped_before_the_error(self) -> None:
        relay, client, _ = make_relay()
        relay.take(b'data: {"i":1}\n\ndata: {"i"')
        relay.fail(b"data: ERROR\n\n")
        assert b"".join(client.out) == b'data: {"i":1}\n\ndata: ERROR\n\n'

    def test_a_client_that_has_just_left_takes_no_worker_connection_with_it(self) -> None:
        relay, client, _ = make_relay()

        def closed(_: bytes) -> None:
            raise RuntimeError("the handler is closed")

        client.raw_writer = lambda: closed  # type: ignore[method-assign]
        relay = Relay(client, relay.reply, b"", None)  # type: ignore[arg-type]
        event = b'data: {"i":1}\n\n'
        assert relay.splice(b"%x\r\n%b\r\n" % (len(event), event))

    def test_crlf_streams_flow_too(self) -> None:
        relay, client, _ = make_relay()
        relay.take(b"data: 1\r\n\r\nda")
        assert client.out == [b"data: 1\r\n\r\n"]

    @pytest.mark.parametrize("cached", [None, 64])
    def test_cached_tokens_are_corrected(self, cached: int | None) -> None:
        relay, client, _ = make_relay(cached)
        usage = {"prompt_tokens": 99, "prompt_tokens_details": {"cached_tokens": 8}}
        event = b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n"
        assert not relay.splice(b"%x\r\n%b\r\n" % (len(event), event))
        relay.take(event)
        sent = msgspec.json.decode(client.out[0][6:])["usage"]
        if cached is None:
            assert sent == {"prompt_tokens": 99}
        else:
            assert sent["prompt_tokens_details"] == {"cached_tokens": 64}

    def test_usage_is_found_in_spliced_chunks(self) -> None:
        relay, _, _ = make_relay()
        event = b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'
        assert relay.splice(b"%x\r\n%b\r\n" % (len(event), event))
        relay.take(b"data: [DONE]\n\n")
        assert relay.usage() == {"completion_tokens": 5}


@pytest.mark.parametrize(("data", "whole"), [
    (b"a\r\ndata: 12\n\n\r\n", True),
    (b"a\r\ndata: 12\n\n\r\na\r\ndata: 12\n\n\r\n", False),  # two
    (b"b\r\ndata: 12\n\n\r\n", False),  # not all of it
    (b"0\r\n\r\n", False),
    (b"zz\r\n\n\n\r\n", False),
    (b"data: 12\n\n\r\n", False),
])  # fmt: skip
def test_only_one_whole_chunk_is_spliced(data: bytes, whole: bool) -> None:
    relay, client, _ = make_relay()
    assert relay.splice(data) is whole
    assert client.out == ([data] if whole else [])


class Scripted(asyncio.Protocol):
    """A worker that sends given packets for each request, each when the one before has arrived."""

    packets: tuple[bytes, ...] = ()
    arrived: asyncio.Event

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._task = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        for packet in self.packets:
            self.arrived.clear()
            self.transport.write(packet)
            async with asyncio.timeout(5):
                await self.arrived.wait()


async def relayed(packets: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, int]:
    """What arrives at a sink for these packets, and how many of them were spliced."""
    arrived, receive = asyncio.Event(), WorkerConnection.data_received

    def received(connection: WorkerConnection, data: bytes) -> None:
        receive(connection, data)
        arrived.set()

    monkeypatch.setattr(WorkerConnection, "data_received", received)
    make = type("Worker", (Scripted,), {"packets": packets, "arrived": arrived})
    server = Serving(make)
    await server.start()
    upstream = Upstream(server.url, 2, 4)
    out, spliced = bytearray(), 0

    def splice(data: bytes) -> bool:
        relay, client, _ = make_relay()
        if not relay.splice(data):
            return False
        nonlocal spliced, out
        spliced += 1
        out += client.out[0].partition(b"\r\n")[2][:-2]
        return True

    try:
        reply = await upstream.send(b"GET / HTTP/1.1\r\n\r\n", head_seconds=5)
        out += await reply.first_piece(5)
        await reply.relay(out.extend, 5, splice)
    finally:
        upstream.close()
        await server.stop()
    return bytes(out), spliced


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


async def test_spliced_and_parsed_chunks_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = b"data: 1\n\n", b"data: 22\n\n", b"data: 333\n\n"
    whole = HEAD + chunk(one), chunk(two), chunk(three), b"0\r\n\r\n"
    assert await relayed(whole, monkeypatch) == (one + two + three, 2)
    torn = HEAD + chunk(one), chunk(two)[:5], chunk(two)[5:] + chunk(three)[:2], \
        chunk(three)[2:] + chunk(one), chunk(two), chunk(one) + b"0\r\n\r\n"  # fmt: skip
    assert await relayed(torn, monkeypatch) == (one + two + three + one + two + one, 1)


async def test_an_upstream_that_is_not_there_or_speaks_no_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upstream = Upstream("http://127.0.0.1:9", 1, 1)
    with pytest.raises(UpstreamError) as caught:
        await upstream.send(b"GET / HTTP/1.1\r\n\r\n", head_seconds=1)
    assert caught.value.kind == "connect"
    with pytest.raises(UpstreamError) as caught:
        await relayed((b"SSH-2.0-OpenSSH\r\n",), monkeypatch)
    assert caught.value.kind == "protocol"


class OnceOnly(asyncio.Protocol):
    """Answers one request a connection and cuts it at the second."""

    made = 0
    answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        OnceOnly.made += 1
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if self.answered:
            self.transport.abort()
        else:
            self.answered = True
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


async def test_a_kept_connection_that_the_worker_closes_is_replaced() -> None:
    server = Serving(OnceOnly)
    await server.start()
    upstream = Upstream(server.url, 2, 60)
    for made in (1, 2, 3):
        reply = await upstream.send(b"GET / HTTP/1.1\r\n\r\n", head_seconds=5)
        assert await reply.whole(10, 5, 5) == b"ok"
        assert OnceOnly.made == made
        assert upstream.num_connections == 1
    upstream.close()
    await server.stop()


async def test_a_reply_that_is_found_damaged_as_it_begins_is_given_up() -> None:
    """Its worker would go on for nobody."""
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunk(b"damaged"))
        assert await reader.read() == b""
        left.set()
        writer.close()

    server = Serving.streams(serve)
    await server.start()
    upstream = Upstream(server.url, 2, 60)
    reply = await upstream.send(b"GET / HTTP/1.1\r\n\r\n", head_seconds=5, wants_piece=True)
    assert await reply.first_piece(5) == b"damaged"
    reply.fail(UpstreamError("protocol", "damaged"))
    with pytest.raises(UpstreamError, match="damaged"):
        await reply.relay(lambda _: None, 5)
    async with asyncio.timeout(5):
        await left.wait()
    upstream.close()
    await server.stop()


@given(st.lists(st.floats(0, 200), max_size=60))
def test_observing_all_is_observing_each(values: list[float]) -> None:
    one, other = LatencyHistogram(), LatencyHistogram()
    one.observe_all(sorted(values))
    for value in values:
        other.observe(value)
    assert one.export().counts == other.export().counts
    assert one.sum_seconds == pytest.approx(other.sum_seconds)


def test_every_series_is_declared_once_and_rendered() -> None:
    stats = Stats()
    stats.ttft.observe(0.3)
    text = render(
        stats.export({"p1": WorkerLoad(running=2)}, 5, 6),
        Extra(
            *(1, 2, 3, 4, 5, 6, 14, 9, 10, 11, 12, 13),
            {"prefilling": 1},
            {"decoding": 2},
            {"tokens": 3},
            *(7, 8),
        ),
    ).decode()
    assert len({series.name for series in metrics.ALL}) == len(metrics.ALL)
    for series in metrics.ALL:
        assert series.name.startswith("perilune_gateway_")
        assert text.count(f"# TYPE {series.name} {series.kind}\n") == 1
    assert 'perilune_gateway_worker_running{worker="p1"} 2\n' in text
    assert 'perilune_gateway_time_to_first_token_seconds_bucket{le="0.35"} 1\n' in text
