"""Where a cluster on this machine keeps its files."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from workers.core.errors import ConfigError

SHM = Path("/dev/shm")  # noqa: S108 - slabs are named by cluster and node, and belong there
MAX_SOCKET_PATH_BYTES = 107
"""Linux' bound on a Unix socket's path, without its final NUL."""


def default_data_dir() -> Path:
    """`$PERILUNE_HOME`, else `~/.local/share/perilune`."""
    configured = os.environ.get("PERILUNE_HOME", "")
    return Path(configured or "~/.local/share/perilune").expanduser()


@dataclass(frozen=True, slots=True)
class Home:
    """Paths inside one data directory."""

    data: Path

    @property
    def run(self) -> Path:
        return self.data / "run"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def token_file(self) -> Path:
        return self.data / "token"

    @property
    def database(self) -> Path:
        return self.data / "perilune.db"

    @property
    def state_file(self) -> Path:
        return self.run / "supervisor.json"

    @property
    def lock_file(self) -> Path:
        return self.run / "supervisor.lock"

    def agent_socket(self, node_id: str) -> Path:
        return self.run / f"{node_id}.sock"

    def log_file(self, component: str) -> Path:
        return self.logs / f"{component}.log"

    def create(self) -> None:
        """Make the folders, readable by this user only. Raises ConfigError where that fails."""
        try:
            for folder in (self.data, self.run, self.logs):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                "--data", str(self.data), f"cannot be made ({error.strerror})", "Name another one."
            ) from error
        longest = len(os.fsencode(self.agent_socket("n99")))
        if longest > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                "--data",
                str(self.data),
                f"is too long: a socket's path in it has {longest} bytes, the system allows "
                f"{MAX_SOCKET_PATH_BYTES}",
                "Name a shorter one.",
            )


def default_cluster_name(data: Path) -> str:
    """`local` for the default folder; others get a suffix, so that their slabs do not collide."""
    if data.resolve() == default_data_dir().resolve() and "PERILUNE_HOME" not in os.environ:
        return "local"
    return "local-" + hashlib.blake2b(os.fsencode(data.resolve()), digest_size=3).hexdigest()


def ensure_token(path: Path) -> str:
    """The operator's bearer token; made with mode 0600 by whoever comes first, atomically."""
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(fresh, path)  # fails where another process was first
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    token = path.read_text().strip()
    if not token:
        raise ConfigError("token file", str(path), "is empty", "Remove it; a new one is made.")
    return token
