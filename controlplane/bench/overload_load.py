"""The requests of the overload bench: an open loop of streams, each judged as its client saw it."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from time import perf_counter

from workers.core.errors import PeriluneError

MODEL = "bench"
Shares = tuple[tuple[str, float], ...]
CLASSES: Shares = (("interactive", 0.2), ("standard", 0.6), ("batch", 0.2))
TENANTS: Shares = (("acme", 0.7), ("beta", 0.3))
MIN_TOKENS, MAX_TOKENS = 16, 1024
MAX_VOCABULARY = 1000
REQUEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the load. `mean_tokens` of a prompt; its length is lognormal, cut at both ends."""

    mean_tokens: float = 250.0
    sigma: float = 0.6
    output_tokens: int = 8
    classes: Shares = (("standard", 1.0),)
    tenants: Shares = (("acme", 1.0),)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come, seconds after the start."""

    at: float
    num_tokens: int
    priority: str
    tenant: str
    seed: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What its client saw. `status` 0: no answer, or one that broke off."""

    priority: str
    tenant: str
    status: int
    ttft_seconds: float | None = None
    tbt_p95_seconds: float | None = None


@dataclass(slots=True)
class Tally:
    """Of one run."""

    requests: int = 0
    within_slo: int = 0
    late: int = 0
    rejected: int = 0
    failed: int = 0
    ttft: list[float] = field(default_factory=list)

    def add(self, seen: Seen, max_ttft: float, max_tbt: float) -> None:
        self.requests += 1
        if seen.status == 429:
            self.rejected += 1
        elif seen.status != 200 or seen.ttft_seconds is None:
            self.failed += 1
        else:
            self.ttft.append(seen.ttft_seconds)
            met = seen.ttft_seconds <= max_ttft and (seen.tbt_p95_seconds or 0.0) <= max_tbt
            self.within_slo += met
            self.late += not met


def key_of(tenant: str) -> str:
    """A client key of the bench's own."""
    return f"bench-{tenant}"


def key_digest(tenant: str) -> str:
    return hashlib.sha256(key_of(tenant).encode()).hexdigest()


def lengths(shape: Shape, rng: Random, count: int) -> list[int]:
    """Prompt lengths whose mean is about `mean_tokens`."""
    raw = [rng.lognormvariate(0.0, shape.sigma) for _ in range(count)]
    scale = shape.mean_tokens * count / sum(raw) if raw else 0.0
    return [int(min(MAX_TOKENS, max(MIN_TOKENS, value * scale))) for value in raw]


def arrivals(shape: Shape, per_second: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson; the same for the same seed."""
    rng = Random(seed)
    times, at = [], rng.expovariate(per_second)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(per_second)
    sizes = lengths(shape, rng, len(times))
    return [
        Arrival(
            at, size, _drawn(rng, shape.classes), _drawn(rng, shape.tenants), rng.randrange(2**31)
        )
        for at, size in zip(times, sizes, strict=True)
    ]


async def play(port: int, load: list[Arrival], shape: Shape) -> list[Seen]:
    """All of them at their times, whatever became of those before."""
    start = asyncio.get_running_loop().time()

    async def one(arrival: Arrival) -> Seen:
        await asyncio.sleep(max(0.0, start + arrival.at - asyncio.get_running_loop().time()))
        return await send(port, arrival, shape)

    return list(await asyncio.gather(*(one(arrival) for arrival in load)))


async def send(port: int, arrival: Arrival, shape: Shape) -> Seen:
    """One stream, bounded in time."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            return await _stream(port, arrival, shape)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, PeriluneError):
        return Seen(arrival.priority, arrival.tenant, 0)


async def _stream(port: int, arrival: Arrival, shape: Shape) -> Seen:
    request = _request(arrival, shape)
    started = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        status = int((await reader.readline()).split(b" ")[1])
        if status != 200:
            return Seen(arrival.priority, arrival.tenant, status)
        times = [perf_counter() async for _ in _events(reader)]
    finally:
        writer.close()
    if not times:
        return Seen(arrival.priority, arrival.tenant, 0)
    gaps = sorted(b - a for a, b in pairwise(times))
    tbt = gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))] if gaps else None
    return Seen(arrival.priority, arrival.tenant, 200, times[0] - started, tbt)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each `data:` line up to [DONE], which must come."""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield line
    raise PeriluneError("a stream broke off")


def _request(arrival: Arrival, shape: Shape) -> bytes:
    rng = Random(arrival.seed)
    prompt = [rng.randrange(MAX_VOCABULARY) for _ in range(arrival.num_tokens)]
    body = {
        "model": MODEL, "prompt": prompt, "stream": True, "max_tokens": shape.output_tokens,
        "ignore_eos": True,
    }  # fmt: skip
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key_of(arrival.tenant)}\r\nconnection: close\r\n"
        f"x-perilune-priority: {arrival.priority}\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def _drawn(rng: Random, shares: Shares) -> str:
    draw = rng.random()
    for name, share in shares:
        draw -= share
        if draw < 0:
            return name
    return shares[-1][0]
