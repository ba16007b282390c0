"""What is logged of an error: its traceback, and nothing of what was in its variables."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator

import pytest
import structlog

from controlplane.logs import configure_log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_a_traceback_has_no_prompts_in_it() -> None:
    out = io.StringIO()
    configure_log("info", out)

    def fails(prompt: str) -> None:
        raise ValueError(f"of {len(prompt)} characters")

    prompt = "my secret " * 200
    try:
        fails(prompt)
    except ValueError:
        structlog.get_logger("test").exception("request_failed")
    text = out.getvalue()
    assert "of 2000 characters" in text
    assert "in fails" in text
    assert "secret" not in text
    assert len(text) < 1000


def test_the_level_holds() -> None:
    out = io.StringIO()
    configure_log("warning", out)
    structlog.get_logger("test").info("not_said")
    structlog.get_logger("test").warning("said")
    assert "not_said" not in out.getvalue()
    assert "said" in out.getvalue()


class Disk(io.StringIO):
    """Full, until it is not."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_nobody_and_is_told_of_when_it_is_over() -> None:
    """A request's own words, and a loop's cry for help, are logged where they must not fail."""
    disk = Disk()
    configure_log("info", disk)
    log = structlog.get_logger("test")
    log.info("lost")
    log.error("also_lost", exc_info=ValueError("a loop's"))
    disk.is_full = False
    log.info("kept")
    log.info("kept_too")
    told, *kept = disk.getvalue().splitlines()
    assert told == "2 messages could not be written to this log"
    assert ["kept" in line for line in kept] == [True, True]
    disk.close()
    log.info("to a closed file")
