"""What every screen is: a widget that draws a context and knows its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.widget import Widget

from console.tui.context import Context, Filtered
from console.tui.keys import Key
from console.tui.widgets.rows import RowsView
from console.viewmodel.acts import Act
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Row


@dataclass(frozen=True, slots=True)
class Location:
    """Where one is: `Location("request", "7f3a...")`, with the filter in force."""

    noun: str
    name: str = ""
    filter: str = ""

    @classmethod
    def parse(cls, path: str) -> Location:
        """`node/n1`, `cache`, `policy/slo/default`, `requests/slow?ttft>2s` with a filter."""
        path, _, wanted = path.partition("?")
        noun, _, name = path.partition("/")
        if noun in ("rejections", "in-flight"):
            return cls("requests", noun.replace("-", "_"))
        if noun == "kvwait" or path == "requests/slow":
            return cls("requests", "live", wanted)
        if noun == "transfers":
            return cls("pair", name) if "/" in name else cls(noun)
        return cls(noun, name)


class Page(Widget, can_focus=False):
    """`title` is the crumb; `fields` what its filter knows; `views` what `[ ]` walk through."""

    DEFAULT_CSS = """
    Page { height: 1fr; width: 1fr; layout: vertical; }
    """

    noun = ""
    title = ""
    keys: Sequence[Key] = ()
    fields: dict[str, FieldKind] = {}
    views: Sequence[str] = ()
    url = "/"
    needs: frozenset[str] = frozenset()  # what the feed reads only for this screen
    footer_text = ""  # instead of the usual footer, where the usual keys do not work

    def __init__(self) -> None:
        super().__init__()
        self.filtered = Filtered()
        self.name_shown = ""
        self.view_index = 0

    @property
    def view(self) -> str:
        """The view shown."""
        return self.views[self.view_index] if self.views else ""

    def offered(self) -> Sequence[Key]:
        """Those of `keys` that the footer offers now: one that needs a row is not, without one."""
        no_row = self.rows_view() is not None and self.selected() is None
        return [key for key in self.keys if not (key.on_row and no_row)]

    @property
    def wanted(self) -> frozenset[str]:
        """What of `needs` the view shown needs."""
        return self.needs

    def act_on(self, action: str) -> Act | str:
        """What an acting key would do to the row at the cursor, or a sentence why nothing."""
        return "There is nothing to act on here."

    def show_context(self, context: Context) -> None:
        """Draw this instant."""
        raise NotImplementedError

    def path(self) -> list[str]:
        """Crumbs of this screen."""
        parts = [self.title]
        if self.view:
            parts.append(self.view)
        if self.name_shown:
            parts.append(self.name_shown)
        return parts

    def right(self) -> str:
        """Filter with its count, and the window, for the crumbs' right end."""
        source = self.filtered.filter.source
        return f"/{source} {self.filtered.shown} of {self.filtered.total}" if source else ""

    def rows_view(self) -> RowsView | None:
        """The table with the cursor, if there is one."""
        return None

    def selected(self) -> Row | None:
        """The row at the cursor."""
        view = self.rows_view()
        return view.cursor if view else None

    def opens(self) -> tuple[str, Location | None]:
        """What Enter does, in a word, and where it leads."""
        row = self.selected()
        if row is None or not row.opens:
            return "", None
        return "open", Location.parse(row.opens)

    def do(self, action: str) -> bool:
        """Perform a key's action; False when it means nothing here."""
        if action in ("next_view", "previous_view") and self.views:
            step = 1 if action == "next_view" else -1
            self.view_index = (self.view_index + step) % len(self.views)
            return True
        view = self.rows_view()
        return view is not None and move_rows(view, action)


def move_rows(view: RowsView, action: str) -> bool:
    """The keys of the group move, on a table."""
    match action:
        case "down":
            view.move(1)
        case "up":
            view.move(-1)
        case "top":
            view.move_to_end(last=False)
        case "bottom":
            view.move_to_end(last=True)
        case "half_down":
            view.move_page(0.5)
        case "half_up":
            view.move_page(-0.5)
        case "page_down":
            view.move_page(1)
        case "page_up":
            view.move_page(-1)
        case "follow":
            view.toggle_follow()
        case _:
            return False
    return True
