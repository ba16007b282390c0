"""What an operator sees while a cluster starts and runs: a live table, or plain lines."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

REFRESHES_PER_SECOND = 2
STYLES = {
    "waiting": "dim",
    "launching": "yellow",
    "loading": "yellow",
    "ready": "green",
    "draining": "cyan",
    "stopping": "yellow",
    "stopped": "dim",
    "failed": "red bold",
}
WORDS = {"launching": "starting"}


@dataclass(frozen=True, slots=True)
class Line:
    """One component at one moment. `seconds` is how long it took to become ready."""

    name: str
    state: str
    seconds: float | None = None
    detail: str = ""

    def words(self) -> str:
        """`ready in 2.1 s`, `failed because ...`, `loading`."""
        word = WORDS.get(self.state, self.state)
        if self.state == "ready" and self.seconds is not None:
            return f"ready in {self.seconds:.1f} s"
        if self.state == "failed":
            return f"failed because {self.detail}"
        return word


class Progress(Protocol):
    """Follows a cluster. Calls come from one thread; none blocks for long."""

    def update(self, line: Line) -> None:
        """A component entered another state."""

    def say(self, text: str) -> None:
        """Something else worth a line."""

    def close(self) -> None:
        """End; may be called twice."""


class PlainProgress:
    """One line a change, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def update(self, line: Line) -> None:
        self.say(f"{line.name}: {line.words()}")

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def close(self) -> None:
        pass


class LiveProgress:
    """A table that redraws itself, for terminals."""

    def __init__(self, console: Console) -> None:
        self._lines: dict[str, Line] = {}
        self._since: dict[str, float] = {}
        self._live = Live(
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            get_renderable=self._render,
            transient=False,
        )
        self._live.start()

    def update(self, line: Line) -> None:
        self._lines[line.name] = line
        self._since[line.name] = time.monotonic()

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for line in self._lines.values():
            words = line.words()
            if line.state in {"launching", "loading", "stopping"}:
                words += f" {time.monotonic() - self._since[line.name]:.0f} s"
            table.add_row(line.name, Text(words, style=STYLES.get(line.state, "")))
        return Group(table)


def make_progress(out: TextIO | None = None) -> Progress:
    """Live where `out` is a terminal."""
    stream = sys.stdout if out is None else out
    if stream.isatty():
        return LiveProgress(Console(file=stream))
    return PlainProgress(stream)
