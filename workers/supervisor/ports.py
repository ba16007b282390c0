"""Ports: chosen, checked to be free, and named with whoever holds them."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.core.errors import ConfigError
from workers.supervisor.procfs import command_line, listener_of

if TYPE_CHECKING:
    from workers.supervisor.settings import Settings


@dataclass(frozen=True, slots=True)
class Ports:
    """One port a listener."""

    control_plane: int
    gateway: int
    agents: tuple[int, ...]  # one a node
    workers: tuple[int, ...]


def choose_ports(settings: Settings) -> Ports:
    """Take the configured ports, or free ones for 0. Raises ConfigError for one in use."""
    num_workers = settings.prefill.count + settings.decode.count
    base, agent = settings.port_workers, settings.port_agent
    wanted = [
        ("--port-control-plane", settings.port_control_plane),
        ("--port-gateway", settings.port_gateway),
        *(("--port-agent", agent and agent + index) for index in range(settings.nodes)),
        *(("--port-workers", base and base + index) for index in range(num_workers)),
    ]
    _refuse_doubles([(option, port) for option, port in wanted if port])
    held: list[socket.socket] = []  # held until all are chosen, so that no two are the same
    try:
        chosen = [_take(option, port, settings.host, held) for option, port in wanted]
    finally:
        for each in held:
            each.close()
    control_plane, gateway, *rest = chosen
    agents, workers = rest[: settings.nodes], rest[settings.nodes :]
    return Ports(control_plane, gateway, tuple(agents), tuple(workers))


def _refuse_doubles(wanted: list[tuple[str, int]]) -> None:
    seen: dict[int, str] = {}
    for option, port in wanted:
        if port in seen:
            raise ConfigError(option, port, f"is also {seen[port]}", "Choose different ports.")
        seen[port] = option


def _take(option: str, port: int, host: str, held: list[socket.socket]) -> int:
    probe = socket.socket()
    held.append(probe)
    # As servers do: a port whose last connections still linger is free.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
        probe.listen(1)
    except socket.gaierror as error:
        raise _wrong_host(host, error) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise _wrong_host(host, error) from error
        raise ConfigError(option, port, _why(error, port), _way_out(option)) from error
    chosen: int = probe.getsockname()[1]
    return chosen


def _why(error: OSError, port: int) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"cannot be listened on ({error.strerror})"
    pid = listener_of(port)
    if pid is None:
        return "is in use by a process that this user may not see"
    return f"is in use by process {pid} ({command_line(pid)})"


def _wrong_host(host: str, error: OSError) -> ConfigError:
    return ConfigError(
        "[cluster] scheduler_endpoint",
        host,
        f"is no address of this machine ({error.strerror})",
        'Write "127.0.0.1:8000", or an address that this machine has.',
    )


def _way_out(option: str) -> str:
    return f"End that process, or choose another port with {option}."
