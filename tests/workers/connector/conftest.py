"""The planner against the pool's own core: what the agent answers, without a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from workers.connector.planner import Planner, RequestInfo
from workers.connector.settings import ConnectorSettings
from workers.core.ids import OwnerId
from workers.core.messages import LegReport, LookupReply, SlotRef, StoredSlot
from workers.core.policies.lru import LruPolicy
from workers.core.pool_state import ClientRef, PoolLimits, PoolState

NAMESPACE = b"n" * 32
BLOCK = 8
ENGINE_BLOCK = 4


class CorePool:
    """`PoolCalls` straight onto a `PoolState`; `down` is an agent that does not answer."""

    def __init__(self, num_slots: int = 64) -> None:
        self.state = PoolState(num_slots, LruPolicy(), PoolLimits())
        self.client = ClientRef(1, "w1")
        self.down = False
        self.known = True
        self.num_lookups = 0
        self.reports: list[LegReport] = []
        self.now = 0.0

    @property
    def namespace(self) -> bytes:
        return NAMESPACE if self.known else b""

    @property
    def incarnation(self) -> int:
        return 7

    def lookup(self, hashes: Sequence[bytes]) -> LookupReply | None:
        self.num_lookups += 1
        return None if self.down else self.state.lookup(NAMESPACE, hashes)

    def prepare_load(self, owner: str, hashes: Sequence[bytes]) -> list[SlotRef] | None:
        if self.down:
            return None
        return self.state.prepare_load(self.client, OwnerId(owner), NAMESPACE, hashes, self.now)

    def pin_prefix(self, owner: str, hashes: Sequence[bytes]) -> int:
        if self.down:
            return 0
        return self.state.pin_prefix(self.client, OwnerId(owner), NAMESPACE, hashes, self.now)

    def release(self, owner: str) -> None:
        self.state.release(OwnerId(owner), self.now)

    def report(self, leg: LegReport) -> None:
        self.reports.append(leg)

    def begin(self, hashes: Sequence[bytes], parent: bytes = b"") -> list[SlotRef]:
        """Another worker has begun to write these blocks."""
        reply = self.state.prepare_store(
            ClientRef(2, "w2"), OwnerId("store:w2:x"), NAMESPACE, parent, hashes, self.now
        )
        self.state.release(OwnerId("store:w2:x"), self.now)
        return [ref for ref in reply.slots if ref is not None]

    def complete(self, refs: Sequence[SlotRef]) -> None:
        self.state.complete_store(self.now, [StoredSlot(r.slot, r.generation, 1) for r in refs])

    def fill(self, hashes: Sequence[bytes]) -> None:
        """Another worker has stored these blocks."""
        self.complete(self.begin(hashes))


@pytest.fixture
def pool() -> CorePool:
    return CorePool()


@pytest.fixture
def make_planner(pool: CorePool) -> Callable[..., Planner]:
    def make(**changes: object) -> Planner:
        values: dict[str, object] = {
            "agent_socket": "unused",
            "worker_id": "w1",
            "block_tokens": BLOCK,
            "engine_block_tokens": ENGINE_BLOCK,
            "kv_role": "kv_both",
            "model_id": "m",
            **changes,
        }
        return Planner(ConnectorSettings(**values), pool)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_info() -> Callable[..., RequestInfo]:
    def make(num_tokens: int, request_id: str = "r1", **changes: object) -> RequestInfo:
        return RequestInfo(request_id, list(range(100, 100 + num_tokens)), **changes)  # type: ignore[arg-type]

    return make
