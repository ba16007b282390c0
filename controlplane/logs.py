"""How the processes of this package log: plain lines, times in UTC."""

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog


def configure_log(level: str = "info", file: TextIO | None = None) -> None:
    """Errors come as text without local variables: these hold prompts and keys."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(
                colors=False, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(
            cast("TextIO", Lossy(sys.stdout if file is None else file))
        ),
    )


class Lossy:
    """A log's file, which stops nobody: what cannot be written (a full disk, a reader that has gone)
    is dropped, and how much that was is said as soon as there is room again."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.dropped = 0

    def write(self, text: str) -> int:
        try:
            if self.dropped:
                self._file.write(f"{self.dropped} messages could not be written to this log\n")
                self._file.flush()
                self.dropped = 0
            return self._file.write(text)
        except (OSError, ValueError):  # a closed file's is the latter
            self.dropped += text != "\n"  # comes apart
            return 0

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()
