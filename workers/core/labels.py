"""Which class a client says that a request belongs to, for policies that learn by class. Bounded."""

from __future__ import annotations

from typing import Final

MAX_REQUESTS: Final = 4096
MAX_LABELS: Final = 64
OTHER: Final = "other"
"""Stands for every label beyond `MAX_LABELS`, so that no client can make tables grow."""


class Labels:
    """Labels of the requests of late."""

    def __init__(self) -> None:
        self._of_request: dict[str, str] = {}
        self._known: set[str] = set()

    def note(self, request: str, label: str) -> None:
        """A request has this label from now on."""
        if label not in self._known:
            if len(self._known) >= MAX_LABELS:
                label = OTHER
            else:
                self._known.add(label)
        self._of_request.pop(request, None)
        self._of_request[request] = label
        if len(self._of_request) > MAX_REQUESTS:
            del self._of_request[next(iter(self._of_request))]

    def of(self, request: str) -> str:
        """ "" where none was given."""
        return self._of_request.get(request, "")
