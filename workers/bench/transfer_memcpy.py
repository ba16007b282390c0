"""What shared memory is measured by: memcpy in this process, one thread, block by block."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from workers.pool.arena import checksum_of

Run = tuple[float, float]
"""Seconds, CPU seconds."""
_LEAST_BYTES: Final = 1 << 20


class Memcpy:
    """Two buffers of so many bytes, every page of both in use."""

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        self._source = np.ones(max(num_bytes, _LEAST_BYTES), np.uint8)
        self._target = np.zeros_like(self._source)
        self._target[:] = 2
        self._starts = range(0, num_bytes - block_bytes + 1, block_bytes)
        self._block_bytes = block_bytes

    def run(self, *, verified: bool) -> Run:
        """Copy all blocks; `verified`: and hash each one's copy, as transfers do."""
        cpu, started = time.process_time(), time.perf_counter()
        view = memoryview(self._target.data)
        for start in self._starts:
            end = start + self._block_bytes
            np.copyto(self._target[start:end], self._source[start:end])
            if verified:
                checksum_of(view[start:end])
        return time.perf_counter() - started, time.process_time() - cpu
