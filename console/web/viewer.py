"""Who looks, from where, at what: the parts of a page's address that every page understands."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, tzinfo
from urllib.parse import unquote, urlencode
from zoneinfo import ZoneInfo

from fastapi import Request

WINDOWS_SECONDS = (900, 3600, 86_400)
ZONE_COOKIE = "perilune_tz"
MAX_FILTER_CHARS = 300


@dataclass(frozen=True, slots=True)
class Viewer:
    """Times are in `tz`; `window`, `filter`, `cursor` and `as_table` come from the query."""

    tz: tzinfo
    path: str
    window: int = WINDOWS_SECONDS[0]
    filter: str = ""
    cursor: str = ""
    as_table: bool = False
    value: str = ""
    compare: str = ""
    view: str = ""

    def href(self, **changes: str | int | bool) -> str:
        """This page with parts of its query changed; what stands at its default is left out."""
        query: dict[str, str | int | bool] = {
            "window": self.window,
            "filter": self.filter,
            "as": "table" if self.as_table else "",
            "value": self.value,
            "view": self.view,
            **changes,
        }
        kept = {
            name: value
            for name, value in query.items()
            if value and (name, value) != ("window", WINDOWS_SECONDS[0])
        }
        return f"{self.path}?{urlencode(kept)}" if kept else self.path


def viewer_of(request: Request) -> Viewer:
    """An unreadable part falls back to its default: a pasted link always opens."""
    query = request.query_params
    return Viewer(
        tz=_zone(request.cookies.get(ZONE_COOKIE, "")),
        path=request.url.path,
        window=_window(query.get("window", "")),
        filter=query.get("filter", "")[:MAX_FILTER_CHARS],
        cursor=query.get("cursor", "")[:MAX_FILTER_CHARS],
        as_table=query.get("as") == "table",
        value=query.get("value", "")[:20],
        compare=query.get("compare", "")[:20],
        view=query.get("view", "")[:20],
    )


def _window(text: str) -> int:
    return int(text) if text.isdecimal() and int(text) in WINDOWS_SECONDS else WINDOWS_SECONDS[0]


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(unquote(name)) if name else UTC
    except (ValueError, OSError, KeyError):
        return UTC
