"""A directory by its address: `etcd://HOST:PORT,HOST:PORT?ca=FILE&cert=FILE&key=FILE`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from workers.core.clock import Clock
from workers.core.errors import ConfigError

if TYPE_CHECKING:
    from workers.directory.base import Directory

SCHEME: Final = "etcd://"
_OPTIONS: Final = ("ca", "cert", "key")
_ENDPOINT: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
_WAY_OUT: Final = "Write etcd://HOST:PORT,HOST:PORT, with ?ca=FILE&cert=FILE&key=FILE for TLS."


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """What an address says. TLS where a file is named."""

    endpoints: tuple[str, ...]
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def uses_tls(self) -> bool:
        return (self.ca, self.certificate, self.key) != (None, None, None)


def parse_directory(text: str) -> EtcdAddress:
    """ConfigError on what is no such address; looks at no file and opens no connection."""
    if not text.startswith(SCHEME):
        raise ConfigError("directory", text, "is no address of a directory", _WAY_OUT)
    hosts, _, query = text.removeprefix(SCHEME).partition("?")
    endpoints = tuple(hosts.rstrip("/").split(","))
    for endpoint in endpoints:
        if not _ENDPOINT.fullmatch(endpoint) or int(endpoint.rpartition(":")[2]) > 65_535:
            raise ConfigError("directory", text, f"{endpoint!r} is no HOST:PORT", _WAY_OUT)
    given = dict(parse_qsl(query, keep_blank_values=True))
    for name in given:
        if name not in _OPTIONS:
            raise ConfigError("directory", text, f"{name!r} is no option", _WAY_OUT)
    if ("cert" in given) != ("key" in given):
        raise ConfigError("directory", text, "cert and key belong together", _WAY_OUT)
    files = {name: Path(path) for name, path in given.items()}
    return EtcdAddress(endpoints, files.get("ca"), files.get("cert"), files.get("key"))


def open_directory(text: str, cluster: str, clock: Clock) -> Directory:
    """A client of it; call it inside the event loop. ConfigError. Needs grpcio and protobuf."""
    from workers.directory.etcd import EtcdDirectory  # noqa: PLC0415 - gRPC only where it is used
    from workers.directory.etcd_client import EtcdClient, Tls  # noqa: PLC0415

    address = parse_directory(text)
    tls = Tls(address.ca, address.certificate, address.key) if address.uses_tls else None
    return EtcdDirectory(EtcdClient(address.endpoints, tls), cluster, clock)
