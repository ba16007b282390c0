"""The planner against the pool's own core: what the agent answers, without a socket."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from connector_halves import Agent, Engine

from workers.connector.planner import Planner, RequestInfo
from workers.connector.settings import ConnectorSettings
from workers.core.ids import OwnerId
from workers.core.messages import LegReport, LookupReply, SlotRef, StoredSlot
from workers.core.policies.lru import LruPolicy
from workers.core.pool_state import ClientRef, PoolLimits, PoolState
from workers.core.transfer_messages import HolderRef

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
        self.looked_up: list[list[bytes]] = []
        self.asked_for: list[str] = []  # requests, one for each of these
        self.on_disk: set[bytes] = set()
        self.promotions: list[tuple[str, list[bytes], str]] = []
        self.fetches: list[tuple[str, list[bytes], str, str]] = []
        self.pushes: list[tuple[str, list[bytes], str, str]] = []
        self.fetchable = True
        self.coming: list[SlotRef] = []
        self.labels: list[tuple[str, str]] = []
        self.kept: set[str] = set()
        self.hints: list[tuple[list[bytes], str]] = []
        self.reports: list[LegReport] = []
        self.now = 0.0

    @property
    def namespace(self) -> bytes:
        return NAMESPACE if self.known else b""

    @property
    def incarnation(self) -> int:
        return 7

    def lookup(
        self, chains: Sequence[Sequence[bytes]], requests: Sequence[str]
    ) -> list[LookupReply] | None:
        self.num_lookups += 1
        self.asked_for += requests
        self.looked_up += [list(chain) for chain in chains]
        return None if self.down else [self._lookup(chain) for chain in chains]

    def _lookup(self, chain: Sequence[bytes]) -> LookupReply:
        """As a node with a second tier says it: `on_disk` are there, but not in memory."""
        reply = self.state.lookup(NAMESPACE, chain)
        tail = itertools.takewhile(lambda key: key in self.on_disk, chain[reply.num_held :])
        return LookupReply(reply.num_held, reply.num_pending, len(list(tail)))

    def prepare_load(self, owner: str, hashes: Sequence[bytes]) -> list[SlotRef] | None:
        if self.down:
            return None
        return self.state.prepare_load(self.client, OwnerId(owner), NAMESPACE, hashes, self.now)

    def pin_prefix(self, owner: str, hashes: Sequence[bytes]) -> int:
        if self.down:
            return 0
        return self.state.pin_prefix(self.client, OwnerId(owner), NAMESPACE, hashes, self.now)

    def promote(self, owner: str, hashes: Sequence[bytes], urgency: str) -> LookupReply | None:
        self.promotions.append((owner, list(hashes), urgency))
        if self.down:
            return None
        self.pin_prefix(owner, hashes)
        return self._lookup(hashes)

    def fetch(
        self, owner: str, hashes: Sequence[bytes], holder: HolderRef, tenant: str
    ) -> LookupReply | None:
        """As an agent says it: what it lacks has slots that are being written now."""
        self.fetches.append((owner, list(hashes), holder.node_id, tenant))
        if self.down:
            return None
        if self.fetchable:
            found = self.state.peek(NAMESPACE, hashes)
            parent = hashes[found.num_held - 1] if found.num_held else b""
            self.coming = self.begin(hashes[found.num_held :], parent)
            self.pin_prefix(owner, hashes)
        return self._lookup(hashes)

    def push(self, owner: str, hashes: Sequence[bytes], target: HolderRef, tenant: str) -> None:
        self.pushes.append((owner, list(hashes), target.node_id, tenant))

    def promote_later(self, owner: str, hashes: Sequence[bytes]) -> None:
        self.promote(owner, hashes, "batch")

    def read_disk(self) -> None:
        """What was asked for has come into memory, pinned for who asked."""
        for owner, hashes, _ in self.promotions:
            wanted = [key for key in hashes if key in self.on_disk]
            self.on_disk.difference_update(wanted)
            above = hashes[: len(hashes) - len(wanted)]
            self.fill(wanted, parent=above[-1] if above else b"")
            self.pin_prefix(owner, hashes)

    def release(self, owner: str) -> None:
        self.kept.discard(owner)
        self.state.release(OwnerId(owner), self.now)

    def keep(self, owner: str) -> None:
        self.kept.add(owner)

    def let_go(self, owner: str) -> None:
        self.kept.discard(owner)

    def label(self, request: str, label: str) -> None:
        self.labels.append((request, label))

    def hint(self, hashes: Sequence[bytes], session: str) -> None:
        self.hints.append((list(hashes), session))

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

    def fill(self, hashes: Sequence[bytes], parent: bytes = b"") -> None:
        """Another worker has stored these blocks."""
        self.complete(self.begin(hashes, parent))


@pytest.fixture
def make_halves_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts node agents, with further arguments of theirs."""
    made: list[Agent] = []

    def make(*extra: str) -> Agent:
        folder = tmp_path / f"agent-{len(made)}"
        folder.mkdir()
        made.append(Agent(folder, *extra))
        made[-1].start()
        return made[-1]

    yield make
    for agent in made:
        agent.stop()


@pytest.fixture
def halves_agent(make_halves_agent: Callable[..., Agent]) -> Agent:
    return make_halves_agent()


@pytest.fixture
def make_engine_at() -> Iterator[Callable[..., Engine]]:
    """Starts both halves of an engine's connector at an agent."""
    made: list[Engine] = []

    def make(agent: Agent, worker_id: str = "p1", kv_role: str = "kv_producer",
             settings: dict[str, object] | None = None, **spec_changes: object) -> Engine:  # fmt: skip
        made.append(Engine(agent, worker_id, kv_role, spec_changes, settings))
        made[-1].start()
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture
def make_engine(
    halves_agent: Agent, make_engine_at: Callable[..., Engine]
) -> Callable[..., Engine]:
    return functools.partial(make_engine_at, halves_agent)


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
