"""The console ends when it is told to, whatever the toolkit waits for by then."""

from __future__ import annotations

import os
import threading
from typing import Final

LATEST_SECONDS: Final = 3.0


def end_at_the_latest(code: int, seconds: float = LATEST_SECONDS) -> None:
    """Leave the process with this code unless it has ended in order before.

    With the terminal gone the toolkit's writer is gone too, and its shutdown waits for that writer.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
