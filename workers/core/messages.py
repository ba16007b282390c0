"""What travels between a node agent and its clients (workers, gateways, the supervisor).

Framing: 4 bytes little-endian length, then one msgpack document, at most `MAX_FRAME_BYTES`.
A client sends `Request(seq, body)`; the agent answers `Reply(seq, body)` with the same `seq`.
After `Subscribe` the agent also sends `EventBatch`, `LegReport` and, where asked, `GatewayShare`
unasked, as `Reply(0, ...)`.
The first request on a connection is `Hello`; anything else first is refused with `Refused`.
When a connection ends, the agent releases what its client was storing and the `load:` pins it
took. `transfer:` pins outlive connections: their lease or `Release` ends them.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from workers.core.cache_messages import CacheReply, CacheRequest
from workers.core.doctor_messages import DoctorReplies, DoctorRequests
from workers.core.gateway_messages import GatewayShare, TellShare
from workers.core.stats_messages import NamespaceSpec, PoolStats, TierName, WorkerStatus
from workers.core.transfer_messages import TransferReplies, TransferRequests

PROTOCOL_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024

RemovalCause = Literal[
    "capacity",  # room was needed in memory
    "ssd_capacity",  # room was needed on SSD
    "quota",  # room within a tenant's or namespace's own limit was needed
    "corrupt",
    "failed_write",
    "purge",
    "tier_lost",  # the device under it failed or was taken away
]

ClientRole = Literal["worker", "gateway", "supervisor", "cli", "agent"]
KvRole = Literal["kv_producer", "kv_consumer", "kv_both"]
EngineRole = Literal["scheduler", "worker"]
"""Which half of the connector speaks: vLLM runs them in two processes."""


class SlotRef(msgspec.Struct, frozen=True, array_like=True):
    """A place in the slab, valid for one generation only."""

    slot: int
    generation: int


class StoredSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot whose bytes are in place; checksum is xxh3_64 over the payload."""

    slot: int
    generation: int
    checksum: int


# --- requests -------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Handshake. A worker also gives its namespace; `hash_vector` proves equal hashing."""

    role: ClientRole
    client_id: str  # worker id, gateway id, ...
    hash_vector: bytes  # workers.core.hashing.hash_test_vector()
    protocol: int = PROTOCOL_VERSION
    pid: int = 0
    namespace: NamespaceSpec | None = None
    kv_role: KvRole = "kv_both"
    engine_role: EngineRole = "worker"
    nonce: bytes = b""  # 32 random bytes over TCP, for the proof
    kv_tokens: int = 0  # that fit into the engine's own memory; 0: not said


class Lookup(msgspec.Struct, tag=True, frozen=True):
    """How long a prefix of these keys the node holds. Changes nothing, touches nothing.

    `request`: whose prompt this is, the same for all its legs and lookups (`request_of` of a load's
    owner); what-if counts each once. "" for a question that no prompt stands behind.
    """

    namespace: bytes
    block_hashes: list[bytes]
    request: str = ""


class PrepareLoad(msgspec.Struct, tag=True, frozen=True):
    """Pin the held prefix of these keys for `owner` and name its slots; may be shorter."""

    owner: str
    namespace: bytes
    block_hashes: list[bytes]


class PinPrefix(msgspec.Struct, tag=True, frozen=True):
    """Pin what is held or being stored of these keys, without reading it."""

    owner: str
    namespace: bytes
    block_hashes: list[bytes]


class PrepareStore(msgspec.Struct, tag=True, frozen=True):
    """Ask for slots for the blocks of a chain that the node lacks.

    `block_hashes` is one chain in order; `parent` the hash before it (b"" at the chain's head).
    What the node then has of parent and chain, held or being stored, is pinned for `owner`.
    """

    owner: str
    namespace: bytes
    parent: bytes
    block_hashes: list[bytes]
    tenant: str = ""  # whose quota it counts against: the request's cache salt, "" without one


class Promote(msgspec.Struct, tag=True, frozen=True):
    """Bring the part of this chain that lies on SSD into memory, pinned for `owner`.

    Answered at once by `LookupReply`: what is under way counts as pending until it can be loaded.
    """

    owner: str
    namespace: bytes
    block_hashes: list[bytes]
    urgency: Literal["first_token", "batch"] = "first_token"


class Hint(msgspec.Struct, tag=True, frozen=True):
    """The session of this chain goes on, or is over: raises or lowers what it is worth."""

    namespace: bytes
    block_hashes: list[bytes]
    session: Literal["continue", "over"]


class Label(msgspec.Struct, tag=True, frozen=True):
    """The class that a request's client names, for eviction policies that learn by class."""

    request: str  # as in owners: the transfer's id
    label: str


class Holds(msgspec.Struct, tag=True, frozen=True):
    """Which of these single blocks are readable here? For the auditor; touches nothing."""

    namespace: bytes
    block_hashes: list[bytes]


class CompleteStore(msgspec.Struct, tag=True, frozen=True):
    """The bytes of these slots are in place (`stored`) or will never be (`failed`)."""

    owner: str
    stored: list[StoredSlot]
    failed: list[SlotRef] = []


class Release(msgspec.Struct, tag=True, frozen=True):
    """End every pin of `owner`, and of `more`, where an operator's are passed over. Idempotent."""

    owner: str
    more: list[str] = []


class Renew(msgspec.Struct, tag=True, frozen=True):
    """Extend the leases of `owners` by the agent's lease time."""

    owners: list[str]


class ReportCorrupt(msgspec.Struct, tag=True, frozen=True):
    """A read failed verification: the block and its descendants leave the index."""

    namespace: bytes
    block_hash: bytes
    slot: int
    generation: int
    cause: Literal["generation", "checksum", "io"]


class LegReport(msgspec.Struct, tag=True, frozen=True):
    """What one leg did with the pool, sent by the worker's connector at the request's end.

    Tokens of a prompt split as device_hit + pool_hit + computed, each in one of them. So the pool
    was asked for prompt - device_hit tokens, and its own hit ratio is pool_hit over that. A request
    that skips the cache by design (prompt logprobs, embeddings) sends no report: it is neither a
    hit nor a miss. Seconds are of this leg only.
    """

    transfer_id: str
    worker_id: str
    kv_role: KvRole
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    pool_hit_tokens: int = 0
    computed_tokens: int = 0
    loaded_blocks: int = 0
    failed_blocks: int = 0
    stored_blocks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    kv_wait_seconds: float = 0.0
    kv_wait_by_layer_seconds: list[float] = []  # empty where layer hooks do not run
    kv_wait_by_stage_seconds: dict[str, float] = {}  # queue, wire, verify, scatter
    observed: Literal["layer", "stage"] = "stage"


class ReportWorkers(msgspec.Struct, tag=True, frozen=True):
    """The supervisor's whole list of workers; answered by `DesiredWorkers`."""

    workers: list[WorkerStatus]


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    """Ask for KV events after `sequence` of `incarnation`; a `Snapshot` comes first on a gap.

    `shares`: a gateway also wants what other gateways tell of their load, and may tell its own.
    """

    incarnation: int = 0
    sequence: int = 0
    shares: bool = False


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Answered by `PoolStats`."""


# --- replies --------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The handshake's yes. `slot_bytes` is 0 until a worker has brought a namespace."""

    node_id: str
    incarnation: int
    slab_path: str
    slab_bytes: int
    slot_bytes: int  # header + payload, page aligned
    header_bytes: int
    num_slots: int
    lease_seconds: float
    namespace: bytes = b""
    transfers: dict[str, str] = {}  # where blocks can be read from: address by transport
    namespaces: dict[bytes, int] = {}  # digest -> bytes of a block


class Refused(msgspec.Struct, tag=True, frozen=True):
    """No. `code` is stable; `message` names both values and the way out."""

    code: str
    message: str


class LookupReply(msgspec.Struct, tag=True, frozen=True):
    """`num_held` blocks from the head can be loaded now; `num_pending` more are on their way there.

    `num_on_disk` counts the blocks right after the held ones that lie on SSD only, with those that
    are being promoted. `num_held + num_on_disk` is what the node has.
    """

    num_held: int
    num_pending: int = 0
    num_on_disk: int = 0


class HoldsReply(msgspec.Struct, tag=True, frozen=True):
    """One letter a key: "d" in memory, "s" on SSD only, "-" not readable; true as of `sequence`."""

    incarnation: int
    sequence: int
    tiers: str


class PreparedLoad(msgspec.Struct, tag=True, frozen=True):
    """Slots of the pinned prefix, in chain order."""

    slots: list[SlotRef]


class PreparedStore(msgspec.Struct, tag=True, frozen=True):
    """One entry a key: a slot to fill, or None where it is held, pending, or there is no room.

    `num_refused` counts the latter; `write_queue` is (waiting blocks, bound).
    """

    slots: list[SlotRef | None]
    num_refused: int = 0
    write_queue: tuple[int, int] = (0, 0)


class Done(msgspec.Struct, tag=True, frozen=True):
    """Done; `count` says how many pins, blocks or leases it concerned."""

    count: int = 0


class WorkerCommand(msgspec.Struct, frozen=True):
    """What the control plane wants of one worker."""

    worker_id: str
    action: Literal["restart", "drain", "resume"]
    command_id: str


class DesiredWorkers(msgspec.Struct, tag=True, frozen=True):
    """Commands not yet acted on."""

    commands: list[WorkerCommand]


class BlocksStored(msgspec.Struct, tag=True, frozen=True):
    """A run of one chain became readable: `block_hashes` follow `parent` (b"" = chain head)."""

    namespace: bytes
    parent: bytes
    block_hashes: list[bytes]
    tier: TierName = "dram"


class BlocksMoved(msgspec.Struct, tag=True, frozen=True):
    """These blocks, held before and after, are now to be had from this tier (the nearest one)."""

    namespace: bytes
    block_hashes: list[bytes]
    tier: TierName


class BlocksRemoved(msgspec.Struct, tag=True, frozen=True):
    """Blocks left. The node has withdrawn their descendants too and lists them here."""

    namespace: bytes
    block_hashes: list[bytes]
    cause: RemovalCause


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """The namespace is empty."""

    namespace: bytes


KvEvent = BlocksStored | BlocksMoved | BlocksRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, tag=True, frozen=True):
    """Events `sequence - len(events) + 1 .. sequence` of one incarnation of a node."""

    node_id: str
    incarnation: int
    sequence: int
    events: list[KvEvent]


class Snapshot(msgspec.Struct, tag=True, frozen=True):
    """All that the node holds, as chain runs, as of `sequence`. Sent in parts; `last` ends it."""

    node_id: str
    incarnation: int
    sequence: int
    first: bool
    last: bool
    runs: list[BlocksStored]


RequestBody = (
    Hello
    | Lookup
    | PrepareLoad
    | PinPrefix
    | PrepareStore
    | Promote
    | Hint
    | Holds
    | Label
    | CompleteStore
    | Release
    | Renew
    | ReportCorrupt
    | LegReport
    | ReportWorkers
    | Subscribe
    | TellShare
    | GetStats
    | CacheRequest
    | TransferRequests
    | DoctorRequests
)
ReplyBody = (
    Welcome
    | Refused
    | LookupReply
    | HoldsReply
    | PreparedLoad
    | PreparedStore
    | Done
    | DesiredWorkers
    | EventBatch
    | Snapshot
    | LegReport
    | GatewayShare
    | PoolStats
    | CacheReply
    | TransferReplies
    | DoctorReplies
)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """`seq` > 0 is echoed in the reply."""

    seq: int
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`seq` 0 marks what the agent sends unasked."""

    seq: int
    body: ReplyBody
