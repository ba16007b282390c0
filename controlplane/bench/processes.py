"""Processes that a bench starts: free ports, the wait until one listens, and their end."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from workers.core.errors import PeriluneError

ROOT: Final = Path(__file__).resolve().parents[2]
STOP_SECONDS: Final = 15.0


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this tree that ends with the block, at the latest by being killed."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_port(port: int, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Raises `PeriluneError` when it ends, or does not listen in time."""
    _wait(lambda: socket.create_connection(("127.0.0.1", port), 0.2).close(), process, seconds)


def wait_socket(path: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    """The same for a Unix socket."""

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(path))

    _wait(connect, process, seconds)


def _wait(connect: Callable[[], None], process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeriluneError(f"{process.args!r} ended with {process.returncode}")
        try:
            connect()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise PeriluneError(f"{process.args!r} did not listen within {seconds:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
