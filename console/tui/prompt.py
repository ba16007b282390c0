"""The line at the bottom for `/`, `:` and a draft's field, with what helps to fill it above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Input, Static

from console.tui.lines import Line, LinesView, fit, line, reversed_line, toned
from console.tui.palette import Entry

PromptKind = Literal["filter", "palette", "field"]


class LineInput(Input):
    """An input that is fed by its owner, key by key.

    The toolkit runs an input's bindings after the key has bubbled up, but takes characters at once:
    in a burst (a slow link, a paste by hand) Ctrl-u or Backspace would then act on what was typed
    after it.
    """

    async def take(self, event: events.Key) -> bool:
        """Edit by one key; True when it is Enter, which is the owner's."""
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            if binding.action == "submit":
                return True
            await self.run_action(binding.action)
            return False
        if event.is_printable and event.character:
            if self.selection.is_empty:
                self.insert_text_at_cursor(event.character)
            else:
                self.replace(event.character, *self.selection)
        return False


class Prompt(Widget):
    """Hidden until opened."""

    DEFAULT_CSS = """
    Prompt { height: auto; display: none; layout: vertical; }
    Prompt Horizontal { height: 1; }
    Prompt Static { width: auto; }
    Prompt Input { height: 1; border: none; padding: 0; width: 1fr; background: ansi_default; }
    Prompt Input:focus { border: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind: PromptKind = "filter"
        self.input = LineInput(compact=True, max_length=500, select_on_focus=False)
        self.is_open = False
        self.found: list[Entry] = []
        self.chosen = 0
        self.field = ""
        self.before = ""
        self._error = ""
        self._hint = ""
        self._label = Static("")
        self._above = LinesView()

    def compose(self) -> ComposeResult:
        """Candidates or an error, then the line itself."""
        yield self._above
        with Horizontal():
            yield self._label
            yield self.input

    def open(
        self, kind: PromptKind, label: str, value: str, *, hint: str = "", field: str = ""
    ) -> None:
        """Take the keyboard. `before` is what Esc goes back to."""
        self.kind, self.field, self.before, self._hint = kind, field, value, hint
        self._error, self.found, self.chosen = "", [], 0
        self._label.update(label)
        self.input.value = value
        self.input.cursor_position = len(value)
        self.is_open = self.display = True
        self.input.focus()

    def close(self) -> None:
        """Give the keyboard back."""
        self.is_open = self.display = False
        self.screen.set_focus(None)

    def say(self, error: str) -> None:
        """What is wrong with the line as it stands; empty clears it."""
        self._error = error

    def offer(self, found: Sequence[Entry]) -> None:
        """Palette lines."""
        self.found = list(found)
        self.chosen = 0

    def choose(self, step: int) -> None:
        """Walk the candidates."""
        if self.found:
            self.chosen = (self.chosen + step) % len(self.found)

    def show_around(self, width: int) -> None:
        """Draw what stands above the line."""
        if not self.is_open:
            return
        lines: list[Line] = []
        for place, entry in enumerate(self.found if self.kind == "palette" else ()):
            text = f" {fit(entry.words, max(10, width - 14))}{entry.key:>12} "
            row = line(toned(text, "accent" if entry.acts else "plain"))
            lines.append(reversed_line(row) if place == self.chosen else row)
        if self._error:
            lines.append(line(toned(f" {self._error}", "warn")))
        elif self._hint:
            lines.append(line(toned(f" {self._hint}", "muted")))
        self._above.show(lines)
