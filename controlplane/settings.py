"""Settings of the control plane's process, its token file, and what of them cannot work."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from sqlalchemy import URL

from controlplane.db.session import parse_url
from workers.core.errors import ConfigError
from workers.data_dir import default_data_dir
from workers.directory.address import parse_directory

TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
CLUSTER_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Settings(BaseModel):
    """All there is to set; made by `make_settings`, which refuses what cannot work."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    host: str = "127.0.0.1"
    port: int = 7700
    database_url: URL
    token: str
    token_file: Path
    cluster: str = "perilune"
    directory: str = ""  # etcd://host:port,...; "" = none
    data: Path
    max_body_bytes: int = 4 * 1024 * 1024
    load_pages: bool = True

    @property
    def reads_are_open(self) -> bool:
        """On loopback anyone on this machine may read; elsewhere reading needs the token."""
        return is_loopback(self.host)


def make_settings(
    *,
    host: str = "127.0.0.1",
    port: int = 7700,
    database_url: str | None = None,
    token_file: Path | None = None,
    cluster: str = "perilune",
    directory: str = "",
    data: Path | None = None,
    load_pages: bool = True,
) -> Settings:
    """Check everything, make the data folder and the token. Raises `ConfigError`."""
    data = data or default_data_dir()
    if directory:
        parse_directory(directory)
    if not 0 <= port <= 65535:
        raise ConfigError("--port", port, "not a TCP port", "Use 0 (any free one) to 65535.")
    if not CLUSTER_PATTERN.fullmatch(cluster):
        way_out = "Use up to 64 of a-z, 0-9, dot, dash, underscore."
        raise ConfigError("--cluster", cluster, "not a cluster name", way_out)
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
        raise ConfigError("--data", str(data), problem, "Name a folder you may write.") from error
    url = parse_url(database_url or f"sqlite+aiosqlite:///{data / 'perilune.db'}")
    token_file = token_file or data / "token"
    return Settings(
        host=host,
        port=port,
        database_url=url,
        token=ensure_token(token_file),
        token_file=token_file,
        cluster=cluster,
        directory=directory,
        data=data,
        load_pages=load_pages,
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def ensure_token(path: Path) -> str:
    """The operator's bearer token; made at the first start, whole or not at all, mode 0600."""
    way_out = "Name a file you may read and write, or remove it to have a new token made."
    try:
        if not path.exists():
            _create_token(path)
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError("--token-file", str(path), "holds no token", way_out) from error
    except OSError as error:
        problem = f"cannot be used: {error.strerror}"
        raise ConfigError("--token-file", str(path), problem, way_out) from error
    if not TOKEN_PATTERN.fullmatch(token):
        problem = "holds no token (16 to 512 letters, digits and ._~+/=-)"
        raise ConfigError("--token-file", str(path), problem, way_out)
    return token


def _create_token(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # link, not rename: of two first starts one wins, the other reads the winner's token
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
