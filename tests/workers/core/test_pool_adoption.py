"""Blocks of a former life, from the slab and from disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.core.hashing import block_hashes
from workers.core.messages import BlocksStored
from workers.core.policies.lru import LruPolicy
from workers.core.pool_adoption import ADOPTED_OWNER, adopt_in_memory, adopt_on_disk, in_chain_order
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import PoolLimits, PoolState
from workers.core.tiers import BlockRecord, Forget

SPACE = b"s" * 32
A = block_hashes(b"a", range(20), 1)
B = block_hashes(b"b", range(20), 1)
C = block_hashes(b"c", range(20), 1)
MakeBench = Callable[..., Any]


def record(key: bytes, parent: bytes, slot: int, generation: int = 7) -> BlockRecord:
    return BlockRecord(slot, generation, key, parent, SPACE, "t", 100, 1)


class TestAdoption:
    def records(self, num: int, first_slot: int = 0) -> list[BlockRecord]:
        parents: list[bytes] = [b"", *A]
        return [record(A[i], parents[i], first_slot + i) for i in range(num)]

    def test_parents_come_first_and_orphans_are_left(self) -> None:
        records = self.records(5)
        order = in_chain_order([*records[3:], *records[:2]], lambda _: False)
        assert [r.key for r in order] == A[:2]
        twice = [*records[:2], record(A[1], A[0], 9, generation=9)]
        assert [r.slot for r in in_chain_order(twice, lambda _: False)] == [0, 9]

    def test_from_memory_with_slots_that_rest(self, make_bench: MakeBench) -> None:
        bench = make_bench(8, 0)
        pool = PoolState(8, LruPolicy(), PoolLimits(), block_bytes=100, first_generation=100)
        assert adopt_in_memory(pool, self.records(4)[::-1], {6: 3}, 5.0) == 4
        check_integrity(pool)
        assert pool.take_events() == [BlocksStored(SPACE, b"", [*A[:4]])]
        assert pool.slots.num_free == 3
        assert pool.owners.get(ADOPTED_OWNER) is not None
        bench.pool, bench.now = pool, 5.0
        assert bench.store(B[:8]) == 3, "adopted blocks are not evicted for a moment"
        pool.expire(8.0)
        assert pool.num_pinned == 0
        assert 6 in pool.quarantined
        pool.expire(36.0)
        assert not pool.quarantined
        generations = {pool.slots.take() for _ in range(pool.slots.num_free)}
        assert all(pair is not None and pair[1] >= 100 for pair in generations)

    def test_from_disk_below_what_is_here_by_now(self, bench: Any) -> None:
        pool = bench.pool
        pool.disk.takes_writes = False
        bench.store(A[:2])
        pool.take_events()
        records = [*self.records(5), record(B[3], B[2], 6)]
        assert adopt_on_disk(pool, records, 8, 3.0) == 3
        assert bench.tiers(A[:5]) == "ddsss"
        assert pool.take_events() == [BlocksStored(SPACE, A[1], [*A[2:5]], "ssd")]
        forgotten = {job.disk_slot for job in pool.disk.take_jobs() if isinstance(job, Forget)}
        assert forgotten == {0, 1, 6}
        assert pool.groups.tenant("t").used_blocks == 3
