"""The files of one agent: its slab with the journal beside it, and its SSD tier."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from workers.core.blocks import Block, BlockState
from workers.core.pool_state import PoolState
from workers.core.tiers import Outcome
from workers.pool.arena import Slab, SlabFile
from workers.pool.journal import Geometry, Journal, Recovered, recover
from workers.pool.records import SlotRecord
from workers.pool.ssd import SsdSettings, SsdTier
from workers.pool.tier import Tier, TierError, TierFacts, TierOpened

OPEN_SECONDS: Final = 30.0

_log = logging.getLogger(__name__)


class DiskListener(Protocol):
    """Hears of the tier, on the agent's own thread."""

    def disk_opened(self, opened: TierOpened) -> None: ...
    def disk_grown(self, num_slots: int) -> None: ...
    def disk_full(self, full: bool) -> None: ...
    def disk_done(self, outcome: Outcome) -> None: ...


class FileStorage:
    """`call_soon` runs a call on the agent's thread, from any thread."""

    def __init__(
        self,
        slab_file: SlabFile,
        ssd: SsdSettings | None,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._slab_file = slab_file
        self.numa_nodes = slab_file.numa_nodes
        self._ssd = ssd
        self._call_soon = call_soon
        self.listener: DiskListener | None = None
        self._slab: Slab | None = None
        self._journal: Journal | None = None
        self._tier: Tier | None = None
        self._opener: threading.Thread | None = None

    def attach(self, slot_bytes: int) -> Slab:
        return self._slab_file.slab(slot_bytes)

    def recover(self) -> Recovered | None:
        if not self._slab_file.adopted:
            return None
        journal = Journal.load(self._slab_file.journal_path)
        if journal is None:
            return None
        geometry = journal.geometry
        slab = self._slab_file.slab(geometry.slot_bytes)
        if slab.num_slots != geometry.num_slots:
            journal.close()
            slab.close()
            return None
        self._journal, self._slab = journal, slab
        return recover(journal, slab)

    def open(self, pool: PoolState, slot_bytes: int) -> None:
        geometry = Geometry(slot_bytes, pool.block_bytes, pool.slots.num_slots)
        if self._journal is None or self._journal.geometry != geometry:
            self._close_files()
            try:
                self._journal = Journal.create(self._slab_file.journal_path, geometry)
            except OSError as error:  # blocks then end with this agent, as without a journal
                _log.warning("no_journal error=%s", error)
        if self._slab is None:
            self._slab = self._slab_file.slab(slot_bytes)
        if self._ssd is not None:
            self._open_tier(self._ssd, self._slab, pool.block_bytes)
        self.settle(pool)

    def settle(self, pool: PoolState) -> None:
        if pool.changed_slots:
            if self._journal is not None:
                for slot in pool.changed_slots:
                    self._journal.note(slot, _note_of(pool, slot))
            pool.changed_slots.clear()
        jobs = pool.disk.take_jobs()
        if jobs and self._tier is not None:
            self._tier.submit(jobs)

    def drop(self) -> None:
        self._close_tier()
        self._close_files()

    def tier_facts(self) -> TierFacts | None:
        return None if self._tier is None else self._tier.facts()

    def close(self) -> None:
        """End the tier's threads and unmap; the SSD's contents stay for the next start."""
        self._close_tier()
        self._close_files()

    # --- inside -----------------------------------------------------------------------------

    def _open_tier(self, settings: SsdSettings, slab: Slab, block_bytes: int) -> None:
        tier = SsdTier(
            settings,
            slab,
            block_bytes,
            done=lambda outcome: self._tell(tier, lambda it: it.disk_done(outcome)),
            grown=lambda num_slots: self._tell(tier, lambda it: it.disk_grown(num_slots)),
            full=lambda full: self._tell(tier, lambda it: it.disk_full(full)),
        )
        self._tier = tier
        self._opener = threading.Thread(target=self._open, args=(tier,), daemon=True, name="ssd")
        self._opener.start()

    def _open(self, tier: Tier) -> None:
        try:
            opened = tier.open()
        except TierError as error:
            _log.error("no_ssd_tier error=%s", error)
            return
        self._tell(tier, lambda it: it.disk_opened(opened))
        tier.start()

    def _tell(self, tier: Tier, call: Callable[[DiskListener], None]) -> None:
        def tell() -> None:
            if self._tier is tier and self.listener is not None:
                call(self.listener)

        self._call_soon(tell)

    def _close_tier(self) -> None:
        if self._opener is not None:
            self._opener.join(timeout=OPEN_SECONDS)
        tier, self._tier, self._opener = self._tier, None, None
        if tier is not None:
            tier.close()

    def _close_files(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._slab is not None:
            self._slab.close()
        self._journal = self._slab = None


def _note_of(pool: PoolState, slot: int) -> SlotRecord | None:
    """What the next agent must know of this slot."""
    block = pool.by_slot.get(slot)
    if block is None:
        return SlotRecord("writing", 0) if slot in pool.quarantined else None
    if block.writing:
        return SlotRecord("writing", block.generation)
    return _stored(block, pool.block_bytes) if block.state is BlockState.STORED else None


def _stored(block: Block, block_bytes: int) -> SlotRecord:
    return SlotRecord(
        state="stored",
        generation=block.generation,
        key=bytes(block.key),
        parent=b"" if block.parent is None else bytes(block.parent.key),
        namespace=block.namespace,
        tenant=block.tenant,
        length=block_bytes,
        checksum=block.checksum,
    )
