"""The sentence inside an error body, for people: engines answer with JSON around it."""

from __future__ import annotations

import json
import re
from typing import Any

_MESSAGE = re.compile(r'"(?:message|detail)"\s*:\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')
"""Whole escapes only: a body may be cut in the middle of one."""


def error_text(body: str) -> str:
    """`{"error": {"message": "m"}}`, problem+json and FastAPI's `detail` give `m`.

    Records keep the start of a body only: a message that was cut off is given as far as it goes.
    Whatever else comes back. Never a control character: a body may quote what a client sent.
    """
    found = body
    if body.lstrip().startswith("{"):
        try:
            found = _message(json.loads(body))
        except (ValueError, RecursionError):
            found = _message_of_cut(body)
    return _printable(found).strip() or _printable(body)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text)


def _message(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for name in ("error", "message", "detail"):
            found = _message(value.get(name))
            if found:
                return found
    if isinstance(value, list) and value:  # one entry for each invalid field
        first = value[0]
        return _message(first.get("msg") if isinstance(first, dict) else first)
    return ""


def _message_of_cut(body: str) -> str:
    match = _MESSAGE.search(body)
    if match is None:
        return ""
    try:
        return str(json.loads(f'"{match.group(1)}"'))
    except ValueError:
        return match.group(1)
