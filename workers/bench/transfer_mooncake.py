"""Mooncake Store on loopback TCP: its master, a holder and a reader, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

PEERS: Final = Path(__file__).parents[2] / ".venv-peers"
SCRIPT: Final = Path(__file__).with_name("transfer_peer.py")
_START_SECONDS: Final = 30.0
_TRIES: Final = 3


class PeerMissingError(Exception):
    """It is not installed, or does not start; the text says which."""


class PeerFailedError(Exception):
    """It runs, and did not store or read what it was asked to, not even when asked again."""


@dataclass
class Mooncake:
    """`put` first; `read` gives seconds and CPU seconds of holder and reader together.

    On a machine that is short of CPU its master takes a client for dead and drops its blocks: they
    are then stored anew, and the read is repeated.
    """

    version: str
    _holder: _Child
    _reader: _Child
    _stores: int = 0

    def put(self, block_bytes: int, count: int) -> None:
        self._stores += 1
        answer = self._holder.ask(
            do="put", name=self._name(block_bytes), bytes=block_bytes, count=count
        )
        if answer["failed"]:
            raise PeerFailedError(f"mooncake did not store {answer['failed']} of {count} blocks")

    def read(self, block_bytes: int, count: int, *, batch: bool = False) -> tuple[float, float]:
        verb, failed = "read_batch" if batch else "read", 0
        for _ in range(_TRIES):
            before = self._holder.cpu_seconds()
            answer = self._reader.ask(
                do=verb, name=self._name(block_bytes), bytes=block_bytes, count=count
            )
            failed = answer["failed"]
            if not failed:
                spent = self._holder.cpu_seconds() - before
                return answer["seconds"], answer["cpu_seconds"] + spent
            self.put(block_bytes, count)
        raise PeerFailedError(f"mooncake did not read {failed} of {count} blocks")

    def _name(self, block_bytes: int) -> str:
        return f"{block_bytes}-{self._stores}"


class _Child:
    """A process that answers lines of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._facts = psutil.Process(process.pid)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if request:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise PeerMissingError(f"mooncake ended with code {self.process.wait(5)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_seconds(self) -> float:
        times = self._facts.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        _end(self.process)


@contextmanager
def running_mooncake(folder: Path, total_bytes: int) -> Iterator[Mooncake]:
    """Three processes; ended with the context. PeerMissingError."""
    master = PEERS / "bin" / "mooncake_master"
    if not master.exists():
        raise PeerMissingError("mooncake-transfer-engine-non-cuda is not installed in .venv-peers")
    port = _free_port()
    command = [
        str(master), f"-rpc_port={port}", "-rpc_address=127.0.0.1",
        f"-metrics_port={_free_port()}", "-default_kv_lease_ttl=3600000",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "master.log").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        stack.callback(_end, process)
        _wait_for_port(process, port)
        holder = _start(stack, folder, "hold", port, 8 * total_bytes, 64 << 20)
        reader = _start(stack, folder, "read", port, 0, total_bytes)
        ready = [child.ask() for child in (holder, reader)]
        if not all(answer["ready"] for answer in ready):
            raise PeerMissingError(f"mooncake's store refused its settings: {ready}")
        yield Mooncake(ready[0]["version"], holder, reader)


def _start(
    stack: contextlib.ExitStack, folder: Path, role: str, port: int, segment: int, buffer: int
) -> _Child:
    log = stack.enter_context((folder / f"{role}.log").open("w"))
    command = [
        str(PEERS / "bin" / "python"), str(SCRIPT), role, f"127.0.0.1:{_free_port()}",
        f"127.0.0.1:{port}", str(segment), str(buffer),
    ]  # fmt: skip
    child = _Child(
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
        )
    )
    stack.callback(child.close)
    return child


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerMissingError(
                f"mooncake_master ended with code {process.returncode} (it needs libibverbs1, "
                "librdmacm1 and libnuma1 of the system)"
            )
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise PeerMissingError("mooncake_master did not come up")


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=5)
