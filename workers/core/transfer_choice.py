"""Which transport for which peer and how many bytes: by measured cost (R26).

Cost = latency + bytes / bandwidth, both as moving averages of what transfers took; before there
are any, a prior (R20). An estimate that was not refreshed fades back to the prior, so that a path
that was bad once is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from workers.core.transfer_types import LinkId

SMALL_BYTES: Final = 128 * 1024
"""Up to here a transfer tells of latency, from here on of bandwidth."""
_WEIGHT: Final = 0.2
_HALF_LIFE_SECONDS: Final = 300.0
_FAILURE_SECONDS: Final = 1.0
MAX_COSTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Cost:
    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


PRIORS: Final[Mapping[str, Cost]] = {
    "shm": Cost(20e-6, 10e9),
    "rdma": Cost(10e-6, 1e6 / 30e-6),  # 1 MB in 20 to 50 us
    "tcp": Cost(100e-6, 1e6 / 250e-6),  # 1 MB in 200 to 400 us
    "memory": Cost(1e-6, 20e9),
}
_UNKNOWN: Final = Cost(1e-3, 1e9)


@dataclass(slots=True)
class _Measured:
    latency: float
    rate: float
    at: float
    failures: float = 0.0


class CostModel:
    """Costs of every link that was used. Not thread-safe."""

    def __init__(self, priors: Mapping[str, Cost] = PRIORS) -> None:
        self._priors = priors
        self._measured: dict[LinkId, _Measured] = {}

    def observe(self, link: LinkId, num_bytes: int, seconds: float, now: float) -> None:
        """A transfer of so many bytes took so long, from its first post to its end."""
        if num_bytes <= 0 or seconds <= 0:
            return
        found = self._entry(link, now)
        found.at, found.failures = now, 0.0
        if num_bytes <= SMALL_BYTES:
            found.latency += _WEIGHT * (seconds - found.latency)
            return
        moving = max(seconds - found.latency, seconds * 0.1)
        found.rate += _WEIGHT * (num_bytes / moving - found.rate)

    def failed(self, link: LinkId, now: float) -> None:
        """A transfer missed pieces for the link's sake: others are preferred for a while."""
        found = self._entry(link, now)
        found.at = now
        found.failures = min(found.failures + 1.0, 16.0)

    def cost(self, link: LinkId, now: float) -> Cost:
        """As of now: what was measured, faded towards the prior."""
        prior = self._priors.get(link.transport, _UNKNOWN)
        found = self._measured.get(link)
        if found is None:
            return prior
        weight = 0.5 ** ((now - found.at) / _HALF_LIFE_SECONDS)
        penalty = found.failures * _FAILURE_SECONDS * 0.5 ** ((now - found.at) / 30.0)
        return Cost(
            prior.latency_seconds + weight * (found.latency - prior.latency_seconds) + penalty,
            prior.bytes_per_second + weight * (found.rate - prior.bytes_per_second),
        )

    def measured(self, link: LinkId) -> Cost | None:
        """Without fading; None where nothing was measured."""
        found = self._measured.get(link)
        return None if found is None else Cost(found.latency, found.rate)

    def choose(
        self, peer: str, num_bytes: int, transports: Iterable[str], now: float
    ) -> str | None:
        """The cheapest of these; None where there are none."""
        return min(
            transports,
            key=lambda name: (self.cost(LinkId(peer, name), now).seconds(num_bytes), name),
            default=None,
        )

    def _entry(self, link: LinkId, now: float) -> _Measured:
        found = self._measured.get(link)
        if found is None:
            if len(self._measured) >= MAX_COSTS:
                oldest = min(self._measured, key=lambda other: self._measured[other].at)
                del self._measured[oldest]
            prior = self._priors.get(link.transport, _UNKNOWN)
            found = _Measured(prior.latency_seconds, prior.bytes_per_second, now)
            self._measured[link] = found
        return found
