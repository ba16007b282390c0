"""Writes that go out before the callback that made them has returned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

import pytest
import uvloop

from controlplane.gateway.direct import writer_of

BIG = os.urandom(1 << 20)


class Seen(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self.paused = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    def pause_writing(self) -> None:
        self.paused += 1


async def connected() -> tuple[asyncio.Transport, Seen, socket.socket]:
    """A transport, its protocol, and the other end, which does not block."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, protocol = await asyncio.get_running_loop().create_connection(Seen, sock=ours)
    return transport, protocol, theirs


async def read_all(theirs: socket.socket, size: int) -> bytes:
    found = b""
    async with asyncio.timeout(20):
        while len(found) < size:
            found += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
    return found


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Any:
    return uvloop.run if request.param == "uvloop" else asyncio.run


def test_the_other_end_has_it_before_the_loop_turns(run: Any) -> None:
    async def scene() -> None:
        transport, _, theirs = await connected()
        writer_of(transport)(b"now")
        assert theirs.recv(10) == b"now"
        transport.close()
        theirs.close()

    run(scene())


def test_what_the_system_does_not_take_follows_in_order(run: Any) -> None:
    async def scene() -> None:
        transport, protocol, theirs = await connected()
        write = writer_of(transport)
        for piece in (b"first", BIG, b"then", BIG, b"last"):
            write(piece)
        expected = b"first" + BIG + b"then" + BIG + b"last"
        assert protocol.paused == 1, "no backpressure"
        assert await read_all(theirs, len(expected)) == expected
        write(b"again at once")
        assert theirs.recv(100) == b"again at once"
        transport.close()
        theirs.close()

    run(scene())


def test_it_stays_behind_what_the_transport_has_queued(run: Any) -> None:
    async def scene() -> None:
        transport, _, theirs = await connected()
        transport.write(b"a" * 10)
        writer_of(transport)(b"b" * 10)
        assert await read_all(theirs, 20) == b"a" * 10 + b"b" * 10
        transport.close()
        theirs.close()

    run(scene())


def test_the_transport_learns_that_the_other_end_has_left(run: Any) -> None:
    async def scene() -> None:
        transport, protocol, theirs = await connected()
        write = writer_of(transport)
        theirs.close()
        for _ in range(3):
            write(b"to nobody")
        async with asyncio.timeout(20):
            await protocol.lost
        with pytest.MonkeyPatch.context() as patch:  # its number may be another's by now
            patch.setattr(os, "write", lambda *_: pytest.fail("written to a closed socket"))
            with contextlib.suppress(RuntimeError):  # as the transport's own write does
                write(b"late")

    run(scene())
