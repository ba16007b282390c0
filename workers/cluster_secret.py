"""The cluster secret: 32 random bytes in the data folder, made at first use, copied by people."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from workers.core.errors import ConfigError
from workers.core.transfer_handshake import SECRET_BYTES

SECRET_FILE: Final = "transfer-secret"  # noqa: S105  a file's name


def load_secret(data_dir: Path) -> bytes:
    """Read it, or make it. ConfigError: others may read it, or it is none."""
    path = data_dir / SECRET_FILE
    if not path.exists():
        _make(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            "transfer_secret", str(path), f"its mode is {mode:04o}: others may read it",
            f"chmod 600 {path}",
        )  # fmt: skip
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            "transfer_secret", str(path), f"is not {SECRET_BYTES} bytes in hexadecimal",
            "Copy it from another node, or remove it on all nodes to have a new one made.",
        )  # fmt: skip
    return secret


def find_secret(data_dir: Path) -> bytes | None:
    """What `load_secret` would read; None where none was made yet. ConfigError as there."""
    return load_secret(data_dir) if (data_dir / SECRET_FILE).exists() else None


def _make(path: Path) -> None:
    """Whole or not at all, and never over another process's: the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
