"""Cache: hit rate, evictions, tiers."""

from __future__ import annotations

from textual.app import ComposeResult

from console.tui.context import Context
from console.tui.figure import label_width, time_columns
from console.tui.frame import COMPACT_HEIGHT
from console.tui.keys import AS_TABLE, LAST_MARK, NEXT_MARK
from console.tui.lines import LinesView, line, table_lines, toned
from console.tui.pages.base import Location, Page
from console.tui.pages.overview import evictions_of, hit_rate_of
from console.tui.widgets.heatmap import HeatmapView
from console.tui.widgets.rows import RowsView
from console.viewmodel import cache
from console.viewmodel.heatmap import Heatmap
from console.viewmodel.marks import events_of

_ROWS = 12


class CachePage(Page):
    """Figures over time with the events under their axis; below, the pool of each node."""

    noun = "cache"
    title = "Cache"
    keys = (AS_TABLE, NEXT_MARK, LAST_MARK)
    views = ("hit rate", "evictions", "tiers")
    url = "/cache"

    def __init__(self) -> None:
        super().__init__()
        self._figure = HeatmapView(max_rows=_ROWS)
        self._events = LinesView()
        self._second = HeatmapView(max_rows=_ROWS)
        self._rows = RowsView()
        self._below = LinesView()
        self._marks: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        """Figure, its events, then whatever has room."""
        yield self._figure
        yield self._events
        yield self._second
        yield self._rows
        yield self._below

    def rows_view(self) -> RowsView | None:
        """The table of tiers has a cursor of its own."""
        return self._rows if self.view == "tiers" else None

    def right(self) -> str:
        """The window."""
        return "15 min"

    def opens(self) -> tuple[str, Location | None]:
        """Enter on a cell opens its node."""
        if self.view == "tiers":
            return super().opens()
        chosen = self._figure.cell
        if chosen is None or not chosen[0].opens:
            return "", None
        return "open the node", Location.parse(chosen[0].opens)

    def show_context(self, context: Context) -> None:
        """Draw the view that is chosen."""
        figures = self.view != "tiers"
        self._figure.display = self._events.display = figures
        roomy = context.height >= COMPACT_HEIGHT
        self._second.display = figures and roomy
        self._rows.display = not figures
        self._below.display = figures and roomy
        tiers = cache.tiers(context.snapshot.nodes)
        if not figures:
            self._rows.set_table(self.filtered.apply(tiers), stale=context.stale)
            return
        first, second = self._both(context)
        self._figure.max_rows = max(4, context.height - (24 if roomy else 10))
        self._figure.set_heatmap(first, context.caps, stale=context.stale)
        self._show_events(context, first)
        if roomy:
            self._second.set_active(False)
            self._second.set_heatmap(second, context.caps, stale=context.stale)
            below = table_lines(tiers, context.width - 2, 8)
            head = [line(""), line(toned(" POOL", "strong"))]
            self._below.show([*head, *(line(" ", *row) for row in below)], stale=context.stale)

    def _both(self, context: Context) -> tuple[Heatmap, Heatmap]:
        pair = [
            hit_rate_of(context, _columns(self._figure, context), self._previous("hit_rate")),
            evictions_of(context, _columns(self._figure, context), self._previous("evictions")),
        ]
        if self.view == "evictions":
            pair.reverse()
        return pair[0], pair[1]

    def _previous(self, name: str) -> Heatmap | None:
        for view in (self._figure, self._second):
            if view.heatmap is not None and view.heatmap.name == name:
                return view.heatmap
        return None

    def _show_events(self, context: Context, heatmap: Heatmap) -> None:
        self._marks = events_of(heatmap.columns, context.snapshot)
        if heatmap.empty:
            self._events.show([])
            return
        labels = label_width(heatmap)
        num = min(len(heatmap.columns), time_columns(context.width, heatmap))
        letters = "".join(self._marks.get(c.key, " ") for c in heatmap.columns[-num:])
        words = "  P policy J joined L lost"
        if labels + num + len(words) > context.width:
            words = ""  # ? says it too
        self._events.show(
            [line(toned(" events".ljust(labels), "muted"), letters, toned(words, "muted"))]
        )

    def do(self, action: str) -> bool:
        """Cells are walked like rows and columns."""
        if super().do(action):
            return True
        if self.view == "tiers":
            return False
        match action:
            case "next_mark" | "previous_mark":
                return self._go_to_mark(forward=action == "next_mark")
            case "as_table":
                self._figure.toggle_table()
            case _:
                return move_cells(self._figure, action)
        return True

    def _go_to_mark(self, *, forward: bool) -> bool:
        chosen = self._figure.cell
        if self._figure.heatmap is None or chosen is None:
            return False
        keys = [column.key for column in self._figure.heatmap.columns]
        at = keys.index(chosen[1].key)
        places = [i for i, key in enumerate(keys) if key in self._marks]
        wanted = [i for i in places if (i > at if forward else i < at)]
        if not wanted:
            return False
        self._figure.move(0, (wanted[0] if forward else wanted[-1]) - at)
        return True


def _columns(view: HeatmapView, context: Context) -> int:
    if view.heatmap is None:
        return max(10, context.width - 26)
    return time_columns(context.width, view.heatmap)


def move_cells(view: HeatmapView, action: str) -> bool:
    """The keys of the group move, on a figure."""
    steps = {
        "down": (1, 0),
        "up": (-1, 0),
        "left": (0, -1),
        "right": (0, 1),
        "half_down": (6, 0),
        "half_up": (-6, 0),
        "page_down": (12, 0),
        "page_up": (-12, 0),
    }
    if action in ("top", "bottom"):
        view.move_to_end(last=action == "bottom")
        return True
    if action not in steps:
        return False
    view.move(*steps[action])
    return True
