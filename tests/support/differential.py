"""One call of the `openai` client, reduced to what two servers must agree on, and its comparison.

Left out, as no two runs of one engine agree on them: `id`, `created` and ids of tool calls;
`system_fingerprint`, which is of an engine's options; where a stream was cut into chunks; how much
of a prompt was cached or newly cached, but for 0 <= cached <= prompt.
Log-probabilities may differ by `TOLERANCE`: a prompt computed in other pieces rounds otherwise.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
from openai_table import Row

TOLERANCE = 2e-2
MEANINGLESS = frozenset({"id", "created", "request_id", "system_fingerprint"})
_MISSING = "(missing)"


def ask(client: openai.OpenAI, row: Row, model: str) -> dict[str, Any]:
    """The answer: status, content type, and the body, the merged stream or the error."""
    resource = client.completions if row.api == "completions" else client.chat.completions
    known = inspect.signature(resource.create).parameters
    arguments = {"model": row.model or model, **row.arguments}
    own = {name: value for name, value in arguments.items() if name in known and value is not None}
    extra = {name: value for name, value in arguments.items() if name not in own}
    for name in ("prompt", "messages"):  # the client insists on them
        if name in known and name in extra:
            own[name] = extra[name]
    create: Any = resource.with_raw_response.create
    try:
        raw = create(**own, extra_body=extra)
    except openai.APIStatusError as error:
        kind = error.response.headers.get("content-type", "")
        return {"status": error.status_code, "type": kind, "error": _body(error.response.content)}
    answer = {"status": raw.status_code, "type": raw.headers["content-type"]}
    if arguments.get("stream"):
        chunks = [chunk.model_dump(exclude_unset=True) for chunk in raw.parse()]
        return {**answer, "stream": merged(chunks)}
    raw.parse()  # what the client cannot read is a fault, too
    return {**answer, "body": _body(raw.content)}


def _body(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream, whatever the places where it was cut."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"choices": choices, "keys": set(), "usage": []}
    for chunk in chunks:
        whole["keys"] |= {f"chunk.{name}" for name in chunk}
        for name in ("object", "model", "prompt_token_ids", "prompt_text"):
            if chunk.get(name) is not None:
                whole.setdefault(name, chunk[name])
        if chunk.get("usage") is not None:
            whole["usage"] = chunk["usage"]  # the last one
        for choice in chunk.get("choices", ()):
            _add(choices.setdefault(choice.get("index", 0), {}), choice, whole["keys"], "choice")
    whole["keys"] = sorted(whole["keys"])
    return whole


def _add(so_far: dict[str, Any], piece: dict[str, Any], keys: set[str], path: str) -> None:
    for name, value in piece.items():
        keys.add(f"{path}.{name}")
        before = so_far.get(name)
        if isinstance(value, dict):
            inner = before if isinstance(before, dict) else {}
            so_far[name] = inner
            _add(inner, value, keys, f"{path}.{name}")
        elif name in ("index", "type", "role") or before is None:
            so_far[name] = value
        elif value is not None:
            joins = isinstance(value, str | list) and isinstance(before, type(value))
            so_far[name] = _joined(name, before, value) if joins else value


def _joined(name: str, before: Any, value: Any) -> Any:
    if name == "tool_calls":
        calls = {call.get("index", 0): dict(call) for call in before}
        for call in value:
            known = calls.setdefault(call.get("index", 0), {})
            _add(known, call, set(), "call")
        return list(calls.values())
    return before + value


def differences(row: Row, plain: Any, ours: Any) -> Iterator[str]:
    """Fields that are not alike, but those that the row excuses."""
    for path, left, right in _differing("", plain, ours):
        excused = any(path == field or path.startswith(f"{field}.") for field in row.different)
        if not excused:
            yield f"{path}: plain {left!r}, gateway {right!r}"


def _differing(path: str, left: Any, right: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(left, dict) and isinstance(right, dict):
        for name in left.keys() | right.keys():
            if name in MEANINGLESS:
                continue
            where = f"{path}.{name}" if path else str(name)
            yield from _differing(where, left.get(name, _MISSING), right.get(name, _MISSING))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for place, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from _differing(f"{path}.{place}", a, b)
    elif not _alike(path, left, right):
        yield path, left, right


def _alike(path: str, left: Any, right: Any) -> bool:
    if path.endswith((".cached_tokens", ".created_cache_tokens")):
        if left is None or right is None:
            return left is right
        return isinstance(left, int) and isinstance(right, int)
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, abs_tol=TOLERANCE)
    return bool(left == right) and type(left) is type(right)


def check_usage(answer: dict[str, Any]) -> None:
    """0 <= cached <= prompt, and the sum is a sum (A16)."""
    usage = (answer.get("body") or answer.get("stream") or {}).get("usage") or {}
    if not usage:
        return
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    assert cached is None or 0 <= cached <= usage["prompt_tokens"], usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage.get("completion_tokens", 0)
