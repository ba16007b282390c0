"""What both clients of the node agent share."""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import Final, Literal

import msgspec

from workers.cluster_secret import SECRET_FILE, find_secret
from workers.core.control_proof import NONCE_BYTES, agent_proved, client_proof
from workers.core.errors import RefusedError
from workers.core.hashing import hash_test_vector
from workers.core.messages import ClientRole, EngineRole, Hello, KvRole, Refused, Welcome
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_handshake import fingerprint
from workers.core.transfer_messages import Challenge, Prove
from workers.data_dir import default_data_dir
from workers.transfer_tls import TlsFiles, find_tls

DEFAULT_TIMEOUT_SECONDS: Final = 1.0
MIN_BACKOFF_SECONDS: Final = 0.05
MAX_BACKOFF_SECONDS: Final = 2.0


def make_hello(
    role: ClientRole,
    client_id: str,
    *,
    namespace: NamespaceSpec | None = None,
    kv_role: KvRole = "kv_both",
    engine_role: EngineRole = "worker",
    kv_tokens: int = 0,
) -> Hello:
    """The handshake of this process."""
    return Hello(
        role=role,
        client_id=client_id,
        hash_vector=hash_test_vector(),
        pid=os.getpid(),
        namespace=namespace,
        kv_role=kv_role,
        engine_role=engine_role,
        kv_tokens=kv_tokens,
    )


class Backoff:
    """How long to leave a peer alone after failures in a row. Not thread-safe."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def failed(self) -> None:
        pause = min(MIN_BACKOFF_SECONDS * 2.0 ** min(self._failures, 10), MAX_BACKOFF_SECONDS)
        self._failures += 1
        self._until = time.monotonic() + pause

    def succeeded(self) -> None:
        self._failures, self._until = 0, 0.0


def with_nonce(hello: Hello) -> Hello:
    """For a connection over TCP, where both sides prove the cluster secret."""
    return msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_BYTES))


def unproved(said: Welcome, address: str) -> Refused:
    """To an agent that lets us in without proving the secret that this side was given."""
    return Refused(
        "secret",
        f"{address}: node {said.node_id} did not prove the cluster secret. Give its agent "
        "--secret-folder with this cluster's secret.",
    )


def answer_challenge(
    hello: Hello, said: Challenge, address: str, secret: bytes | None = None
) -> Prove:
    """With `secret`, or the data folder's. RefusedError: there is none, or the agent's is another."""
    folder = default_data_dir()
    secret = secret or find_secret(folder)
    if secret is None:
        raise RefusedError(
            "secret",
            f"{address}: node {said.node_id} asks for the cluster secret and {folder} has none. "
            f"Copy `{SECRET_FILE}` (mode 0600) from that node's data folder into it.",
        )
    if not agent_proved(secret, hello, said):
        raise RefusedError(
            "secret",
            f"{address}: node {said.node_id} has another cluster secret ({said.fingerprint}) than "
            f"this side ({fingerprint(secret)}). Copy `{SECRET_FILE}` from one data folder to the other.",
        )
    return Prove(client_proof(secret, hello, said))


def notice_silence(sock: socket.socket) -> None:
    """End a TCP connection whose other side has said nothing for 11 s, not even to the kernel.

    A host that has lost its power resets nothing, and who only listens would do so for ever.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if number := getattr(socket, option, None):  # Linux' names
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


def tls_of(given: TlsFiles | Literal[False] | None) -> TlsFiles | None:
    """What a connection over TCP is made with: as given, or as the data folder has it."""
    if given is None:
        return find_tls(default_data_dir())
    return given or None


def parse_address(address: str) -> tuple[str, str]:
    """("unix", path) or ("tcp", "host:port")."""
    kind, colon, rest = address.partition(":")
    if colon and kind in {"unix", "tcp"}:
        return kind, rest
    return "unix", address
