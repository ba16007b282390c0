"""One thing in full on a screen of its own: a request, a node, a worker, a pair, an audit row."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult

from console.tui import details
from console.tui.context import Context
from console.tui.feed import REQUEST
from console.tui.lines import Line, LinesView
from console.tui.pages.base import Location, Page
from console.viewmodel.numbers import short_id
from console.viewmodel.table import clean

Draw = Callable[[Context, str, int], list[Line]]

_KINDS: dict[str, tuple[str, str, Draw]] = {
    "request": ("Requests", "/requests/", details.request_lines),
    "node": ("Topology", "/nodes/", details.node_lines),
    "worker": ("Topology", "/workers/", details.worker_lines),
    "gateway": ("Topology", "/gateways/", details.gateway_lines),
    "pair": ("Transfers", "/transfers/", details.pair_lines),
    "job": ("Jobs", "/jobs/", details.job_lines),
    "audit_row": ("Audit", "/audit/", details.audit_lines),
}


class DetailPage(Page):
    """Lines that scroll when they do not fit."""

    DEFAULT_CSS = """
    DetailPage LinesView { height: 1fr; }
    """

    def __init__(self, noun: str) -> None:
        super().__init__()
        self.noun = noun
        self.title, self._base, self._draw = _KINDS[noun]
        self._view = LinesView()
        self._lines: list[Line] = []
        self._top = 0
        self._stale = False

    @property
    def url(self) -> str:  # type: ignore[override]  # follows what is shown
        """The page of what is shown."""
        return self._base + self.name_shown

    @property
    def wanted(self) -> frozenset[str]:
        """A request that is none of the last ones is read by its id."""
        return frozenset({REQUEST + self.name_shown} if self.noun == "request" else ())

    def compose(self) -> ComposeResult:
        """Lines only."""
        yield self._view

    def path(self) -> list[str]:
        """`Requests > 7f3a9c21`."""
        name = short_id(self.name_shown) if self.noun == "request" else clean(self.name_shown)
        return [self.title, name.replace("/", " -> ") if self.noun == "pair" else name]

    def opens(self) -> tuple[str, Location | None]:
        """Nothing further."""
        return "", None

    def right(self) -> str:
        """How far one has read."""
        room = max(1, self._view.size.height)
        if len(self._lines) <= room:
            return ""
        return (
            f"lines {self._top + 1}-{min(len(self._lines), self._top + room)} of {len(self._lines)}"
        )

    def show_context(self, context: Context) -> None:
        """Draw the thing anew."""
        self._lines = self._draw(context, self.name_shown, context.width)
        self._stale = context.stale
        self._scroll(0)

    def do(self, action: str) -> bool:
        """Scroll."""
        room = max(1, self._view.size.height)
        steps = {
            "down": 1, "up": -1, "half_down": room // 2, "half_up": -(room // 2),
            "page_down": room, "page_up": -room, "top": -100_000, "bottom": 100_000,
        }  # fmt: skip
        if action not in steps:
            return False
        self._scroll(steps[action])
        return True

    def _scroll(self, rows: int) -> None:
        most = max(0, len(self._lines) - max(1, self._view.size.height))
        self._top = max(0, min(self._top + rows, most))
        self._view.show(self._lines[self._top :], stale=self._stale)
