"""Prompts brought to one form, so that equal questions have equal tokens. Off unless asked for.

line_ends       CRLF and lone CR become LF
spaces          odd blanks (no-break, wide, tabs inside a line) become one space each, runs of them
                inside a line one, those at a line's end none; indentation stays
system_first    system and developer messages go before the others, in their order

Only texts change: no roles, tool calls, token ids or parts of other kinds.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

Rule = Literal["line_ends", "spaces", "system_first"]

_SYSTEM: Final = ("system", "developer")
_CR: Final = re.compile(r"\r\n?")
_ODD_BLANK: Final = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_INSIDE: Final = re.compile(r"(?<=[^ \t\n])[ \t]+")
_AT_END: Final = re.compile(r"[ \t]+(?=\n|\Z)")


def normalised(
    fields: dict[str, Any], rules: Sequence[Rule], *, chat: bool
) -> tuple[dict[str, Any], list[Rule]]:
    """Fields with their texts in one form, and the rules that changed something.

    Nothing is changed in place; what is malformed stays, for the engine to judge.
    """
    applied: list[Rule] = []
    for rule in rules:
        changed = _apply(fields, rule, chat)
        if changed != fields:
            fields = changed
            applied.append(rule)
    return fields, applied


def _apply(fields: dict[str, Any], rule: Rule, chat: bool) -> dict[str, Any]:
    match rule:
        case "line_ends":
            return _with_texts(fields, _line_ends, chat)
        case "spaces":
            return _with_texts(fields, _spaces, chat)
        case "system_first":
            return _system_first(fields) if chat else fields


def _line_ends(text: str) -> str:
    return _CR.sub("\n", text) if "\r" in text else text


def _spaces(text: str) -> str:
    text = _ODD_BLANK.sub(" ", text)
    return _INSIDE.sub(" ", _AT_END.sub("", text))


def _with_texts(fields: dict[str, Any], change: Callable[[str], str], chat: bool) -> dict[str, Any]:
    if chat:
        messages = fields.get("messages")
        if not isinstance(messages, list):
            return fields
        return {**fields, "messages": [_message(message, change) for message in messages]}
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return {**fields, "prompt": change(prompt)}
    if isinstance(prompt, list):
        texts = [change(item) if isinstance(item, str) else item for item in prompt]
        return {**fields, "prompt": texts}
    return fields


def _message(message: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        return {**message, "content": [_part(part, change) for part in content]}
    return message


def _part(part: Any, change: Callable[[str], str]) -> Any:
    if isinstance(part, str):
        return change(part)
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": change(part["text"])}
    return part


def _system_first(fields: dict[str, Any]) -> dict[str, Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return fields
    ordered = sorted(messages, key=lambda message: message.get("role") not in _SYSTEM)
    return {**fields, "messages": ordered}
