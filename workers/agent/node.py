"""The agent's state and what each request does to it. No I/O: the server feeds it and sends."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from workers.agent.cache_ops import CacheOps
from workers.agent.cache_policy import CachePolicy
from workers.agent.doctor import Doctor
from workers.agent.events import EventLog, Subscriber
from workers.agent.fetch import Fetcher
from workers.agent.handshake import (
    MAX_NAMESPACES,
    check_block_tokens,
    check_geometry,
    check_hello,
    check_leg_report,
)
from workers.agent.metrics import AgentFacts, LegCounters, pool_stats
from workers.agent.peers import Peers
from workers.agent.pool_host import PoolHost, Storage
from workers.agent.pool_requests import PoolRequests
from workers.agent.push import Pusher
from workers.agent.reservations import Reservations
from workers.agent.session import Session
from workers.agent.settings import AgentSettings
from workers.agent.shares import Shares
from workers.agent.transfers import NodeTransfers
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
    Release,
    ReplyBody,
    ReportWorkers,
    RequestBody,
    Subscribe,
    Welcome,
    WorkerCommand,
)
from workers.core.owners import TooManyOwnersError
from workers.core.pool_state import PoolState
from workers.core.pool_views import stored_runs
from workers.core.stats_messages import NamespaceInfo, NamespaceSpec, PoolStats, WorkerStatus
from workers.core.tiers import Outcome
from workers.pool.tier import TierOpened

MAX_WORKERS: Final = 1024
MAX_LEG_REPORTS: Final = 2000
MAX_COMMANDS: Final = 100
MAX_COMMANDS_SEEN: Final = 1000

_log = logging.getLogger(__name__)


class Node:
    """One node: its pool, its namespaces, who is connected and what waits for the heartbeat."""

    def __init__(
        self,
        settings: AgentSettings,
        slab_path: str,
        clock: Clock,
        rss_bytes: Callable[[], int] = lambda: 0,
        storage: Storage | None = None,
    ) -> None:
        self.settings = settings
        self.slab_path = slab_path
        self.clock = clock
        self._rss_bytes = rss_bytes
        self.started = clock.monotonic()
        self.incarnation = int(clock.wall() * 1000)
        self.host = PoolHost(settings, clock, self.incarnation, storage)
        self.log = EventLog(settings.node_id, self.incarnation)
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
        self.transfers = NodeTransfers(
            settings, self.incarnation, slab_path, self.host.storage.attach
        )
        self.peers = Peers(settings.node_id, settings.secret, settings.tls)
        self.reservations = Reservations(self, self.transfers)
        self.fetcher = Fetcher(self, self.transfers, self.peers, self.reservations)
        self.pusher = Pusher(self, self.transfers, self.peers)
        self.doctor = Doctor(self, self.transfers)
        self.shares = Shares(self.sessions)
        self._handlers: dict[type, Callable[[Session, Any], ReplyBody]] = {
            **self.pool_requests.handlers(),
            **CacheOps(self).handlers(),
            **self.fetcher.handlers(),
            **self.reservations.handlers(),
            **self.pusher.handlers(),
            **self.doctor.handlers(),
            **self.shares.handlers(),
            LegReport: self._leg_report,
            Release: self._release,
            ReportWorkers: self._report_workers,
            Subscribe: self._subscribe,
            GetStats: lambda _session, _body: self.stats(),
            Hello: lambda _session, _body: Refused("hello_twice", "Say Hello once a connection."),
        }

    @property
    def pool(self) -> PoolState | None:
        """None until a worker brought a namespace, or a former agent's pool was adopted."""
        return self.host.pool

    @property
    def node_id(self) -> str:
        return self.settings.node_id

    async def close(self) -> None:
        """End what moves bytes between nodes, before the slab goes."""
        self.transfers.close()
        await self.fetcher.close()
        await self.pusher.close()
        self.reservations.close()
        await self.peers.close()
        await self.doctor.close()

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
            slab_bytes=self.host.slab_bytes,
            slot_bytes=0 if self.pool is None else slot_bytes_of(self.pool.block_bytes),
            header_bytes=SLOT_HEADER_BYTES,
            num_slots=0 if self.pool is None else self.pool.slots.num_slots,
            lease_seconds=self.host.limits.lease_seconds,
            namespace=session.namespace,
            transfers=self.transfers.addresses,
            namespaces={digest: spec.block_bytes for digest, spec in self.namespaces.items()},
        )

    def goodbye(self, connection: int) -> None:
        """A connection ended, in whatever way."""
        self.reservations.goodbye(connection)
        self.shares.left(connection)
        if self.sessions.pop(connection, None) is not None and self.pool is not None:
            self.pool.abandon_client(connection)
            self.publish()

    def handle(self, session: Session, body: RequestBody) -> ReplyBody:
        """Do what is asked. Events that come of it are with the subscribers before the reply."""
        self.num_requests += 1
        try:
            return self._handlers[type(body)](session, body)
        except TooManyOwnersError as error:
            return Refused("too_many_owners", str(error))
        finally:
            self.publish()

    def adopt_left(self) -> None:
        """Go on with what a former agent left in the slab. Once, before anybody connects."""
        self.host.adopt_left()
        if self.pool is not None:
            _log.info(
                "slab_adopted blocks=%d lost=%d quarantined_slots=%d",
                self.host.num_adopted, self.host.num_lost, len(self.pool.quarantined),
            )  # fmt: skip
        self.publish()

    # --- from the loops ---------------------------------------------------------------------

    def expire(self) -> int:
        """End what outlived its lease; how many owners."""
        num_expired = self.host.tick()
        self.transfers.retry(self.clock.monotonic())
        self.publish()
        return num_expired

    def disk_opened(self, opened: TierOpened) -> None:
        """The SSD tier is ready. This and the next: called on the agent's own thread."""
        num_adopted = self.host.disk_opened(opened)
        _log.info(
            "ssd_ready slots=%d of=%d adopted_blocks=%d",
            opened.num_slots,
            opened.max_slots,
            num_adopted,
        )
        self.publish()

    def disk_grown(self, num_slots: int) -> None:
        self.host.disk_grown(num_slots)
        self.publish()

    def disk_full(self, full: bool) -> None:
        self.host.disk_full(full)
        self.publish()

    def disk_done(self, outcome: Outcome) -> None:
        self.host.disk_done(outcome)
        self.publish()

    def stats(self) -> PoolStats:
        facts = AgentFacts(
            self.settings.node_id,
            self.incarnation,
            self.clock.monotonic() - self.started,
            self.host.slab_bytes,
            self._rss_bytes(),
        )
        stats = pool_stats(facts, self.host, self.legs, self._namespace_infos(), self.workers)
        moved = self.transfers.stats()
        return msgspec.structs.replace(
            stats,
            endpoint=self.settings.peer_endpoint if self.transfers.engine else "",
            moved_bytes_total=sum(pair.bytes_total for pair in moved.pairs),
            transfers=msgspec.structs.replace(moved, modes=self.reservations.mode_stats()),
        )

    def apply_cache_policy(self, policy: CachePolicy, revision: int = 0) -> None:
        """Live; see `PoolHost.apply`."""
        self.host.apply(policy, revision)
        self.publish()

    def shrink_slab(self, slab_bytes: int) -> None:
        """The machine cannot back more than this: use no slot beyond it, then or later."""
        self.host.shrink_slab(slab_bytes)

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
        if (refused := check_leg_report(body)) is not None:
            return refused
        self.legs.count(body)
        self.leg_reports.append(body)
        self._broadcast(body)
        return Done(1)

    def _release(self, session: Session, body: Release) -> ReplyBody:
        for owner in (body.owner, *body.more):
            self.pusher.released(owner)
        return self.pool_requests.release(session, body)

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
        if body.shares and session.hello.role == "gateway":
            self.shares.joined(session)
        return Done(self.log.sequence)

    # --- inside -----------------------------------------------------------------------------

    def _join(self, session: Session, spec: NamespaceSpec) -> Refused | None:
        """Check a worker's namespace, and cut the slab by the first."""
        refused = check_block_tokens(spec, self.settings.block_tokens)
        if refused is not None:
            return refused
        known_bytes = self.pool.block_bytes if self.pool is not None and self.namespaces else 0
        slot_bytes = slot_bytes_of(spec.block_bytes)
        refused = check_geometry(spec.block_bytes, known_bytes, self.host.slab_bytes, slot_bytes)
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
        if self.pool is None or self.pool.block_bytes != spec.block_bytes:
            self._begin_pool(spec.block_bytes)
        self.transfers.follow(self.pool, self.namespaces)
        return None

    def _begin_pool(self, block_bytes: int) -> None:
        """A pool for blocks of this size; an adopted one of another that nobody joined gives way."""
        if self.pool is not None:
            self.host.give_up()
            self.publish()
        self.host.begin(block_bytes)

    def publish(self) -> None:
        """Changes are noted and told before any reply leaves."""
        self.host.settle()
        events = [] if self.pool is None else self.pool.take_events()
        if events:
            self._broadcast(self.log.append(events))
            self.pusher.wake()

    def _broadcast(self, message: Any) -> None:
        for session in self.sessions.values():
            if session.subscriber is not None:
                session.subscriber.offer(message)

    def _namespace_infos(self) -> list[NamespaceInfo]:
        workers: dict[bytes, set[str]] = {}
        kv_tokens: dict[bytes, dict[str, int]] = {}
        for session in self.sessions.values():
            if session.namespace:
                workers.setdefault(session.namespace, set()).add(session.client.worker)
            if session.namespace and session.hello.kv_tokens > 0:
                said = kv_tokens.setdefault(session.namespace, {})
                said[session.client.worker] = session.hello.kv_tokens
        return [
            NamespaceInfo(digest, spec, sorted(workers.get(digest, ())), kv_tokens.get(digest, {}))
            for digest, spec in self.namespaces.items()
        ]
