"""A node's RDMA as its agent runs it: had where it can be, and tried again where it cannot."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from workers.agent.settings import AgentSettings
from workers.core.errors import ConfigError
from workers.core.transfer_stats import RdmaPortStats, RdmaRailStats
from workers.transfer.base import PushTarget, SlotMemory
from workers.transfer.rdma.devices import port_state
from workers.transfer.rdma.node import RdmaNode, check_host
from workers.transfer.rdma.server import RdmaServer
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.transport import RdmaTransport

RETRY_SECONDS: Final = 10.0
_log = logging.getLogger(__name__)


class NodeRdma:
    """`problem`: why there is none although the settings name it; "" otherwise.

    `look` before there is memory, `open` with it, `again` now and then, `close` in the end.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.wanted = "rdma" in settings.transports and settings.secret is not None
        self.problem = ""
        self._settings = settings
        self._node: RdmaNode | None = None
        self._server: RdmaServer | None = None
        self._transport: RdmaTransport | None = None
        self._again_at = 0.0

    @property
    def address(self) -> str:
        """Where peers begin; "" where there is none."""
        return "" if self._server is None else "{}:{}".format(*self._server.address)

    @property
    def not_ready(self) -> str:
        """Why the node lacks the transport that it was told to have; "" where it does not."""
        if not self._settings.demands_rdma or not self.wanted:
            return ""
        return self.problem or self._all_down()

    def look(self) -> None:
        """Can it be had on this host, for a slab of this size? Opens nothing."""
        if not self.wanted:
            return
        try:
            check_host(RdmaSettings(), self._settings.slab_bytes)
        except ConfigError as error:
            self._failed(error)
        else:
            self.problem = ""

    def open(self, memory: SlotMemory, push: PushTarget) -> RdmaTransport | None:
        """Register the slab with every active port, let peers in; None: see `problem`."""
        settings = self._settings
        if not self.wanted or settings.secret is None:
            return None
        try:
            # Kept before the server is tried: `close` then ends it, whatever the server says.
            node = self._node = RdmaNode(memory)
            host = settings.tcp_host or "127.0.0.1"
            self._server = RdmaServer(node, settings.node_id, settings.secret, host=host, push=push)
        except (ConfigError, OSError) as error:
            self.close()
            self._failed(error)
            return None
        self.problem = ""
        self._transport = RdmaTransport(node, settings.node_id, settings.secret)
        return self._transport

    def again(
        self, memory: SlotMemory | None, push: PushTarget | None, now: float
    ) -> RdmaTransport | None:
        """Every ten seconds while it is missing: a port may have come up, a limit been raised."""
        if not self.problem or now < self._again_at:
            return None
        self._again_at = now + RETRY_SECONDS
        self.look()
        if self.problem or memory is None or push is None:
            return None
        return self.open(memory, push)

    def ports(self) -> list[RdmaPortStats]:
        return [] if self._node is None else self._node.stats()

    def rails(self) -> list[RdmaRailStats]:
        return [] if self._transport is None else self._transport.rails()

    def slots_by_memory_node(self) -> dict[int, int]:
        """How many slots lie where; empty where that makes no difference."""
        return {} if self._node is None else dict(Counter(self._node.slot_nodes))

    def close(self) -> None:
        """After the engine that uses its transport. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._node is not None:
            self._node.close()
        self._node = self._server = self._transport = None

    def _failed(self, error: Exception) -> None:
        text = str(error)
        if text != self.problem:
            level = logging.ERROR if self._settings.demands_rdma else logging.WARNING
            _log.log(level, "no_rdma error=%s", text)
        self.problem = text

    def _all_down(self) -> str:
        if self._node is None:
            return ""
        states = {port.name: port_state(port.port.device, port.number) for port in self._node.ports}
        if "ACTIVE" in states.values():
            return ""
        named = ", ".join(f"{name} {state or 'gone'}" for name, state in states.items())
        return (
            f"no active RDMA port ({named}). Set its interface up and see to its cable; blocks do "
            "not move meanwhile."
        )
