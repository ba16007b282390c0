"""The console in a real terminal: a tmux server of our own, driven by keys and read as text."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

WAIT_SECONDS = 60.0


def wait(check: Callable[[], object], what: str | Callable[[], str]) -> None:
    """Poll: this machine may be busy with other tests."""
    end = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.1)


class Terminal:
    """A tmux server of our own with one pane."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._base = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        # A size in the environment, as parallel test processes have it, would stand for the pane's.
        left = ("PERILUNE", "TMUX", "NO_COLOR", "COLUMNS", "LINES")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(left)}
        self._environ = {**clean, "LC_ALL": "C.UTF-8", **environ}
        self._tmux("new-session", "-d", "-x", "80", "-y", "24", "bash --norc --noprofile")

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            [*self._base, *words], env=self._environ, capture_output=True, text=True, check=True, timeout=30
        )  # fmt: skip
        return done.stdout

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def send(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def size(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def flags(self) -> str:
        """Mouse asked for, alternate screen, cursor shown."""
        return self._tmux("display", "-p", "#{mouse_any_flag}#{alternate_on}#{cursor_flag}").strip()

    def child(self) -> psutil.Process:
        shell = psutil.Process(int(self._tmux("display", "-p", "#{pane_pid}")))
        wait(shell.children, "nothing runs in the pane")
        return shell.children()[0]

    def until(self, *wanted: str) -> str:
        wait(
            lambda: all(text in self.text() for text in wanted),
            lambda: f"waited for {wanted}:\n{self.text()}",
        )
        return self.text()

    def close(self) -> None:
        self._tmux("kill-server")
