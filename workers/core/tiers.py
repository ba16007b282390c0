"""The SSD tier as a value: whose copies are where, what is under way, what the shell is to do.

Pure. The pool starts jobs; the shell takes them by `take_jobs`, does them in any order and reports
each once, as an `Outcome`. A slot of the disk or of the slab that a job uses is not given to
another before that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from workers.core.blocks import Block, DiskCopy
from workers.core.messages import SlotRef
from workers.core.policies.base import BlockUse
from workers.core.pool_evictor import TierEvictor
from workers.core.slots import SlotTable

MAX_WRITES: Final = 128
MAX_READS: Final = 256
MAX_WANTED: Final = 8192

Urgency = Literal["first_token", "batch"]
Problem = Literal["", "source", "full", "io", "missing", "short", "checksum"]
"""source: the slot in memory was not what it should be; missing: no such record on disk."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What is noted of a block's copy: enough to find it again after a restart."""

    slot: int
    generation: int
    key: bytes
    parent: bytes  # b"" at a chain's head
    namespace: bytes
    tenant: str
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class WriteOut:
    """Copy a slot of the slab to disk: clear the record, write the data, write the record."""

    job: int
    source: SlotRef
    record: BlockRecord


@dataclass(frozen=True, slots=True)
class ReadIn:
    """Copy a block from disk into a slot of the slab, verify it, and write the slot's header."""

    job: int
    target: SlotRef
    record: BlockRecord
    urgency: Urgency


@dataclass(frozen=True, slots=True)
class Forget:
    """Clear the record of this slot unless it is of a later generation. Not reported."""

    disk_slot: int
    disk_generation: int


DiskJob = WriteOut | ReadIn | Forget


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a `WriteOut` or `ReadIn` ended."""

    job: int
    problem: Problem = ""
    seconds: float = 0.0
    message: str = ""


@dataclass(slots=True)
class DiskCounters:
    """Monotone; names as in `TierStats`."""

    read_blocks_total: int = 0
    read_seconds_total: float = 0.0
    written_blocks_total: int = 0
    write_seconds_total: float = 0.0
    evicted_blocks_total: int = 0
    failed_reads_total: int = 0
    failed_writes_total: int = 0


class DiskState:
    """Closed until `open`; then `slots` are the places of the disk's file."""

    def __init__(self, evictor: TierEvictor) -> None:
        self.evictor = evictor  # of the blocks that lie on disk only
        self.slots = SlotTable(0)
        self.counters = DiskCounters()
        self.by_slot: dict[int, Block] = {}
        self.leaving: dict[Block, BlockUse] = {}  # on their way out of memory
        self.duplicates: dict[Block, None] = {}  # also in memory; the oldest copy first
        self.takes_writes = False
        self.cap_blocks: int | None = None
        self._promoted: dict[Block, BlockUse] = {}  # on their way into memory
        self._wanted: dict[Urgency, dict[Block, None]] = {"first_token": {}, "batch": {}}
        self._jobs: dict[int, tuple[WriteOut | ReadIn, Block]] = {}
        self._todo: list[DiskJob] = []
        self._last_job = 0
        self.num_writes = 0
        self.num_reads = 0

    def open(self, slots: SlotTable) -> None:
        self.slots = slots
        self.takes_writes = True

    @property
    def num_free(self) -> int:
        """Slots that may be taken."""
        if self.cap_blocks is None:
            return self.slots.num_free
        return max(0, min(self.slots.num_free, self.cap_blocks - self.slots.num_used))

    @property
    def num_over_cap(self) -> int:
        return 0 if self.cap_blocks is None else max(0, self.slots.num_used - self.cap_blocks)

    # --- jobs -------------------------------------------------------------------------------

    def take_jobs(self) -> list[DiskJob]:
        jobs, self._todo = self._todo, []
        return jobs

    def add_jobs(self, jobs: Iterable[DiskJob]) -> None:
        self._todo += jobs

    def start_write(self, block: Block, block_bytes: int) -> None:
        """Copy a block out; there must be a free slot."""
        taken = self.slots.take()
        assert taken is not None, "room was made before"
        block.disk = DiskCopy(*taken)
        block.copying = True
        self.by_slot[block.disk.slot] = block
        self.num_writes += 1
        self._start(WriteOut(self._number(), block.ref, record_of(block, block_bytes)), block)

    def start_read(self, block: Block, block_bytes: int, urgency: Urgency, now: float) -> None:
        """Copy a block into the slot that it has been given."""
        use = self.evictor.use_of(block.key)
        self._promoted[block] = use or BlockUse(block.key, now, 1, False)
        self.evictor.removed(block.key)
        block.copying = True
        self.num_reads += 1
        job = ReadIn(self._number(), block.ref, record_of(block, block_bytes), urgency)
        self._start(job, block)

    def end(self, outcome: Outcome) -> tuple[WriteOut | ReadIn, Block] | None:
        """The job that is reported; None for one that is not under way."""
        found = self._jobs.pop(outcome.job, None)
        if found is None:
            return None
        job, block = found
        block.copying = False
        if isinstance(job, WriteOut):
            self.num_writes -= 1
            self._count_write(outcome)
        else:
            self.num_reads -= 1
            self._count_read(outcome)
        return found

    # --- wanted in memory -------------------------------------------------------------------

    @property
    def num_wanted(self) -> int:
        return sum(map(len, self._wanted.values()))

    def is_wanted(self, block: Block) -> bool:
        return any(block in waiting for waiting in self._wanted.values())

    def want(self, block: Block, urgency: Urgency) -> bool:
        """Let a block wait for a slot; the more urgent wish counts. False: too many wait."""
        if urgency == "batch" and block in self._wanted["first_token"]:
            return True
        if not self.is_wanted(block) and self.num_wanted >= MAX_WANTED:
            return False
        self.unwant(block)
        self._wanted[urgency][block] = None
        return True

    def unwant(self, block: Block) -> None:
        for waiting in self._wanted.values():
            waiting.pop(block, None)

    def next_wanted(self) -> tuple[Block, Urgency] | None:
        """What waits for a first token goes before what waits in bulk."""
        for urgency, waiting in self._wanted.items():
            for block in waiting:
                return block, urgency
        return None

    # --- copies -----------------------------------------------------------------------------

    def arrived(self, block: Block, use: BlockUse, now: float) -> None:
        """A block lies on disk only from now on."""
        self.duplicates.pop(block, None)
        self.evictor.adopt(use, now)

    def adopt(self, block: Block, copy: DiskCopy, now: float) -> None:
        """A block of a former life, on disk only; its slot is in use already."""
        block.disk = copy
        self.by_slot[copy.slot] = block
        self.evictor.adopt(BlockUse(block.key, now, 1, False), now)

    def use_of_promoted(self, block: Block, now: float) -> BlockUse:
        return self._promoted.pop(block, BlockUse(block.key, now, 1, False))

    def forget(self, block: Block) -> None:
        """A block leaves the index."""
        self.leaving.pop(block, None)
        self.duplicates.pop(block, None)
        self.unwant(block)
        self._promoted.pop(block, None)
        if not block.copying:
            self.free(block)

    def free(self, block: Block) -> None:
        """Give up the copy, if there is one. No job may be using it."""
        copy, block.disk = block.disk, None
        self.duplicates.pop(block, None)
        if copy is not None:
            del self.by_slot[copy.slot]
            self.slots.give_back(copy.slot)
            self._todo.append(Forget(copy.slot, copy.generation))

    def drop_duplicate(self) -> bool:
        """Give up the oldest copy of a block that is in memory too."""
        for block in self.duplicates:
            self.free(block)
            return True
        return False

    # --- inside -----------------------------------------------------------------------------

    def _number(self) -> int:
        self._last_job += 1
        return self._last_job

    def _start(self, job: WriteOut | ReadIn, block: Block) -> None:
        self._jobs[job.job] = (job, block)
        self._todo.append(job)

    def _count_write(self, outcome: Outcome) -> None:
        counters = self.counters
        counters.failed_writes_total += bool(outcome.problem)
        counters.written_blocks_total += not outcome.problem
        counters.write_seconds_total += outcome.seconds

    def _count_read(self, outcome: Outcome) -> None:
        counters = self.counters
        counters.failed_reads_total += bool(outcome.problem)
        counters.read_blocks_total += not outcome.problem
        counters.read_seconds_total += outcome.seconds


def record_of(block: Block, block_bytes: int) -> BlockRecord:
    copy = block.disk
    assert copy is not None, "a block without a copy has no record"
    parent = b"" if block.parent is None else bytes(block.parent.key)
    return BlockRecord(
        slot=copy.slot,
        generation=copy.generation,
        key=bytes(block.key),
        parent=parent,
        namespace=block.namespace,
        tenant=block.tenant,
        length=block_bytes,
        checksum=block.checksum,
    )
