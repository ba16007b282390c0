"""Requests that failed lately, and where: one on which every engine breaks says little of engines."""

from dataclasses import dataclass, field
from typing import Final

REMEMBERED_SECONDS: Final = 300.0
"""After its last failure."""
MAX_REQUESTS: Final = 1024
MAX_WORKERS: Final = 16
"""Of one request; two are enough to suspect it."""


@dataclass(slots=True)
class _Failures:
    until: float
    workers: dict[str, str] = field(default_factory=dict)  # and the leg that failed there


@dataclass(slots=True)
class Suspects:
    """`request` is equal for equal requests, whoever sends them and however often."""

    _requests: dict[int, _Failures] = field(default_factory=dict)  # longest unheard of first

    def __len__(self) -> int:
        return len(self._requests)

    def failed(self, request: int, worker_id: str, leg: str, now: float) -> bool:
        """Whether that is evidence against the worker by itself: it has failed nowhere else."""
        known = self._requests.pop(request, None)
        if known is None or known.until < now:
            known = _Failures(now)
        known.until = now + REMEMBERED_SECONDS
        self._requests[request] = known
        self._forget(now)
        if len(known.workers) < MAX_WORKERS:
            known.workers.setdefault(worker_id, leg)
        return len(known.workers) == 1

    def _forget(self, now: float) -> None:
        """Called with one that has just failed, which stays."""
        while True:
            request, failures = next(iter(self._requests.items()))
            if len(self._requests) <= MAX_REQUESTS and failures.until >= now:
                return
            del self._requests[request]

    def served(self, request: int, leg: str) -> None:
        """Some worker has done that leg of it, so where it failed the worker was why."""
        known = self._requests.get(request)
        if known is None:
            return
        known.workers = {name: failed for name, failed in known.workers.items() if failed != leg}
        if not known.workers:
            del self._requests[request]

    def check_integrity(self) -> None:
        assert len(self._requests) <= MAX_REQUESTS
        assert all(0 < len(known.workers) <= MAX_WORKERS for known in self._requests.values())
