"""A small server with the control plane's contract and recorded objects, and pages on top."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from path_objects import make_doctor, make_node_pair, make_report
from path_routes import add_paths
from pool_routes import add_pool
from recorded_replies import page_of, series_of, ticks
from request_objects import make_gateways, make_ledger, make_running, make_summary
from request_routes import add_requests

from console.web.routes import mount
from controlplane.audit.schemas import AuditList, AuditRow
from controlplane.cache.schemas import CachePinned
from controlplane.decisions.schemas import (
    Decision,
    DecodeCandidate,
    Leg,
    Phase,
    PrefillCandidate,
)
from controlplane.doctor.schemas import DoctorReport
from controlplane.fleet.schemas import Worker, WorkerList
from controlplane.gateways.running_schemas import RunningList
from controlplane.gateways.schemas import Gateway, GatewayList
from controlplane.jobs.schemas import Job
from controlplane.ledger.schemas import LedgerList, LedgerSummary
from controlplane.nodes.pool_schemas import PoolReport
from controlplane.nodes.schemas import Node, NodeList
from controlplane.policies.schemas import PolicyList, PolicyRevision, SloSpec
from controlplane.schema_base import Problem, Schema
from controlplane.stats.schemas import (
    Attention,
    Change,
    Matrix,
    Overview,
    Pair,
    RoleSummary,
)
from controlplane.transfers.schemas import NodeTransferList

AT = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
MOMENT = datetime.fromtimestamp(AT, UTC)


@dataclass
class Recorded:
    """What the server answers; tests replace parts of it."""

    overview: Overview | None = None
    nodes: list[Node] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)
    policies: list[PolicyRevision] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)
    matrix: Matrix = field(default_factory=lambda: Matrix(window_seconds=300, pairs=[]))
    series: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)
    pool: PoolReport | None = None
    pins: list[CachePinned] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    doctor: DoctorReport = field(default_factory=DoctorReport)
    transfers: NodeTransferList | None = None
    running: RunningList | None = None
    ledger: LedgerList | None = None
    summary: LedgerSummary | None = None
    at: float = AT
    hits: list[str] = field(default_factory=list)


def _reply(body: Schema) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _problem(status: int, title: str, detail: str = "", **more: Any) -> Response:
    body = Problem(title=title, status=status, detail=detail, **more).model_dump()
    return JSONResponse(body, status_code=status, media_type="application/problem+json")


def api(recorded: Recorded) -> FastAPI:
    """The routes that the pages read."""
    app = FastAPI()

    @app.middleware("http")
    async def count(request: Request, call_next: Any) -> Response:
        recorded.hits.append(request.url.path)
        reply: Response = await call_next(request)
        return reply

    @app.get("/api/v1/overview")
    async def overview() -> Response:
        if recorded.overview is None:
            return _problem(503, "Starting", "The database is being opened.", way_out="Wait 5 s.")
        return _reply(recorded.overview.model_copy(update={"at": recorded.at}))

    @app.get("/api/v1/nodes")
    async def nodes() -> Response:
        return _reply(NodeList(items=recorded.nodes))

    @app.get("/api/v1/workers")
    async def workers() -> Response:
        return _reply(WorkerList(items=recorded.workers))

    @app.get("/api/v1/decisions")
    async def decisions(limit: int = 50, cursor: str = "", worker: str = "") -> Response:
        rows = [d for d in recorded.decisions if worker in ("", d.prefill_worker, d.decode_worker)]
        return _reply(page_of(rows, limit, cursor))

    @app.get("/api/v1/rejections")
    async def rejections(limit: int = 50, cursor: str = "") -> Response:
        rows = [d for d in recorded.decisions if d.status == "rejected"]
        return _reply(page_of(rows, limit, cursor))

    @app.get("/api/v1/decisions/{request_id}")
    async def decision(request_id: str) -> Response:
        found = [d for d in recorded.decisions if d.request_id == request_id]
        if not found:
            return _problem(404, "No such request", f"No request {request_id} is recorded.")
        return _reply(found[0])

    @app.get("/api/v1/stats/series")
    async def series(metric: str, source: str, window: float, step: float) -> Response:
        return _reply(series_of(recorded, metric.split(","), source, window, step))

    @app.get("/api/v1/transfers/matrix")
    async def matrix() -> Response:
        return _reply(recorded.matrix)

    @app.get("/api/v1/audit")
    async def audit(limit: int = 50) -> Response:
        return _reply(AuditList(items=recorded.audit[:limit]))

    @app.get("/api/v1/gateways")
    async def gateways() -> Response:
        return _reply(GatewayList(items=recorded.gateways))

    @app.get("/api/v1/events")
    async def events() -> StreamingResponse:
        return StreamingResponse(ticks(recorded), media_type="text/event-stream")

    _add_policies(app, recorded)
    add_pool(app, recorded)
    add_paths(app, recorded)
    add_requests(app, recorded)
    return app


def _add_policies(app: FastAPI, recorded: Recorded) -> None:
    def of(*name: str) -> list[PolicyRevision]:
        return [p for p in recorded.policies if (p.kind, p.scope) == name]

    @app.get("/api/v1/policies")
    async def policies() -> Response:
        return _reply(PolicyList(items=[p for p in recorded.policies if p.active]))

    @app.get("/api/v1/policies/{kind}/{scope}")
    async def policy(kind: str, scope: str) -> Response:
        found = [p for p in of(kind, scope) if p.active]
        return _reply(found[0]) if found else _problem(404, "No such policy")

    @app.get("/api/v1/policies/{kind}/{scope}/revisions")
    async def revisions(kind: str, scope: str) -> Response:
        return _reply(PolicyList(items=sorted(of(kind, scope), key=lambda p: -p.revision)))

    @app.get("/api/v1/policies/{kind}/{scope}/revisions/{revision}")
    async def one(kind: str, scope: str, revision: int) -> Response:
        found = [p for p in of(kind, scope) if p.revision == revision]
        return _reply(found[0]) if found else _problem(404, "No such revision")


def node(name: str, **changes: Any) -> Node:
    """A healthy node."""
    fields: dict[str, Any] = {
        "id": name,
        "state": "ready",
        "incarnation": 1,
        "joined_at": MOMENT - timedelta(hours=2),
        "last_heartbeat_at": MOMENT,
        "heartbeat_age_seconds": 0.4,
        "events_endpoint": f"unix:/run/{name}.sock",
        "block_tokens": 256,
        "slab_bytes": 160 * 2**30,
        "used_blocks": 4_100,
        "capacity_blocks": 5_120,
        "pinned_blocks": 12,
        "block_bytes": 32 * 2**20,
        "rss_bytes": 80 * 2**20,
        "write_queue_blocks": 12,
        "write_queue_bound": 500,
    }
    return Node(**{**fields, **changes})


def bare_node(name: str, **changes: Any) -> Node:
    """A node of which nothing but its name is known."""
    return Node(
        **{
            "id": name,
            "state": "ready",
            "incarnation": 1,
            "joined_at": MOMENT,
            "last_heartbeat_at": MOMENT,
            "heartbeat_age_seconds": 0.2,
            **changes,
        }
    )


def worker(name: str, role: str, node_id: str, **changes: Any) -> Worker:
    """A healthy worker."""
    fields: dict[str, Any] = {
        "id": name,
        "node_id": node_id,
        "role": role,
        "model": "llama-8b",
        "url": "http://127.0.0.1:8101",
        "state": "ready",
        "pid": 4711,
        "running": 2,
        "waiting": 0,
        "rss_bytes": 3 * 2**30,
        "age_seconds": 0.4,
    }
    return Worker(**{**fields, **changes})


def gateway() -> Gateway:
    """A gateway that has just reported."""
    return Gateway(
        id="g1",
        url="http://127.0.0.1:8000",
        pid=4712,
        state="ready",
        view_revision=7,
        last_report_at=MOMENT,
        age_seconds=0.3,
    )


def decision(number: int, **changes: Any) -> Decision:
    """A finished request with every part filled."""
    fields: dict[str, Any] = {
        "request_id": f"{number:08x}0123456789abcdef01234567",
        "at": MOMENT - timedelta(seconds=number * 3),
        "gateway_id": "g1",
        "tenant": "acme",
        "model": "llama-8b",
        "status": "finished_stop",
        "policy_revisions": {"slo/default": 1},
        "balancing_threshold": 1.5,
        "prompt_tokens": 12_288,
        "hit_tokens": 8_192,
        "output_tokens": 214,
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "predicted_ttft_seconds": 0.402,
        "ttft_seconds": 0.41,
        "tbt_p95_seconds": 0.031,
        "e2e_seconds": 7.1,
        "http_status": 200,
        "phases": PHASES,
        "prefill_candidates": PREFILL,
        "decode_candidates": DECODE,
        "prefill_leg": LEG,
        "decode_leg": LEG.model_copy(update={"worker_id": "d1", "kv_wait_seconds": 0.012}),
    }
    return Decision(**{**fields, **changes})


PHASES = [
    Phase(name="admitted", measured_seconds=0.0006, start_seconds=0),
    Phase(name="queue", predicted_seconds=0.041, measured_seconds=0.0442, start_seconds=0.0006),
    Phase(name="transfer", predicted_seconds=0.054, measured_seconds=0.0581, note="16 blocks"),
    Phase(name="prefill", predicted_seconds=0.118, measured_seconds=0.121, note="4,096 computed"),
    Phase(name="handover", predicted_seconds=0.161, measured_seconds=4.22, note="48 blocks"),
    Phase(name="first decode step", predicted_seconds=0.028),
]
PREFILL = [
    PrefillCandidate(
        worker_id="p1",
        node_id="n1",
        own_prefix_tokens=4096,
        used_prefix_tokens=8192,
        queue_seconds=0.041,
        transfer_seconds=0.054,
        prefill_seconds=0.118,
        ttft_seconds=0.213,
        verdict="chosen",
    ),
    PrefillCandidate(
        worker_id="p2",
        node_id="n2",
        own_prefix_tokens=0,
        used_prefix_tokens=8192,
        queue_seconds=0.39,
        transfer_seconds=0.0,
        prefill_seconds=0.118,
        ttft_seconds=0.508,
        verdict="295 ms slower: queue",
    ),
]
DECODE = [
    DecodeCandidate(
        worker_id="d1", node_id="n2", running=11, cap=16, predicted_tbt_seconds=0.034, verdict="chosen"
    )
]  # fmt: skip
LEG = Leg(
    worker_id="p1",
    prompt_tokens=12_288,
    device_hit_tokens=0,
    pool_hit_tokens=8_192,
    computed_tokens=4_096,
    loaded_blocks=32,
    stored_blocks=16,
    loaded_bytes=2**30,
    stored_bytes=2**29,
)


def revision(number: int, *, active: bool = False, **spec: Any) -> PolicyRevision:
    """One of slo/default."""
    return PolicyRevision(
        kind="slo",
        scope="default",
        revision=number,
        spec=SloSpec(**spec).model_dump(mode="json"),
        author="ana",
        reason="" if number == 1 else "shorter queue",
        created_at=MOMENT - timedelta(hours=3 - number),
        active=active,
    )


def overview_of(**changes: Any) -> Overview:
    """Numbers of a healthy cluster."""
    fields: dict[str, Any] = {
        "cluster": "prod-eu1",
        "at": AT,
        "window_seconds": 900,
        "sample_age_seconds": 0.4,
        "requests_per_minute": 412.0,
        "rejected_ratio": 0.0,
        "hit_ratio": 0.581,
        "hit_tokens": 5_810,
        "prompt_tokens": 10_000,
        "used_bytes": int(1.52 * 2**40),
        "capacity_bytes": int(1.88 * 2**40),
        "evictions_per_second": 71.0,
        "moved_bytes_per_second": 6.3e9,
        "ttft_p50_seconds": 0.4,
        "ttft_p95_seconds": 3.91,
        "tbt_p50_seconds": 0.02,
        "tbt_p95_seconds": 0.031,
        "slo_attainment_ratio": 0.93,
        "slo_max_ttft_seconds": 2.0,
        "slo_max_tbt_seconds": 0.05,
        "slo_mode": "enforce",
        "kv_wait_ratio": 0.389,
        "roles": [
            RoleSummary(role="prefill", ready=2, total=2, running=6, waiting=3, queue_p95_seconds=0.39, write_queue_blocks=118, write_queue_bound=500),
            RoleSummary(role="decode", ready=1, total=2, running=74, waiting=0, queue_p95_seconds=0.002),
        ],
        "attention": [
            Attention(severity="critical", text="n1 -> n2 P95 2.84 s, 25x predicted", since=AT - 372, opens="link/p1/d1"),
            Attention(severity="warn", text="TTFT P95 over SLO 2.00 s", since=AT - 300, opens="requests"),
        ],
        "changes": [
            Change(at=AT - 738, text="policy cache/default r16 -> r17", actor="ben", reason="longer decay"),
            Change(at=AT - 1072, text="n2 joined, incarnation 4", actor="agent"),
        ],
    }  # fmt: skip
    return Overview(**{**fields, **changes})


def busy() -> Recorded:
    """Four nodes, one of them lost, traffic of many kinds."""
    rng = random.Random(7)
    nodes = [
        node("n1"),
        node("n2", used_blocks=5_000),
        bare_node("n3"),
        node("n4", state="lost", heartbeat_age_seconds=38.0, last_heartbeat_at=MOMENT - timedelta(seconds=38)),
    ]  # fmt: skip
    workers = [
        worker("p1", "prefill", "n1"),
        worker("p2", "prefill", "n2", waiting=3),
        worker("d1", "decode", "n2", running=11, restarts=1),
        worker("d2", "decode", "n4", state="lost", age_seconds=38.0),
    ]
    rejected = {
        "status": "rejected", "tenant": "batch", "http_status": 429, "retry_after_seconds": 3.0,
        "error": "predicted TTFT 2.31 s > 2.00 s", "decode_worker": "", "ttft_seconds": None,
        "hit_tokens": None, "phases": [], "prefill_leg": None, "decode_leg": None,
        "tbt_p95_seconds": None, "output_tokens": None,
    }  # fmt: skip
    running = {"status": "running", "ttft_seconds": None, "e2e_seconds": None, "phases": PHASES[:3]}
    kinds: list[dict[str, Any]] = [{}, {}, running, rejected, {"ttft_seconds": 4.47}]
    decisions = [decision(i, **kinds[i % len(kinds)]) for i in range(120)]
    series: dict[tuple[str, str], list[float | None]] = {}
    for name, level in (("n1", 0.9), ("n2", 0.45), ("n4", 0.6)):
        asked = [float(rng.randint(8_000, 12_000)) for _ in range(91)]
        asked[30:34] = [0.0] * 4
        rates = [min(1.0, max(0.0, rng.gauss(level - i * 0.003, 0.05))) for i in range(91)]
        hits = [value * rate for value, rate in zip(asked, rates, strict=True)]
        gone = 4 if name == "n4" else 0
        series[f"node:{name}", "prompt_tokens"] = [*asked[: 91 - gone], *[None] * gone]
        series[f"node:{name}", "hit_tokens"] = [*hits[: 91 - gone], *[None] * gone]
        series[f"node:{name}", "evicted_capacity"] = [float(rng.randint(0, 600)) for _ in range(91)]
        series[f"node:{name}", "evicted_corrupt"] = [0.0] * 91
    for metric, level in (
        ("ttft_p95_seconds", 2.0), ("tbt_p95_seconds", 0.03), ("requests", 70.0), ("rejected", 3.0),
        ("queue_p95_seconds", 0.3), ("hit_tokens", 6_000.0), ("prompt_tokens", 10_000.0),
        ("slo_met", 60.0), ("slo_missed", 6.0), ("kv_wait_seconds", 1.0), ("decode_seconds", 6.0),
    ):  # fmt: skip
        line: list[float | None] = [max(0.0, rng.gauss(level, level / 5)) for _ in range(91)]
        line[20:26] = [None] * 6
        series["cluster", metric] = line
    pairs = [
        Pair(source="p1", destination="d1", path="shm", transfers=27, bytes=28_800_000_000, seconds=70.5, p50_seconds=2.61, p95_seconds=2.84),
        Pair(source="p2", destination="d1", path="shm", transfers=77, bytes=9_000_000_000, seconds=6.1, p50_seconds=0.06, p95_seconds=0.104, failures=1),
        make_node_pair("n1", "n2", 2.61, failures=3),
        make_node_pair("n3", "n2", 0.04),
    ]  # fmt: skip
    audit = [
        AuditRow(id=9 - i, at=MOMENT - timedelta(minutes=i * 7), actor="ana", verb="policy.put", target="slo/default", before='{"max_ttft_ms": 2000}', after='{"max_ttft_ms": 1}', reason="a trial", request_id="0123456789abcdef")
        for i in range(8)
    ]  # fmt: skip
    policies = [
        revision(1),
        revision(2, active=True, mode="enforce", max_ttft_ms=2000, max_tbt_ms=50),
    ]
    return Recorded(
        overview_of(), nodes, workers, decisions, audit, policies, [gateway(), *make_gateways(MOMENT, ("p1", "d1", "p2", "d2"))],
        Matrix(window_seconds=300, pairs=pairs), series,
        doctor=make_doctor(MOMENT, ("n1", "n2", "n3", "n4"), ("n1", "n2")), transfers=make_report("n1", "n2"),
        running=make_running(MOMENT), ledger=make_ledger(MOMENT), summary=make_summary(),
    )  # fmt: skip


def empty() -> Recorded:
    """A control plane that has just started."""
    quiet = Overview(cluster="new", at=AT, window_seconds=900, sample_age_seconds=None)
    return Recorded(quiet, policies=[revision(1, active=True)])


def with_pages(recorded: Recorded) -> FastAPI:
    """The recorded API with the pages mounted, as the control plane mounts them."""
    app = api(recorded)
    mount(app, SimpleNamespace(cluster="prod-eu1"))
    return app


@pytest.fixture
def made() -> SimpleNamespace:
    """Makers of recorded objects."""
    return SimpleNamespace(
        AT=AT, Recorded=Recorded, busy=busy, empty=empty, node=node, bare_node=bare_node,
        worker=worker, decision=decision, revision=revision, overview_of=overview_of,
        with_pages=with_pages,
    )  # fmt: skip


@pytest.fixture
def recorded() -> Recorded:
    return busy()


@pytest.fixture
async def browser(recorded: Recorded) -> AsyncIterator[httpx2.AsyncClient]:
    """Asks for pages as a browser would, without a socket."""
    transport = httpx2.ASGITransport(app=with_pages(recorded))
    async with httpx2.AsyncClient(transport=transport, base_url="http://pages") as client:
        yield client
