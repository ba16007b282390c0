"""Runs a node: sockets, lease clock, heartbeat, slab. Everything it starts, it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket as sockets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from workers.agent.connection import Connections
from workers.agent.heartbeat import Heartbeat
from workers.agent.node import Node
from workers.agent.settings import AgentSettings
from workers.agent.storage import FileStorage
from workers.agent.tls_listener import TlsListener
from workers.agent.transfers import require_secret
from workers.core.clock import Clock
from workers.core.errors import ConfigError
from workers.core.pool_integrity import check_integrity
from workers.pool.arena import SlabFile
from workers.pool.ssd import SsdSettings
from workers.process import private_rss_bytes
from workers.transfer_tls import TlsFiles, plain_refused, server_context

if TYPE_CHECKING:
    from workers.directory.publisher import DirectoryPublisher

LEASE_TICK_SECONDS: Final = 0.25
IDLE_TICK_SECONDS: Final = 1.0

_log = logging.getLogger(__name__)


async def serve(settings: AgentSettings, clock: Clock, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. ConfigError: a port, socket or slab that cannot be had."""
    require_secret(settings)
    slab = SlabFile(settings.slab_name, settings.slab_bytes)
    try:
        async with contextlib.AsyncExitStack() as stack:
            storage = FileStorage(slab, _ssd_settings(settings), _call_soon())
            stack.callback(storage.close)
            node = Node(settings, str(slab.path), clock, private_rss_bytes, storage)
            stack.push_async_callback(node.close)
            storage.listener = node
            node.adopt_left()
            connections = Connections(node)
            stack.callback(connections.close_all)
            for server in await _listen(settings, connections):
                stack.callback(server.close)
            stack.callback(settings.socket.unlink, missing_ok=True)
            slab.start_touching(settings.touch_bytes_per_second)
            await _run_loops(node, slab, stop)
        await asyncio.sleep(0)  # connections learn that they are lost while the loop still runs
    finally:
        slab.close()
        _log.info("agent_stopped node=%s", settings.node_id)


def _ssd_settings(settings: AgentSettings) -> SsdSettings | None:
    if settings.ssd_path is None:
        return None
    return SsdSettings(settings.ssd_path, settings.slab_name, settings.ssd_bytes)


def _call_soon() -> Callable[[Callable[[], None]], None]:
    """Calls from other threads; dropped once the loop is closed."""
    loop = asyncio.get_running_loop()

    def call_soon(call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call)

    return call_soon


async def _run_loops(node: Node, slab: SlabFile, stop: asyncio.Event) -> None:
    loops = [_expire_leases(node), _watch_when_idle(node, slab)]
    if node.settings.check_every_seconds > 0:
        loops.append(_check_anyway(node))
    if node.settings.control_plane:
        loops.append(Heartbeat(node).run())
    if node.settings.directory:
        loops.append(_publisher(node).run())
    tasks = [asyncio.create_task(loop) for loop in loops]
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a loop that ends is a fault of ours: let it be seen
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)


def _publisher(node: Node) -> DirectoryPublisher:
    from workers.agent.directory import make_publisher  # noqa: PLC0415 - only where there is one

    return make_publisher(node)


async def _expire_leases(node: Node) -> None:
    while True:
        await asyncio.sleep(LEASE_TICK_SECONDS)
        num_expired = node.expire()
        if num_expired:
            _log.warning("leases_expired owners=%d", num_expired)


async def _watch_when_idle(node: Node, slab: SlabFile) -> None:
    """Look for faults while nothing else is to be done."""
    seen, told = -1, False
    while True:
        await asyncio.sleep(IDLE_TICK_SECONDS)
        if slab.touch_error and not told:
            told = True
            _log.error("slab_not_allocated path=%s error=%s", slab.path, slab.touch_error)
            node.shrink_slab(slab.touched_bytes)
        idle = node.num_requests == seen
        seen = node.num_requests
        if idle and node.settings.check_when_idle and node.pool is not None:
            check_integrity(node.pool)


async def _check_anyway(node: Node) -> None:
    """For long runs under load: a fault ends the agent."""
    while True:
        await asyncio.sleep(node.settings.check_every_seconds)
        if node.pool is not None:
            check_integrity(node.pool)


async def _listen(
    settings: AgentSettings, connections: Connections
) -> list[asyncio.Server | TlsListener]:
    loop = asyncio.get_running_loop()
    path = settings.socket
    _remove_stale_socket(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0o177)
    try:
        servers: list[asyncio.Server | TlsListener] = [
            await loop.create_unix_server(connections.make, str(path))
        ]
    except OSError as error:
        raise ConfigError(
            "socket", str(path), str(error), "Choose a shorter or other path."
        ) from None
    finally:
        os.umask(mask)
    endpoints = [settings.endpoint]
    if settings.tcp_host and settings.tls is not None:
        listener = _listen_under_tls(settings, settings.tls, connections)
        servers.append(listener)
        endpoints.append("tcp+tls:{}:{}".format(*listener.address))
    elif settings.tcp_host:
        try:
            server = await loop.create_server(
                connections.make_tcp, settings.tcp_host, settings.tcp_port
            )
        except OSError as error:
            servers[0].close()
            address = f"{settings.tcp_host}:{settings.tcp_port}"
            raise ConfigError("tcp", address, str(error), "Choose a free port.") from None
        servers.append(server)
        host, port = server.sockets[0].getsockname()[:2]
        endpoints.append(f"tcp:{host}:{port}")
    _log.info("agent_ready node=%s endpoints=%s", settings.node_id, ",".join(endpoints))
    return servers


def _listen_under_tls(
    settings: AgentSettings, tls: TlsFiles, connections: Connections
) -> TlsListener:
    refusal = plain_refused(settings.node_id, tls)
    listener = TlsListener(connections.make_tcp, server_context(tls), refusal)
    try:
        listener.start(settings.tcp_host, settings.tcp_port)
    except OSError as error:
        address = f"{settings.tcp_host}:{settings.tcp_port}"
        raise ConfigError("tcp", address, str(error), "Choose a free port.") from None
    return listener


def _remove_stale_socket(settings: AgentSettings) -> None:
    """ConfigError where another process answers on it."""
    path = str(settings.socket)
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            settings.socket.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError("socket", path, str(error), "Choose another path.") from None
    raise ConfigError("socket", path, "another process listens on it", "Stop it first.")
