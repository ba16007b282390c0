"""Every key that works on the screen one came from."""

from __future__ import annotations

from collections.abc import Sequence

from console.tui.context import Context
from console.tui.details import field_lines
from console.tui.frame import help_lines
from console.tui.keys import Key
from console.tui.lines import Line, line, toned
from console.tui.pages.detail import DetailPage
from console.viewmodel.table import Row, Text
from console.viewmodel.words import HELP


class HelpPage(DetailPage):
    """The list is made from the key table, so it cannot be out of date."""

    def __init__(self) -> None:
        super().__init__("request")
        self.noun = "help"
        self.title = "Help"
        self._keys: Sequence[Key] = ()
        self._twin = ""

    def of(self, keys: Sequence[Key], twin: str) -> None:
        """Which screen's keys to show."""
        self._keys, self._twin = keys, twin
        self._draw = self._all_lines

    def path(self) -> list[str]:
        """`Help`."""
        return ["Help"]

    def _all_lines(self, context: Context, name: str, width: int) -> list[Line]:
        lines = help_lines(self._keys, self._twin)
        lines.append(line(""))
        lines.append(line(toned(" words", "strong")))
        rows = tuple(Row(word, (Text(f"  {word}"), Text(text, "muted"))) for word, text in HELP)
        return [*lines, *field_lines(rows, width)]
