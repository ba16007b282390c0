"""A server that ends while somebody connects."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket

import pytest

from workers.engines.emulated.http import Exchange, Server


async def nothing(exchange: Exchange) -> None:
    exchange.send(200, {})


@pytest.mark.parametrize("turns", range(5))
async def test_who_connects_while_a_server_stops_is_cut_off(turns: int) -> None:
    server = Server(nothing)
    await server.start("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.stop()
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()  # says so where a connection was forgotten
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(client.recv, 1) == b""
    assert server.num_connections == 0
