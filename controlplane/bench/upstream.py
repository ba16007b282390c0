"""The workers of the gateway bench: canned answers, as cheap as they can be.

Run as a process: prints its two ports (prefill, decode) as JSON and serves until it is ended.
"""

import asyncio
import json
import sys
from functools import partial
from typing import cast

import uvloop

from workers.process import die_with_parent

NUM_CHUNKS = 33
CHUNK_SECONDS = 0.002
_PREFILL = json.dumps({
    "id": "cmpl-p", "object": "text_completion", "created": 1, "model": "bench",
    "choices": [{"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 300, "total_tokens": 301, "completion_tokens": 1},
    "kv_transfer_params": {"perilune": {"num_blocks": 4}},
}).encode()  # fmt: skip
_PLAIN = json.dumps({
    "id": "cmpl-d", "object": "text_completion", "created": 1, "model": "bench",
    "choices": [{"index": 0, "text": " word" * 32, "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 300, "total_tokens": 332, "completion_tokens": 32},
}).encode()  # fmt: skip
_EVENT = b"data: " + json.dumps({
    "id": "cmpl-d", "object": "text_completion", "created": 1, "model": "bench",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}).encode() + b"\n\n"  # fmt: skip
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class CannedWorker(asyncio.Protocol):
    """Answers each request by what its body asks for; no real parsing."""

    def __init__(self, *, prefill: bool) -> None:
        self._prefill = prefill
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (request := self._take()) is not None:
            self._answer(*request)

    def _take(self) -> tuple[bytes, bytes] | None:
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return None
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if len(rest) < length:
            return None
        self._buffer = rest[length:]
        return head, rest[:length]

    def _answer(self, head: bytes, body: bytes) -> None:
        if self._transport is None:
            return
        if head.startswith(b"GET"):  # health checks and model lists of routers
            models = b'{"object":"list","data":[{"id":"bench","object":"model"}]}'
            self._transport.write(_JSON % (len(models), models))
        elif self._prefill:
            self._transport.write(_JSON % (len(_PREFILL), _PREFILL))
        elif b'"stream":true' in body.replace(b" ", b""):
            self._transport.write(_STREAM)
            self._next_chunk(0)
        else:
            self._transport.write(_JSON % (len(_PLAIN), _PLAIN))

    def _next_chunk(self, i: int) -> None:
        if self._transport is None:
            return
        if i == NUM_CHUNKS - 1:
            self._transport.write(_DONE)
            return
        self._transport.write(_CHUNK)
        asyncio.get_running_loop().call_later(CHUNK_SECONDS, self._next_chunk, i + 1)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for prefill in (True, False):
        make = partial(CannedWorker, prefill=prefill)
        server = await loop.create_server(make, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_serve())
