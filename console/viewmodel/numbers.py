"""Numbers and times as text, the same in terminal, web and CLI.

The rules of numbers are `workers.core.numbers`; here are those that need the viewer's zone.
"""

from __future__ import annotations

import re
from datetime import datetime, tzinfo

from workers.core.numbers import (
    NO_TRAFFIC,
    NOT_OFFERED,
    UNKNOWN,
    age,
    count,
    duration,
    known,
    moved_bytes,
    moved_rate,
    per_minute,
    per_second,
    percent,
    points,
    rate_per_minute,
    stored_bytes,
    three_digits,
    times,
    used_of,
    window,
)

__all__ = [
    "NOT_OFFERED",
    "NO_TRAFFIC",
    "UNKNOWN",
    "age",
    "clock",
    "count",
    "duration",
    "known",
    "moved_bytes",
    "moved_rate",
    "offset",
    "per_minute",
    "per_second",
    "percent",
    "points",
    "rate_per_minute",
    "short_id",
    "stamp",
    "stored_bytes",
    "three_digits",
    "times",
    "used_of",
    "window",
]

_ID_PREFIX = re.compile(r"^[a-z]{1,8}[-_](?=.{8})")


def clock(at: float | datetime | None, tz: tzinfo, *, seconds: bool = True) -> str:
    """Wall time in the viewer's zone: `14:07:32`."""
    moment = _moment(at, tz)
    if moment is None:
        return UNKNOWN
    return moment.strftime("%H:%M:%S" if seconds else "%H:%M")


def stamp(at: float | datetime | None, now: float, tz: tzinfo) -> str:
    """`14:07:32` today, `11-27 09:12` on another day."""
    moment, today = _moment(at, tz), _moment(now, tz)
    if moment is None or today is None:
        return UNKNOWN
    if moment.date() == today.date():
        return moment.strftime("%H:%M:%S")
    return moment.strftime("%m-%d %H:%M")


def offset(at: float, tz: tzinfo) -> str:
    """`+01:00`."""
    text = datetime.fromtimestamp(at, tz).strftime("%z")
    return f"{text[:3]}:{text[3:5]}" if text else "+00:00"


def _moment(at: float | datetime | None, tz: tzinfo) -> datetime | None:
    if at is None:
        return None
    if isinstance(at, datetime):
        return at.astimezone(tz)
    number = known(at)
    return None if number is None else datetime.fromtimestamp(number, tz)


def short_id(identifier: str) -> str:
    """Ids show 8 characters; a leading word such as `req-` is not part of them."""
    return _ID_PREFIX.sub("", identifier)[:8] or identifier[:8]
