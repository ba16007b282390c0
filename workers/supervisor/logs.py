"""A process's output: into a file with a bound, its last lines kept for error messages."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_LOG_BYTES = 20 * 1024 * 1024
KEPT_LINES = 60
MAX_LINE_BYTES = 4096
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^\([^)]*\bpid=\d+\)\s*|^(ERROR|CRITICAL)\s+\d\d-\d\d \S+ \[[^\]]*\]\s*")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt|Warning)\b.*")


class BoundedLog:
    """Appends to `path`; at `max_bytes` the file becomes `<path>.1` and a new one begins."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()
        self._partial = b""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def write(self, chunk: bytes) -> list[str]:
        """Append bytes; returns the lines that they completed."""
        with contextlib.suppress(OSError, ValueError):  # a full disk must not end what runs
            if self._size + len(chunk) > self._max_bytes:
                self._rotate()
            self._file.write(chunk)
            self._size += len(chunk)
        *whole, rest = (self._partial + chunk).split(b"\n")
        self._partial = rest[-MAX_LINE_BYTES:]
        lines = [clean(line[:MAX_LINE_BYTES]) for line in whole]
        self.lines.extend(lines)
        return lines

    def begin(self, title: str) -> None:
        """Mark a new process in the file; its predecessor's lines are no cause of its end."""
        self.lines.clear()
        self._partial = b""
        self.write(f"--- {title}\n".encode())
        self.lines.clear()

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        if self._path.exists():  # else an attempt before this one got so far, and no further
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        self._file = self._path.open("ab", buffering=0)
        self._size = 0


def clean(line: bytes) -> str:
    """Text without colours and line ends."""
    return _ANSI.sub("", line.decode(errors="replace")).rstrip()


def last_error_line(lines: list[str]) -> str:
    """The line that says best why a process ended: its last exception, error or word."""
    stripped = [_strip_prefixes(line) for line in lines]
    words = [line for line in stripped if line]
    for wanted in (_is_exception, _is_error):
        for index in reversed(range(len(words))):
            if wanted(words[index]):
                return _with_detail(words, index)[:300]
    return words[-1][:300] if words else ""


def _with_detail(words: list[str], index: int) -> str:
    """pydantic only counts errors in its first line; the next one names the first of them."""
    line = words[index]
    if " validation error" in line and index + 1 < len(words):
        return words[index + 1].removeprefix("Value error, ")
    return line


def _strip_prefixes(line: str) -> str:
    for _ in range(3):  # "(EngineCore pid=1) ERROR 11-29 12:00:00 [core.py:1] ..."
        line = _PREFIX.sub("", line)
    return line.strip()


def _is_exception(line: str) -> bool:
    # The engine's API process ends with a line that only points at another process' log.
    return bool(_EXCEPTION.match(line)) and "See root cause above" not in line


def _is_error(line: str) -> bool:
    return "error" in line.lower()
