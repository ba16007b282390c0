"""What an agent is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from workers.core.errors import ConfigError
from workers.core.hosts import is_anywhere
from workers.directory.address import parse_directory
from workers.transfer_tls import TlsFiles

TRANSPORTS: Final = ("shm", "tcp", "rdma")
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Made once, by `parse_arguments` or a test; passed down. ConfigError on what cannot work."""

    node_id: str
    socket: Path
    slab_name: str
    slab_bytes: int
    block_tokens: int
    tcp_host: str = ""  # "" = no TCP
    tcp_port: int = 0
    control_plane: str = ""  # "" = none
    token_file: Path | None = None
    lease_seconds: float = 30.0
    write_queue_blocks: int = 500
    touch_bytes_per_second: float = 1 << 30
    heartbeat_seconds: float = 1.0
    check_when_idle: bool = False
    check_every_seconds: float = 0.0  # busy or not; 0 = never
    directory: str = ""  # etcd://host:port,... ; "" = none
    cluster: str = "perilune"  # its name there
    ssd_path: Path | None = None  # a folder on the device; None = no SSD tier
    tls: TlsFiles | None = None  # for TCP between nodes; None: plain
    secret: bytes | None = field(default=None, repr=False)  # the cluster's; None: no transfers
    transports: tuple[str, ...] = ("shm", "tcp")
    ssd_bytes: int = 0  # 0 = a tenth of what is free there

    def __post_init__(self) -> None:
        _require_positive("block_tokens", self.block_tokens)
        _require_positive("slab_bytes", self.slab_bytes)
        _require_positive("lease_seconds", self.lease_seconds)
        _require_positive("heartbeat_seconds", self.heartbeat_seconds)
        _require_positive("write_queue_blocks", self.write_queue_blocks)
        if self.ssd_bytes < 0:
            raise ConfigError(
                "ssd_bytes", self.ssd_bytes, "is negative", "Give bytes, or 0 for a safe default."
            )
        if self.directory:
            parse_directory(self.directory)
        if not self.node_id:
            raise ConfigError("node_id", self.node_id, "is empty", "Name the node, e.g. n1.")

    @property
    def demands_rdma(self) -> bool:
        """RDMA is the only way to other hosts that was asked for: nothing takes its place."""
        return "rdma" in self.transports and "tcp" not in self.transports

    @property
    def peer_endpoint(self) -> str:
        """Where agents of other nodes find this one."""
        return f"tcp:{self.tcp_host}:{self.tcp_port}" if self.tcp_host and self.tcp_port else ""

    @property
    def endpoint(self) -> str:
        """Where processes of this host find the agent."""
        return f"unix:{self.socket.absolute()}"

    @property
    def events_endpoint(self) -> str:
        """Where the control plane and gateways are sent: to the socket, unless the agent listens for
        other hosts, where there is no such socket."""
        local = not self.peer_endpoint or is_loopback(self.tcp_host)
        return self.endpoint if local else self.peer_endpoint


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


def parse_tcp(address: str) -> tuple[str, int]:
    """`host:port`; "" means none. ConfigError."""
    if not address:
        return "", 0
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError("tcp", address, "is no host:port", "Say, for instance, 127.0.0.1:7710.")
    if is_anywhere(host):
        raise ConfigError(
            "tcp",
            address,
            "means all addresses, and other nodes are told where to connect to",
            f"Give the one by which they reach this node, for instance 10.0.0.7:{port}.",
        )
    return host, int(port)


def parse_transports(text: str) -> tuple[str, ...]:
    """Names, separated by commas; "auto" is all of them. ConfigError."""
    if text.strip() == AUTO:
        return TRANSPORTS
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in TRANSPORTS:
            raise ConfigError(
                "transports",
                name,
                "is not known here",
                f"Take of: {', '.join(TRANSPORTS)}; or {AUTO}.",
            )
    return names


def _require_positive(field: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(field, value, "must be greater than 0", "Give a positive number.")
