"""What the C library does with memory that was freed."""

import ctypes
from typing import Final

LARGE_BYTES: Final = 128 * 1024
_M_MMAP_THRESHOLD: Final = -3  # malloc.h


def give_large_blocks_back() -> bool:
    """Have blocks of that size and more go back to the system when they are freed.

    Otherwise glibc raises its bound to the largest block that was ever freed, up to 32 MiB, and
    keeps what is smaller: reports and bodies of a busy moment would count for ever. False: there is
    another C library.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
    except (AttributeError, OSError):
        return False
