"""The client for event loops when the network resets its connection: in uvloop, as agents and
gateways run it, where writing to such a connection is no OSError."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

import uvloop
from serving import Serving

from workers.client import AsyncAgentClient, make_hello
from workers.core.messages import Snapshot
from workers.core.stats_messages import NamespaceSpec

WAIT = 30.0


class Path:
    """Carries connections to an agent and resets them all when told so."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._serving = Serving.streams(self._carry)
        return await self._serving.start()

    async def reset(self) -> None:
        """With an RST: as after a peer's host has restarted."""
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()
        await asyncio.sleep(0.2)  # the client's loop takes note of it

    async def close(self) -> None:
        await self.reset()
        await self._serving.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.get_running_loop().create_task(_pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        while data := await source.read(65536):
            sink.write(data)


def run(agent: Any, spec: NamespaceSpec, use: Callable[[AsyncAgentClient, Path], Any]) -> None:
    agent.worker("p1", spec)
    port = int(agent.log.split("tcp:127.0.0.1:")[1].split()[0])

    async def main() -> None:
        path = Path(port)
        address = f"tcp:127.0.0.1:{await path.open()}"
        client = AsyncAgentClient(address, make_hello("gateway", "g1"), WAIT)
        try:
            async with asyncio.timeout(WAIT):
                await use(client, path)
        finally:
            await client.close()
            await path.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_calls_go_on_over_a_new_connection(make_agent: Any, spec: NamespaceSpec) -> None:
    async def use(client: AsyncAgentClient, path: Path) -> None:
        assert (await client.stats()).node_id == "n1"
        for _ in range(2):
            await path.reset()
            assert (await client.stats()).node_id == "n1"

    run(make_agent("--tcp", "127.0.0.1:0").start(), spec, use)


def test_a_stream_that_is_reset_begins_anew(make_agent: Any, spec: NamespaceSpec) -> None:
    async def use(client: AsyncAgentClient, path: Path) -> None:
        num_snapshots = 0
        async for message in client.subscribe():
            if isinstance(message, Snapshot) and message.first:
                num_snapshots += 1
                await path.reset()
                client.resync()  # asked on a connection that is gone
            if num_snapshots == 3:
                return

    run(make_agent("--tcp", "127.0.0.1:0").start(), spec, use)
