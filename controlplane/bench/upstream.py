"""What the gateway bench's proxies talk to: canned workers and a canned control plane, as cheap as
they can be.

Run as a process with the path of a ClusterView: prints its three ports (prefill, decode, control
plane) as JSON and serves until it is ended. The view is read when a gateway first asks for it.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from workers.process import die_with_parent

NUM_CHUNKS = 33
CHUNK_SECONDS = 0.002
POLL_SECONDS = 20.0
"""After so long a gateway's poll for a newer view is told that there is none."""
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
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_UNCHANGED = b"HTTP/1.1 304 Not Modified\r\ncontent-length: 0\r\n\r\n"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Canned(asyncio.Protocol):
    """Answers each request by what its head and body ask for; no real parsing."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (request := self._take()) is not None:
            if self.transport is not None:
                self.answer(*request)

    def _take(self) -> tuple[bytes, bytes] | None:
        place = self._buffer.find(b"\r\n\r\n")
        if place < 0:
            return None
        head, start, length = bytes(self._buffer[:place]), place + 4, 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if len(self._buffer) < start + length:
            return None
        body = bytes(self._buffer[start : start + length])
        del self._buffer[: start + length]
        return head, body

    def answer(self, head: bytes, body: bytes) -> None:
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


class CannedWorker(Canned):
    """A prefill or decode engine."""

    prefill = False

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):  # health checks and model lists of routers
            models = b'{"object":"list","data":[{"id":"bench","object":"model"}]}'
            self.write(_JSON % (len(models), models))
        elif head.startswith((b"POST /v1/completions/render ", b"POST /tokenize ")):
            rendered = _rendered(body, only_ids=b"/tokenize " in head)
            self.write(_JSON % (len(rendered), rendered))
        elif self.prefill:
            self.write(_JSON % (len(_PREFILL), _PREFILL))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self.write(_STREAM)
            self._next_chunk(0)
        else:
            self.write(_JSON % (len(_PLAIN), _PLAIN))

    def _next_chunk(self, i: int) -> None:
        if self.transport is None:
            return
        if i == NUM_CHUNKS - 1:
            self.transport.write(_DONE)
            return
        self.transport.write(_CHUNK)
        asyncio.get_running_loop().call_later(CHUNK_SECONDS, self._next_chunk, i + 1)


def _rendered(body: bytes, *, only_ids: bool) -> bytes:
    """As engines answer who wants a prompt's token ids, as the peer does: an id for each four
    bytes, which is about what a tokenizer gives, at no cost to speak of."""
    prompt = _decode(body)["prompt"].encode()
    ids = memoryview(prompt[: len(prompt) // 4 * 4]).cast("I").tolist()
    if only_ids:
        return _encode({"count": len(ids), "max_model_len": 131072, "tokens": ids})
    return _encode([{"request_id": "r", "token_ids": ids, "sampling_params": {}, "model": "bench"}])


class CannedPrefill(CannedWorker):
    """Answers leg 1."""

    prefill = True


class CannedControlPlane(Canned):
    """Gives the view, takes reports and forgets them."""

    view = Path()

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET") and b"after=" in head:
            asyncio.get_running_loop().call_later(POLL_SECONDS, self.write, _UNCHANGED)
            return
        text = self.view.read_bytes() if head.startswith(b"GET") else b"{}"
        self.write(_JSON % (len(text), text))


async def _serve(view: Path) -> None:
    loop = asyncio.get_running_loop()
    CannedControlPlane.view = view
    kinds: tuple[Callable[[], Canned], ...] = (CannedPrefill, CannedWorker, CannedControlPlane)
    ports = []
    for make in kinds:
        server = await loop.create_server(make, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    gc.freeze()  # what is left to look through is connections
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_serve(Path(sys.argv[1])))
