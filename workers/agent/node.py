"""The agent's state and what each request does to it. No I/O: the server feeds it and sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from workers.agent.cache_ops import CacheOps
from workers.agent.events import EventLog, Subscriber
from workers.agent.handshake import (
    MAX_NAMESPACES,
    check_block_tokens,
    check_geometry,
    check_hello,
)
from workers.agent.metrics import AgentFacts, LegCounters, pool_stats
from workers.agent.pool_requests import PoolRequests
from workers.agent.session import Session
from workers.agent.settings import AgentSettings
from workers.core.blocks import SLOT_HEADER_BYTES, slot_bytes_of
from workers.core.clock import Clock
from workers.core.hashing import namespace_digest
from workers.core.messages import (
    BlocksStored,
    DesiredWorkers,
    Done,
    GetStats,
    Hello,
    LegReport,
    Refused,
    ReplyBody,
    ReportWorkers,
    RequestBody,
    Subscribe,
    Welcome,
    WorkerCommand,
)
from workers.core.owners import TooManyOwnersError
from workers.core.policies.registry import make_policy
from workers.core.pool_state import PoolLimits, PoolState
from workers.core.pool_views import stored_runs
from workers.core.stats_messages import NamespaceInfo, NamespaceSpec, PoolStats, WorkerStatus

MAX_WORKERS: Final = 1024
MAX_LEG_REPORTS: Final = 2000
MAX_COMMANDS: Final = 100
MAX_COMMANDS_SEEN: Final = 1000
_GENERATION_SHIFT: Final = 16
_GENERATION_MASK: Final = (1 << 62) - 1


class CachePolicy(msgspec.Struct, frozen=True):
    """What of the control plane's cache policy acts here; other fields are others' business."""

    lease_seconds: float | None = None
    write_queue_blocks: int | None = None


class Node:
    """One node: its pool, its namespaces, who is connected and what waits for the heartbeat."""

    def __init__(
        self,
        settings: AgentSettings,
        slab_path: str,
        clock: Clock,
        rss_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.settings = settings
        self.slab_path = slab_path
        self.slab_bytes = settings.slab_bytes
        self.clock = clock
        self._rss_bytes = rss_bytes
        self.started = clock.monotonic()
        self.incarnation = int(clock.wall() * 1000)
        self.limits = PoolLimits(settings.lease_seconds, settings.write_queue_blocks)
        self.log = EventLog(settings.node_id, self.incarnation)
        self.pool: PoolState | None = None
        self.sessions: dict[int, Session] = {}
        self.legs = LegCounters()
        self.leg_reports: deque[LegReport] = deque(maxlen=MAX_LEG_REPORTS)
        self.workers: list[WorkerStatus] = []
        self.acknowledged: deque[str] = deque(maxlen=MAX_COMMANDS)
        self.num_requests = 0
        self._commands: dict[str, WorkerCommand] = {}
        self._commands_seen: dict[str, None] = {}
        self.namespaces: dict[bytes, NamespaceSpec] = {}
        self.pool_requests = PoolRequests(self)
        self._handlers: dict[type, Callable[[Session, Any], ReplyBody]] = {
            **self.pool_requests.handlers(),
            **CacheOps(self).handlers(),
            LegReport: self._leg_report,
            ReportWorkers: self._report_workers,
            Subscribe: self._subscribe,
            GetStats: lambda _session, _body: self.stats(),
            Hello: lambda _session, _body: Refused("hello_twice", "Say Hello once a connection."),
        }

    # --- connections ------------------------------------------------------------------------

    def welcome(
        self, connection: int, hello: Hello, subscribe: Callable[[], Subscriber]
    ) -> Welcome | Refused:
        """Take a client in, or say why not."""
        refused = check_hello(hello)
        session = Session(connection, hello, subscribe)
        if refused is None and hello.role == "worker" and hello.namespace is not None:
            refused = self._join(session, hello.namespace)
        if refused is not None:
            return refused
        self.sessions[connection] = session
        return Welcome(
            node_id=self.settings.node_id,
            incarnation=self.incarnation,
            slab_path=self.slab_path,
            slab_bytes=self.slab_bytes,
            slot_bytes=0 if self.pool is None else slot_bytes_of(self.pool.block_bytes),
            header_bytes=SLOT_HEADER_BYTES,
            num_slots=0 if self.pool is None else self.pool.slots.num_slots,
            lease_seconds=self.limits.lease_seconds,
            namespace=session.namespace,
        )

    def goodbye(self, connection: int) -> None:
        """A connection ended, in whatever way."""
        if self.sessions.pop(connection, None) is not None and self.pool is not None:
            self.pool.abandon_client(connection)
            self._publish()

    def handle(self, session: Session, body: RequestBody) -> ReplyBody:
        """Do what is asked. Events that come of it are with the subscribers before the reply."""
        self.num_requests += 1
        try:
            return self._handlers[type(body)](session, body)
        except TooManyOwnersError as error:
            return Refused("too_many_owners", str(error))
        finally:
            self._publish()

    # --- from the loops ---------------------------------------------------------------------

    def expire(self) -> int:
        """End what outlived its lease; how many owners."""
        if self.pool is None:
            return 0
        num_expired = self.pool.expire(self.clock.monotonic())
        self._publish()
        return num_expired

    def stats(self) -> PoolStats:
        facts = AgentFacts(
            self.settings.node_id,
            self.incarnation,
            self.clock.monotonic() - self.started,
            self.slab_bytes,
            self._rss_bytes(),
        )
        return pool_stats(
            facts, self.pool, self.limits, self.legs, self._namespace_infos(), self.workers
        )

    def apply_cache_policy(self, policy: CachePolicy) -> None:
        """Absurd values are left out: the control plane validates, an older one may not."""
        if policy.lease_seconds is not None and policy.lease_seconds > 0:
            self.limits.lease_seconds = policy.lease_seconds
        if policy.write_queue_blocks is not None and policy.write_queue_blocks > 0:
            self.limits.write_queue_blocks = policy.write_queue_blocks

    def shrink_slab(self, slab_bytes: int) -> None:
        """The machine cannot back more than this: use no slot beyond it, then or later."""
        self.slab_bytes = slab_bytes
        if self.pool is not None:
            self.pool.slots.shrink(slab_bytes // slot_bytes_of(self.pool.block_bytes))

    def take_commands(self, commands: list[WorkerCommand]) -> None:
        """Keep new commands for the supervisor; each once, however often it is repeated."""
        for command in commands:
            fresh = command.command_id not in self._commands_seen
            if fresh and len(self._commands) < MAX_COMMANDS:
                self._commands[command.command_id] = command
                self._commands_seen[command.command_id] = None
        while len(self._commands_seen) > MAX_COMMANDS_SEEN:
            del self._commands_seen[next(iter(self._commands_seen))]

    def readable_runs(self) -> list[BlocksStored]:
        return [] if self.pool is None else stored_runs(self.pool)

    # --- requests ---------------------------------------------------------------------------

    def _leg_report(self, session: Session, body: LegReport) -> ReplyBody:
        self.legs.count(body)
        self.leg_reports.append(body)
        self._broadcast(body)
        return Done(1)

    def _report_workers(self, session: Session, body: ReportWorkers) -> ReplyBody:
        if session.hello.role not in {"supervisor", "cli"}:
            return Refused(
                "role", f"ReportWorkers from a {session.hello.role}: only a supervisor may."
            )
        self.workers = list(body.workers[:MAX_WORKERS])
        commands = list(self._commands.values())
        self.acknowledged.extend(self._commands)
        self._commands.clear()
        return DesiredWorkers(commands)

    def _subscribe(self, session: Session, body: Subscribe) -> ReplyBody:
        if session.subscriber is None:
            session.subscriber = session.subscribe()
        session.subscriber.start(body.incarnation, body.sequence)
        return Done(self.log.sequence)

    # --- inside -----------------------------------------------------------------------------

    def _join(self, session: Session, spec: NamespaceSpec) -> Refused | None:
        """Check a worker's namespace, and cut the slab by the first."""
        refused = check_block_tokens(spec, self.settings.block_tokens)
        if refused is not None:
            return refused
        known_bytes = 0 if self.pool is None else self.pool.block_bytes
        slot_bytes = slot_bytes_of(spec.block_bytes)
        refused = check_geometry(spec.block_bytes, known_bytes, self.slab_bytes, slot_bytes)
        if refused is not None:
            return refused
        digest = namespace_digest(spec)
        if digest not in self.namespaces and len(self.namespaces) >= MAX_NAMESPACES:
            return Refused(
                "too_many_namespaces",
                f"{len(self.namespaces)} namespaces are served already, at most "
                f"{MAX_NAMESPACES} can be. Restart the agent to forget old ones.",
            )
        self.namespaces[digest] = spec
        session.namespace = digest
        if self.pool is None:
            self.pool = self._make_pool(spec.block_bytes, slot_bytes)
        return None

    def _make_pool(self, block_bytes: int, slot_bytes: int) -> PoolState:
        generation = (self.incarnation << _GENERATION_SHIFT) & _GENERATION_MASK
        return PoolState(
            self.slab_bytes // slot_bytes,
            make_policy("lru"),
            self.limits,
            block_bytes=block_bytes,
            first_generation=generation,
        )

    def _publish(self) -> None:
        events = [] if self.pool is None else self.pool.take_events()
        if events:
            self._broadcast(self.log.append(events))

    def _broadcast(self, message: Any) -> None:
        for session in self.sessions.values():
            if session.subscriber is not None:
                session.subscriber.offer(message)

    def _namespace_infos(self) -> list[NamespaceInfo]:
        workers: dict[bytes, set[str]] = {}
        for session in self.sessions.values():
            if session.namespace:
                workers.setdefault(session.namespace, set()).add(session.client.worker)
        return [
            NamespaceInfo(digest, spec, sorted(workers.get(digest, ())))
            for digest, spec in self.namespaces.items()
        ]
