"""How a stream of events (SSE) begins and ends, as bytes."""

import re
from typing import Final

FIELDS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
"""How its lines begin; the last one is a comment's."""
DONE_MARKS: Final = (b"data: [DONE]", b"data:[DONE]")
ERROR_DATA: Final = rb'data: ?(?=\{\s*"error":\s*(?!null|\s))'
"""Before what an engine's stream says when it has failed; `"error": null` is none."""
MAX_EVENT_BYTES: Final = 1024 * 1024
"""A longer event is passed on as it comes."""
_BEFORE_DATA: Final = re.compile(rb"(?:(?:(?::|event:|id:|retry:)[^\r\n]*)?[\r\n])*")


def past_comments(events: bytes) -> bytes:
    """From the first line on that has data, or is none of a stream's: what stands before it says
    nothing of an answer. b"" for nothing but that."""
    if events.startswith(b"data:"):
        return events
    found = _BEFORE_DATA.match(events)
    return events[found.end() :] if found is not None else events


def is_event(data: bytes) -> bool:
    """Whether it begins with a whole one."""
    return data.startswith(b"data:") and ends_event(data)


def ends_event(data: bytes) -> bool:
    return data.find(b"\n\n") >= 0 or data.find(b"\r\n\r\n") >= 0


def may_become_event(data: bytes) -> bool:
    """Whether it begins as a line of a stream does, be it only by a letter."""
    return any(name.startswith(data[: len(name)]) for name in FIELDS)
