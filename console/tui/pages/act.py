"""Before an operator's action on the cache or on a job, and before the doctor runs."""

from __future__ import annotations

from textual.message import Message

from console.tui.context import Context
from console.tui.lines import Line, line, toned
from console.tui.pages.panel import PanelPage, wrapped
from console.viewmodel.acts import Act
from console.viewmodel.table import clean


class ActPage(PanelPage):
    """What it will do and whether it can be undone; what cannot is agreed to by typing its name."""

    noun = "act"
    title = "Cache"

    class Agreed(Message):
        """The operator said yes."""

        def __init__(self, act: Act, reason: str) -> None:
            super().__init__()
            self.act = act
            self.reason = reason

    def __init__(self) -> None:
        super().__init__()
        self.act: Act | None = None

    @property
    def footer_text(self) -> str:  # type: ignore[override]  # follows what is asked
        """How to agree."""
        if self.typed:
            return "type the name, Enter   y agrees then   Tab next   Esc cancel"
        leaves = "cancel" if self.leave == super().leave else "lets it run"
        return f"y agrees   Tab next   Enter presses what is in focus   Esc {leaves}"

    @property
    def leave(self) -> str:
        """Of a panel that asks whether to cancel, `Cancel` would say both."""
        return self.act.leave if self.act else super().leave

    @property
    def typed(self) -> str:
        """The target's name, where the action cannot be undone."""
        return self.act.typed if self.act else ""

    @property
    def is_set(self) -> bool:
        """An act was given."""
        return self.act is not None

    def path(self) -> list[str]:
        """`Cache > purge`."""
        if self.act is None:
            return ["Cache"]
        if self.act.kind == "doctor":
            return ["Doctor", "run"]
        if self.act.kind == "cancel_request":
            return ["Requests", "in flight", "cancel"]
        return ["Jobs" if self.act.job_id else "Cache", self.act.kind]

    def ask(self, act: Act, now: float) -> None:
        """Start over with an act."""
        self.act = act
        self.reset(now)

    def body(self, context: Context) -> list[Line]:
        """What will happen."""
        if self.act is None:
            return []
        return [
            line(toned(f" {clean(self.act.title)}", "strong")),
            line(""),
            *wrapped(self.act.lines, context.width),
            line(""),
        ]

    def button(self) -> str:
        """`Purge acme`."""
        return clean(self.act.button) if self.act else ""

    def doing(self) -> str:
        """The control plane is being asked."""
        return "Asking the control plane."

    def agreed(self, reason: str) -> None:
        """The app sends it."""
        if self.act is not None:
            self.post_message(self.Agreed(self.act, reason))
