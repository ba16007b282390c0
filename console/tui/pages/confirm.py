"""Before a policy is put into effect."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from console.tui.context import Context
from console.tui.lines import Line, line, toned
from console.tui.pages.panel import PanelPage, wrapped
from console.viewmodel import policies
from console.viewmodel.policies import Checked, Draft


@dataclass(frozen=True, slots=True)
class Change:
    """A draft that is ready to be put."""

    draft: Draft
    checked: Checked


class ConfirmPage(PanelPage):
    """The differences, and what they will do."""

    noun = "confirm"
    title = "Policies"
    footer_text = "y put into effect   Tab next   Enter presses what is in focus   Esc cancel"

    class Agreed(Message):
        """The operator said yes."""

        def __init__(self, change: Change, reason: str) -> None:
            super().__init__()
            self.change = change
            self.reason = reason

    def __init__(self) -> None:
        super().__init__()
        self.change: Change | None = None

    @property
    def is_set(self) -> bool:
        """A change was given."""
        return self.change is not None

    def path(self) -> list[str]:
        """`Policies > slo/default > draft > put`."""
        return [self.title, self.change.draft.name if self.change else "", "draft", "put"]

    def ask(self, change: Change, now: float) -> None:
        """Start over with a change."""
        self.change = change
        self.reset(now)

    def body(self, context: Context) -> list[Line]:
        """Differences, then consequences with the numbers of now."""
        if self.change is None:
            return []
        draft, checked = self.change.draft, self.change.checked
        head = f" PUT {draft.name}, on top of r{draft.base.revision}"
        return [
            line(toned(head, "strong")),
            line(""),
            *(line("   ", text) for text in policies.diff(draft, checked)),
            line(""),
            *wrapped(
                policies.consequences(draft, checked, context.snapshot.overview), context.width
            ),
            line(""),
        ]

    def button(self) -> str:
        """`Put slo/default`."""
        return f"Put {self.change.draft.name}" if self.change else ""

    def doing(self) -> str:
        """Gateways are being told."""
        return "Putting it into effect."

    def agreed(self, reason: str) -> None:
        """The app writes it."""
        if self.change is not None:
            self.post_message(self.Agreed(self.change, reason))
