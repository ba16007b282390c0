"""Run by a test on a small file system of its own: fills an SSD tier with three times its cap."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from blake3 import blake3

from workers.core.ids import OwnerId
from workers.core.messages import StoredSlot
from workers.core.policies.lru import LruPolicy
from workers.core.pool_adoption import adopt_on_disk
from workers.core.pool_base import ClientRef, PoolLimits
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import PoolState
from workers.core.tiers import Outcome
from workers.pool.arena import Slab, SlabFile
from workers.pool.ssd import SsdSettings, SsdTier

BLOCK_BYTES = 60_000
SLOT_BYTES = 61_440
NUM_SLOTS = 32
SPACE = b"s" * 32


def free_bytes(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def main(folder: Path) -> None:
    before = free_bytes(folder)
    name = f"perilune-small-{os.getpid()}.slab"
    slab_file = SlabFile(name, NUM_SLOTS * SLOT_BYTES)
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def done(outcome: Outcome) -> None:
        with lock:
            outcomes.append(outcome)

    pool = PoolState(NUM_SLOTS, LruPolicy(), PoolLimits(), block_bytes=BLOCK_BYTES)
    slab = Slab.attach(slab_file.path, SLOT_BYTES)
    grown: list[int] = []
    tier = SsdTier(SsdSettings(folder, name), slab, BLOCK_BYTES, done=done, grown=grown.append)
    try:
        opened = tier.open()
        adopt_on_disk(pool, opened.records, opened.num_slots, 0.0)
        tier.start()
        deadline = time.monotonic() + 60
        while not grown or grown[-1] < opened.max_slots:
            assert time.monotonic() < deadline, tier.facts()
            time.sleep(0.01)
        pool.disk.slots.grow(grown[-1])
        for number in range(3 * grown[-1]):
            store(pool, slab, number)
            while pool.disk.num_writes or outcomes:
                assert time.monotonic() < deadline, tier.facts()
                with lock:
                    ended, outcomes[:] = list(outcomes), []
                for outcome in ended:
                    assert not outcome.problem, outcome
                    pool.disk_done(outcome, float(number))
                tier.submit(pool.disk.take_jobs())
                time.sleep(0.0005)
            check_integrity(pool)
        used = before - free_bytes(folder)
        assert used <= 0.11 * before + (1 << 20), (used, before)
        assert pool.disk.counters.evicted_blocks_total > grown[-1]
        assert tier.facts().state == "ok", tier.facts()
        print("ok", used, before, opened.max_slots)
    finally:
        tier.close()
        slab.close()
        slab_file.close()


def store(pool: PoolState, slab: Slab, number: int) -> None:
    key = blake3(number.to_bytes(8, "little")).digest(length=16)
    owner = OwnerId(f"transfer:{number}")
    reply = pool.prepare_store(ClientRef(1, "w"), owner, SPACE, b"", [key], float(number))
    (ref,) = reply.slots
    assert ref is not None
    checksum = slab.write_block(ref.slot, ref.generation, key, blake3(key).digest(BLOCK_BYTES))
    pool.complete_store(float(number), [StoredSlot(ref.slot, ref.generation, checksum)])
    pool.release(owner, float(number))
    pool.demote_ahead(float(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
