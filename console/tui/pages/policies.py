"""Policies: the list, one policy with its history, and a draft."""

from __future__ import annotations

from datetime import UTC, tzinfo
from textwrap import wrap

from textual.app import ComposeResult
from textual.containers import Horizontal

from console.tui import details
from console.tui.context import Context
from console.tui.frame import DETAIL_WIDTH, WIDE_WIDTH
from console.tui.keys import COMPARE, EDIT, PUT, REBASE
from console.tui.lines import Line, LinesView, line, table_lines, toned
from console.tui.pages.base import Location, Page
from console.tui.widgets.rows import RowsView
from console.viewmodel import numbers, policies, policy_history
from console.viewmodel.policies import Checked, Draft, FieldView
from console.viewmodel.table import Column, Row, Table, Text, cell
from controlplane.policies.schemas import PolicyRevision


class PoliciesPage(Page):
    """What is in force, since when, by whom and why."""

    DEFAULT_CSS = f"""
    PoliciesPage #detail {{ width: {DETAIL_WIDTH}; height: 1fr; padding-left: 1; }}
    """
    noun = "policies"
    title = "Policies"
    keys = (EDIT,)
    fields = policies.FIELDS
    url = "/policies"

    def __init__(self) -> None:
        super().__init__()
        self._rows = RowsView()
        self._detail = LinesView("detail")
        self._shown: Context | None = None

    def compose(self) -> ComposeResult:
        """The list; on wide screens the spec beside it."""
        with Horizontal():
            yield self._rows
            yield self._detail

    def rows_view(self) -> RowsView:
        """The list."""
        return self._rows

    def show_context(self, context: Context) -> None:
        """Draw the active revisions."""
        self._shown = context
        table = policies.policies(context.snapshot.policies, now=context.server_now, tz=context.tz)
        if context.loading:
            table = Table(table.columns, (), context.loading)
        self._rows.set_table(self.filtered.apply(table), stale=context.stale)
        self.show_detail()

    def show_detail(self) -> None:
        """The pane that follows the cursor on wide screens."""
        context, row = self._shown, self._rows.cursor
        wide = context is not None and context.width >= WIDE_WIDTH
        self._detail.display = wide
        if context is None or row is None or not wide:
            self._detail.show([])
            return
        self._detail.show(details.policy_lines(context, row.key, DETAIL_WIDTH - 1))

    def on_rows_view_moved(self) -> None:
        """Keep the pane with the cursor."""
        self.show_detail()


FRAME_LINES = 6
"""Header, crumbs, footer and a page's own two: what its fields cannot have."""
HISTORY_LINES = 6
"""Of a policy's page: the newest revisions, and the one at the cursor in full."""


class PolicyPage(Page):
    """One policy: its spec, then its revisions."""

    DEFAULT_CSS = """
    PolicyPage RowsView { height: 1fr; min-height: 4; }
    """
    noun = "policy"
    title = "Policies"
    keys = (EDIT,)

    def __init__(self) -> None:
        super().__init__()
        self._spec = LinesView()
        self._history = RowsView()
        self._below = LinesView()
        self._width = 80
        self.revisions: list[PolicyRevision] = []

    @property
    def url(self) -> str:  # type: ignore[override]  # follows what is shown
        """The page of this policy."""
        return f"/policies/{self.name_shown}"

    def compose(self) -> ComposeResult:
        """Spec above, history below; under it the revision at the cursor in full."""
        yield self._spec
        yield self._history
        yield self._below

    def rows_view(self) -> RowsView:
        """The history."""
        return self._history

    def opens(self) -> tuple[str, Location | None]:
        """A revision has no screen of its own."""
        return "", None

    def show_context(self, context: Context) -> None:
        """Draw the active spec and the revisions read so far."""
        lines = details.policy_lines(context, self.name_shown, context.width)
        room = context.height - FRAME_LINES - HISTORY_LINES
        if len(lines) > room:
            way = "E lists them" if context.can_act else "a taller window lists them"
            more = f" {len(lines) - room + 1} more fields: {way}"
            lines = [*lines[: room - 1], line(toned(more, "muted"))]
        self._spec.show([*lines, line("")], stale=context.stale)
        own = [r for r in self.revisions if f"{r.kind}/{r.scope}" == self.name_shown]
        table = policy_history.history(own, now=context.server_now, tz=context.tz)
        self._history.set_table(table)
        self._width = context.width
        self.show_detail()

    def show_detail(self) -> None:
        """The read-out of the revision at the cursor."""
        row = self._history.cursor
        texts = policy_history.in_full(row) if row else ()
        lines = [part for text in texts for part in details.wrapped(" ", text, self._width)]
        self._below.show([line(""), *lines] if lines else [])

    def on_rows_view_moved(self) -> None:
        """Keep the read-out with the cursor."""
        self.show_detail()


DRAFT_COLUMNS = (
    Column("mark", "", 1),
    Column("field", "FIELD", 20),
    Column("value", "VALUE", 14, "right"),
    Column("was", "ACTIVE", 12, "right"),
    Column("allowed", "ALLOWED", 24, grow=True),
)


class DraftPage(Page):
    """A draft, kept here until it is put or dropped. Errors stand on the line they concern."""

    DEFAULT_CSS = """
    DraftPage RowsView { height: auto; }
    """
    noun = "draft"
    title = "Policies"
    keys = (PUT, COMPARE, REBASE)

    def __init__(self) -> None:
        super().__init__()
        self._head = LinesView()
        self._rows = RowsView()
        self._below = LinesView()
        self._tz: tzinfo = UTC
        self.draft: Draft | None = None
        self.newer: PolicyRevision | None = None
        self.note = ""
        self.comparing = False

    @property
    def url(self) -> str:  # type: ignore[override]  # follows what is shown
        """The page of the policy."""
        return f"/policies/{self.name_shown}"

    def compose(self) -> ComposeResult:
        """Head, fields, differences."""
        yield self._head
        yield self._rows
        yield self._below

    def path(self) -> list[str]:
        """`Policies > slo/default > draft`."""
        return [self.title, self.name_shown, "draft"]

    def rows_view(self) -> RowsView:
        """The fields."""
        return self._rows

    def checked(self) -> Checked | None:
        """The draft, validated."""
        return policies.check(self.draft) if self.draft else None

    def field(self) -> FieldView | None:
        """The field at the cursor."""
        checked, row = self.checked(), self._rows.cursor
        if checked is None or row is None:
            return None
        return next((view for view in checked.fields if view.name == row.key), None)

    def opens(self) -> tuple[str, Location | None]:
        """Enter edits the field."""
        return "edit the field", None

    def set_field(self, name: str, text: str) -> None:
        """Write a field of the draft."""
        if self.draft is not None:
            self.draft = self.draft.with_value(name, text)

    def show_context(self, context: Context) -> None:
        """Draw fields, then what differs."""
        self._tz = context.tz
        draft, checked = self.draft, self.checked()
        if draft is None or checked is None:
            return
        active = next(
            (p for p in context.snapshot.policies if f"{p.kind}/{p.scope}" == draft.name),
            draft.base,
        )
        self.newer = active if active.revision > draft.base.revision else None
        since = numbers.stamp(draft.base.created_at, context.server_now, context.tz)
        title = f" {draft.name}   draft on r{draft.base.revision}, active since {since}"
        self._head.show([line(toned(title, "strong")), line("")])
        rows = tuple(_field_row(view) for view in checked.fields)
        self._rows.set_table(Table(DRAFT_COLUMNS, rows))
        below = self._below_lines(draft, checked, context.width)
        room = context.height - FRAME_LINES - len(below)
        self._rows.styles.height = max(4, min(len(rows) + 1, room))
        self._below.show(below)

    def _below_lines(self, draft: Draft, checked: Checked, width: int) -> list[Line]:
        lines = [line("")]
        if self.newer is not None:
            lines.extend(_warning(policies.conflict(draft, self.newer, self._tz), width))
        elif self.note:
            lines.extend(_warning(self.note, width))
        lines.extend(line("   ", text) for text in policies.diff(draft, checked))
        if self.comparing and self.newer is not None:
            lines.append(line(""))
            lines.append(line(toned(f" COMPARED WITH r{self.newer.revision}", "strong")))
            lines.extend(table_lines(_compare_table(checked, draft, self.newer), width))
        if checked.spec is None:
            lines.append(line(toned(" Put is not possible while a field is wrong.", "warn")))
        return lines


def _warning(text: str, width: int) -> list[Line]:
    return [line(toned(f" {part}", "warn")) for part in wrap(text, max(20, width - 2))]


def _field_row(view: FieldView) -> Row:
    """An error takes the place of what is allowed, which it repeats."""
    tone = cell(view.error, "critical") if view.error else Text(view.allowed, "muted")
    mark = "!" if view.error else "*" if view.changed else ""
    cells = (
        Text(mark, "critical" if view.error else "accent"),
        Text(view.name),
        cell(view.text, "critical" if view.error else "strong" if view.changed else "plain"),
        cell(view.was, "muted"),
        tone,
    )
    return Row(view.name, cells)


_COMPARE_COLUMNS = (
    Column("field", "FIELD", 28),
    Column("base", "BASE", 12, "right"),
    Column("newer", "NEWER", 12, "right"),
    Column("draft", "DRAFT", 12, "right"),
)


def _compare_table(checked: Checked, draft: Draft, newer: PolicyRevision) -> Table:
    texts = policies.texts_of(newer)
    rows = tuple(
        Row(
            v.name,
            (Text(v.name), cell(v.was), cell(texts.get(v.name, numbers.UNKNOWN)), cell(v.text)),
        )
        for v in checked.fields
        if v.changed or texts.get(v.name, v.was) != v.was
    )
    return Table(
        _COMPARE_COLUMNS, rows, f"r{newer.revision} says what r{draft.base.revision} said."
    )
