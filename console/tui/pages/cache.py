"""Cache: hit rate, evictions, tiers, tenants, what-if, pins."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult

from console.tui.context import Context
from console.tui.figure import label_width, time_columns
from console.tui.frame import COMPACT_HEIGHT
from console.tui.keys import (
    AS_TABLE,
    EDIT_CACHE,
    LAST_MARK,
    NEXT_MARK,
    PIN,
    PREFETCH,
    PURGE,
    Key,
)
from console.tui.lines import Line, LinesView, line, toned
from console.tui.pages.base import Location, Page
from console.tui.pages.overview import evictions_of, hit_rate_of
from console.tui.pool_lines import HEALTH, curve_lines, pool_head_lines, titled
from console.tui.widgets.heatmap import HeatmapView
from console.tui.widgets.rows import RowsView
from console.viewmodel import acts, pins, pool
from console.viewmodel.acts import Act
from console.viewmodel.heatmap import Heatmap
from console.viewmodel.marks import events_of
from console.viewmodel.table import Table

_ROWS = 12
_CURVE_ROWS = 16
_FIGURE_LINES = 6  # title, legend, signs, axis, read-out, events
_SECOND_LINES = 4
_TABLE_LINES = 5
_FIGURE_VIEWS = ("hit rate", "evictions")
_VIEW_KEYS: dict[str, tuple[Key, ...]] = {
    "hit rate": (AS_TABLE, NEXT_MARK, LAST_MARK),
    "evictions": (AS_TABLE, NEXT_MARK, LAST_MARK),
    "tiers": (PURGE,),
    "tenants": (PIN, PREFETCH, PURGE),
    "what-if": (),
    "pins": (PIN,),
}
_CHOOSE = "Nothing is at the cursor here."


class CachePage(Page):
    """Above all views the policy, the write queue and what runs; below, the view that is chosen."""

    noun = "cache"
    title = "Cache"
    views = tuple(_VIEW_KEYS)
    url = "/cache"
    needs = frozenset({"pool"})

    def __init__(self) -> None:
        super().__init__()
        self._head = LinesView()
        self._figure = HeatmapView(max_rows=_ROWS)
        self._events = LinesView()
        self._second = HeatmapView(max_rows=_ROWS)
        self._rows = RowsView()
        self._below = LinesView()
        self._marks: dict[str, str] = {}
        self._shown: Context | None = None

    @property
    def keys(self) -> Sequence[Key]:  # type: ignore[override]  # what works depends on the view
        """Those of the view."""
        return (EDIT_CACHE, *_VIEW_KEYS[self.view])

    @property
    def wanted(self) -> frozenset[str]:
        """Pins are asked of the nodes: only while they are shown."""
        return self.needs | {"pins"} if self.view == "pins" else self.needs

    def compose(self) -> ComposeResult:
        """Head, figure and its events, then whatever has room."""
        yield self._head
        yield self._figure
        yield self._events
        yield self._second
        yield self._rows
        yield self._below

    def open_view(self, name: str) -> None:
        """`hit_rate`, `tiers`: the last part of a console path."""
        wanted = name.replace("_", " ").replace("what if", "what-if")
        if wanted in self.views:
            self.view_index = self.views.index(wanted)

    def rows_view(self) -> RowsView | None:
        """Views of rows have a cursor of their own."""
        return self._rows if self.view in ("tiers", "tenants", "pins") else None

    def right(self) -> str:
        """The window."""
        return "15 min, rates 1 min" if self.view == "tiers" else "15 min"

    def opens(self) -> tuple[str, Location | None]:
        """Enter on a cell or a tier opens its node."""
        if self.rows_view() is not None:
            return super().opens()
        chosen = self._figure.cell
        if self.view == "what-if" or chosen is None or not chosen[0].opens:
            return "", None
        return "open the node", Location.parse(chosen[0].opens)

    def show_context(self, context: Context) -> None:
        """Draw the view that is chosen."""
        self._shown = context
        head = pool_head_lines(context)
        self._head.show(head, stale=context.stale)
        figures = self.view in _FIGURE_VIEWS
        rows = self.rows_view() is not None
        self._figure.display = self._events.display = figures
        self._second.display = False
        self._rows.display = rows
        if figures:
            self._show_figures(context, len(head))
        elif rows:
            self._show_rows(context, len(head))
        else:
            room = context.height - 4 - len(head)
            self._below.show(curve_lines(context, context.width, room), stale=context.stale)

    def _show_figures(self, context: Context, above: int) -> None:
        """The first figure has room first; then the table below, then the second figure; of the hit
        rate the other way round."""
        first, second = self._both(context)
        body = context.height - 4 - above
        roomy = context.height >= COMPACT_HEIGHT
        table_first = self.view == "evictions"
        kept = _TABLE_LINES if table_first else 0
        below = _TABLE_LINES if table_first or roomy else 0
        rows = min(len(first.rows), max(4, body - _FIGURE_LINES - below))
        left = body - rows - _FIGURE_LINES
        needs = len(second.rows) + _SECOND_LINES
        self._second.display = roomy and left - kept >= needs
        left -= needs if self._second.display else 0
        self._figure.max_rows = rows
        self._figure.set_heatmap(first, context.caps, stale=context.stale)
        self._show_events(context, first)
        if self._second.display:
            self._second.set_active(False)
            self._second.max_rows = len(second.rows)
            self._second.set_heatmap(second, context.caps, stale=context.stale)
        self._below.show(self._below_figures(context, left - 3), stale=context.stale)

    def _below_figures(self, context: Context, limit: int) -> list[Line]:
        report, width = context.snapshot.pool, context.width
        table = pool.health(report) if self.view == "evictions" else pool.tiers(report)
        worst = pool.worst_first(table) if len(table.rows) > limit else table
        return titled(HEALTH if self.view == "evictions" else "TIERS", worst, width, limit)

    def _show_rows(self, context: Context, above: int) -> None:
        table, below = self._row_view(context)
        room = context.height - 4 - above
        extra = below if context.height >= COMPACT_HEIGHT else []
        wanted = 1 + max(1, len(table.rows))
        left = room - wanted - len(extra) - 1
        if left >= _CURVE_ROWS and context.snapshot.pool is not None and self.view != "pins":
            extra = [
                *extra,
                line(""),
                *curve_lines(context, context.width, left, with_health=False),
            ]
        self._rows.styles.height = max(3, min(wanted, room - len(extra))) if extra else "1fr"
        self._rows.set_table(self.filtered.apply(table), stale=context.stale)
        self._below.show(extra, stale=context.stale)

    def _row_view(self, context: Context) -> tuple[Table, list[Line]]:
        report, width = context.snapshot.pool, context.width
        if self.view == "pins":
            found = context.snapshot.pins
            return pins.pins(found, now=context.server_now, tz=context.tz), []
        if self.view == "tenants":
            return pool.groups(report), titled("NAMESPACES", pool.namespaces(report), width, 10)
        return pool.tiers(report), titled(
            "HEALTH OF EVICTION, 15 min", pool.health(report), width, 12
        )

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
        if self.view not in _FIGURE_VIEWS:
            return False
        match action:
            case "next_mark" | "previous_mark":
                return self._go_to_mark(forward=action == "next_mark")
            case "as_table":
                self._figure.toggle_table()
            case _:
                return move_cells(self._figure, action)
        return True

    def act_on(self, action: str) -> Act | str:
        """What an acting key would do to the row at the cursor, or why nothing."""
        snapshot = self._shown.snapshot if self._shown else None
        row = self.selected()
        if snapshot is None or row is None:
            return _CHOOSE
        if self.view == "pins":
            items = snapshot.pins.items if snapshot.pins else []
            return acts.unpin([p for p in items if p.name == row.facts.get("name")]) or _CHOOSE
        if snapshot.pool is None:
            return pool.NOT_YET
        if self.view == "tiers":
            return acts.purge_node(str(row.facts.get("node")), snapshot.pool) or _CHOOSE
        return acts.of_group(action, row.key, snapshot.pool)

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
