"""TLS between nodes, where it is wanted: one certificate a node, one authority for the cluster.

The files are named by options of the agent, or by `PERILUNE_TRANSFER_TLS_CERT`, `_KEY` and `_CA`, or
lie in the data folder as `transfer-tls/cert.pem`, `key.pem` and `ca.pem`. Both ends show a
certificate of the authority; names in it are not compared, since nodes are known by their secret.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from workers.core.errors import ConfigError

FOLDER: Final = "transfer-tls"
ENVIRONMENT: Final = "PERILUNE_TRANSFER_TLS_"
PARTS: Final = ("cert", "key", "ca")
FIRST_BYTES: Final = 3
"""By these a connection under TLS is told from a plain one."""
WAY_OUT: Final = (
    "Give --transfer-tls-cert, --transfer-tls-key and --transfer-tls-ca (or the files in "
    f"{FOLDER}/ of the data folder) on every host, or on none."
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: this node's certificate and key, and the authority that all nodes' are from."""

    cert: Path
    key: Path
    ca: Path

    def __str__(self) -> str:
        return f"TLS with certificate {self.cert} and authority {self.ca}"


def tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """All of them or none. ConfigError."""
    given = dict(zip(PARTS, (cert, key, ca), strict=True))
    if not any(given.values()):
        return None
    for part, path in given.items():
        if path is None:
            raise ConfigError(
                f"transfer_tls_{part}", "", "is not given, and others are", "Give all three."
            )
    assert cert is not None
    assert key is not None
    assert ca is not None
    return TlsFiles(cert, key, ca)


def find_tls(data_dir: Path) -> TlsFiles | None:
    """By the environment, else those of the data folder, if they are there. ConfigError."""
    named = [os.environ.get(f"{ENVIRONMENT}{part.upper()}", "") for part in PARTS]
    if any(named):
        return tls_files(*(Path(name) if name else None for name in named))
    folder = data_dir / FOLDER
    if not folder.is_dir():
        return None
    return TlsFiles(*(folder / f"{part}.pem" for part in PARTS))


def tls_environment(files: TlsFiles) -> dict[str, str]:
    """What `find_tls` of a child process reads."""
    return {f"{ENVIRONMENT}{part.upper()}": str(getattr(files, part)) for part in PARTS}


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """ConfigError names the file that cannot be used."""
    return _context(files, server=True)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """ConfigError names the file that cannot be used."""
    return _context(files, server=False)


@lru_cache(maxsize=16)
def _context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _check_mode(files.key)
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "transfer_tls_cert", f"{files.cert}, {files.key}", f"cannot be used: {error}",
            "Give a PEM certificate and the key that belongs to it.",
        ) from None  # fmt: skip
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "transfer_tls_ca", str(files.ca), f"cannot be used: {error}",
            "Give the PEM certificate of the cluster's authority.",
        ) from None  # fmt: skip
    return context


def _check_mode(key: Path) -> None:
    try:
        mode = key.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(
            "transfer_tls_key", str(key), f"cannot be read: {error.strerror}", "Check the path."
        ) from None
    if mode & 0o077:
        raise ConfigError(
            "transfer_tls_key", str(key), f"its mode is {mode:04o}: others may read it",
            f"chmod 600 {key}",
        )  # fmt: skip


def is_client_hello(first: bytes | bytearray | memoryview) -> bool:
    """A TLS record of a handshake, any version. A frame of ours that began so would be longer than
    any first frame is."""
    return len(first) >= FIRST_BYTES and bytes(first[:2]) == b"\x16\x03" and 1 <= first[2] <= 4


def plain_refused(node_id: str, files: object) -> str:
    """To a peer that came without TLS."""
    return f"{node_id} asks for {files}; this connection came without TLS. {WAY_OUT}"


def tls_refused(node_id: str) -> str:
    """To a peer that came with TLS."""
    return f"{node_id} speaks no TLS with other nodes, this connection came with it. {WAY_OUT}"


def tls_failed(peer: str, files: object, error: object) -> str:
    """Of a handshake that this side began."""
    return (
        f"this side uses {files}; {peer} does not accept it, or answers without TLS ({error}). "
        f"{WAY_OUT}"
    )
