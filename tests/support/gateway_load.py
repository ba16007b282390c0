"""One gateway process over paced engines, with a control plane that only counts what it is sent."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import paced_engine
import psutil
from paced_engine import Plan
from pool_churn import BLOCK_TOKENS, NAMESPACE

from controlplane.bench.processes import free_port, wait_port
from workers.engines.emulated.http import Exchange, Server

TOKEN = "operator"
START_SECONDS = 60.0
_SENT_AT = b'"text":" '


class _Told(msgspec.Struct):
    request_id: str
    status: str


class _Report(msgspec.Struct):
    decisions: list[_Told] = []


class Sink:
    """Serves one view, takes reports and counts how requests ended."""

    def __init__(self, view: dict[str, Any]) -> None:
        self._view = view
        self._server = Server(self._handle)
        self._reports = msgspec.json.Decoder(_Report)
        self.statuses: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        await self._server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        await self._server.stop()

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path.startswith("/api/v1/view"):
            if "after=" in exchange.query:
                await asyncio.sleep(20)
            exchange.send(200, self._view)
            return
        for told in self._reports.decode(bytes(exchange.body)).decisions:
            self.statuses[told.status] += 1
        exchange.send(200, {})


@dataclass
class LoadedGateway:
    """The process and where it listens."""

    port: int
    process: psutil.Process
    sink: Sink
    engine_ports: list[int]

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def waited_seconds(self) -> float:
        """For which it could have run, but others did (Linux's run-queue delay)."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9

    async def get(self, path: str) -> bytes:
        """With the operator's token."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode())
        async with asyncio.timeout(START_SECONDS):
            reply = await reader.read(-1)
        writer.close()
        return reply.partition(b"\r\n\r\n")[2]

    async def gauges(self, *names: str) -> dict[str, float]:
        """Those of these series that are not zero."""
        found = {}
        for line in (await self.get("/metrics")).decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(tuple(f"perilune_gateway_{n}" for n in names)) and float(value):
                found[name] = float(value)
        return found

    async def held(self) -> dict[str, Any]:
        """Requests, slots and queue places that it still counts."""
        listing = json.loads(await self.get("/debug/requests"))
        gauges = await self.gauges("in_flight", "requests_by_state", "worker_running",
                                   "worker_waiting", "worker_queued_tokens")  # fmt: skip
        return gauges | ({"requests": listing["requests"]} if listing["requests"] else {})

    async def nothing_held(self) -> None:
        """Waits for it, within a bound."""
        deadline = time.monotonic() + START_SECONDS
        while held := await self.held():
            assert time.monotonic() < deadline, held
            await asyncio.sleep(0.1)


@asynccontextmanager
async def loaded_gateway(
    folder: Path, plan: Plan, model: Path, log: Path, **more: Any
) -> AsyncIterator[LoadedGateway]:
    """Half of the workers prefill, half decode. `more` goes into the view."""
    command = [sys.executable, str(paced_engine.FILE), msgspec.json.encode(plan).decode()]
    engines = subprocess.Popen(command, stdout=subprocess.PIPE)
    gateway: subprocess.Popen[bytes] | None = None
    sink: Sink | None = None
    try:
        assert engines.stdout is not None
        ports = json.loads(engines.stdout.readline())
        sink = Sink(_view(ports, model) | more)
        await sink.start()
        port = free_port()
        gateway = _start_gateway(folder, port, sink.url, log)
        await asyncio.to_thread(wait_port, port, gateway, START_SECONDS)
        made = LoadedGateway(port, psutil.Process(gateway.pid), sink, ports)
        async with asyncio.timeout(START_SECONDS):
            while b'"status":"ok"' not in await made.get("/health"):
                await asyncio.sleep(0.05)
        yield made
    finally:
        for process in (gateway, engines):
            if process is not None:
                await asyncio.to_thread(_end, process)
        if sink is not None:
            await sink.stop()


def _start_gateway(folder: Path, port: int, url: str, log: Path) -> subprocess.Popen[bytes]:
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    command = [
        sys.executable, "-m", "controlplane.gateway", "--port", str(port), "--control-plane", url,
        "--token-file", str(token_file), "--drain", "1", "--log-level", "warning",
    ]  # fmt: skip
    with log.open("wb") as errors:
        return subprocess.Popen(command, stderr=errors)


def _view(ports: list[int], model: Path) -> dict[str, Any]:
    workers = [
        {"id": f"w{number}", "node_id": "n1", "model": "m", "state": "ready",
         "role": "prefill" if number <= len(ports) // 2 else "decode",
         "url": f"http://127.0.0.1:{port}", "max_concurrent_requests": 4096,
         "namespace": NAMESPACE.hex(), "block_tokens": BLOCK_TOKENS}
        for number, port in enumerate(ports, 1)
    ]  # fmt: skip
    return {
        "revision": 1, "boot_id": "load", "cluster": "load", "nodes": [], "workers": workers,
        "models": [{"id": "m", "path": str(model), "max_model_len": 100_000}],
        "policies": [policy("scheduling", max_concurrent_per_decode=4096)], "client_keys": [],
    }  # fmt: skip


def policy(kind: str, **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "scope": "default", "revision": 1, "spec": spec}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(15)
    if process.stdout is not None:
        process.stdout.close()


def request_bytes(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Streams:
    """What the clients of many streams saw. Delays in seconds, from the engine to the client."""

    delays: array[float] = field(default_factory=lambda: array("d"))
    broken: list[str] = field(default_factory=list)
    done: int = 0


class StreamClient(asyncio.Protocol):
    """Asks for one stream and reads it to its end, which sets `ended`."""

    def __init__(self, streams: Streams, request: bytes, num_chunks: int) -> None:
        loop = asyncio.get_running_loop()
        self._clock = time.monotonic  # the engine reads the same clock
        self._streams, self._request, self._left = streams, request, num_chunks
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        text = self._tail + data
        end = 0
        while (place := text.find(_SENT_AT, end)) >= 0:
            close = text.find(b'"', place + len(_SENT_AT))
            if close < 0:
                break
            self._streams.delays.append(now - float(text[place + len(_SENT_AT) : close]))
            self._left -= 1
            end = close
        self._tail = text[end:][-4096:]
        if self._tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            self._streams.done += 1
            self._end("" if self._left == 0 else f"{self._left} pieces are missing")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._end(f"broke off ({exc}) after {self._tail[-300:]!r}")

    def _end(self, problem: str) -> None:
        if problem:
            self._streams.broken.append(problem)
        if not self.ended.done():
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.close()
