"""The sentence inside error bodies, whole and cut off."""

from __future__ import annotations

import json

import pytest

from workers.core.error_text import error_text

MESSAGE = "max_tokens must be at least 1, got -4."


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"error": {"message": MESSAGE, "type": "BadRequestError", "code": 400}}),
        json.dumps({"object": "error", "message": MESSAGE}),
        json.dumps({"error": MESSAGE}),
        json.dumps({"title": "bad", "status": 400, "detail": MESSAGE}),
        json.dumps({"detail": [{"loc": ["body"], "msg": MESSAGE}]}),
        MESSAGE,
    ],
)
def test_the_message_alone(body: str) -> None:
    assert error_text(body) == MESSAGE


@pytest.mark.parametrize(
    "body",
    ["", "connection refused", "{broken", '{"error": null}', "[1, 2]", "{}", '{"detail": []}'],
)
def test_what_holds_no_message_stays(body: str) -> None:
    assert error_text(body) == body


@pytest.mark.parametrize("length", range(30, 75))
def test_a_cut_body_gives_what_is_there(length: int) -> None:
    message = 'say "a" \\ \u00e9\u4e2d and so on'
    body = json.dumps({"error": {"message": message, "type": "BadRequestError"}})[:length]
    assert message.startswith(error_text(body))


@pytest.mark.parametrize("hidden", ["\x1b[2J", "\x9b2J", "\u202e", "\ud83d", "\n"])
def test_nothing_that_drives_a_terminal(hidden: str) -> None:
    for body in (json.dumps({"error": {"message": f"bad {hidden}x"}}), f"bad {hidden}x"):
        text = error_text(body)
        assert text.isprintable()
        assert text.startswith("bad ")


def test_deep_nesting_is_no_failure() -> None:
    body = '{"error":' * 100_000
    assert error_text(body) == body
