"""What is corrected in an engine's reply, in place: every other byte stays as it came.

`usage.prompt_tokens_details` are the prefill leg's, with its own prefix hits: decode would count as
cached what prefill handed over (A15). They stand in replies and streams alike where the prefill
worker says them; where nobody does, decode's figure is left out. Transfer parameters stay among
ourselves.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

_NULL = b"null"
MAX_TOKENS: Final = 2**31 - 1
Details = dict[str, Any] | None
"""`prompt_tokens_details` as leg 1 had them; None: nobody knows."""


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Reply(msgspec.Struct):
    """The rest of a reply, logprobs and all, is passed over."""

    usage: msgspec.Raw = msgspec.Raw(b"")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    choices: list[_Choice] | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None


class _Counted(msgspec.Struct):
    """Of a reply with nothing to put right."""

    usage: _Counts | None = None
    kv_transfer_params: Any = None
    choices: list[_Choice] | None = None


class ReadReply(msgspec.Struct):
    """A whole reply for the client, and what the record wants of it."""

    body: bytes
    by_length: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    has_choices: bool = True  # or cannot be read


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_counted = msgspec.json.Decoder(_Counted).decode
_decode = msgspec.json.Decoder().decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def read_whole(body: bytes, details: Details) -> ReadReply:
    """Never raises: what cannot be read is passed on as it is."""
    try:
        if details is None and b'"cached_tokens"' not in body:
            counted = _decode_counted(body)
            if counted.kv_transfer_params is None:
                return _as_it_is(body, counted)
        reply = _decode_reply(body)
        raw = bytes(reply.usage)
        usage = _decode(raw) if raw.startswith(b"{") else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ReadReply(body)
    last = reply.choices[-1].finish_reason if reply.choices else None
    read = ReadReply(body, by_length=last == "length", has_choices=bool(reply.choices))
    params = bytes(reply.kv_transfer_params)
    if params not in (b"", _NULL):
        read.body = _put(body, "kv_transfer_params", params, _NULL)
    if isinstance(usage, dict):
        read.prompt_tokens = count(usage.get("prompt_tokens"))
        read.completion_tokens = count(usage.get("completion_tokens"))
        if correct(usage, details):
            read.body = _put(read.body, "usage", raw, _encode(usage))
    return read


def _as_it_is(body: bytes, reply: _Counted) -> ReadReply:
    last = reply.choices[-1].finish_reason if reply.choices else None
    usage = reply.usage or _Counts()
    counts = count(usage.prompt_tokens), count(usage.completion_tokens)
    return ReadReply(body, last == "length", *counts, bool(reply.choices))


def correct_events(data: bytes, details: Details) -> bytes:
    """Whole events of a stream; those with a usage frame are corrected."""
    if details is not None:  # frames leave out what is null
        details = {name: value for name, value in details.items() if value is not None}
    return b"\n\n".join(_event(event, details) for event in data.split(b"\n\n"))


def _event(event: bytes, details: Details) -> bytes:
    if b'"usage"' not in event or not event.startswith(b"data: "):
        return event
    try:
        chunk = _decode_reply(event[6:])
        raw = bytes(chunk.usage)
        usage = _decode(raw) if raw.startswith(b"{") else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return event
    # Engines put the details into the last frame, which has no choices.
    known = details if not chunk.choices else None
    if not isinstance(usage, dict) or not correct(usage, known):
        return event
    return _put(event, "usage", raw, _encode(usage))


def correct(usage: dict[str, Any], details: Details) -> bool:
    """Whether `usage` had to be changed; 0 <= cached <= prompt whatever anybody says (A16)."""
    given = usage.get("prompt_tokens_details")
    before: dict[str, Any] = given if isinstance(given, dict) else {}
    cached = count(details.get("cached_tokens")) if details is not None else None
    if details is None or cached is None:
        if before.get("cached_tokens") is None:
            return False
        if set(before) == {"cached_tokens"}:
            del usage["prompt_tokens_details"]
        else:
            before["cached_tokens"] = None
        return True
    limit = count(usage.get("prompt_tokens"))
    cached = max(0, cached if limit is None else min(cached, limit))
    usage["prompt_tokens_details"] = {**before, **details, "cached_tokens": cached}
    return bool(usage["prompt_tokens_details"] != given)


def _put(body: bytes, name: str, old: bytes, new: bytes) -> bytes:
    """Replace the value of a field of the reply. Inside a JSON text its quotes would be escaped, so
    where name and value stand together is the field, or one within another field."""
    places = list(_places(body, f'"{name}"'.encode(), old))
    if len(places) == 1:
        place = places[0]
        return body[:place] + new + body[place + len(old) :]
    start = body.find(b"{")
    if not places or start < 0:
        return body
    fields = _decode_fields(body[start:])
    fields[name] = msgspec.Raw(new)
    return body[:start] + _encode(fields)


def _places(body: bytes, name: bytes, value: bytes) -> Iterator[int]:
    end = len(body)
    while (place := body.rfind(value, 0, end)) >= 0:
        before = body[max(0, place - 64) : place].rstrip()
        if before.endswith(b":") and before[:-1].rstrip().endswith(name):
            yield place
        end = place + len(value) - 1


def count(value: object) -> int | None:
    """Of tokens, as an engine says it; None where that is no such number."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_TOKENS else None
