"""The server's own limits and manners, on raw sockets where it matters."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from controlplane.gateway.client_connection import ClientConnection


async def raw(rig: Any, *parts: bytes, pause: float = 0.0, eof: bool = False) -> bytes:
    """What comes back for these bytes, until the server closes or a second of silence."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(pause)
    if eof:
        writer.write_eof()
    answer = b""
    try:
        while True:
            async with asyncio.timeout(1.0):
                data = await reader.read(65536)
            if not data:
                break
            answer += data
    except TimeoutError:
        pass
    writer.close()
    return answer


def post(body: bytes, *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    head = [b"POST /v1/completions " + version, b"host: x", b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, *lines]) + b"\r\n\r\n" + body


HELLO = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()


@pytest.mark.parametrize(("body", "status", "says"), [
    (b'{"model":"tiny"', 400, "no valid JSON"),
    (b"[1]", 400, "must be a JSON object"),
    (b"", 400, "no valid JSON"),
    (b'{"a":"\xff"}', 400, "no valid JSON"),
    (b"[" * 100_000, 400, "nested too deeply"),
    (b'{"model":"nope"}', 404, "known models: tiny"),
    (b'{"model":7}', 400, "model: must be a string"),
    (b'{"prompt":"the only model is meant","max_tokens":1}', 200, "choices"),
])  # fmt: skip
async def test_bad_bodies_have_one_clear_message(
    rig: Any, body: bytes, status: int, says: str
) -> None:
    await rig.start()
    response = await rig.client.post("/v1/completions", content=body)
    assert response.status_code == status
    assert says in response.text
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert rig.seen() == []
        assert rig.gateway.stats.client_errors == 1


async def test_a_body_over_the_limit_is_413_naming_it(rig: Any) -> None:
    rig.limits = replace(rig.limits, max_body_bytes=1000)
    await rig.start()
    response = await rig.client.post("/v1/completions", content=b"x" * 2000)
    assert response.status_code == 413
    assert "the limit is 1000 (max_body_bytes)" in response.json()["error"]["message"]
    chunk = b"%x\r\n%b\r\n" % (600, b"x" * 600)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await raw(rig, head, chunk, chunk, pause=0.01)).startswith(b"HTTP/1.1 413")
    assert (await rig.complete(prompt="hello")).status_code == 200


async def test_a_large_body_is_no_large_head(rig: Any) -> None:
    await rig.start()
    for _ in range(2):  # on one connection
        response = await rig.complete(prompt="the quick brown fox " * 20_000, max_tokens=1)
        assert response.status_code == 400
        assert "maximum context length" in response.json()["error"]["message"]
    assert len(rig.gateway.server.connections) == 1


async def test_a36_a_head_over_the_limit_is_431(rig: Any) -> None:
    await rig.start()
    response = await rig.client.get("/health", headers={"x-large": "y" * 8000})
    assert response.status_code == 200
    answer = await raw(rig, post(HELLO, b"x-huge: " + b"y" * 70_000))
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"65536 bytes" in answer
    drip = await raw(rig, b"GET /health HTTP/1.1\r\nx: ", *[b"y" * 20_000] * 4, pause=0.01)
    assert drip.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("lines", [
    b"x-huge: " + b"y" * 70_000, b"expect: a-miracle", b"content-length: 99999999",
])  # fmt: skip
async def test_a_refusal_is_said_once_and_ends_cleanly(rig: Any, lines: bytes) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    await rig.start()
    answer = await raw(rig, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert faults == []


async def test_an_offer_to_upgrade_is_passed_over(rig: Any) -> None:
    """Java's HTTP client offers h2c on every plain request."""
    await rig.start()
    offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAA")
    whole = post(HELLO, *offer) * 2
    answer = await raw(rig, whole)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"connection: close" not in answer
    torn = [whole[i : i + 50] for i in range(0, len(whole), 50)]
    assert (await raw(rig, *torn)).count(b"HTTP/1.1 200 OK") == 2
    assert (await raw(rig, b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(b"HTTP/1.1 405")


async def test_head_has_no_body(rig: Any) -> None:
    await rig.start()
    head = b"HEAD %b HTTP/1.1\r\nhost: x\r\n\r\n"
    get = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    for path, status in ((b"/v1/models", b"200"), (b"/nothing", b"404")):
        first, second = (await raw(rig, head % path + get)).split(b"HTTP/1.1 ")[1:]
        assert first.startswith(status)
        assert b"content-length: 0" not in first
        assert first.endswith(b"\r\n\r\n")
        assert second.endswith(b'{"status":"ok"}')


async def test_a_flood_of_pipelined_requests_is_not_read_ahead(rig: Any, eventually: Any) -> None:
    """A client that sends without reading holds one read's worth of requests and answers."""
    await rig.start()
    get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port, limit=4096)
    writer.write(get * 100_000)
    (connection,) = await eventually(lambda: list(rig.gateway.server.connections))
    await eventually(lambda: connection.write_paused_since is not None)
    for _ in range(20):
        await asyncio.sleep(0.01)
        assert len(connection._waiting) <= 2**18 / len(get) + rig.limits.max_pipelined
        assert connection._transport.get_write_buffer_size() < 2**20
    writer.transport.abort()


async def test_expect_continue_is_answered_first(rig: Any) -> None:
    await rig.start()
    head = post(HELLO, b"expect: 100-continue").removesuffix(HELLO)
    answer = await raw(rig, head, HELLO, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    refused = await raw(rig, post(HELLO, b"expect: a-miracle"))
    assert refused.startswith(b"HTTP/1.1 417")
    assert b'"type":"invalid_request_error"' in refused


async def test_expect_continue_of_a_pipelined_request_is_answered_in_its_turn(rig: Any) -> None:
    await rig.start()
    head = post(HELLO, b"expect: 100-continue").removesuffix(HELLO)
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    writer.write(post(HELLO) + head)
    async with asyncio.timeout(10):
        first = await reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200")
        writer.write(HELLO)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
async def test_json_in_other_encodings_is_taken_as_engines_take_it(rig: Any, encoding: str) -> None:
    await rig.start()
    text = json.dumps(
        {"model": "tiny", "prompt": "Größe 日本", "max_tokens": 1}, ensure_ascii=False
    )
    response = await rig.client.post("/v1/completions", content=text.encode(encoding))
    assert response.status_code == 200
    assert rig.decode_bodies()[0]["prompt"] == "Größe 日本"
    broken = await rig.client.post("/v1/completions", content=text.encode(encoding)[:-1])
    assert broken.status_code == 400


async def test_chunked_bodies_and_torn_packets(rig: Any) -> None:
    await rig.start()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in HELLO) + b"0\r\n\r\n"
    whole = head + body
    pieces = [whole[i : i + 37] for i in range(0, len(whole), 37)]
    assert (await raw(rig, *pieces)).startswith(b"HTTP/1.1 200 OK")


async def test_a_trailer_says_nothing_of_the_request(rig: Any) -> None:
    """What stands before a gateway may have set or struck out the head's lines."""
    await rig.start()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: head\r\n"
    chunk = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(HELLO), HELLO)
    trailer = b"x-request-id: trailer\r\nx-perilune-priority: batch\r\n\r\n"
    answer = await raw(rig, head + chunk + trailer)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"x-request-id: head\r\n" in answer
    record = await rig.control_plane.ended()
    assert (record.client_request_id, record.priority) == ("head", "standard")


@pytest.mark.parametrize("field", [b"x-n: v\r\n", b"v"])
async def test_a_trailer_without_end_is_431(rig: Any, field: bytes) -> None:
    """Of many fields, or of one."""
    await rig.start()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    start = head + b"%x\r\n%b\r\n0\r\nx-a: " % (len(HELLO), HELLO) + field
    answer = await raw(rig, start, *[field * (16384 // len(field))] * 8, pause=0.01)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"trailer is over the limit of 65536 bytes" in answer


async def test_a_body_in_very_many_pieces_is_put_together_as_it_comes(
    rig: Any, eventually: Any
) -> None:
    """Each piece has a head of its own in memory, larger than itself."""
    await rig.start()
    connections = rig.gateway.server.connections
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b" " * 20_000 + HELLO
    whole = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    writer.write(head + whole)
    await eventually(lambda: [c for c in connections if c._body_bytes == len(body)])
    (connection,) = connections
    assert len(connection._body) <= 1024
    writer.write(b"0\r\n\r\n")
    assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
    writer.close()


async def test_pipelined_requests_are_answered_in_order(rig: Any) -> None:
    await rig.start()
    get = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = await raw(rig, post(HELLO) + get % b"/v1/models" + get % b"/nothing")
    kinds = [part.split(b" ")[0] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert kinds == [b"200", b"200", b"404"]
    assert answer.index(b"text_completion") < answer.index(b'"object":"list"')


async def test_a35_many_requests_on_two_connections(rig: Any) -> None:
    await rig.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    other_reader, other = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    for i in range(8):
        source, sink = (reader, writer) if i % 2 else (other_reader, other)
        sink.write(post(HELLO))
        head = await source.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await source.readexactly(length)
    writer.close()
    other.close()


async def test_http_1_0_gets_no_chunks(rig: Any) -> None:
    await rig.start()
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 2}).encode()
    answer = await raw(rig, post(body, version=b"HTTP/1.0"))
    head, _, text = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert text.startswith(b"data: ")
    assert text.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/nothing", 404),
    ("GET", "/v1/models/none", 404), ("GET", "/v1/models/tiny", 200), ("GET", "/health", 200),
])  # fmt: skip
async def test_routes(rig: Any, method: str, path: str, status: int) -> None:
    await rig.start()
    assert (await rig.client.request(method, path)).status_code == status


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/"])
async def test_an_error_repeats_the_head_of_a_long_name_only(rig: Any, path: str) -> None:
    await rig.start()
    name = "m" * 30_000
    if path == "/v1/completions":
        reply = await rig.client.post(path, json={"model": name, "prompt": "x"})
    else:
        reply = await rig.client.get(path + name)
    assert reply.status_code == 404
    assert "'mmmm" in reply.text
    assert "known models: tiny" in reply.text
    assert len(reply.text) < 1000


async def test_garbage_is_refused(rig: Any) -> None:
    await rig.start()
    assert (await raw(rig, b"\x16\x03\x01 no http\r\n\r\n")).startswith(b"HTTP/1.1 400")


async def test_a_request_that_never_arrives_is_given_up(rig: Any) -> None:
    rig.timeouts = replace(rig.timeouts, client_read=0.1)
    await rig.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    async with asyncio.timeout(10):
        assert (await reader.read(1000)).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_too_many_connections_are_told_so(rig: Any) -> None:
    rig.limits = replace(rig.limits, max_connections=1)
    await rig.start()
    first = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    await asyncio.sleep(0.05)
    assert (await raw(rig, b"")).startswith(b"HTTP/1.1 503")
    first[1].close()


async def test_keys_decide_the_tenant_and_salt_the_legs(rig: Any) -> None:
    await rig.start()
    await rig.complete(prompt="hello")
    await rig.complete(prompt="hello", cache_salt="mine")
    plain, salted = (body.get("cache_salt") for body in rig.decode_bodies())
    assert plain is None
    assert salted not in (None, "mine")
    digest = hashlib.sha256(b"pk-a").hexdigest()
    keys = [rig.key(digest, "acme"), rig.key(hashlib.sha256(b"pk-b").hexdigest(), "other")]
    await rig.publish(client_keys=keys)
    for key, status in (("pk-a", 200), ("pk-b", 200), ("pk-c", 401)):
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "tiny", "prompt": "hello", "cache_salt": "mine"}
        response = await rig.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == status
    assert (await rig.complete(prompt="hello")).status_code == 401
    assert (await rig.client.get("/v1/models")).status_code == 401
    salts = [body.get("cache_salt") for body in rig.decode_bodies()[2:]]
    salts += [salted]
    assert len(set(salts)) == 3
    assert None not in salts
    prefill_salts = {body.get("cache_salt") for body in rig.prefill_bodies()}
    assert prefill_salts == {None, *salts}


async def test_tenants_are_known_to_the_pool_by_name_and_never_share_by_a_salt(rig: Any) -> None:
    await rig.start()
    keys = [
        rig.key(hashlib.sha256(key).hexdigest(), tenant)
        for key, tenant in ((b"pk-a", "acme"), (b"pk-b", "other"))
    ]
    await rig.publish(client_keys=keys)
    for key in ("pk-a", "pk-b"):
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "tiny", "prompt": "hello", "cache_salt": "y" * 2000}
        refused = await rig.client.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 400
        assert "cache_salt" in refused.json()["error"]["message"]
        body["cache_salt"] = "mine"
        served = await rig.client.post("/v1/completions", json=body, headers=headers)
        assert served.status_code == 200
    params = [body["kv_transfer_params"]["perilune"] for body in rig.decode_bodies()]
    assert [each["tenant"] for each in params] == ["acme", "other"]


async def test_models_health_and_metrics(rig: Any) -> None:
    await rig.start()
    await rig.fleet.stop_worker("p1")  # worker 0 is dead: the catalogue is our own (A34)
    (model,) = (await rig.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["metadata"]["emulated"]) == ("tiny", True)
    health = (await rig.client.get("/health")).json()
    assert (health["status"], health["missing"]) == ("ok", [])
    await rig.publish(**rig.make_view(p1="stopped", p2="stopped"))
    response = await rig.client.get("/health")
    assert response.status_code == 200  # decode alone can serve
    assert response.json()["missing"] == ["prefill worker for model tiny"]
    await rig.publish(**rig.make_view(d1="stopped", d2="stopped"))
    assert (await rig.client.get("/health")).status_code == 503
    text = (await rig.client.get("/metrics")).text
    assert "perilune_gateway_requests_total 0" in text


async def test_a_drain_finishes_what_runs_and_takes_no_more(rig: Any, eventually: Any) -> None:
    rig.engine = replace(rig.engine, decode_ms=20)
    await rig.start()
    running = asyncio.create_task(rig.complete(prompt="hello", max_tokens=20))
    await eventually(lambda: rig.gateway.stats.in_flight == 1)
    stopping = asyncio.create_task(rig.gateway.server.stop(drain_seconds=10))
    response = await running
    assert response.status_code == 200
    assert response.headers["connection"] == "close"
    await stopping
    assert rig.gateway.server.connections == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_outlasts_the_drain_is_told_so(rig: Any, eventually: Any, stream: bool) -> None:
    """Not left with a connection that closes on nothing, and no worker's failure."""
    rig.engine = replace(rig.engine, decode_ms=50.0)
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    asked = {"prompt": "hello", "max_tokens": 5000, "ignore_eos": True, "stream": stream}
    request = asyncio.create_task(rig.complete(**asked))
    gateway = rig.gateway
    if stream:
        await eventually(lambda: any(one.head_sent for one in gateway.server.connections))
    else:
        await eventually(lambda: gateway.cluster.loads()["d1"].requests_total)
    await gateway.stop(drain_seconds=0.05)
    reply = await request
    assert b'"code":"stopping"' in reply.content
    assert reply.status_code == (200 if stream else 503)
    assert reply.headers.get("retry-after") == (None if stream else "1")
    assert gateway.cluster.loads()["d1"].failures_total == 0
    record = await rig.control_plane.ended("cancelled")
    assert "being stopped" in record.error


@pytest.mark.parametrize("sent", [
    b"POST /v1/comp",
    post(b"")[:-2],
    post(b"x" * 10_000_000)[:1000],
    b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" + post(b"x" * 1000)[:200],
])  # fmt: skip
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_request_that_arrives_while_the_gateway_stops_is_told_so(
    rig: Any, eventually: Any, sent: bytes, goes_on: bool
) -> None:
    await rig.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    writer.write(sent)
    before = b""
    if sent.startswith(b"GET"):
        before = await reader.readuntil(b'{"status":"ok"}')
    await eventually(lambda: any(one.is_arriving for one in rig.gateway.server.connections))
    stopping = asyncio.create_task(rig.gateway.stop(drain_seconds=0.5))
    if goes_on:  # what stands unread when a socket is closed would take the answer away
        connections = rig.gateway.server.connections
        await eventually(lambda: any(one.is_lingering for one in connections))
        writer.write(b"x" * 3_000_000)
        await asyncio.sleep(0.2)
    async with asyncio.timeout(10):
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503"), (before, answer)
    assert b"retry-after: 1" in head
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "stopping"
    writer.close()
    async with asyncio.timeout(10):
        await stopping


async def test_who_does_not_read_that_the_gateway_stops_holds_it_up_for_a_moment_only(
    rig: Any, eventually: Any
) -> None:
    await rig.start()
    _, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    writer.write(b"POST /v1/comp")
    await eventually(lambda: any(one.is_arriving for one in rig.gateway.server.connections))
    async with asyncio.timeout(10):
        await rig.gateway.stop(drain_seconds=60)
    writer.close()


async def test_what_a_broken_transport_is_still_given_is_dropped(rig: Any) -> None:
    """uvloop closes it a moment before `connection_lost`, and then raises at every write."""

    class Broken:
        def is_closing(self) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"{name}: the handler is closed")

    await rig.start()
    connection = ClientConnection(rig.gateway.server)
    connection._transport = Broken()  # type: ignore[assignment]
    connection.respond(200, b"{}")
    connection.finish(b"last")
    connection._next()
