"""Transfers between nodes as counters of the series `pair:n1>n2`. Pure.

A pair of nodes carries one counter of bytes for each transport (`bytes_tcp`): that tells it from a
pair of workers, and which path it took.
"""

from __future__ import annotations

from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS
from controlplane.stats.bucket import NUM_COUNTS
from controlplane.stats.histogram import bucket_of
from workers.core.stats_messages import PoolStats
from workers.core.transfer_stats import BUCKET_SECONDS, StageHistogram

PATH_PREFIX = "bytes_"
_TARGETS = [bucket_of(HISTOGRAM_BOUNDS_SECONDS, bound) for bound in BUCKET_SECONDS]
"""Where a bucket of an agent's histogram goes: by its upper bound, so never to something faster."""


def node_pairs(stats: PoolStats) -> dict[str, tuple[dict[str, float], list[int]]]:
    """By "n1>n2": cumulative counters, and the histogram of whole transfers."""
    found: dict[str, tuple[dict[str, float], list[int]]] = {}
    for pair in stats.transfers.pairs:
        values, counts = found.setdefault(
            f"{pair.source}>{pair.destination}", ({}, [0] * NUM_COUNTS)
        )
        total = next((one for one in pair.seconds if one.stage == "total"), None)
        added = {
            "transfers": pair.transfers_total,
            "bytes": pair.bytes_total,
            "seconds": total.sum_seconds if total else 0.0,
            "failures": sum(pair.missing_by_cause.values()),
            f"{PATH_PREFIX}{pair.transport}": pair.bytes_total,
        }
        for name, value in added.items():
            values[name] = values.get(name, 0.0) + value
        if total is not None:
            _add(counts, total)
    return found


def path_of(counters: dict[str, float]) -> str | None:
    """The transport that carried most bytes; None: no pair of nodes."""
    paths = {
        name.removeprefix(PATH_PREFIX): value
        for name, value in counters.items()
        if name.startswith(PATH_PREFIX)
    }
    return max(paths, key=lambda name: (paths[name], name), default=None)


def _add(counts: list[int], histogram: StageHistogram) -> None:
    for index, count in enumerate(histogram.counts):
        target = _TARGETS[index] if index < len(_TARGETS) else NUM_COUNTS - 1
        counts[target] += count
