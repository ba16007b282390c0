"""What the gateway bench sends, and how it is timed: as fast as it goes, or at a fixed rate.

A request goes to each port of a target in turn: a proxy has one, the engines themselves have two.
"""

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final, cast

from controlplane.bench.pace import Pace
from controlplane.bench.tokenise import random_text
from workers.core.errors import PeriluneError

PROMPT_TAIL: Final = 100
"""Characters at a prompt's end that no other prompt has."""
NUM_HEADS: Final = 8
"""Beginnings that prompts of one size share."""
ANSWER_SECONDS: Final = 30.0
HELD_UP_SECONDS: Final = 0.001
"""A sender that is later than this has stood still: what it sends next moves with it."""
MODEL: Final = "bench"
_END: Final = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """Of requests: characters of the prompt, and whether the answer is streamed."""

    chars: int
    stream: bool

    @property
    def name(self) -> str:
        return "streamed" if self.stream else "plain"

    def heads(self) -> list[str]:
        chance = Random(self.chars)
        return [random_text(chance, self.chars - PROMPT_TAIL) for _ in range(NUM_HEADS)]


def prompts(kind: Kind, count: int, seed: int) -> Iterator[str]:
    """Each of `kind.chars` characters, with an end of its own."""
    chance, heads = Random(seed), kind.heads()
    for number in range(count):
        head = heads[number % NUM_HEADS][: kind.chars - PROMPT_TAIL]
        yield (head + " " + random_text(chance, PROMPT_TAIL + 10))[: kind.chars]


def body_of(kind: Kind, prompt: str) -> bytes:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "stream": kind.stream}
    return json.dumps(fields).encode()


@dataclass(slots=True)
class Timed:
    """Of one run: seconds to each answer's first body byte, in rising order, and of the whole; of
    these the sender itself stood still for `held_up_seconds`."""

    first_bytes: list[float]
    seconds: float
    held_up_seconds: float = 0.0

    def ms(self, share: float) -> float:
        """The quantile, in milliseconds."""
        last = len(self.first_bytes) - 1
        return self.first_bytes[min(last, int(share * len(self.first_bytes)))] * 1000


async def as_fast_as_it_goes(ports: Sequence[int], bodies: Sequence[bytes], clients: int) -> Timed:
    """`clients` connections, each with one request at a time."""
    left, begun = iter(bodies), time.perf_counter()

    async def client() -> list[float]:
        session = await _Session.open(ports)
        try:
            return [await session.ask(body) for body in left]
        finally:
            session.close()

    done = await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - begun
    return Timed(sorted(first for times in done for first in times), seconds)


async def at_rate(
    ports: Sequence[int], bodies: Sequence[bytes], per_second: float, seed: int
) -> Timed:
    """Each request in a slot of its own, somewhere within it, whatever became of those before.

    Where the sender stood still, for the machine had other work, all later slots move on: sent at
    once, what was due would wait for itself, and that would be taken for the target's latency.
    """
    chance, idle, begun = Random(seed), list[_Session](), time.perf_counter()
    idle += await asyncio.gather(*(_Session.open(ports) for _ in range(8)))

    async def one(body: bytes) -> float:
        session = idle.pop() if idle else await _Session.open(ports)
        first = await session.ask(body)
        idle.append(session)
        return first

    tasks, held_up = [], 0.0
    try:
        with Pace() as pace, _no_collections():
            async with asyncio.TaskGroup() as group:
                for number, body in enumerate(bodies):
                    due = begun + held_up + (number + chance.random()) / per_second
                    await pace.until(due)
                    late = time.perf_counter() - due
                    held_up += late if late > HELD_UP_SECONDS else 0.0
                    tasks.append(group.create_task(one(body)))
    finally:
        for session in idle:
            session.close()
    first_bytes = sorted(task.result() for task in tasks)
    return Timed(first_bytes, time.perf_counter() - begun, held_up)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Python's collector would look through the tasks of a run again and again, for milliseconds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Session:
    """Kept connections to each port."""

    def __init__(self, connections: list["_Connection"]) -> None:
        self._connections = connections

    @classmethod
    async def open(cls, ports: Sequence[int]) -> "_Session":
        loop, connections = asyncio.get_running_loop(), []
        for port in ports:
            make = partial(_Connection, port)
            _, connection = await loop.create_connection(make, "127.0.0.1", port)
            connections.append(connection)
        return cls(connections)

    async def ask(self, body: bytes) -> float:
        """Seconds to the first body byte of the last port's answer, read to its end."""
        begun = time.perf_counter()
        async with asyncio.timeout(ANSWER_SECONDS):
            for connection in self._connections:
                first_at = await connection.ask(body)
        return first_at - begun

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _Connection(asyncio.Protocol):
    """One request at a time. Reads no more of an answer than its head and its end."""

    def __init__(self, port: int) -> None:
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
            "content-type: application/json\r\ncontent-length: "
        ).encode()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[float] | None = None
        self._buffer = b""
        self._in_head = True
        self._left: int | None = None  # of a body with a length
        self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("the connection ended before the answer did")

    def ask(self, body: bytes) -> "asyncio.Future[float]":
        """When the first body byte had come; done when all have."""
        self._answer = asyncio.get_running_loop().create_future()
        self._buffer, self._in_head, self._first_at = b"", True, 0.0
        if self._transport is None:
            self._fail("the connection is closed")
        else:
            self._transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            data = self._take_head(self._buffer + data)
        if self._in_head or not data:
            return
        if not self._first_at:
            self._first_at = time.perf_counter()
        if self._left is not None:
            self._left -= len(data)
            is_done = self._left <= 0
        else:
            self._buffer = (self._buffer + data)[-len(_END) :]
            is_done = self._buffer == _END
        if is_done and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._first_at)

    def _take_head(self, data: bytes) -> bytes:
        """What has come of the body."""
        head, found, body = data.partition(b"\r\n\r\n")
        self._buffer = data
        if not found:
            return b""
        head = head.lower()
        if not head.startswith(b"http/1.1 200"):
            self._fail(f"the answer was {data[:300]!r}")
            return b""
        self._in_head, self._left, self._buffer = False, None, b""
        if b"content-length:" in head:
            self._left = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        return body

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PeriluneError(reason))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
