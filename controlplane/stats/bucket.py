"""What one source did in one stretch of time, and how such stretches add up. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS
from controlplane.stats.histogram import add_counts, quantile

NUM_COUNTS: Final = len(HISTOGRAM_BOUNDS_SECONDS) + 1
PERCENTILES: Final[dict[str, tuple[str, float]]] = {
    "ttft_p50_seconds": ("ttft", 0.50),
    "ttft_p95_seconds": ("ttft", 0.95),
    "tbt_p50_seconds": ("tbt", 0.50),
    "tbt_p95_seconds": ("tbt", 0.95),
    "queue_p95_seconds": ("queue", 0.95),
}
TRANSFER_HISTOGRAM: Final = "transfer"


class Bucket(msgspec.Struct, array_like=True):
    """Increments add, gauges keep the worst, histograms add. A key that is missing is unknown."""

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, list[int]] = {}
    reset: bool = False

    def count(self, increments: dict[str, float]) -> None:
        for name, value in increments.items():
            self.counters[name] = self.counters.get(name, 0.0) + value

    def gauge(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.gauges[name] = max(value, self.gauges.get(name, value))

    def observe(self, histograms: dict[str, list[int]]) -> None:
        for name, counts in histograms.items():
            add_counts(self.histograms.setdefault(name, [0] * NUM_COUNTS), counts)

    def merge(self, other: Bucket) -> None:
        """Take `other`, another stretch of the same source, into this one."""
        self.count(other.counters)
        self.gauge(other.gauges)
        self.observe(other.histograms)
        self.reset = self.reset or other.reset

    def value(self, metric: str) -> float | None:
        """A `Metric` of controlplane.stats.schemas; null where nothing is known."""
        percentile = PERCENTILES.get(metric)
        if percentile is not None:
            return self.percentile(*percentile)
        if metric in self.counters:
            return self.counters[metric]
        return self.gauges.get(metric)

    def percentile(self, histogram: str, share: float) -> float | None:
        counts = self.histograms.get(histogram)
        return None if counts is None else quantile(HISTOGRAM_BOUNDS_SECONDS, counts, share)

    def points(self) -> dict[str, float]:
        """All that is known, by metric."""
        known = {**self.gauges, **self.counters}
        for metric, (histogram, share) in PERCENTILES.items():
            value = self.percentile(histogram, share)
            if value is not None and histogram in self.histograms:
                known[metric] = value
        return known


def merged(buckets: Iterable[Bucket]) -> Bucket:
    """One bucket over several stretches of one source."""
    total = new_bucket()
    for bucket in buckets:
        total.merge(bucket)
    return total


def new_bucket() -> Bucket:
    return Bucket({}, {}, {}, False)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Bucket)


def encode(bucket: Bucket) -> bytes:
    """Bytes for the database; empty histograms are left out."""
    histograms = {name: counts for name, counts in bucket.histograms.items() if any(counts)}
    return _encoder.encode(Bucket(bucket.counters, bucket.gauges, histograms, bucket.reset))


def decode(data: bytes) -> Bucket:
    return _decoder.decode(data)
