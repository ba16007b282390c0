"""What crosses between the connector's two halves: orders down each step, results back up.

vLLM pickles these between its processes. Plain values only.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PageTarget:
    """Page `page` of a pool block belongs into the engine's block `block_id`."""

    page: int
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One pool block to read. `slot` is -1 where the pool lost it after it was promised."""

    block_hash: bytes
    slot: int
    generation: int
    pages: tuple[PageTarget, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """All that one request reads this step, in chain order; slots of one agent incarnation."""

    request_id: str
    attempt: int
    incarnation: int
    first_block: int  # index in the prompt of blocks[0]
    blocks: tuple[BlockLoad, ...]


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A run of a request's chain whose tokens are computed when this step has run.

    `block_ids` holds the engine's blocks of the whole run, in order.
    """

    request_id: str
    attempt: int
    owner: str
    namespace: bytes
    parent: bytes
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """One engine step's work for the worker half. A step with a `number` comes back in the results,
    so that the planner learns how long it took."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    number: int = 0


@dataclass(slots=True)
class LoadResult:
    """How one `LoadOrder` went. `first_failed` is an index in the prompt, -1 where none failed."""

    request_id: str
    attempt: int
    loaded_blocks: int = 0
    failed_blocks: int = 0
    first_failed: int = -1
    loaded_bytes: int = 0
    verify_seconds: float = 0.0
    scatter_seconds: float = 0.0
    by_layer_seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class StoreResult:
    """Blocks of one request: handed to the pool, refused by it and kept to be offered again, or
    dropped."""

    request_id: str
    stored_blocks: int = 0
    stored_bytes: int = 0
    refused_blocks: int = 0
    dropped_blocks: int = 0


@dataclass(slots=True)
class StepResults:
    """What the worker half did in a step; `steps` are the numbers of those that ended."""

    loads: list[LoadResult] = field(default_factory=list)
    stores: list[StoreResult] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.steps)
