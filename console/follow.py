"""`perilune logs`: the end of a component's log, and what comes after."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

POLL_SECONDS = 0.2
TAIL_BYTES = 256 * 1024


def tail(path: Path, num_lines: int) -> list[str]:
    """The last lines, of at most the last 256 KiB."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - TAIL_BYTES, 0))
        return file.read().decode(errors="replace").splitlines()[-num_lines:]


def follow(path: Path, *, from_start: bool = False) -> Generator[str, None, None]:
    """What is appended from now on, across rotation; ends only with the caller."""
    file = path.open("rb")
    if not from_start:
        file.seek(0, 2)
    try:
        while True:
            chunk = file.read()
            if chunk:
                yield chunk.decode(errors="replace")
                continue
            if _was_rotated(path, file.fileno(), file.tell()):
                file.close()
                file = path.open("rb")
                continue
            time.sleep(POLL_SECONDS)
    finally:
        file.close()


def _was_rotated(path: Path, descriptor: int, position: int) -> bool:
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return now.st_ino != os.fstat(descriptor).st_ino or now.st_size < position
