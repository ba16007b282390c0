"""How many HTTP requests the control plane answered, by route and class of status. Bounded."""

from __future__ import annotations

from collections import Counter

from starlette.types import Scope

MAX_SERIES = 1000
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})


class RequestCounts:
    """Keyed by route template, never by path, so that clients cannot add series."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        key = (method, route, f"{status // 100}xx")
        if key in self.counts or len(self.counts) < MAX_SERIES:
            self.counts[key] += 1
