"""Spans out of decision records, to a real OTLP receiver."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from controlplane.gateway.tracing import Trace, trace_of
from workers.engines.emulated.http import Exchange, Server

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_clients_trace_goes_on() -> None:
    trace = trace_of(PARENT)
    assert (trace.trace_id, trace.parent_id, trace.sampled) == (
        0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True,
    )  # fmt: skip
    assert trace.traceparent.startswith(b"00-0af7651916cd43dd8448eb211c80319c-")
    assert trace.traceparent.endswith(b"-01")
    assert b"b7ad6b7169203331" not in trace.traceparent
    assert not trace_of(PARENT[:-2] + b"00").sampled


@pytest.mark.parametrize(
    "header", [b"", b"nonsense", PARENT.upper(), b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01"]
)
def test_what_is_no_traceparent_begins_a_trace(header: bytes) -> None:
    trace = trace_of(header)
    assert trace.parent_id == 0
    assert trace.sampled
    assert trace == Trace(trace.trace_id, trace.span_id, 0, sampled=True)


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self._server = Server(self._handle)

    async def start(self) -> None:
        await self._server.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        await self._server.stop()

    async def _handle(self, exchange: Exchange) -> None:
        assert exchange.path == "/v1/traces"
        body = bytes(exchange.body)
        if exchange.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        exchange.send(200, b"", "application/x-protobuf")


@pytest.mark.parametrize("parents", [(PARENT, PARENT), (b"nonsense",), ()])
async def test_a_trace_that_begins_here_has_no_state_of_another(
    rig: Any, parents: tuple[bytes, ...]
) -> None:
    """Of two parents none counts, and the state belongs to theirs."""
    collector = Collector()
    await collector.start()
    try:
        rig.settings = replace(rig.settings, otlp_endpoint=collector.url)
        await rig.start()
        headers = [("traceparent", parent.decode()) for parent in parents]
        reply = await rig.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 3},
            headers=[*headers, ("tracestate", "vendor=1")],
        )
        assert reply.status_code == 200
    finally:
        await collector.stop()
    seen = [record["headers"] for api in rig.fleet.apis.values() for record in api.records]
    assert seen
    assert not any("tracestate" in headers for headers in seen)
    assert not any("0af7651916cd43dd" in headers["traceparent"] for headers in seen)


async def test_a_request_is_a_span_with_its_phases(
    rig: Any, eventually: Callable[..., Awaitable[Any]]
) -> None:
    collector = Collector()
    await collector.start()
    try:
        rig.settings = replace(rig.settings, otlp_endpoint=collector.url)
        await rig.start()
        reply = await rig.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 3},
            headers={"traceparent": PARENT.decode()},
        )
        assert reply.status_code == 200
        await eventually(lambda: any(s.kind == 2 for s in collector.spans), "the request's span")
    finally:
        await collector.stop()
    root = next(span for span in collector.spans if span.kind == 2)
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert root.name == "text_completion tiny"
    attributes = {a.key: a.value for a in root.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 3
    assert attributes["perilune.prefill_worker"].string_value in ("p1", "p2")
    children = {s.name: s for s in collector.spans if s.parent_span_id == root.span_id}
    assert {"prefill"} <= children.keys()
    for child in children.values():
        assert root.start_time_unix_nano <= child.start_time_unix_nano
        assert child.end_time_unix_nano <= root.end_time_unix_nano + 5_000_000
    legs = [record["headers"]["traceparent"] for name in ("p1", "p2", "d1", "d2")
            for record in rig.api(name).records]  # fmt: skip
    assert legs
    assert all(root.span_id.hex() in header for header in legs)
