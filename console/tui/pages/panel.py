"""The panel before anything changes: what will happen, a reason, Cancel in focus."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from textual import events
from textual.app import ComposeResult
from textual.message import Message

from console.tui.context import Context
from console.tui.lines import REVERSE, Line, LinesView, Span, line, toned
from console.tui.pages.base import Page
from console.tui.prompt import LineInput
from console.viewmodel.table import Text

HOLD_OFF_SECONDS = 0.3
"""A key that is still held down from before does not agree."""
CANCEL, AGREE = 0, 1


class PanelPage(Page):
    """`y`, or Tab and Enter, agrees. Esc cancels. Where `typed` is given, it must stand in its field
    first. Subclasses say what it is about, and send their own message in `agreed`."""

    DEFAULT_CSS = """
    PanelPage Input { height: 1; border: none; padding: 0 1; width: 1fr; background: ansi_default; }
    PanelPage Input:focus { border: none; text-style: none; }
    """

    class Cancelled(Message):
        """The operator said no."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = False
        self._text = LinesView()
        self._typed = LineInput(max_length=300, select_on_focus=False)
        self._reason = LineInput(
            placeholder="reason (goes to the audit row; Tab reaches it)",
            max_length=500,
            select_on_focus=False,
        )
        self._buttons = LinesView()
        self._focus = CANCEL
        self._note = ""
        self._opened_at = 0.0

    def compose(self) -> ComposeResult:
        """What will happen, what must be typed, why, and the two ways on."""
        yield self._text
        yield self._typed
        yield self._reason
        yield self._buttons

    @property
    def typed(self) -> str:
        """What must be typed to agree; empty where a key is enough."""
        return ""

    @property
    def leave(self) -> str:
        """The word on the button that does nothing."""
        return "Cancel"

    @property
    def is_set(self) -> bool:
        """There is something to ask."""
        raise NotImplementedError

    def body(self, context: Context) -> list[Line]:
        """What will happen."""
        raise NotImplementedError

    def button(self) -> str:
        """The word on the button that agrees."""
        raise NotImplementedError

    def doing(self) -> str:
        """Said while the answer is waited for."""
        raise NotImplementedError

    def agreed(self, reason: str) -> None:
        """Post the message that acts."""
        raise NotImplementedError

    def reset(self, now: float) -> None:
        """Start over."""
        self.busy, self._note, self._opened_at = False, "", now
        self._reason.value = self._typed.value = ""
        self._typed.placeholder = f"type {self.typed}" if self.typed else ""
        self._typed.display = bool(self.typed)
        self._focus = CANCEL
        if self.typed:  # a name cannot be typed by accident: the field may have the focus
            self._focus = AGREE + 1
            self._typed.focus()

    def show_context(self, context: Context) -> None:
        """Draw the panel with the numbers of now."""
        if self.is_set:
            self._text.show(self.body(context))
            self._show_buttons()

    def _fields(self) -> list[LineInput]:
        return [self._typed, self._reason] if self.typed else [self._reason]

    def _show_buttons(self) -> None:
        words = (f"[ {self.leave} ]", f"[ y  {self.button()} ]")
        spans: list[Span] = [Span("   ")]
        for place, text in enumerate(words):
            spans.append(Span(text, REVERSE) if place == self._focus else Span(text))
            spans.append(Span("   "))
        note = toned(f"   {self._note}", "warn") if self._note else ""
        state: Line = line(toned(f"   {self.doing()}", "muted")) if self.busy else line(note)
        self._buttons.show([line(""), tuple(spans), state])

    async def press(self, event: events.Key, now: float) -> None:
        """A key while this panel is open."""
        key = event.key
        if self._focus > AGREE and key not in ("tab", "shift+tab", "escape"):
            field = self._fields()[self._focus - 2]
            if await field.take(event):
                self._move(AGREE - self._focus)
            return
        match key:
            case "y":
                self._agree(now)
            case "escape":
                self.post_message(self.Cancelled())
            case "tab" | "right" | "down":
                self._move(1)
            case "shift+tab" | "left" | "up":
                self._move(-1)
            case "enter" if self._focus == CANCEL:
                self.post_message(self.Cancelled())
            case "enter":
                self._agree(now)
            case _:
                return

    def _move(self, step: int) -> None:
        """Cancel, agree, the fields, and around."""
        fields = self._fields()
        self._focus = (self._focus + step) % (2 + len(fields))
        if self._focus > AGREE:
            fields[self._focus - 2].focus()
        else:
            self.screen.set_focus(None)
        self._show_buttons()

    def _agree(self, now: float) -> None:
        if self.busy or not self.is_set or now - self._opened_at < HOLD_OFF_SECONDS:
            return
        if self.typed and self._typed.value.strip() != self.typed:
            self._note = f"Type {self.typed} in its field first (Tab reaches it)."
            self._show_buttons()
            return
        self.busy = True
        self._show_buttons()
        self.agreed(self._reason.value.strip())


def wrapped(texts: Sequence[Text], width: int) -> list[Line]:
    """Consequences, each under its own start."""
    lines: list[Line] = []
    for text in texts:
        parts = wrap(text.text, max(20, width - 5), subsequent_indent=" " * 6)
        lines.extend(line("   ", toned(part, text.tone)) for part in parts)
    return lines
