"""Engines that answer with whatever bytes a test gives them, and a gateway over them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
from serving import Serving

from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings, Timeouts

ANSWER = b'{"choices":[{"text":"ok","finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'
EVENT = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def whole(body: bytes, status: bytes = b"200 OK", lines: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%b" % (status, lines)
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


def chunked(*events: bytes, lines: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return b"%b%btransfer-encoding: chunked\r\n\r\n%b0\r\n%b\r\n" % (SSE, lines, chunks, trailer)


def until_close(body: bytes, kind: bytes = b"content-type: application/json\r\n") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bconnection: close\r\n\r\n%b" % (kind, body)


def cut(*events: bytes) -> bytes:
    """Chunks of a stream, and no end."""
    return chunked(*events).removesuffix(b"0\r\n\r\n")


def as_kind(kind: bytes, body: bytes) -> bytes:
    lines = b"content-type: %b\r\n" % kind if kind else b""
    return chunked(body).replace(b"content-type: text/event-stream\r\n", lines)


class RawEngine:
    """Answers every request with bytes that a test gives it; closes after them if it is to."""

    def __init__(self) -> None:
        self.answer = whole(ANSWER)
        self.closes = False
        self.requests = 0
        self.rest: asyncio.Event | None = None  # then `more` goes out behind the answer
        self.more = b""

    async def start(self) -> RawEngine:
        self._serving = Serving.streams(self._serve)
        await self._serving.start()
        self.url = self._serving.url
        return self

    async def stop(self) -> None:
        await self._serving.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].split() or [b"0"]  # none: a probe
                await reader.readexactly(int(length[0]))
                self.requests += 1
                writer.write(self.answer)
                await writer.drain()
                if self.rest is not None:
                    await self.rest.wait()
                    writer.write(self.more)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class Rig:
    """A gateway over a prefill engine that is sound and a decode engine that is odd."""

    def __init__(self, file: Path, *, second: bool = False) -> None:
        self.file = file
        self.prefill, self.decode = RawEngine(), RawEngine()
        self.second = RawEngine()  # a decode engine that is sound, if the gateway is to know it
        self.has_second = second

    async def start(self) -> None:
        await self.prefill.start()
        await self.decode.start()
        await self.second.start()
        rows = [("p1", "prefill", self.prefill), ("d1", "decode", self.decode)]
        if self.has_second:
            rows.append(("d2", "decode", self.second))
        self.file.write_text(
            "".join(
                f'[[worker]]\nid = "{name}"\nrole = "{role}"\nmodel = "m"\nurl = "{engine.url}"\n'
                for name, role, engine in rows
            )
        )
        timeouts = Timeouts(prefill=15, first_byte=15, whole_reply=15, idle=15, drain=1)
        self.gateway = Gateway(Settings(port=0, static_view=str(self.file), timeouts=timeouts))
        await self.gateway.start()
        self.client = httpx2.AsyncClient(base_url=self.gateway.url, timeout=20, verify=False)

    async def stop(self) -> None:
        await self.client.aclose()
        await self.gateway.stop(1.0)
        await self.prefill.stop()
        await self.decode.stop()
        await self.second.stop()
        assert self.gateway.stats.in_flight == 0
        assert not self.gateway.cluster.slots._holders
        assert not self.gateway._passing.busy

    async def post(self, path: str = "/v1/completions", **more: Any) -> httpx2.Response:
        body = {"model": "m", "prompt": "hi", "max_tokens": 5, **more}
        return await self.client.post(path, json=body)
