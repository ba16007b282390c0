"""Typed clients of the control plane's REST API and event stream.

`Client` blocks, `AsyncClient` awaits; both have the same methods. Imports schemas only, so that
a console needs neither the server's framework nor its database.
Errors: `ClientError` and its `UnreachableError`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import httpx2

from controlplane import calls
from controlplane.audit.schemas import AuditList
from controlplane.calls import Call
from controlplane.client_http import (
    BACKOFF_SECONDS,
    DEFAULT_URL,
    STREAM_SILENCE_SECONDS,
    TIMEOUT_SECONDS,
    ClientError,
    StreamState,
    UnreachableError,
    check_url,
    decode,
    default_url,
    find_token,
    make_headers,
    make_request,
    problem_of,
)
from controlplane.decisions.schemas import Decision, DecisionList
from controlplane.events.schemas import Event
from controlplane.fleet.schemas import Worker, WorkerAction, WorkerActionReply, WorkerRegistration
from controlplane.gateways.schemas import ClusterView, Gateway, GatewayReport, ReportReply
from controlplane.models.schemas import Model, ModelRegistration
from controlplane.nodes.schemas import Heartbeat, HeartbeatReply, Node
from controlplane.policies.schemas import (
    PolicyList,
    PolicyPut,
    PolicyPutReply,
    PolicyRevert,
    PolicyRevision,
)
from controlplane.stats.schemas import Matrix, Overview, SeriesReply
from controlplane.tokens.schemas import Key, KeyCreate, KeyCreated

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "Client",
    "ClientError",
    "StreamState",
    "UnreachableError",
    "default_url",
    "find_token",
]

T = TypeVar("T")


class Client:
    """Blocking client; use it as a context manager or call `close`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        actor: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.url = check_url(url or default_url())
        self._http = httpx2.Client(
            base_url=self.url,
            headers=make_headers(token if token is not None else find_token(), actor),
            timeout=timeout_seconds,
            transport=transport,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Send one call of `controlplane.calls`; raises `ClientError`."""
        try:
            response = self._http.request(**make_request(call))
        except httpx2.HTTPError as error:
            raise UnreachableError(self.url, error) from error
        return decode(call, response)

    def health(self) -> dict[str, object]:
        return self.send(calls.health())

    def nodes(self) -> list[Node]:
        return self.send(calls.nodes()).items

    def node(self, node_id: str) -> Node:
        return self.send(calls.node(node_id))

    def remove_node(self, node_id: str, reason: str = "") -> None:
        self.send(calls.remove_node(node_id, reason))

    def heartbeat(self, node_id: str, body: Heartbeat) -> HeartbeatReply:
        return self.send(calls.heartbeat(node_id, body))

    def workers(self) -> list[Worker]:
        return self.send(calls.workers()).items

    def worker(self, worker_id: str) -> Worker:
        return self.send(calls.worker(worker_id))

    def register_worker(self, body: WorkerRegistration) -> Worker:
        return self.send(calls.register_worker(body))

    def remove_worker(self, worker_id: str, reason: str = "") -> None:
        self.send(calls.remove_worker(worker_id, reason))

    def worker_action(self, worker_id: str, body: WorkerAction) -> WorkerActionReply:
        return self.send(calls.worker_action(worker_id, body))

    def models(self) -> list[Model]:
        return self.send(calls.models()).items

    def put_model(self, model_id: str, body: ModelRegistration) -> Model:
        return self.send(calls.put_model(model_id, body))

    def remove_model(self, model_id: str, reason: str = "") -> None:
        self.send(calls.remove_model(model_id, reason))

    def policies(self) -> list[PolicyRevision]:
        return self.send(calls.policies()).items

    def policy(self, kind: str, scope: str) -> PolicyRevision:
        return self.send(calls.policy(kind, scope))

    def policy_revisions(
        self, kind: str, scope: str, limit: int | None = None, cursor: str | None = None
    ) -> PolicyList:
        return self.send(calls.policy_revisions(kind, scope, limit, cursor))

    def policy_revision(self, kind: str, scope: str, revision: int) -> PolicyRevision:
        return self.send(calls.policy_revision(kind, scope, revision))

    def put_policy(
        self, kind: str, scope: str, body: PolicyPut, if_match: int | None = None
    ) -> PolicyPutReply:
        return self.send(calls.put_policy(kind, scope, body, if_match))

    def revert_policy(
        self, kind: str, scope: str, body: PolicyRevert, if_match: int | None = None
    ) -> PolicyPutReply:
        return self.send(calls.revert_policy(kind, scope, body, if_match))

    def decisions(
        self,
        *,
        status: str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        worker: str | None = None,
        since: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DecisionList:
        return self.send(calls.decisions(status, model, tenant, worker, since, limit, cursor))

    def rejections(
        self, *, since: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> DecisionList:
        return self.send(calls.rejections(since, limit, cursor))

    def decision(self, request_id: str) -> Decision:
        return self.send(calls.decision(request_id))

    def series(
        self,
        metric: str,
        source: str = "cluster",
        window: float = 900,
        step: float = 10,
        end: float | None = None,
    ) -> SeriesReply:
        return self.send(calls.series(metric, source, window, step, end))

    def cache_stats(self, window: float = 900, step: float = 10) -> SeriesReply:
        return self.send(calls.cache_stats(window, step))

    def matrix(self, window: float = 300) -> Matrix:
        return self.send(calls.matrix(window))

    def overview(self, window: float = 900) -> Overview:
        return self.send(calls.overview(window))

    def audit(
        self,
        *,
        actor: str | None = None,
        verb: str | None = None,
        target: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> AuditList:
        return self.send(calls.audit(actor, verb, target, limit, cursor))

    def keys(self) -> list[Key]:
        return self.send(calls.keys()).items

    def create_key(self, body: KeyCreate) -> KeyCreated:
        return self.send(calls.create_key(body))

    def delete_key(self, key_id: int, reason: str = "") -> Key:
        return self.send(calls.delete_key(key_id, reason))

    def gateways(self) -> list[Gateway]:
        return self.send(calls.gateways()).items

    def gateway(self, gateway_id: str) -> Gateway:
        return self.send(calls.gateway(gateway_id))

    def report(self, gateway_id: str, body: GatewayReport) -> ReportReply:
        return self.send(calls.report(gateway_id, body))

    def view(
        self, gateway_id: str | None = None, after: int | None = None, wait: float = 0
    ) -> ClusterView | None:
        return self.send(calls.view(gateway_id, after, wait))


@dataclass(slots=True)
class _Position:
    """Id of the last event received: where a reconnect resumes."""

    event_id: str | None


class AsyncClient:
    """The same over asyncio, and the event stream."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        actor: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = check_url(url or default_url())
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=make_headers(token if token is not None else find_token(), actor),
            timeout=timeout_seconds,
            transport=transport,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Send one call of `controlplane.calls`; raises `ClientError`."""
        try:
            response = await self._http.request(**make_request(call))
        except httpx2.HTTPError as error:
            raise UnreachableError(self.url, error) from error
        return decode(call, response)

    async def events(
        self,
        last_event_id: str | None = None,
        on_state: Callable[[StreamState], None] | None = None,
    ) -> AsyncIterator[Event]:
        """Events as they come, for ever: reconnects with backoff and resumes where it was.

        Read what you need by REST after the first `StreamState(connected=True)` and after every
        `reset`. Refusals (401, 403, 404) raise `ClientError`; everything else is retried.
        """
        tell = on_state or (lambda _state: None)
        low, high = BACKOFF_SECONDS
        delay = low
        position = _Position(last_event_id)
        while True:
            try:
                async for event in self._stream(position, tell):
                    delay = low
                    yield event
                reason = "the stream ended"
            except (httpx2.HTTPError, httpx2.StreamError) as error:
                reason = str(error) or type(error).__name__
            pause = delay * random.uniform(0.8, 1.2)  # noqa: S311 - spreads reconnects, no secret
            tell(StreamState(connected=False, error=reason, retry_in_seconds=pause))
            await asyncio.sleep(pause)
            delay = min(delay * 2, high)

    async def _stream(
        self, position: _Position, tell: Callable[[StreamState], None]
    ) -> AsyncIterator[Event]:
        headers = {"Last-Event-ID": position.event_id} if position.event_id else {}
        timeout = httpx2.Timeout(TIMEOUT_SECONDS, read=STREAM_SILENCE_SECONDS)
        path = f"{calls.API}/events"
        async with self._http.sse(path, headers=headers, timeout=timeout) as source:
            response = source.response
            if 400 <= response.status_code < 500:
                await response.aread()
                raise ClientError(problem_of(response))
            response.raise_for_status()
            tell(StreamState(connected=True))
            async for sse in source:
                position.event_id = sse.id or position.event_id
                if sse.data:  # without data it only tells where the stream stands
                    yield Event.model_validate(
                        {"id": sse.id, "type": sse.event, "data": json.loads(sse.data)}
                    )

    async def health(self) -> dict[str, object]:
        return await self.send(calls.health())

    async def nodes(self) -> list[Node]:
        return (await self.send(calls.nodes())).items

    async def node(self, node_id: str) -> Node:
        return await self.send(calls.node(node_id))

    async def remove_node(self, node_id: str, reason: str = "") -> None:
        await self.send(calls.remove_node(node_id, reason))

    async def heartbeat(self, node_id: str, body: Heartbeat) -> HeartbeatReply:
        return await self.send(calls.heartbeat(node_id, body))

    async def workers(self) -> list[Worker]:
        return (await self.send(calls.workers())).items

    async def worker(self, worker_id: str) -> Worker:
        return await self.send(calls.worker(worker_id))

    async def register_worker(self, body: WorkerRegistration) -> Worker:
        return await self.send(calls.register_worker(body))

    async def remove_worker(self, worker_id: str, reason: str = "") -> None:
        await self.send(calls.remove_worker(worker_id, reason))

    async def worker_action(self, worker_id: str, body: WorkerAction) -> WorkerActionReply:
        return await self.send(calls.worker_action(worker_id, body))

    async def models(self) -> list[Model]:
        return (await self.send(calls.models())).items

    async def put_model(self, model_id: str, body: ModelRegistration) -> Model:
        return await self.send(calls.put_model(model_id, body))

    async def remove_model(self, model_id: str, reason: str = "") -> None:
        await self.send(calls.remove_model(model_id, reason))

    async def policies(self) -> list[PolicyRevision]:
        return (await self.send(calls.policies())).items

    async def policy(self, kind: str, scope: str) -> PolicyRevision:
        return await self.send(calls.policy(kind, scope))

    async def policy_revisions(
        self, kind: str, scope: str, limit: int | None = None, cursor: str | None = None
    ) -> PolicyList:
        return await self.send(calls.policy_revisions(kind, scope, limit, cursor))

    async def policy_revision(self, kind: str, scope: str, revision: int) -> PolicyRevision:
        return await self.send(calls.policy_revision(kind, scope, revision))

    async def put_policy(
        self, kind: str, scope: str, body: PolicyPut, if_match: int | None = None
    ) -> PolicyPutReply:
        return await self.send(calls.put_policy(kind, scope, body, if_match))

    async def revert_policy(
        self, kind: str, scope: str, body: PolicyRevert, if_match: int | None = None
    ) -> PolicyPutReply:
        return await self.send(calls.revert_policy(kind, scope, body, if_match))

    async def decisions(
        self,
        *,
        status: str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        worker: str | None = None,
        since: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DecisionList:
        return await self.send(calls.decisions(status, model, tenant, worker, since, limit, cursor))

    async def rejections(
        self, *, since: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> DecisionList:
        return await self.send(calls.rejections(since, limit, cursor))

    async def decision(self, request_id: str) -> Decision:
        return await self.send(calls.decision(request_id))

    async def series(
        self,
        metric: str,
        source: str = "cluster",
        window: float = 900,
        step: float = 10,
        end: float | None = None,
    ) -> SeriesReply:
        return await self.send(calls.series(metric, source, window, step, end))

    async def cache_stats(self, window: float = 900, step: float = 10) -> SeriesReply:
        return await self.send(calls.cache_stats(window, step))

    async def matrix(self, window: float = 300) -> Matrix:
        return await self.send(calls.matrix(window))

    async def overview(self, window: float = 900) -> Overview:
        return await self.send(calls.overview(window))

    async def audit(
        self,
        *,
        actor: str | None = None,
        verb: str | None = None,
        target: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> AuditList:
        return await self.send(calls.audit(actor, verb, target, limit, cursor))

    async def keys(self) -> list[Key]:
        return (await self.send(calls.keys())).items

    async def create_key(self, body: KeyCreate) -> KeyCreated:
        return await self.send(calls.create_key(body))

    async def delete_key(self, key_id: int, reason: str = "") -> Key:
        return await self.send(calls.delete_key(key_id, reason))

    async def gateways(self) -> list[Gateway]:
        return (await self.send(calls.gateways())).items

    async def gateway(self, gateway_id: str) -> Gateway:
        return await self.send(calls.gateway(gateway_id))

    async def report(self, gateway_id: str, body: GatewayReport) -> ReportReply:
        return await self.send(calls.report(gateway_id, body))

    async def view(
        self, gateway_id: str | None = None, after: int | None = None, wait: float = 0
    ) -> ClusterView | None:
        return await self.send(calls.view(gateway_id, after, wait))
