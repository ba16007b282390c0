"""How the processes of this package log: plain lines, times in UTC."""

import logging
import sys
from typing import TextIO

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
        logger_factory=structlog.PrintLoggerFactory(sys.stdout if file is None else file),
    )
