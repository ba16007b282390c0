"""The control plane as one object: every noun's service, wired once, passed to every endpoint."""

from __future__ import annotations

from controlplane.announce import Announcer
from controlplane.audit import repository as audit_repository
from controlplane.audit.service import KEEP_ROWS, AuditTrail
from controlplane.clock import Clock, SystemClock
from controlplane.db.session import Database
from controlplane.decisions.service import DecisionLog
from controlplane.doctor.service import DoctorService
from controlplane.events.bus import EventBus
from controlplane.fleet import repository as fleet_repository
from controlplane.fleet.commands_queue import CommandQueue
from controlplane.fleet.service import WorkerRegistry
from controlplane.gateways.asking import GatewayClient
from controlplane.gateways.running import RunningRequests
from controlplane.gateways.schemas import ClusterView
from controlplane.gateways.service import GatewayRegistry
from controlplane.gateways.view import ViewRevisions
from controlplane.index_audit.service import IndexAudit, Resyncer
from controlplane.jobs.service import JobStore
from controlplane.ledger.service import Ledger
from controlplane.metrics.requests import RequestCounts
from controlplane.models.service import ModelRegistry
from controlplane.nodes.pool_service import PoolReporter
from controlplane.nodes.service import NodeRegistry
from controlplane.overview.service import OverviewService
from controlplane.policies.schemas import RecordsSpec
from controlplane.policies.service import PolicyStore
from controlplane.prompts.service import prune as prune_prompts
from controlplane.settings import Settings
from controlplane.stats.service import StatsService
from controlplane.tokens.service import KeyStore


class Plane:
    """Made before the event loop's first request; `load` reads the database, `close` ends it."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock = clock or SystemClock()
        self.started_at = self.clock.monotonic()
        self.db = Database(settings.database_url)
        self.bus = EventBus()
        self.view = ViewRevisions(self.clock)
        self.counts = RequestCounts()
        self.announcer = Announcer(self.bus, self.view)
        self.audit = AuditTrail(self.bus, self.clock)
        self.index_audit = IndexAudit()
        self.resyncer: Resyncer | None = None  # set by the loop that follows the nodes
        self.jobs = JobStore(self.bus, self.clock, self.audit)
        self.stats = StatsService(self.clock)
        self.nodes = NodeRegistry(self.clock)
        self.fleet = WorkerRegistry(
            self.clock,
            self.nodes.state_of,
            self.stats.collector.worker_load,
            self.stats.collector.data_path,
        )
        self.commands = CommandQueue(self.clock)
        self.models = ModelRegistry()
        self.policies = PolicyStore(self.clock)
        self.keys = KeyStore(self.clock)
        self.gateways = GatewayRegistry(self.clock)
        self.running = RunningRequests(self.clock, self.gateways, GatewayClient(settings.token))
        self.ledger = Ledger(self.clock)
        self.decisions = DecisionLog(self.bus, self.clock, self.stats.take_outcome)
        self.pool = PoolReporter(self.clock, self.db, self.nodes, self.stats)
        self.doctor = DoctorService(
            self.clock,
            self.db,
            self.nodes,
            self.models,
            self.decisions,
            str(settings.data / "logs"),
        )
        self.overview = OverviewService(
            settings.cluster,
            self.clock,
            self.db,
            self.nodes,
            self.fleet,
            self.gateways,
            self.policies,
            self.stats,
            self.audit,
            self.pool,
        )

    async def load(self) -> None:
        """Everything that an earlier life wrote; the first policies where there are none."""
        async with self.db.write() as tx:
            await self.policies.load(tx)
        async with self.db.read() as session:
            await self.nodes.load(session)
            await self.fleet.load_all(session)
            await self.commands.load(session)
            await self.models.load(session)
            await self.keys.load(session)
            await self.gateways.load(session)
            await self.audit.load(session)
            await self.jobs.load(session)
            await self.stats.load(session)
        self.sweep()

    def sweep(self) -> None:
        """Silence turns into stale, lost and dropped; whoever listens is told."""
        for node_id in self.nodes.sweep():
            self.forget_node(node_id)
        lost, dropped = self.gateways.sweep()
        for gateway_id in lost:
            self.stats.collector.gateway_lost(gateway_id)
        for gateway_id in dropped:
            self.stats.collector.forget_gateway(gateway_id)
        self.announcer.gateways_removed(dropped)
        self.announcer.workers_removed(self.fleet.sweep())
        self.announcer.nodes(self.nodes.list())
        self.announcer.workers(self.fleet.list())
        self.announcer.gateways(self.gateways.list())

    def forget_node(self, node_id: str) -> None:
        """The node is out of the registry: so are its workers and its counters."""
        workers = self.fleet.ids_of_node(node_id)
        self.fleet.drop(workers)
        self.stats.collector.forget_node(node_id)
        self.announcer.workers_removed(workers)
        self.announcer.node_removed(node_id)

    def cluster_view(self) -> ClusterView:
        workers = self.fleet.list()
        return ClusterView(
            revision=self.view.revision,
            boot_id=self.bus.boot_id,
            cluster=self.settings.cluster,
            nodes=self.nodes.list(),
            workers=workers,
            models=self.models.list(workers),
            policies=self.policies.list(),
            client_keys=self.keys.for_gateways(),
        )

    async def save(self) -> None:
        """Write what changed since the last time: rows of nodes, workers, gateways; statistics."""
        async with self.db.write() as tx:
            await self.nodes.save(tx)
            await self.fleet.save(tx)
            await self.gateways.save(tx)
        await self.stats.flush(self.db)

    async def prune(self) -> None:
        """Keep histories within their bounds."""
        expired = self.commands.expired()
        async with self.db.write() as tx:
            records = RecordsSpec.model_validate(self.policies.active["records", "default"].spec)
            await self.decisions.prune(tx.session, records)
            await prune_prompts(tx.session, self.clock.now(), records)
            await self.ledger.prune(tx.session)
            await self.stats.prune(tx.session)
            await audit_repository.prune(tx.session, KEEP_ROWS)
            await self.jobs.prune(tx.session)
            if expired:
                await fleet_repository.remove_commands(tx.session, expired)
        self.commands.forget(expired)

    def close_streams(self) -> None:
        """End event streams and long polls, so that the server can stop."""
        self.bus.close()
        self.view.close()

    async def close(self) -> None:
        self.close_streams()
        await self.doctor.close()
        await self.running.close()
        await self.db.close()
