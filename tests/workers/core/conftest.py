"""A pool of two tiers without a disk: jobs end as the tests say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workers.core.ids import BlockHash, OwnerId
from workers.core.messages import StoredSlot
from workers.core.policies.lru import LruPolicy
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef, PoolLimits, PoolState
from workers.core.slots import SlotTable
from workers.core.tiers import DiskJob, Forget, Outcome

SPACE = b"s" * 32
P1 = ClientRef(1, "p1")


class Bench:
    """A pool of 8 slots over a disk of 8; `work` ends all that is under way."""

    def __init__(self, num_slots: int = 8, num_disk: int = 8, **limits: Any) -> None:
        self.now = 0.0
        self.num_owners = 0
        values: dict[str, Any] = {"lease_seconds": 30.0, "reserve_share": 0.5} | limits
        self.pool = PoolState(num_slots, LruPolicy(), PoolLimits(**values), block_bytes=100)
        self.jobs: list[DiskJob] = []
        if num_disk:
            self.pool.disk.open(SlotTable(num_disk, 1))

    def store(
        self, keys: list[BlockHash], tenant: str = "", parent: bytes = b"", space: bytes = SPACE
    ) -> int:
        """Stored and let go; how many were new."""
        self.num_owners += 1
        self.now += 1
        owner = OwnerId(f"transfer:{self.num_owners}")
        reply = self.pool.prepare_store(P1, owner, space, parent, keys, self.now, tenant)
        slots = [StoredSlot(ref.slot, ref.generation, 1) for ref in reply.slots if ref]
        self.pool.complete_store(self.now, slots)
        self.pool.release(owner, self.now)
        return len(slots)

    def demote(self) -> None:
        while self.pool.demote_ahead(self.now):
            self.work()

    def promote(self, keys: list[BlockHash], owner: str = "load:d1:1") -> Any:
        self.now += 1
        return self.pool.promote(P1, OwnerId(owner), SPACE, keys, "first_token", self.now)

    def take(self) -> list[DiskJob]:
        self.jobs += self.pool.disk.take_jobs()
        return self.jobs

    def work(self, problem: Any = "") -> int:
        jobs = [job for job in self.take() if not isinstance(job, Forget)]
        self.jobs.clear()
        for job in jobs:
            self.pool.disk_done(Outcome(job.job, problem), self.now)
        return len(jobs)

    def tiers(self, keys: list[BlockHash]) -> str:
        return self.pool.holds(SPACE, keys)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    check_integrity(made.pool)


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """`Bench` with numbers of its own."""
    return Bench
