"""Transfers between nodes: what each pair moved, how long it took by stage, and the slowest."""

from typing import Literal

from controlplane.schema_base import Schema


class TransferStage(Schema):
    """One stage of a pair's transfers. Percentiles come from a histogram; null: there were none."""

    stage: Literal["queue_wait", "setup", "wire", "verify", "total"]
    p50_seconds: float | None
    p99_seconds: float | None
    sum_seconds: float


class SlowestTransfer(Schema):
    """One of the slowest of the last ten minutes. Seconds by stage add up to `total_seconds`."""

    transfer_id: str
    age_seconds: float
    bytes: int
    pieces: int
    missing: int
    retries: int
    queue_wait_seconds: float
    setup_seconds: float
    wire_seconds: float
    verify_seconds: float
    total_seconds: float
    error: str = ""


class NodeTransfers(Schema):
    """Transfers of one kind between two nodes, since the reporting agent started.

    `missing` counts pieces that did not come, by cause; the blocks were computed instead.
    """

    source: str
    destination: str
    transport: str
    priority: Literal["first_token", "batch"]
    reported_by: str
    transfers: int
    bytes: int
    pieces: int
    retries: int
    missing: dict[str, int] = {}
    in_flight: int = 0
    mode: Literal["pull", "push"] = "pull"  # began at the destination, or at the source
    stages: list[TransferStage] = []
    slowest: list[SlowestTransfer] = []


class NodeLink(Schema):
    """The path from `node` to `peer` by one transport, as of the last heartbeat."""

    node: str
    peer: str
    transport: str
    state: str  # idle, opening, up
    breaker: str  # closed, open, half_open
    window_ops: int
    in_flight_ops: int
    in_flight_bytes: int
    opens: int
    small_ops: int
    resent_bytes: int
    retries_refused: int
    late_completions: int
    cap_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    bytes_per_second: float | None = None
    last_error: str = ""
    chosen: bool = False  # what a transfer of 1 MiB would take now
    override: bool = False  # set for this peer, whatever it costs
    cost_seconds: float | None = None  # what a transfer of 1 MiB is expected to take
    why: str = ""  # it is chosen or not: the cost of each, or that it is set
    best_bytes_per_second: float | None = None  # while busy; what a cap by share is a share of


class NodeMode(Schema):
    """How blocks of prefill legs on `source` come to decode legs on `destination`, and why.

    Seconds are what a request waits for `bytes`, as measured of late.
    """

    source: str
    destination: str
    mode: Literal["pull", "push"]
    why: str
    bytes: int
    pull_seconds: float
    push_seconds: float
    pulled: int  # requests
    pushed: int
    failed_pushes: int


class NodeAlarm(Schema):
    """A path that carries nothing now: its breaker is open."""

    node: str
    text: str


class NodeTransferList(Schema):
    """GET /api/v1/transfers/nodes. The largest rows first; `total` counts all that match."""

    rows: list[NodeTransfers]
    total: int
    links: list[NodeLink]
    alarms: list[NodeAlarm]
    modes: list[NodeMode] = []
