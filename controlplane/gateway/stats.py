"""Counters and histograms of this process; one writer, the event loop."""

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from datetime import UTC, datetime

from controlplane.core.fitting import Calibration
from controlplane.gateway.wire import HISTOGRAM_BOUNDS_SECONDS, GatewayStats, Histogram, WorkerLoad

_BOUNDS = HISTOGRAM_BOUNDS_SECONDS


class LatencyHistogram:
    """Cumulative counts by `HISTOGRAM_BOUNDS_SECONDS` and the sum."""

    __slots__ = ("counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = array("Q", [0] * (len(_BOUNDS) + 1))
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.sum_seconds += seconds

    def observe_all(self, ordered: list[float]) -> None:
        """Many at once, in rising order: a few searches instead of one a value."""
        done, total = 0, len(ordered)
        while done < total:
            i = bisect_left(_BOUNDS, ordered[done])
            upto = bisect_right(ordered, _BOUNDS[i], done) if i < len(_BOUNDS) else total
            self.counts[i] += upto - done
            done = upto
        self.sum_seconds += sum(ordered)

    def export(self) -> Histogram:
        return Histogram(self.counts.tolist(), self.sum_seconds)


@dataclass(slots=True)
class WorkerCounters:
    """Of one worker, since the gateway's start."""

    requests: int = 0
    failures: int = 0


@dataclass(slots=True)
class Stats:
    """What `GatewayStats` and /metrics show."""

    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    requests: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    client_errors: int = 0
    in_flight: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    tokenizer_mismatch: int = 0
    slo_met: int = 0
    slo_missed: int = 0
    shed: int = 0
    probes: int = 0
    probes_met: int = 0
    decisions_dropped: int = 0
    retries_prefill: int = 0
    retries_decode: int = 0
    decode_side_prefills: int = 0
    handoff_missing: int = 0
    prefetched_blocks: int = 0
    prefetches_cancelled: int = 0
    replicated_blocks: int = 0
    ttft_calibration: Calibration = field(default_factory=Calibration)
    transfer_calibration: Calibration = field(default_factory=Calibration)
    staged_released: int = 0
    staged_left: int = 0
    shares_refused: int = 0
    model_mismatch: int = 0
    stuck: dict[str, int] = field(default_factory=dict)  # by state
    stuck_now: int = 0
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    tbt: LatencyHistogram = field(default_factory=LatencyHistogram)
    queue: LatencyHistogram = field(default_factory=LatencyHistogram)
    workers: dict[str, WorkerCounters] = field(default_factory=dict)

    def worker(self, worker_id: str) -> WorkerCounters:
        counters = self.workers.get(worker_id)
        if counters is None:
            counters = self.workers[worker_id] = WorkerCounters()
        return counters

    def export(self, loads: dict[str, WorkerLoad], index_blocks: int, rss: int) -> GatewayStats:
        return GatewayStats(
            started_at=self.started_at,
            ttft=self.ttft.export(),
            tbt=self.tbt.export(),
            queue=self.queue.export(),
            requests_total=self.requests,
            rejected_total=self.rejected,
            failed_total=self.failed,
            cancelled_total=self.cancelled,
            client_errors_total=self.client_errors,
            in_flight=self.in_flight,
            stuck=self.stuck_now,
            prompt_tokens_total=self.prompt_tokens,
            hit_tokens_total=self.hit_tokens,
            output_tokens_total=self.output_tokens,
            tokenizer_mismatch_total=self.tokenizer_mismatch,
            slo_met_total=self.slo_met,
            slo_missed_total=self.slo_missed,
            shed_total=self.shed,
            probes_total=self.probes,
            probes_met_total=self.probes_met,
            decisions_dropped_total=self.decisions_dropped,
            prefetched_blocks_total=self.prefetched_blocks,
            replicated_blocks_total=self.replicated_blocks,
            ttft_error=self.ttft_calibration.median_relative_error(),
            transfer_error=self.transfer_calibration.median_relative_error(),
            workers=loads,
            index_blocks=index_blocks,
            rss_bytes=rss,
        )
