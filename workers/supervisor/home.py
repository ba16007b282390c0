"""Where a cluster on this machine keeps its files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from workers.core.errors import ConfigError
from workers.data_dir import default_data_dir

SHM = Path("/dev/shm")  # noqa: S108 - slabs are named by cluster and node, and belong there
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # the control plane's own rule
MAX_SOCKET_PATH_BYTES = 107
"""Linux' bound on a Unix socket's path, without its final NUL."""


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
        self._check_length()
        try:
            for folder in (self.data, self.run, self.logs):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "cannot be written", str(folder))
            self.lock_file.open("a").close()
        except OSError as error:
            what = f"cannot be used ({error.filename}: {error.strerror})"
            way_out = "Make it writable for this user, or name another one."
            raise ConfigError("--data", str(self.data), what, way_out) from error

    def _check_length(self) -> None:
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
    way_out = "Remove it; a new one is made."
    try:
        if not path.exists():
            _make_token(path)
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError("token file", str(path), "holds no token", way_out) from error
    except OSError as error:
        what = f"cannot be used ({error.strerror})"
        raise ConfigError("token file", str(path), what, way_out) from error
    if not TOKEN_PATTERN.fullmatch(token):
        what = "holds no token (16 to 512 letters, digits and ._~+/=-)"
        raise ConfigError("token file", str(path), what, way_out)
    return token


def _make_token(path: Path) -> None:
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
