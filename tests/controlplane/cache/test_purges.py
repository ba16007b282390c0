"""A purge's progress: blocks purged, of those that there were to purge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from controlplane.cache.context import JobContext
from controlplane.cache.purges import _purge_here
from workers.core.cache_messages import CHANGED_BLOCKS, PinChains, PurgeChains, Selection, Slice
from workers.core.hashing import block_hashes
from workers.core.ids import OwnerId
from workers.core.messages import StoredSlot
from workers.core.policies.lru import LruPolicy
from workers.core.pool_ops import pin, purge
from workers.core.pool_state import ClientRef, PoolLimits, PoolState

SPACE, OTHER = b"s" * 32, b"o" * 32
NUM_ACME, NUM_REST = 2100, 5000


@dataclass
class PoolAgent:
    """A pool that answers as its agent does, without a socket; `calls` bounds how often."""

    node: str = "n1"
    pool: PoolState = field(
        default_factory=lambda: PoolState(9000, LruPolicy(), PoolLimits(30.0, 9000))
    )
    calls: int = 1000
    says_what_is_left: bool = True

    async def call(self, body: PurgeChains, _reply: type[Slice]) -> Slice:
        self.calls -= 1
        if self.calls < 0:
            raise asyncio.CancelledError
        reply = purge(self.pool, body)
        if self.says_what_is_left:
            return reply
        return Slice(reply.num_blocks, reply.num_skipped, reply.num_in_use, reply.cursor)

    def store(self, name: bytes, num_blocks: int, tenant: str, space: bytes = SPACE) -> None:
        for number in range(num_blocks // 50):
            keys = block_hashes(name + bytes([number]), range(50), 1)
            owner = OwnerId(f"store:{tenant}{number}")
            reply = self.pool.prepare_store(
                ClientRef(1, "p1"), owner, space, b"", keys, 1.0, tenant
            )
            slots = [StoredSlot(ref.slot, ref.generation, 1) for ref in reply.slots if ref]
            self.pool.complete_store(1.0, slots)
            self.pool.release(owner, 1.0)


@pytest.fixture
def agent() -> PoolAgent:
    made = PoolAgent()
    made.store(b"a", NUM_ACME, "acme")
    made.store(b"r", NUM_REST, "")
    return made


@dataclass
class Run:
    """One attempt of a job, and all that it told of its progress."""

    spec: dict[str, Any]
    told: list[tuple[int, int | None]] = field(default_factory=list)

    async def purge(self, agent: PoolAgent) -> dict[str, object]:
        nothing: Any = None
        self.context = JobContext(1, self.spec, 1, nothing, nothing, self._tell)
        return await _purge_here(self.context, agent)  # type: ignore[arg-type]

    def _tell(self, done: int, total: int | None, _note: str) -> None:
        assert total is None or done <= total
        self.told.append((done, total))


async def test_of_what_a_tenant_has_not_of_what_the_walk_passes(agent: PoolAgent) -> None:
    run = Run({"tenant": "acme"})
    result = await run.purge(agent)
    assert result == {"blocks": NUM_ACME, "kept_by_pins": 0, "in_use": 0, "confirmed": True}
    assert {total for _, total in run.told} == {NUM_ACME}
    dones = [done for done, _ in run.told]
    assert dones == sorted(dones)
    assert dones[-1] == NUM_ACME
    assert len(set(dones)) > NUM_ACME // CHANGED_BLOCKS, "it shows how it goes on"
    assert len(agent.pool.blocks) == NUM_REST


async def test_cancelled_and_taken_up_again(agent: PoolAgent) -> None:
    agent.calls = (NUM_REST + NUM_ACME // 2) // CHANGED_BLOCKS  # the walk begins with the others
    first = Run({"tenant": "acme"})
    with pytest.raises(asyncio.CancelledError):
        await first.purge(agent)
    done, total = first.told[-1]
    assert total == NUM_ACME
    assert 0 < done < NUM_ACME
    agent.calls = 1000
    again = Run({"tenant": "acme"})
    assert (await again.purge(agent))["confirmed"]
    assert again.told[-1] == (NUM_ACME - done, NUM_ACME - done), "what was left then"


async def test_what_pins_keep_was_there_too(agent: PoolAgent) -> None:
    key = bytes(next(block.key for block in agent.pool.blocks.values() if not block.children))
    pin(agent.pool, PinChains("keep", Selection(key=key)), 1.0)
    run = Run({"tenant": "acme"})
    result = await run.purge(agent)
    assert (result["kept_by_pins"], result["confirmed"]) == (50, False)
    assert run.told[-1] == (NUM_ACME - 50, NUM_ACME)


async def test_what_is_selected_twice_over_is_settled_at_the_end(agent: PoolAgent) -> None:
    agent.store(b"o", 500, "acme", OTHER)
    run = Run({"tenant": "acme", "namespace": OTHER.hex()})
    assert (await run.purge(agent))["blocks"] == 500
    assert run.told[-1] == (500, 500)


async def test_of_an_older_agent_only_what_is_done_is_known(agent: PoolAgent) -> None:
    agent.says_what_is_left = False
    run = Run({"tenant": "acme"})
    assert (await run.purge(agent))["blocks"] == NUM_ACME
    assert run.told[-1] == (NUM_ACME, None)
