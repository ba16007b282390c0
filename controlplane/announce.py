"""Tells listeners and gateways what changed about nodes, workers and gateways, and only that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.events.bus import EventBus
from controlplane.events.schemas import EventType
from controlplane.fleet.schemas import Worker
from controlplane.gateways.schemas import Gateway
from controlplane.gateways.view import ViewRevisions
from controlplane.nodes.schemas import Node
from controlplane.schema_base import Schema

Signature = tuple[object, ...]
AGES = {"heartbeat_age_seconds", "last_heartbeat_at", "age_seconds", "last_report_at"}


@dataclass(slots=True)
class Announcer:
    """A row's signature is what makes its change news; gauges alone are not. They go out with
    `refresh`, to those who listen, and are not kept."""

    bus: EventBus
    view: ViewRevisions
    _signatures: dict[tuple[str, str], Signature] = field(default_factory=dict)
    _sent: dict[tuple[str, str], str] = field(default_factory=dict)

    def nodes(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            signature = (
                node.state,
                node.incarnation,
                node.events_endpoint,
                node.index_epoch,
                node.block_tokens,
                tuple(node.namespaces),
            )
            if self._changed("node", node.id, signature):
                self._publish("node", node.id, node)
                self.view.bump()

    def workers(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            signature = (
                worker.node_id,
                worker.role,
                worker.model,
                worker.url,
                worker.state,
                worker.engine,
                worker.pid,
                worker.restarts,
                worker.last_error,
                worker.namespace,
                worker.block_tokens,
                worker.max_concurrent_requests,
            )
            if self._changed("worker", worker.id, signature):
                self._publish("worker", worker.id, worker)
                self.view.bump()

    def gateways(self, gateways: Iterable[Gateway]) -> None:
        """Gateways do not read each other: no new view for them."""
        for gateway in gateways:
            signature = (gateway.state, gateway.url, gateway.pid)
            if self._changed("gateway", gateway.id, signature):
                self._publish("gateway", gateway.id, gateway)

    def node_removed(self, node_id: str) -> None:
        self._forget("node", node_id)
        self.bus.publish("node_removed", {"id": node_id})
        self.view.bump()

    def workers_removed(self, worker_ids: Iterable[str]) -> None:
        for worker_id in worker_ids:
            self._forget("worker", worker_id)
            self.view.bump()

    def gateways_removed(self, gateway_ids: Iterable[str]) -> None:
        for gateway_id in gateway_ids:
            self._forget("gateway", gateway_id)

    def refresh(self, nodes: list[Node], workers: list[Worker], gateways: list[Gateway]) -> None:
        """Send rows whose numbers moved since they were last sent."""
        for kind, rows in (("node", nodes), ("worker", workers), ("gateway", gateways)):
            for row in rows:
                key, text = (kind, row.id), row.model_dump_json(exclude=AGES)
                if self._sent.get(key) != text:
                    self._sent[key] = text
                    self.bus.publish_passing(_event_type(kind), row)

    def _changed(self, kind: str, name: str, signature: Signature) -> bool:
        if self._signatures.get((kind, name)) == signature:
            return False
        self._signatures[kind, name] = signature
        return True

    def _publish(self, kind: EventType, name: str, row: Schema) -> None:
        self._sent.pop((kind, name), None)
        self.bus.publish(kind, row)

    def _forget(self, kind: str, name: str) -> None:
        self._signatures.pop((kind, name), None)
        self._sent.pop((kind, name), None)


def _event_type(kind: str) -> EventType:
    if kind == "node":
        return "node"
    return "worker" if kind == "worker" else "gateway"
