"""Samples of transfers between nodes. Labels: pairs of nodes, transports, two classes; bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controlplane.plane import Plane
from workers.core.stats_messages import PoolStats
from workers.core.transfer_stats import PairStats

MAX_ROWS = 4096
"""Pairs and links that are exported; those of nodes whose names come later are left out."""
Sample = tuple[str, Sequence[str], float]
Key = tuple[str, ...]


def transfer_values(plane: Plane) -> Iterator[Sample]:
    """One scrape. What both ends of a pair report (pulls and pushes) is one sample."""
    heard = sorted(
        (node.stats for node in plane.nodes.live() if node.stats is not None),
        key=lambda stats: stats.node_id,
    )
    sums: dict[tuple[str, Key], float] = {}
    rows: set[Key] = set()
    for pair in (pair for stats in heard for pair in stats.transfers.pairs):
        labels = (pair.source, pair.destination, pair.transport, pair.priority)
        if labels not in rows and len(rows) >= MAX_ROWS:
            continue
        rows.add(labels)
        for name, key, value in _pair(pair, labels):
            sums[name, key] = sums.get((name, key), 0.0) + value
    for (name, key), value in sums.items():
        yield name, key, value
    yield from _links(heard)


def _pair(pair: PairStats, labels: Key) -> Iterator[tuple[str, Key, float]]:
    yield "transfers_total", labels, pair.transfers_total
    yield "transfer_bytes_total", labels, pair.bytes_total
    yield "transfer_pieces_total", labels, pair.pieces_total
    yield "transfer_retries_total", labels, pair.retries_total
    yield "transfers_in_flight", labels, pair.in_flight
    for cause, count in pair.missing_by_cause.items():
        yield "transfer_missing_total", (*labels, cause), count
    for stage in pair.seconds:
        yield "transfer_seconds_total", (*labels, stage.stage), stage.sum_seconds


def _links(heard: Sequence[PoolStats]) -> Iterator[Sample]:
    links = [(stats.node_id, link) for stats in heard for link in stats.transfers.links]
    for node, link in links[:MAX_ROWS]:
        labels = (node, link.peer, link.transport)
        yield "transfer_link_healthy", labels, float(link.breaker == "closed")
        yield "transfer_link_window_ops", labels, link.window_ops
        yield "transfer_link_resent_bytes_total", labels, link.resent_bytes_total
        if link.bytes_per_second is not None:
            yield "transfer_link_bandwidth", labels, link.bytes_per_second
    for stats in heard:
        yield "transfer_alarms", (stats.node_id,), len(stats.transfers.alarms)
    yield from _ports(heard)


def _ports(heard: Sequence[PoolStats]) -> Iterator[Sample]:
    ports = [(stats.node_id, port) for stats in heard for port in stats.transfers.ports]
    for node, port in ports[:MAX_ROWS]:
        labels = (node, port.name)
        yield "rdma_port_active", labels, float(port.state == "ACTIVE")
        yield "rdma_queue_pairs", labels, port.queue_pairs
        yield "rdma_queue_depth", labels, port.queue_depth
        yield "rdma_read_bytes_total", labels, port.read_bytes_total
        yield "rdma_written_bytes_total", labels, port.written_bytes_total
        yield "rdma_off_rail_bytes_total", labels, port.off_rail_bytes_total
        yield "rdma_off_numa_bytes_total", labels, port.off_numa_bytes_total
        yield "rdma_work_requests_total", labels, port.work_requests_total
        yield "rdma_errors_total", labels, port.errors_total
        yield "rdma_receiver_not_ready_total", labels, port.receiver_not_ready_total
        yield "rdma_retries_total", labels, port.retries_total
