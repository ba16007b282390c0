"""Engines that answer at a set pace, as cheap as they can be: for many requests through a gateway.

`python paced_engine.py '{"workers": 4, "chunks": 8, "every": 0.5}'` prints the workers' ports as
JSON and serves until it is ended. Each piece of a stream says when it was sent. What a request is
to meet stands in its body: `fail:prefill`, `fail:decode` (500), `fail:reset` (before the first
byte), `fail:cut` (after two pieces), `fail:client` (400).
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, cast

import msgspec
import uvloop
from pool_churn import SPEC

from workers.client import make_hello
from workers.client_async import AsyncAgentClient
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.messages import Done, LegReport
from workers.process import die_with_parent


class Plan(msgspec.Struct, frozen=True):
    """How the workers behave. `agent`: where they report their legs; "" nowhere."""

    workers: int = 4
    chunks: int = 8
    every: float = 0.5
    agent: str = ""


MAX_REPORTS = 4096
_USAGE = {"prompt_tokens": 300, "total_tokens": 308, "completion_tokens": 8}
_CHOICE = {"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}
_WHOLE = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "usage": _USAGE}
_PREFILLED = json.dumps({
    **_WHOLE, "choices": [_CHOICE], "kv_transfer_params": {"perilune": {"num_blocks": 4}},
}).encode()  # fmt: skip
_PLAIN = json.dumps({**_WHOLE, "choices": [_CHOICE]}).encode()
_ERROR = b'{"error":{"message":"as asked","type":"server_error","code":%d}}'
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"text":" %.6f","logprobs":null,"finish_reason":null}]}\n\n'
)
_LAST = b"data: " + json.dumps({**_WHOLE, "choices": []}).encode() + b"\n\ndata: [DONE]\n\n"
_END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_LAST), _LAST)
_REPLY = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_TRANSFER = b'"transfer_id":"'


class PacedWorker(asyncio.Protocol):
    """One connection of a worker."""

    def __init__(self, plan: Plan, name: str, reports: asyncio.Queue[LegReport]) -> None:
        self._plan, self._name, self._reports = plan, name, reports
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._transport is not None:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            place = head.lower().find(b"content-length:")
            length = 0 if place < 0 else int(head[place + 15 :].split(b"\r\n", 1)[0])
            if not separator or len(rest) < length:
                return
            self._buffer = rest[length:]
            self._answer(head, rest[:length])

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        fault = body.partition(b"fail:")[2][:7]
        if head.startswith(b"GET"):
            self._reply(200, b"{}")
        elif b'"leg":"prefill"' in body:
            self._prefill(body, fault)
        elif fault.startswith(b"decode"):
            self._reply(500, _ERROR % 500)
        elif fault.startswith(b"reset"):
            self._transport.abort()
        elif b'"stream":true' in body:
            self._transport.write(_STREAM)
            self._report(body, "kv_consumer")
            self._next_chunk(2 if fault.startswith(b"cut") else -1, self._plan.chunks)
        else:
            self._report(body, "kv_consumer")
            self._reply(200, _PLAIN)

    def _prefill(self, body: bytes, fault: bytes) -> None:
        if fault.startswith(b"prefill"):
            self._reply(500, _ERROR % 500)
        elif fault.startswith(b"client"):
            self._reply(400, _ERROR % 400)
        else:
            self._report(body, "kv_producer")
            self._reply(200, _PREFILLED)

    def _reply(self, status: int, body: bytes) -> None:
        if self._transport is not None:
            reason = {200: b"OK", 400: b"Bad Request"}.get(status, b"Internal Server Error")
            self._transport.write(_REPLY % (status, reason, len(body), body))

    def _next_chunk(self, until_cut: int, left: int) -> None:
        if self._transport is None:
            return
        if until_cut == 0:
            self._transport.abort()
        elif left == 0:
            self._transport.write(_END)
        else:
            event = _EVENT % monotonic()
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            self._loop.call_later(self._plan.every, self._next_chunk, until_cut - 1, left - 1)

    def _report(self, body: bytes, role: Any) -> None:
        """As connectors do, from `transfer_id` in the leg's parameters."""
        if not self._plan.agent or self._reports.full():
            return
        name = body.partition(_TRANSFER)[2].partition(b'"')[0].decode()
        self._reports.put_nowait(
            LegReport(name, self._name, role, prompt_tokens=300, computed_tokens=300)
        )


async def _send_reports(agent: str, reports: asyncio.Queue[LegReport]) -> None:
    client = AsyncAgentClient(f"unix:{agent}", make_hello("worker", "w1", namespace=SPEC))
    while True:
        report = await reports.get()
        try:
            await client.call(report, Done)
        except (AgentUnavailableError, RefusedError, ProtocolError):
            await asyncio.sleep(0.1)


async def _serve(plan: Plan) -> None:
    loop, ports = asyncio.get_running_loop(), []
    reports: asyncio.Queue[LegReport] = asyncio.Queue(MAX_REPORTS)
    for number in range(plan.workers):
        make = partial(PacedWorker, plan, f"w{number + 1}", reports)
        server = await loop.create_server(make, "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    if plan.agent:
        await _send_reports(plan.agent, reports)
    await asyncio.Event().wait()


FILE = Path(__file__)

if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=Plan)))
