"""What becomes of memory that is no longer used: by the C library, and by Python's collector."""

import ctypes
import gc
from typing import Final

LARGE_BYTES: Final = 128 * 1024
_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_M_ARENA_MAX: Final = -8


def give_large_blocks_back() -> bool:
    """Have blocks of that size and more go back to the system when they are freed.

    Otherwise glibc raises its bound to the largest block that was ever freed, up to 32 MiB, and
    keeps what is smaller: reports and bodies of a busy moment would count for ever. All threads
    share one arena: what the tokenisers' thread makes the loop frees, and each would keep its own
    holes. False: there is another C library.
    """
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)) and bool(
            library.mallopt(_M_ARENA_MAX, 1)
        )
    except (AttributeError, OSError):
        return False


CALM_THRESHOLD: Final = 500_000
YOUNG_SECONDS: Final = 2.0
LONGEST_YOUNG_SECONDS: Final = 32.0
FEW: Final = 2_000
"""Objects in cycles, found at once, that may as well wait for longer; a failing request leaves a
hundred or so."""
FULL_SECONDS: Final = 300.0


def calm_collector() -> None:
    """Leave collections to `Collector`, but for a flood of objects. Requests make next to no cycles,
    yet each allocates a few hundred containers, and its record lives for a second: left alone the
    collector would look through the same records every tenth of a second, and first tokens would
    wait for it for milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(CALM_THRESHOLD, 20, 20)


class Collector:
    """Collects what few cycles there are, on a schedule: the seldomer, the fewer they are. `tick` a
    few times a second; it does nothing in a process whose collector was not calmed."""

    def __init__(self) -> None:
        self._young_at = self._full_at = 0.0
        self._pause = YOUNG_SECONDS

    def tick(self, now: float) -> None:
        if gc.get_threshold()[0] != CALM_THRESHOLD:
            return
        if not self._young_at:
            self._young_at = self._full_at = now
        if now - self._full_at >= FULL_SECONDS:
            self._full_at = self._young_at = now
            gc.collect()
        elif now - self._young_at >= self._pause:
            self._young_at = now
            are_few = gc.collect(1) <= FEW
            self._pause = min(2 * self._pause, LONGEST_YOUNG_SECONDS) if are_few else YOUNG_SECONDS
