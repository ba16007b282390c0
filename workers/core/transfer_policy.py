"""What an operator sets of transfers between nodes, and what follows of it for one node. Pure.

The control plane's spec `transfer` has the same fields; an agent gets it with its heartbeat and
acts on it at once. Pairs of nodes are named by the way that the bytes go: "n1>n2".
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from workers.core.transfer_pacing import CAP_SHARE
from workers.core.transfer_types import SMALL_PIECE_BYTES, CapRule, Direction, TransferLimits

TransportName = Literal["shm", "tcp", "rdma"]
Mode = Literal["pull", "push"]
ModeSetting = Literal["auto", "pull", "push"]
MAX_OVERRIDES: Final = 1000
PAIR_PATTERN: Final = r"^[^>\s]{1,128}>[^>\s]{1,128}$"
Pair = Annotated[str, Meta(pattern=PAIR_PATTERN)]
Seconds = Annotated[float, Meta(ge=0.05, le=600)]
Gbps = Annotated[float, Meta(ge=0.0001, le=100_000)]
_BYTES_PER_GBPS: Final = 1e9 / 8
_MIB: Final = 1 << 20


class TransferPolicy(msgspec.Struct, frozen=True):
    """The defaults are what acts where nobody has said anything.

    `cap_gbps` caps each link between two nodes; without it a link is capped at `cap_share` of its
    bandwidth where `collectives_share_link`, else not at all. The bandwidth is `link_gbps`, or the
    best that transfers have shown. Shared memory is no link. `piece_bytes` 0 moves each block whole.
    """

    mode: ModeSetting = "auto"
    collectives_share_link: bool = False
    cap_share: Annotated[float, Meta(gt=0, le=1)] = CAP_SHARE
    cap_gbps: Gbps | None = None
    link_gbps: Gbps | None = None
    piece_bytes: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    parallelism: Annotated[int, Meta(ge=1, le=16)] = 2
    window_mib: Annotated[float, Meta(ge=1, le=16_384)] = 64.0
    window_ops: Annotated[int, Meta(ge=1, le=65_536)] = 256
    batch_share: Annotated[float, Meta(ge=0.01, le=1)] = 0.5
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 4
    retry_share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    retry_floor_mib: Annotated[float, Meta(ge=1, le=16_384)] = 64.0
    connect_seconds: Seconds = 1.0
    stall_seconds: Seconds = 1.5
    fetch_seconds: Seconds = 10.0
    transport_overrides: Annotated[dict[Pair, TransportName], Meta(max_length=MAX_OVERRIDES)] = {}
    mode_overrides: Annotated[dict[Pair, Mode], Meta(max_length=MAX_OVERRIDES)] = {}

    def __post_init__(self) -> None:
        if 0 < self.piece_bytes < SMALL_PIECE_BYTES:
            raise ValueError(
                f"piece_bytes = {self.piece_bytes}: pieces under {SMALL_PIECE_BYTES} bytes cost more "
                "than they bring; 0 moves blocks whole"
            )


def limits_of(policy: TransferPolicy) -> TransferLimits:
    """The engine's bounds; what the policy does not speak of is as ever."""
    window = int(policy.window_mib * _MIB)
    return TransferLimits(
        window_bytes=window,
        window_ops=policy.window_ops,
        batch_share=policy.batch_share,
        refill_bytes=min(_MIB, window // 4),
        max_attempts=policy.max_attempts,
        retry_floor_bytes=int(policy.retry_floor_mib * _MIB),
        retry_share=policy.retry_share,
        connect_seconds=policy.connect_seconds,
        stall_seconds=policy.stall_seconds,
    )


def cap_of(policy: TransferPolicy) -> CapRule:
    """The cap of every link, in bytes a second."""
    if policy.cap_gbps is not None:
        return CapRule(rate=policy.cap_gbps * _BYTES_PER_GBPS)
    if not policy.collectives_share_link:
        return CapRule()
    link_rate = (policy.link_gbps or 0.0) * _BYTES_PER_GBPS
    return CapRule(share=policy.cap_share, link_rate=link_rate)


def transports_of(policy: TransferPolicy, node_id: str) -> dict[tuple[str, Direction], str]:
    """What is set for this node's own transfers: what it pulls from a peer, what it pushes to one."""
    found: dict[tuple[str, Direction], str] = {}
    for pair, transport in policy.transport_overrides.items():
        source, _, destination = pair.partition(">")
        if destination == node_id:
            found[source, Direction.PULL] = transport
        if source == node_id:
            found[destination, Direction.PUSH] = transport
    return found


def mode_of(policy: TransferPolicy, source: str, destination: str) -> Mode | None:
    """How blocks go from one node to the other; None: as is cheaper."""
    found = policy.mode_overrides.get(f"{source}>{destination}")
    if found is not None:
        return found
    return None if policy.mode == "auto" else policy.mode
