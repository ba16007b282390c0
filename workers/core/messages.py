"""What travels between a node agent and its clients (workers, gateways, the supervisor).

Framing: 4 bytes little-endian length, then one msgpack document, at most `MAX_FRAME_BYTES`.
A client sends `Request(seq, body)`; the agent answers `Reply(seq, body)` with the same `seq`.
After `Subscribe` the agent also sends `EventBatch` and `LegReport` unasked, as `Reply(0, ...)`.
The first request on a connection is `Hello`; anything else first is refused with `Refused`.
When a connection ends, the agent releases what its client was storing and the `load:` pins it
took. `transfer:` pins outlive connections: their lease or `Release` ends them.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

PROTOCOL_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024

ClientRole = Literal["worker", "gateway", "supervisor", "cli"]
KvRole = Literal["kv_producer", "kv_consumer", "kv_both"]
EngineRole = Literal["scheduler", "worker"]
"""Which half of the connector speaks: vLLM runs them in two processes."""


class NamespaceSpec(msgspec.Struct, frozen=True):
    """Everything that must agree before one worker may read another's blocks."""

    model_id: str
    weights_version: str
    kv_dtype: str
    page_layout: str  # e.g. "LBHNC"
    isa: str  # e.g. "vec", "amx", "cuda"
    page_bytes: tuple[int, ...]  # bytes of one engine block, per layer, in layer order
    engine_block_tokens: int
    block_tokens: int  # pool block: a multiple of engine_block_tokens
    tp_size: int
    rank_layout: str  # e.g. "tp1"
    format_version: int = 1

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one pool block: all layers."""
        return sum(self.page_bytes) * (self.block_tokens // self.engine_block_tokens)


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


class Lookup(msgspec.Struct, tag=True, frozen=True):
    """How long a prefix of these keys the node holds. Changes nothing, touches nothing."""

    namespace: bytes
    block_hashes: list[bytes]


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


class CompleteStore(msgspec.Struct, tag=True, frozen=True):
    """The bytes of these slots are in place (`stored`) or will never be (`failed`)."""

    owner: str
    stored: list[StoredSlot]
    failed: list[SlotRef] = []


class Release(msgspec.Struct, tag=True, frozen=True):
    """End every pin of `owner`. Idempotent."""

    owner: str


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

    Tokens of a prompt split as device_hit + pool_hit + computed. Seconds are of this leg only.
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


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker process as its supervisor sees it."""

    worker_id: str
    role: Literal["prefill", "decode", "both"]
    model: str
    url: str
    state: Literal["launching", "loading", "ready", "draining", "stopped", "failed"]
    pid: int = 0
    restarts: int = 0
    engine: Literal["vllm", "emulated"] = "vllm"
    started_at: float = 0.0  # seconds since the epoch
    last_error: str = ""
    log_file: str = ""
    rss_bytes: int = 0


class ReportWorkers(msgspec.Struct, tag=True, frozen=True):
    """The supervisor's whole list of workers; answered by `DesiredWorkers`."""

    workers: list[WorkerStatus]


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    """Ask for KV events after `sequence` of `incarnation`; a `Snapshot` comes first on a gap."""

    incarnation: int = 0
    sequence: int = 0


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


class Refused(msgspec.Struct, tag=True, frozen=True):
    """No. `code` is stable; `message` names both values and the way out."""

    code: str
    message: str


class LookupReply(msgspec.Struct, tag=True, frozen=True):
    """`num_held` blocks from the head are readable; `num_pending` more are being stored."""

    num_held: int
    num_pending: int = 0


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


class BlocksRemoved(msgspec.Struct, tag=True, frozen=True):
    """Blocks left. The node has withdrawn their descendants too and lists them here."""

    namespace: bytes
    block_hashes: list[bytes]
    cause: Literal["capacity", "corrupt", "failed_write", "purge"]


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """The namespace is empty."""

    namespace: bytes


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


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


class NamespaceInfo(msgspec.Struct, frozen=True):
    """A namespace that the node serves."""

    digest: bytes
    spec: NamespaceSpec
    workers: list[str] = []


class PoolStats(msgspec.Struct, tag=True, frozen=True):
    """Counters are cumulative over one incarnation; gauges are as of now. Bytes, blocks, seconds."""

    node_id: str
    incarnation: int
    uptime_seconds: float
    capacity_blocks: int
    used_blocks: int
    pinned_blocks: int
    pending_blocks: int
    block_bytes: int
    slab_bytes: int
    rss_bytes: int  # the agent's resident memory without its slab
    write_queue_blocks: int
    write_queue_bound: int
    lookups_total: int = 0
    lookup_blocks_total: int = 0
    lookup_hit_blocks_total: int = 0
    prompt_tokens_total: int = 0  # from leg reports of producers
    hit_tokens_total: int = 0
    stored_blocks_total: int = 0
    store_failed_total: int = 0
    store_refused_total: int = 0
    loaded_blocks_total: int = 0
    load_failed_total: int = 0
    evict_attempts_total: int = 0
    evicted_blocks_total: int = 0
    evicted_by_cause: dict[str, int] = {}
    starved_by_pins_total: int = 0
    corrupt_total: int = 0
    leases_expired_total: int = 0
    moved_bytes_total: int = 0  # between nodes; shared memory is not moved
    shm_bytes_by_pair: dict[str, int] = {}  # "p1>d1": bytes stored by p1 and loaded by d1
    shm_seconds_by_pair: dict[str, float] = {}
    evicted_wanted_again_total: int = 0
    num_owners: int = 0
    namespaces: list[NamespaceInfo] = []
    workers: list[WorkerStatus] = []


RequestBody = (
    Hello
    | Lookup
    | PrepareLoad
    | PinPrefix
    | PrepareStore
    | CompleteStore
    | Release
    | Renew
    | ReportCorrupt
    | LegReport
    | ReportWorkers
    | Subscribe
    | GetStats
)
ReplyBody = (
    Welcome
    | Refused
    | LookupReply
    | PreparedLoad
    | PreparedStore
    | Done
    | DesiredWorkers
    | EventBatch
    | Snapshot
    | LegReport
    | PoolStats
)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """`seq` > 0 is echoed in the reply."""

    seq: int
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`seq` 0 marks what the agent sends unasked."""

    seq: int
    body: ReplyBody
