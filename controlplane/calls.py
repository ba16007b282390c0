"""The control plane's REST calls as values: method, path, parameters, and the type of the reply.

Both clients of `controlplane.client` send them; nothing here opens a connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from controlplane.audit.schemas import AuditList
from controlplane.decisions.schemas import Decision, DecisionList
from controlplane.fleet.schemas import (
    Worker,
    WorkerAction,
    WorkerActionReply,
    WorkerList,
    WorkerRegistration,
)
from controlplane.gateways.schemas import (
    ClusterView,
    Gateway,
    GatewayList,
    GatewayReport,
    ReportReply,
)
from controlplane.models.schemas import Model, ModelList, ModelRegistration
from controlplane.nodes.schemas import Heartbeat, HeartbeatReply, Node, NodeList
from controlplane.policies.schemas import (
    PolicyList,
    PolicyPut,
    PolicyPutReply,
    PolicyRevert,
    PolicyRevision,
)
from controlplane.schema_base import Schema
from controlplane.stats.schemas import Matrix, Overview, SeriesReply
from controlplane.tokens.schemas import Key, KeyCreate, KeyCreated, KeyList

T = TypeVar("T")
API = "/api/v1"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request; `reply` is the pydantic type of a 2xx body, None where there is none."""

    method: str
    path: str
    reply: Any
    params: dict[str, str] = field(default_factory=dict)
    body: Schema | None = None
    headers: dict[str, str] = field(default_factory=dict)
    timeout_seconds: float | None = None


def _path(*parts: str) -> str:
    return "/".join([API, *(quote(part, safe="") for part in parts)])


def _params(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _page(**values: object) -> dict[str, str]:
    return _params(**{name: value or None for name, value in values.items()})


def health() -> Call[dict[str, object]]:
    return Call("GET", "/health", dict[str, object])


def nodes() -> Call[NodeList]:
    return Call("GET", _path("nodes"), NodeList)


def node(node_id: str) -> Call[Node]:
    return Call("GET", _path("nodes", node_id), Node)


def remove_node(node_id: str, reason: str) -> Call[None]:
    return Call("DELETE", _path("nodes", node_id), None, _page(reason=reason))


def heartbeat(node_id: str, body: Heartbeat) -> Call[HeartbeatReply]:
    return Call("POST", _path("nodes", node_id, "heartbeat"), HeartbeatReply, body=body)


def workers() -> Call[WorkerList]:
    return Call("GET", _path("workers"), WorkerList)


def worker(worker_id: str) -> Call[Worker]:
    return Call("GET", _path("workers", worker_id), Worker)


def register_worker(body: WorkerRegistration) -> Call[Worker]:
    return Call("POST", _path("workers"), Worker, body=body)


def remove_worker(worker_id: str, reason: str) -> Call[None]:
    return Call("DELETE", _path("workers", worker_id), None, _page(reason=reason))


def worker_action(worker_id: str, body: WorkerAction) -> Call[WorkerActionReply]:
    return Call("POST", _path("workers", worker_id, "actions"), WorkerActionReply, body=body)


def models() -> Call[ModelList]:
    return Call("GET", _path("models"), ModelList)


def put_model(model_id: str, body: ModelRegistration) -> Call[Model]:
    return Call("PUT", f"{API}/models/{quote(model_id)}", Model, body=body)


def remove_model(model_id: str, reason: str) -> Call[None]:
    return Call("DELETE", f"{API}/models/{quote(model_id)}", None, _page(reason=reason))


def policies() -> Call[PolicyList]:
    return Call("GET", _path("policies"), PolicyList)


def policy(kind: str, scope: str) -> Call[PolicyRevision]:
    return Call("GET", _path("policies", kind, scope), PolicyRevision)


def policy_revisions(
    kind: str, scope: str, limit: int | None, cursor: str | None
) -> Call[PolicyList]:
    path = _path("policies", kind, scope, "revisions")
    return Call("GET", path, PolicyList, _page(limit=limit, cursor=cursor))


def policy_revision(kind: str, scope: str, revision: int) -> Call[PolicyRevision]:
    return Call("GET", _path("policies", kind, scope, "revisions", str(revision)), PolicyRevision)


def put_policy(
    kind: str, scope: str, body: PolicyPut, if_match: int | None
) -> Call[PolicyPutReply]:
    headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
    path = _path("policies", kind, scope)
    return Call("PUT", path, PolicyPutReply, body=body, headers=headers)


def revert_policy(
    kind: str, scope: str, body: PolicyRevert, if_match: int | None
) -> Call[PolicyPutReply]:
    headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
    path = _path("policies", kind, scope, "revert")
    return Call("POST", path, PolicyPutReply, body=body, headers=headers)


def decisions(
    status: str | None,
    model: str | None,
    tenant: str | None,
    worker_id: str | None,
    since: str | None,
    limit: int | None,
    cursor: str | None,
) -> Call[DecisionList]:
    params = _page(
        status=status,
        model=model,
        tenant=tenant,
        worker=worker_id,
        since=since,
        limit=limit,
        cursor=cursor,
    )
    return Call("GET", _path("decisions"), DecisionList, params)


def rejections(since: str | None, limit: int | None, cursor: str | None) -> Call[DecisionList]:
    params = _page(since=since, limit=limit, cursor=cursor)
    return Call("GET", _path("rejections"), DecisionList, params)


def decision(request_id: str) -> Call[Decision]:
    return Call("GET", _path("decisions", request_id), Decision)


def series(
    metric: str, source: str, window: float, step: float, end: float | None
) -> Call[SeriesReply]:
    params = _params(metric=metric, source=source, window=window, step=step, end=end)
    return Call("GET", _path("stats", "series"), SeriesReply, params)


def cache_stats(window: float, step: float) -> Call[SeriesReply]:
    return Call("GET", _path("cache", "stats"), SeriesReply, _params(window=window, step=step))


def matrix(window: float) -> Call[Matrix]:
    return Call("GET", _path("transfers", "matrix"), Matrix, _params(window=window))


def overview(window: float) -> Call[Overview]:
    return Call("GET", _path("overview"), Overview, _params(window=window))


def audit(
    actor: str | None, verb: str | None, target: str | None, limit: int | None, cursor: str | None
) -> Call[AuditList]:
    params = _page(actor=actor, verb=verb, target=target, limit=limit, cursor=cursor)
    return Call("GET", _path("audit"), AuditList, params)


def keys() -> Call[KeyList]:
    return Call("GET", _path("keys"), KeyList)


def create_key(body: KeyCreate) -> Call[KeyCreated]:
    return Call("POST", _path("keys"), KeyCreated, body=body)


def delete_key(key_id: int, reason: str) -> Call[Key]:
    return Call("DELETE", _path("keys", str(key_id)), Key, _page(reason=reason))


def gateways() -> Call[GatewayList]:
    return Call("GET", _path("gateways"), GatewayList)


def gateway(gateway_id: str) -> Call[Gateway]:
    return Call("GET", _path("gateways", gateway_id), Gateway)


def report(gateway_id: str, body: GatewayReport) -> Call[ReportReply]:
    return Call("POST", _path("gateways", gateway_id, "report"), ReportReply, body=body)


def view(gateway_id: str | None, after: int | None, wait: float) -> Call[ClusterView | None]:
    params = _params(gateway=gateway_id, after=after, wait=wait)
    return Call("GET", _path("view"), ClusterView, params, timeout_seconds=wait + 10.0)
