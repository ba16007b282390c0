"""What is logged of an error: its traceback, and nothing of what was in its variables."""

from __future__ import annotations

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
