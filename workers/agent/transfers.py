"""The node's transfers with other nodes: an engine that pulls, and a server that lets others pull.

Both begin when the pool has slots, and begin anew when the slots change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count

import msgspec

from workers.agent.rdma import NodeRdma
from workers.agent.settings import AgentSettings, is_loopback
from workers.core.blocks import SLOT_HEADER_BYTES, slot_bytes_of
from workers.core.errors import ConfigError
from workers.core.messages import Welcome
from workers.core.pool_ops import OPERATOR
from workers.core.pool_state import PoolState
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_handshake import SlabFacts
from workers.core.transfer_policy import TransferPolicy, cap_of, limits_of, transports_of
from workers.core.transfer_stats import RdmaRailStats, TransferStats
from workers.pool.arena import Slab
from workers.transfer.base import PeerAddress, SlotMemory, Transport
from workers.transfer.engine import TransferEngine
from workers.transfer.push import OnLanded, ReservedSlots
from workers.transfer.shm import ShmTransport
from workers.transfer.tcp import TcpTransport
from workers.transfer.tcp_server import TcpServer
from workers.transfer_tls import client_context, server_context

_log = logging.getLogger(__name__)


class NodeTransfers:
    """`engine` is None until `begin`, and where the node has no secret or no transport."""

    def __init__(
        self,
        settings: AgentSettings,
        incarnation: int,
        slab_path: str,
        attach: Callable[[int], Slab | None] = lambda slot_bytes: None,
    ) -> None:
        """`attach`: see `Storage`."""
        self._settings = settings
        self._attach = attach
        self._incarnation = incarnation
        self._slab_path = slab_path
        self._memory: SlotMemory | None = None
        self._server: TcpServer | None = None
        self._rdma = NodeRdma(settings)
        self._rdma.look()
        self._pool: PoolState | None = None
        self._tcp: TcpTransport | None = None
        self.engine: TransferEngine | None = None
        self.problem = ""
        self.reserved: ReservedSlots | None = None  # for pushes of peers
        self.on_landed: OnLanded = lambda slot, generation, checksum: None
        self.numbers = count(1)  # of this node's own doings in the pool
        self.policy = TransferPolicy()
        self.policy_revision = 0

    @property
    def enabled(self) -> bool:
        return self._settings.secret is not None and bool(self._settings.transports)

    @property
    def secret(self) -> bytes | None:
        return self._settings.secret

    @property
    def slab_path(self) -> str:
        return self._slab_path

    @property
    def slab(self) -> Slab | None:
        return None if self._memory is None else self._memory.slab

    @property
    def addresses(self) -> dict[str, str]:
        """Where peers can read this node's slots: address by transport."""
        if self._memory is None:
            return {}
        found = {"shm": self._slab_path} if "shm" in self._settings.transports else {}
        if self._server is not None:
            host, port = self._server.address
            found["tcp"] = f"{host}:{port}"
        if self._rdma.address:
            found["rdma"] = self._rdma.address
        return found

    @property
    def pushed_by(self) -> list[str]:
        """Transports by which peers can write into reserved slots of this node."""
        return [name for name in self.addresses if name != ShmTransport.name]

    def follow(self, pool: PoolState | None, namespaces: dict[bytes, NamespaceSpec]) -> None:
        """Call when the pool or its namespaces may have changed; cheap where they have not."""
        if not self.enabled or pool is None:
            return
        if pool is not self._pool:
            self.close()
            self._begin(pool)
        memory = self._memory
        if memory is not None and len(memory.facts.namespaces) != len(namespaces):
            memory.facts = _facts(pool, namespaces)

    def peer(self, welcome: Welcome) -> PeerAddress:
        """A node as its agent's welcome describes it."""
        facts = SlabFacts(
            welcome.slot_bytes, welcome.header_bytes, welcome.num_slots, welcome.namespaces
        )
        return PeerAddress(welcome.node_id, welcome.transfers, welcome.incarnation, facts)

    @staticmethod
    def connection(number: int) -> int:
        """For the pool, a connection of its own: what one doing was writing ends with it alone."""
        return OPERATOR.connection - number

    def retry(self, now: float) -> None:
        """Try again what could not be had. Cheap where nothing is missing."""
        transport = self._rdma.again(self._memory, self.reserved, now)
        if transport is not None and self.engine is not None:
            self.engine.add_transport(transport)
            _log.info("rdma_ready address=%s", self._rdma.address)

    @property
    def rdma_problem(self) -> str:
        """Why there is no RDMA although the settings name it."""
        return self._rdma.problem

    @property
    def not_ready(self) -> str:
        """Why this node cannot move blocks in the way that it was told to; "" where it can."""
        return self._rdma.not_ready

    @property
    def slots_by_memory_node(self) -> dict[int, int]:
        return self._rdma.slots_by_memory_node()

    def rails(self, peer: str) -> list[RdmaRailStats]:
        """Paths to that peer over RDMA, and those that are passed over."""
        return [rail for rail in self._rdma.rails() if rail.peer == peer]

    def apply(self, policy: TransferPolicy, revision: int = 0) -> None:
        """Acts at once, on what is under way too; cheap where nothing has changed."""
        changed, self.policy_revision = policy != self.policy, revision
        if changed:
            self.policy = policy
            self._configure()
            _log.info("transfer_policy revision=%d", revision)

    def _configure(self) -> None:
        policy = self.policy
        if self._tcp is not None:
            self._tcp.parallelism = policy.parallelism
        if self.engine is not None:
            overrides = transports_of(policy, self._settings.node_id)
            self.engine.configure(limits_of(policy), cap_of(policy), overrides)

    def stats(self) -> TransferStats:
        moved = TransferStats() if self.engine is None else self.engine.stats()
        return msgspec.structs.replace(
            moved,
            ports=self._rdma.ports(),
            rails=self._rdma.rails(),
            problem=self._rdma.problem or self.problem,
            not_ready=self.not_ready,
            policy_revision=self.policy_revision,
        )

    def close(self) -> None:
        """End what is under way; after it nobody writes the slots. Idempotent."""
        if self.engine is not None:
            self.engine.close()
        if self._server is not None:
            self._server.close()
        self._rdma.close()
        if self._memory is not None:
            self._memory.slab.close()
        self.engine = self._server = self._memory = self._pool = self._tcp = None
        self.reserved = None

    def _begin(self, pool: PoolState) -> None:
        settings = self._settings
        assert settings.secret is not None
        slot_bytes = slot_bytes_of(pool.block_bytes)
        slab = self._attach(slot_bytes) or Slab.attach(self._slab_path, slot_bytes)
        memory = SlotMemory(slab, _facts(pool, {}), self._incarnation)
        reserved = self.reserved = ReservedSlots(self.on_landed)
        transports: list[Transport] = []
        if "shm" in settings.transports:
            transports.append(ShmTransport(memory))
        if "tcp" in settings.transports:
            tls = settings.tls
            self._tcp = TcpTransport(
                memory, settings.node_id, settings.secret,
                tls=None if tls is None else client_context(tls), tls_name=str(tls),
            )  # fmt: skip
            transports.append(self._tcp)
            self._server = self._listen(memory, settings.secret)
        if (rdma := self._rdma.open(memory, reserved)) is not None:
            transports.append(rdma)
        if self._server is None and not self._rdma.address:
            self.reserved = None  # no way leads into them
        self._memory, self._pool = memory, pool
        self.engine = TransferEngine(settings.node_id, memory, transports)
        self._configure()
        self.engine.start()
        _log.info("transfers_ready addresses=%s", self.addresses)

    def _listen(self, memory: SlotMemory, secret: bytes) -> TcpServer | None:
        """On the interface that the agent itself listens on."""
        settings = self._settings
        if not settings.tcp_host:
            return None
        try:
            tls = settings.tls
            return TcpServer(
                memory, settings.node_id, secret, host=settings.tcp_host, push=self.reserved,
                tls=None if tls is None else server_context(tls), tls_name=str(tls),
            )  # fmt: skip
        except OSError as error:
            self.problem = f"no transfers to others over TCP: {error}"
            _log.error("no_transfer_server host=%s error=%s", settings.tcp_host, error)
            return None


def _facts(pool: PoolState, namespaces: dict[bytes, NamespaceSpec]) -> SlabFacts:
    digests = {digest: spec.block_bytes for digest, spec in namespaces.items()}
    slot_bytes = slot_bytes_of(pool.block_bytes)
    return SlabFacts(slot_bytes, SLOT_HEADER_BYTES, pool.slots.num_slots, digests)


def require_secret(settings: AgentSettings) -> None:
    """ConfigError: a network address without a secret would let anybody read the pool."""
    host = settings.tcp_host
    if settings.secret is None and host and not is_loopback(host):
        raise ConfigError(
            "tcp", host, "is no loopback address and there is no cluster secret",
            "Give --secret-folder, so that only nodes of this cluster may speak to the agent.",
        )  # fmt: skip
