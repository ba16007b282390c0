"""Overview: is it fine, what is not, what changed, without a key press."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from console.tui.context import Context
from console.tui.frame import COMPACT_HEIGHT, COMPACT_WIDTH, SMALL_HEIGHT, WIDE_WIDTH
from console.tui.lines import Line, LinesView, fit, line, table_lines, toned
from console.tui.pages.base import Page
from console.tui.widgets.heatmap import HeatmapView
from console.tui.widgets.rows import RowsView
from console.viewmodel import cache, requests, transfers
from console.viewmodel.heatmap import Heatmap
from console.viewmodel.overview import OverviewView, ServiceRow, overview
from console.viewmodel.sparkline import sparkline
from console.viewmodel.table import Tone

RIGHT_WIDTH = 86
COMPACT_ROWS = ("requests", "rejected", "ttft", "tbt", "kv_wait", "slo")
SMALL_ROWS = ("requests", "rejected", "ttft", "slo")
"""In the smallest windows: what is wrong has to be seen beside them."""


class OverviewPage(Page):
    """Service, roles, what needs attention, what changed; figures at the right when wide."""

    DEFAULT_CSS = """
    OverviewPage #right { width: 86; height: 1fr; padding-left: 1; }
    OverviewPage #left { width: 1fr; height: 1fr; }
    OverviewPage RowsView { height: 2; }
    """
    noun = "overview"
    title = "Overview"
    url = "/"

    def __init__(self) -> None:
        super().__init__()
        self._service = LinesView()
        self._attention = RowsView()
        self._changes = LinesView()
        self._matrix = HeatmapView(max_rows=8)
        self._hit = HeatmapView(max_rows=12)
        self._evictions = HeatmapView(max_rows=len(cache.EVICTION_REASONS))
        self._window = ""

    def compose(self) -> ComposeResult:
        """Left the lines, right the figures."""
        with Horizontal():
            with Vertical(id="left"):
                yield self._service
                yield self._attention
                yield self._changes
            with Vertical(id="right"):
                yield self._matrix
                yield self._hit
                yield self._evictions

    def rows_view(self) -> RowsView:
        """What needs attention."""
        return self._attention

    def right(self) -> str:
        """The window of every rate here."""
        return self._window

    def show_context(self, context: Context) -> None:
        """Fit the sections to the height; what changed takes what is left."""
        view = overview(context.snapshot, context.history, now=context.server_now, tz=context.tz)
        self._window = view.window
        wide = context.width >= WIDE_WIDTH
        self.query_one("#right").display = wide
        width = context.width - (RIGHT_WIDTH if wide else 0)
        if context.loading:
            self._service.show([line(""), line(toned(f" {context.loading}", "muted"))])
            self._attention.display = False
            self._changes.show([])
            return
        top = service_lines(context, view, width)
        self._service.show(top, stale=context.stale)
        self._attention.display = True
        room = max(2, context.height - 4 - len(top))
        blank = 1 if context.height >= SMALL_HEIGHT else 0
        changes = 2 if room >= 5 else 0
        num = max(2, min(1 + max(1, len(view.attention.rows)), room - changes - blank))
        self._attention.styles.height = num
        self._attention.set_table(view.attention, stale=context.stale)
        left = max(0, room - num - 1)
        below = (
            [line(" ", *row) for row in table_lines(view.changes, width - 2)][:left]
            if left >= 2
            else []
        )
        self._changes.show(
            [line(""), *below, *_last_requests(context, width, left - len(below))],
            stale=context.stale,
        )
        if wide:
            self._show_figures(context)

    def _show_figures(self, context: Context) -> None:
        self._hit.max_rows = max(6, context.height - 42)
        for view in (self._matrix, self._hit, self._evictions):
            view.set_active(False)
        matrix = matrix_of(context, self._matrix.heatmap)
        hit_rate = hit_rate_of(context, 48, self._hit.heatmap)
        self._matrix.set_heatmap(matrix, context.caps, stale=context.stale)
        self._hit.set_heatmap(hit_rate, context.caps, stale=context.stale)
        evictions = evictions_of(context, 48, self._evictions.heatmap)
        self._evictions.set_heatmap(evictions, context.caps, stale=context.stale)


def _last_requests(context: Context, width: int, room: int) -> list[Line]:
    """The newest requests, where a wide screen has rows to spare."""
    if context.width < WIDE_WIDTH or room < 5:
        return []
    newest = context.snapshot.decisions[-(room - 3) :]
    table = requests.requests(newest, now=context.server_now, tz=context.tz)
    head = line(toned(" LAST REQUESTS, newest last", "strong"))
    return [line(""), head, *(line(" ", *row) for row in table_lines(table, width - 2))]


def matrix_of(context: Context, previous: Heatmap | None = None) -> Heatmap:
    """The transfer matrix of an instant."""
    snapshot = context.snapshot
    view = transfers.first_view(snapshot.nodes)
    own = previous is not None and previous.name.startswith("node_") == (view == "nodes")
    return transfers.transfers(
        snapshot.matrix,
        view=view,
        workers=snapshot.workers,
        nodes=snapshot.nodes,
        previous=previous if own else None,
    )


def hit_rate_of(context: Context, num_columns: int, previous: Heatmap | None = None) -> Heatmap:
    """The hit-rate figure of an instant."""
    axis = cache.TimeAxis(context.server_now, context.tz, 900.0, num_columns)
    series = context.history.frame(("prompt_tokens", "hit_tokens"), "*", end=context.server_now)
    snapshot = context.snapshot
    return cache.hit_rate(series, snapshot.nodes, axis, workers=snapshot.workers, previous=previous)


def evictions_of(context: Context, num_columns: int, previous: Heatmap | None = None) -> Heatmap:
    """The eviction figure of an instant."""
    axis = cache.TimeAxis(context.server_now, context.tz, 900.0, num_columns)
    metrics = tuple(metric for metric, _ in cache.EVICTION_REASONS)
    series = context.history.frame(metrics, "node:*", end=context.server_now)
    return cache.evictions(series, axis, previous=previous)


def service_lines(context: Context, view: OverviewView, width: int) -> list[Line]:
    """SERVICE and ROLE, or the steps of set-up while no worker has joined."""
    if view.setup:
        lines = [line(""), line(toned(" The cluster is not complete yet:", "strong"))]
        lines.extend(
            line(
                toned(f"   {'done   ' if done else 'waiting'}  ", "well" if done else "warn"), words
            )
            for words, done in view.setup
        )
        return [*lines, line("")]
    compact = context.width < COMPACT_WIDTH or context.height < COMPACT_HEIGHT
    small = context.height < SMALL_HEIGHT
    kept = SMALL_ROWS if small else COMPACT_ROWS
    rows = [row for row in view.service if not compact or row.key in kept]
    label = " SERVICE" + " " * 13
    head = f"{label}{view.window:>8}   {'last ' + view.window + ', ' + view.step + ' a step':<32}SLO or alarm"
    lines = [line(toned(head[: width - 1], "muted"))]
    lines.extend(_service_line(row, context) for row in rows)
    if view.empty:
        lines.append(line(toned(f" {view.empty}", "muted")))
    roles = [line(" ", *row) for row in table_lines(view.roles, width - 2)]
    if small:
        return [*lines, *roles]
    lines.extend((line(""), *roles))
    if not compact:
        lines.extend(_worst_lines(context))
    return [*lines, line("")]


def _service_line(row: ServiceRow, context: Context) -> Line:
    bars = sparkline(row.values, ceiling=row.ceiling, ascii_only=context.caps.ascii_only)
    tone: Tone = "warn" if row.breach else "plain"
    now = row.now + ("!" if row.breach else " ")
    return line(
        f" {row.label:<18}",
        toned(f"{now:>11}", "warn" if row.breach else "strong"),
        "  ",
        toned(fit(bars, 32), tone),
        toned(row.limit, "muted"),
    )


def _worst_lines(context: Context) -> list[Line]:
    """The worst row of every figure."""
    hit = hit_rate_of(context, 15)
    matrix = matrix_of(context)
    lines = [line(""), line(toned(" WORST OF EACH FIGURE, 15 min (transfers 5 min)", "muted"))]
    lowest = min(
        (row for row in hit.rows if row.key != "all" and row.summary[:1].isdigit()),
        key=lambda row: float(row.summary.rstrip(" %<")),
        default=None,
    )
    text = f"{lowest.label} {lowest.summary} %" if lowest else "no lookups"
    lines.append(line(f" {'local hit rate':<22}", text))
    worst = matrix.worst(1)
    text = worst[0][2].readout if worst else "no KV has travelled"
    lines.append(line(f" {matrix.title.partition(',')[0]:<22}", text))
    return lines
