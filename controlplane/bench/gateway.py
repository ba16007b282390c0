"""`perilune bench gateway`: CPU a request and latency of the gateway, beside a peer's.

Upstream workers answer at once, so that what is measured is the proxy. Tokenisation is timed
apart: the gateway under test has no tokenizer. One connection a client, kept alive.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from controlplane.bench.processes import free_port, wait_port
from controlplane.bench.tokenise import tokenise_figures
from workers.core.errors import PeriluneError

ROOT = Path(__file__).resolve().parents[2]
PEER_PROGRAM = ROOT / ".venv-peers" / "bin" / "vllm-router"
START_SECONDS = 30.0
PROMPT = "the quick brown fox jumps over the lazy dog " * 30


class NoPeerError(PeriluneError):
    """Asked to compare with a peer that is not installed."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `requests` measured ones over `clients` connections, after `warm_up`."""

    requests: int = 2000
    clients: int = 8
    warm_up: int = 200


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one proxy and one kind of request."""

    cpu_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def run_gateway_bench(
    *, peer: str | None, load: Load, model_path: str | None, rounds: int = 3
) -> dict[str, Any]:
    """`peer` "vllm-router", or None. The rounds of both alternate; medians are given."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-bench-")))
        prefill, decode = stack.enter_context(_upstream())
        ours = stack.enter_context(_gateway(folder, prefill, decode))
        theirs = stack.enter_context(_peer(prefill, decode)) if peer else None
        result: dict[str, Any] = {"peer": peer, "requests": load.requests, "rounds": rounds}
        for kind, stream in (("streamed", True), ("plain", False)):
            result[kind] = _compare(ours, theirs, load, rounds, stream=stream)
        result["gateway_rss_bytes"] = ours.process.memory_info().rss
    figures = tokenise_figures(model_path) if model_path else None
    result["tokenise_ms"] = None if figures is None else figures["2000"]["fresh_ms"]
    result["tokenise"] = figures
    return result


# --- measuring ---


@dataclass(slots=True)
class _Proxy:
    port: int
    process: psutil.Process

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def _compare(
    ours: _Proxy, theirs: _Proxy | None, load: Load, rounds: int, *, stream: bool
) -> dict[str, Any]:
    runs: dict[str, list[Measured]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        runs["ours"].append(uvloop.run(_measure(ours, load, stream=stream)))
        if theirs is not None:
            runs["theirs"].append(uvloop.run(_measure(theirs, load, stream=stream)))
    mine = _median(runs["ours"])
    peer = _median(runs["theirs"]) if theirs is not None else None
    return {
        "cpu_ms": mine.cpu_ms,
        "ttft_p50_ms": mine.ttft_p50_ms,
        "ttft_p99_ms": mine.ttft_p99_ms,
        "peer_cpu_ms": None if peer is None else peer.cpu_ms,
        "cpu_over_peer": None if peer is None else mine.cpu_ms / peer.cpu_ms,
        "ttft_p50_over_peer": None if peer is None else mine.ttft_p50_ms / peer.ttft_p50_ms,
        "ttft_p99_over_peer": None if peer is None else mine.ttft_p99_ms / peer.ttft_p99_ms,
    }


def _median(runs: list[Measured]) -> Measured:
    return Measured(
        statistics.median(run.cpu_ms for run in runs),
        statistics.median(run.ttft_p50_ms for run in runs),
        statistics.median(run.ttft_p99_ms for run in runs),
    )


async def _measure(proxy: _Proxy, load: Load, *, stream: bool) -> Measured:
    body = {"model": "bench", "prompt": PROMPT, "max_tokens": 32, "stream": stream}
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{proxy.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    request = head.encode() + payload
    await _send_all(proxy.port, request, load.warm_up, load.clients)
    before = proxy.cpu_seconds()
    times = sorted(await _send_all(proxy.port, request, load.requests, load.clients))
    cpu = proxy.cpu_seconds() - before
    return Measured(
        cpu / len(times) * 1000,
        times[len(times) // 2] * 1000,
        times[int(len(times) * 0.99)] * 1000,
    )


async def _send_all(port: int, request: bytes, requests: int, clients: int) -> list[float]:
    """Seconds to the first body byte of each request."""
    share = max(1, requests // clients)
    done = await asyncio.gather(*(_client(port, request, share) for _ in range(clients)))
    return [seconds for times in done for seconds in times]


async def _client(port: int, request: bytes, count: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    try:
        for _ in range(count):
            start = time.perf_counter()
            writer.write(request)
            async with asyncio.timeout(START_SECONDS):
                times.append(await _read_answer(reader) - start)
    finally:
        writer.close()
    return times


async def _read_answer(reader: asyncio.StreamReader) -> float:
    """Reads one answer; when its first body byte was there."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise PeriluneError(f"the proxy answered {head[:200]!r}")
    if b"content-length:" in head:
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        return time.perf_counter()
    line = await reader.readuntil(b"\r\n")
    first_at = time.perf_counter()
    while line != b"0\r\n":
        await reader.readexactly(int(line, 16) + 2)
        line = await reader.readuntil(b"\r\n")
    await reader.readuntil(b"\r\n")
    return first_at


# --- processes ---


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _upstream() -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "controlplane.bench.upstream"]
    with _process(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise PeriluneError("the bench's workers did not start")
        prefill, decode = json.loads(line)
        yield prefill, decode


@contextmanager
def _gateway(folder: Path, prefill: int, decode: int) -> Iterator[_Proxy]:
    workers = [
        {"id": name, "node_id": "n1", "role": role, "model": "bench", "state": "ready",
         "url": f"http://127.0.0.1:{port}", "max_concurrent_requests": 256}
        for name, role, port in (("p1", "prefill", prefill), ("d1", "decode", decode))
    ]  # fmt: skip
    view = folder / "view.json"
    spec = {"max_concurrent_per_decode": 256}
    policy = {"kind": "scheduling", "scope": "default", "revision": 1, "spec": spec}
    view.write_text(json.dumps({"workers": workers, "policies": [policy]}))
    port = free_port()
    command = [sys.executable, "-m", "controlplane.gateway", "--port", str(port),
               "--static", str(view), "--log-level", "warning"]  # fmt: skip
    with _process(command) as process:
        wait_port(port, process, START_SECONDS)
        yield _Proxy(port, psutil.Process(process.pid))


@contextmanager
def _peer(prefill: int, decode: int) -> Iterator[_Proxy]:
    if not PEER_PROGRAM.exists():
        raise NoPeerError(f"vllm-router is not installed ({PEER_PROGRAM}); run `make peers`")
    port = free_port()
    command = [
        str(PEER_PROGRAM), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
        "--vllm-pd-disaggregation", "--prefill", f"http://127.0.0.1:{prefill}",
        "--decode", f"http://127.0.0.1:{decode}", "--log-level", "warning",
        "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    with _process(command, stdout=subprocess.DEVNULL) as process:
        wait_port(port, process, START_SECONDS)
        yield _Proxy(port, psutil.Process(process.pid))
