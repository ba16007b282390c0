"""The panel before anything changes: what will happen, a reason, Cancel in focus."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from textual import events
from textual.app import ComposeResult
from textual.message import Message

from console.tui.context import Context
from console.tui.lines import REVERSE, Line, LinesView, Span, line, toned
from console.tui.pages.base import Page
from console.tui.prompt import LineInput
from console.viewmodel import policies
from console.viewmodel.policies import Checked, Draft

HOLD_OFF_SECONDS = 0.3
"""A key that is still held down from before does not agree."""


@dataclass(frozen=True, slots=True)
class Change:
    """A draft that is ready to be put."""

    draft: Draft
    checked: Checked


class ConfirmPage(Page):
    """`y`, or Tab and Enter, agrees. Esc cancels."""

    DEFAULT_CSS = """
    ConfirmPage Input { height: 1; border: none; padding: 0 1; width: 1fr; background: ansi_default; }
    ConfirmPage Input:focus { border: none; text-style: none; }
    """
    noun = "confirm"
    title = "Policies"
    footer_text = "y put into effect   Tab next   Enter presses what is in focus   Esc cancel"

    class Agreed(Message):
        """The operator said yes."""

        def __init__(self, change: Change, reason: str) -> None:
            super().__init__()
            self.change = change
            self.reason = reason

    class Cancelled(Message):
        """The operator said no."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Change | None = None
        self.busy = False
        self._text = LinesView()
        self._reason = LineInput(
            placeholder="reason (goes to the audit row; Tab reaches it)",
            max_length=500,
            select_on_focus=False,
        )
        self._buttons = LinesView()
        self._focus = 0
        self._opened_at = 0.0

    def compose(self) -> ComposeResult:
        """What will happen, why, and the two ways on."""
        yield self._text
        yield self._reason
        yield self._buttons

    def path(self) -> list[str]:
        """`Policies > slo/default > put`."""
        return [self.title, self.change.draft.name if self.change else "", "put"]

    def ask(self, change: Change, now: float) -> None:
        """Start over with a change."""
        self.change, self.busy, self._focus, self._opened_at = change, False, 0, now
        self._reason.value = ""

    def show_context(self, context: Context) -> None:
        """Draw the panel with the numbers of now."""
        if self.change is None:
            return
        draft, checked = self.change.draft, self.change.checked
        lines = [
            line(toned(f" PUT {draft.name}, on top of r{draft.base.revision}", "strong")),
            line(""),
        ]
        lines.extend(line("   ", text) for text in policies.diff(draft, checked))
        lines.append(line(""))
        for text in policies.consequences(draft, checked, context.snapshot.overview):
            parts = wrap(text.text, max(20, context.width - 5), subsequent_indent=" " * 6)
            lines.extend(line("   ", toned(part, text.tone)) for part in parts)
        lines.append(line(""))
        self._text.show(lines)
        self._show_buttons()

    def _show_buttons(self) -> None:
        name = self.change.draft.name if self.change else ""
        words = ("[ Cancel ]", f"[ y  Put {name} ]")
        spans: list[Span] = [Span("   ")]
        for place, text in enumerate(words):
            spans.append(Span(text, REVERSE) if place == self._focus else Span(text))
            spans.append(Span("   "))
        state: Line = line(toned("   Putting it into effect.", "muted")) if self.busy else line("")
        self._buttons.show([line(""), tuple(spans), state])

    async def press(self, event: events.Key, now: float) -> None:
        """A key while this panel is open."""
        key = event.key
        if self._focus == 2 and key not in ("tab", "shift+tab", "escape"):
            if await self._reason.take(event):
                self._move(-1)
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
            case "enter" if self._focus == 0:
                self.post_message(self.Cancelled())
            case "enter":
                self._agree(now)
            case _:
                return

    def _move(self, step: int) -> None:
        """Cancel, agree, reason, and around."""
        self._focus = (self._focus + step) % 3
        if self._focus == 2:
            self._reason.focus()
        else:
            self.screen.set_focus(None)
        self._show_buttons()

    def _agree(self, now: float) -> None:
        if self.busy or self.change is None or now - self._opened_at < HOLD_OFF_SECONDS:
            return
        self.busy = True
        self._show_buttons()
        self.post_message(self.Agreed(self.change, self._reason.value.strip()))
