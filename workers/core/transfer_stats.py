"""What transfers cost, by source, destination, transport, priority and mode; and the slowest of late.

Counters are cumulative over one incarnation. Everything is bounded: pairs, slow transfers, buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from workers.core.transfer_modes import ModeStats
from workers.core.transfer_types import Direction, Priority, Timing, TransferResult

STAGES: Final = ("queue_wait", "setup", "wire", "verify", "total")
BUCKET_SECONDS: Final = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005,
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds; one more bucket takes what is longer."""
MAX_PAIRS: Final = 1024
SLOWEST: Final = 8
CHOICE_BYTES: Final = 1 << 20
"""A transfer of this size stands for all where a report says which transport is chosen."""
RECENT_SECONDS: Final = 600.0


class StageHistogram(msgspec.Struct, frozen=True):
    """`counts` has one more entry than `BUCKET_SECONDS`."""

    stage: str
    counts: list[int]
    sum_seconds: float


class SlowTransfer(msgspec.Struct, frozen=True):
    """One of the slowest of the last ten minutes."""

    transfer_id: str
    ended_at: float  # monotonic seconds of the node
    num_bytes: int
    num_pieces: int
    num_missing: int
    num_retries: int
    timing: Timing
    detail: str = ""


class PairStats(msgspec.Struct, frozen=True):
    """Transfers of one kind between two nodes."""

    source: str
    destination: str
    transport: str
    priority: Literal["first_token", "batch"]
    transfers_total: int
    bytes_total: int
    pieces_total: int
    retries_total: int
    missing_by_cause: dict[str, int]
    seconds: list[StageHistogram]
    slowest: list[SlowTransfer]
    in_flight: int = 0  # transfers now
    mode: Literal["pull", "push"] = (
        "pull"  # whose side began them: the destination's or the source's
    )


class LinkStats(msgspec.Struct, frozen=True):
    """The state of one path, as of now."""

    peer: str
    transport: str
    state: str
    breaker: str
    window_ops: int  # effective queue depth
    in_flight_ops: int
    in_flight_bytes: int
    opens_total: int
    small_ops_total: int
    resent_bytes_total: int
    retries_refused_total: int
    late_completions_total: int
    cap_bytes_per_second: float = 0.0
    latency_seconds: float | None = None
    bytes_per_second: float | None = None
    last_error: str = ""
    chosen: bool = False  # what a transfer of CHOICE_BYTES from or to that peer would take now
    override: bool = False  # set for this peer, whatever it costs
    cost_seconds: float | None = None  # what a transfer of CHOICE_BYTES is expected to take
    why: str = ""  # it is chosen or not, for people
    best_bytes_per_second: float | None = None  # while busy; what a cap by share is a share of


class RdmaPortStats(msgspec.Struct, frozen=True):
    """One RDMA port that the slab is registered with. Counters count from then on.

    `receiver_not_ready_total` and `retries_total` are the device's own, of all that use the port.
    """

    name: str  # "mlx5_0/1"
    state: str  # "ACTIVE", "DOWN", ...
    gid: str
    gid_index: int
    gid_type: str
    gid_reason: str
    active_mtu: int
    queue_depth: int  # effective, of each queue pair
    inline_bytes: int
    reads: int  # that the device keeps outstanding
    numa_node: int  # -1: unknown
    queue_pairs: int
    read_bytes_total: int = 0
    written_bytes_total: int = 0
    off_rail_bytes_total: int = 0
    off_numa_bytes_total: int = 0
    work_requests_total: int = 0
    posts_total: int = 0
    errors_total: int = 0
    receiver_not_ready_total: int = 0
    retries_total: int = 0
    notes: list[str] = []


class RdmaRailStats(msgspec.Struct, frozen=True):
    """The path from a port of this node to one of a peer. `error`: why it is passed over now."""

    peer: str
    port: str
    peer_port: str
    off_rail: bool
    mtu: int
    moved_bytes: int = 0
    error: str = ""


class TransferStats(msgspec.Struct, frozen=True):
    """What an agent reports.

    `problem`: a transport that is wanted and cannot be had, while others carry the blocks.
    `not_ready`: why the node has no way to move blocks that it was told to have.
    """

    pairs: list[PairStats] = []
    links: list[LinkStats] = []
    alarms: list[str] = []
    modes: list[ModeStats] = []  # how blocks of other nodes' prefill legs come here
    policy_revision: int = 0  # of the control plane's `transfer`, that acts here
    at: float = 0.0  # the node's monotonic seconds, as in `SlowTransfer.ended_at`
    ports: list[RdmaPortStats] = []
    rails: list[RdmaRailStats] = []
    problem: str = ""
    not_ready: str = ""


@dataclass(slots=True)
class _Pair:
    transfers: int = 0
    num_bytes: int = 0
    pieces: int = 0
    retries: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(
        default_factory=lambda: {stage: [0] * (len(BUCKET_SECONDS) + 1) for stage in STAGES}
    )
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    slowest: list[SlowTransfer] = field(default_factory=list)
    used_at: float = 0.0


PairKey = tuple[str, str, str, Priority, Direction]


class TransferLedger:
    """Books every end of a transfer. `node_id` is the node that keeps it."""

    def __init__(self, node_id: str, max_pairs: int = MAX_PAIRS) -> None:
        self._node_id = node_id
        self._max_pairs = max_pairs
        self._pairs: dict[PairKey, _Pair] = {}

    def key_of(
        self, peer: str, transport: str, priority: Priority, direction: Direction
    ) -> PairKey:
        pulled = direction is Direction.PULL
        source, destination = (peer, self._node_id) if pulled else (self._node_id, peer)
        return source, destination, transport, priority, direction

    def record(self, result: TransferResult, now: float) -> None:
        peer, transport = result.link
        pair = self._pair(self.key_of(peer, transport, result.priority, result.direction), now)
        pair.transfers += 1
        pair.num_bytes += result.num_bytes
        pair.pieces += result.num_pieces - len(result.missing)
        pair.retries += result.num_retries
        for cause in result.missing.values():
            pair.missing[cause] = pair.missing.get(cause, 0) + 1
        for stage in STAGES:
            seconds: float = getattr(result.timing, stage)
            pair.counts[stage][bisect_left(BUCKET_SECONDS, seconds)] += 1
            pair.sums[stage] += seconds
        _keep_slowest(pair, result, now)

    def report(self, in_flight: dict[PairKey, int]) -> list[PairStats]:
        """Sorted by source, destination, transport, priority, direction."""
        keys = sorted({*self._pairs, *in_flight})
        return [self._stats(key, in_flight.get(key, 0)) for key in keys]

    def _stats(self, key: PairKey, in_flight: int) -> PairStats:
        pair = self._pairs.get(key) or _Pair()
        source, destination, transport, priority, direction = key
        return PairStats(
            source, destination, transport, priority.value, pair.transfers, pair.num_bytes,
            pair.pieces, pair.retries, dict(pair.missing),
            [StageHistogram(s, list(pair.counts[s]), pair.sums[s]) for s in STAGES],
            list(pair.slowest), in_flight, direction.value,
        )  # fmt: skip

    def _pair(self, key: PairKey, now: float) -> _Pair:
        pair = self._pairs.get(key)
        if pair is None:
            if len(self._pairs) >= self._max_pairs:
                oldest = min(self._pairs, key=lambda other: self._pairs[other].used_at)
                del self._pairs[oldest]
            pair = self._pairs[key] = _Pair()
        pair.used_at = now
        return pair


def _keep_slowest(pair: _Pair, result: TransferResult, now: float) -> None:
    slowest = [slow for slow in pair.slowest if slow.ended_at > now - RECENT_SECONDS]
    total = result.timing.total
    if len(slowest) < SLOWEST or total > slowest[-1].timing.total:
        slowest.append(
            SlowTransfer(
                result.transfer_id,
                now,
                result.num_bytes,
                result.num_pieces,
                len(result.missing),
                result.num_retries,
                result.timing,
                result.detail,
            )
        )
        slowest.sort(key=lambda slow: -slow.timing.total)
        del slowest[SLOWEST:]
    pair.slowest = slowest
