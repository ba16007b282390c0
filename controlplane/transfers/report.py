"""Builds the report on transfers between nodes from what agents said of themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from controlplane.stats.histogram import quantile
from controlplane.transfers.schemas import (
    NodeAlarm,
    NodeLink,
    NodeMode,
    NodeTransferList,
    NodeTransfers,
    SlowestTransfer,
    TransferStage,
)
from workers.core.stats_messages import PoolStats
from workers.core.transfer_modes import ModeStats
from workers.core.transfer_stats import (
    BUCKET_SECONDS,
    LinkStats,
    PairStats,
    SlowTransfer,
    StageHistogram,
)

MAX_LINKS = 1000
MAX_ALARMS = 200


@dataclass(frozen=True, slots=True)
class Heard:
    """A node's last word and its age in seconds."""

    stats: PoolStats
    age: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """All given ones must match; `node` is either end."""

    source: str | None = None
    destination: str | None = None
    node: str | None = None
    transport: str | None = None
    priority: str | None = None

    def matches_pair(self, source: str, destination: str) -> bool:
        return (
            self.source in (None, source)
            and self.destination in (None, destination)
            and (self.node is None or self.node in (source, destination))
        )

    def matches(self, pair: PairStats) -> bool:
        return (
            self.matches_pair(pair.source, pair.destination)
            and self.transport in (None, pair.transport)
            and self.priority in (None, pair.priority)
        )

    def matches_link(self, node: str, link: LinkStats) -> bool:
        ends = {node, link.peer}
        given = {end for end in (self.source, self.destination, self.node) if end is not None}
        return given <= ends and self.transport in (None, link.transport)


def report(heard: Iterable[Heard], wanted: Wanted, limit: int) -> NodeTransferList:
    """Rows with most bytes first."""
    known = list(heard)
    found = [(pair, one) for one in known for pair in one.stats.transfers.pairs if wanted.matches(pair)]  # fmt: skip
    found.sort(key=lambda row: (-row[0].bytes_total, row[0].source, row[0].destination))
    links = [
        _link(one.stats.node_id, link)
        for one in known
        for link in one.stats.transfers.links
        if wanted.matches_link(one.stats.node_id, link)
    ]
    alarms = [
        NodeAlarm(node=one.stats.node_id, text=text)
        for one in known
        for text in one.stats.transfers.alarms
    ]
    modes = [
        _mode(one.stats.node_id, mode)
        for one in known
        for mode in one.stats.transfers.modes
        if wanted.matches_pair(mode.source, one.stats.node_id)
    ]
    return NodeTransferList(
        modes=modes[:MAX_LINKS],
        rows=[_row(pair, one) for pair, one in found[:limit]],
        total=len(found),
        links=links[:MAX_LINKS],
        alarms=alarms[:MAX_ALARMS],
    )


def _row(pair: PairStats, heard: Heard) -> NodeTransfers:
    return NodeTransfers(
        source=pair.source,
        destination=pair.destination,
        transport=pair.transport,
        priority=pair.priority,
        reported_by=heard.stats.node_id,
        transfers=pair.transfers_total,
        bytes=pair.bytes_total,
        pieces=pair.pieces_total,
        retries=pair.retries_total,
        missing=pair.missing_by_cause,
        in_flight=pair.in_flight,
        mode=pair.mode,
        stages=list(_stages(pair.seconds)),
        slowest=[_slow(slow, heard) for slow in pair.slowest],
    )


def _stages(histograms: Iterable[StageHistogram]) -> Iterator[TransferStage]:
    for one in histograms:
        yield TransferStage.model_validate(
            {
                "stage": one.stage,
                "p50_seconds": quantile(BUCKET_SECONDS, one.counts, 0.50),
                "p99_seconds": quantile(BUCKET_SECONDS, one.counts, 0.99),
                "sum_seconds": one.sum_seconds,
            }
        )


def _slow(slow: SlowTransfer, heard: Heard) -> SlowestTransfer:
    timing = slow.timing
    return SlowestTransfer(
        transfer_id=slow.transfer_id,
        age_seconds=max(0.0, heard.stats.transfers.at - slow.ended_at) + heard.age,
        bytes=slow.num_bytes,
        pieces=slow.num_pieces,
        missing=slow.num_missing,
        retries=slow.num_retries,
        queue_wait_seconds=timing.queue_wait,
        setup_seconds=timing.setup,
        wire_seconds=timing.wire,
        verify_seconds=timing.verify,
        total_seconds=timing.total,
        error=slow.detail,
    )


def _mode(node: str, mode: ModeStats) -> NodeMode:
    return NodeMode(
        source=mode.source,
        destination=node,
        mode=mode.mode,
        why=mode.why,
        bytes=mode.num_bytes,
        pull_seconds=mode.pull_seconds,
        push_seconds=mode.push_seconds,
        pulled=mode.pulled_total,
        pushed=mode.pushed_total,
        failed_pushes=mode.failed_pushes_total,
    )


def _link(node: str, link: LinkStats) -> NodeLink:
    return NodeLink(
        node=node,
        peer=link.peer,
        transport=link.transport,
        state=link.state,
        breaker=link.breaker,
        window_ops=link.window_ops,
        in_flight_ops=link.in_flight_ops,
        in_flight_bytes=link.in_flight_bytes,
        opens=link.opens_total,
        small_ops=link.small_ops_total,
        resent_bytes=link.resent_bytes_total,
        retries_refused=link.retries_refused_total,
        late_completions=link.late_completions_total,
        cap_bytes_per_second=link.cap_bytes_per_second or None,
        latency_seconds=link.latency_seconds,
        bytes_per_second=link.bytes_per_second,
        last_error=link.last_error,
        chosen=link.chosen,
        override=link.override,
        cost_seconds=link.cost_seconds,
        why=link.why,
        best_bytes_per_second=link.best_bytes_per_second,
    )
