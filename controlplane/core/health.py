"""Passive health: what the data path itself met. Probes are no proof of service."""

from dataclasses import dataclass, field

FAILURES_TO_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(slots=True)
class _Worker:
    failures: int = 0  # in a row
    pauses: int = 0  # in a row
    open_until: float = 0.0


@dataclass(slots=True)
class DataPathHealth:
    """A worker that fails pauses for 1 s, then twice as long each time it fails its trial.

    Client errors never come here (I7). Entries of workers that left are dropped by `keep`.
    """

    _workers: dict[str, _Worker] = field(default_factory=dict)

    def is_paused(self, worker_id: str, now: float) -> bool:
        if not self._workers:
            return False
        worker = self._workers.get(worker_id)
        return worker is not None and now < worker.open_until

    def failed(self, worker_id: str, now: float, *, unreachable: bool) -> None:
        """`unreachable` (refused, reset) pauses at once; other failures after three in a row."""
        worker = self._workers.setdefault(worker_id, _Worker())
        worker.failures += 1
        if unreachable or worker.failures >= FAILURES_TO_OPEN or worker.pauses:
            pause = FIRST_PAUSE_SECONDS * 2 ** min(worker.pauses, 10)
            worker.open_until = now + min(pause, LONGEST_PAUSE_SECONDS)
            worker.pauses += 1

    def served(self, worker_id: str) -> None:
        if self._workers:
            self._workers.pop(worker_id, None)

    def keep(self, worker_ids: set[str]) -> None:
        for gone in self._workers.keys() - worker_ids:
            del self._workers[gone]

    def paused(self, now: float) -> list[str]:
        return [name for name, worker in self._workers.items() if now < worker.open_until]
