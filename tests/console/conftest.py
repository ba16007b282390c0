"""A cluster of real schema objects, and a source that serves them without a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from fake_source import FakeSource
from path_objects import (
    make_check,
    make_doctor,
    make_link,
    make_node_pair,
    make_report,
    make_slow,
    make_transfers,
)
from pool_objects import make_group, make_job, make_pool, make_pool_node, make_tier
from request_objects import make_gateways, make_ledger, make_running, make_summary

from controlplane.audit.schemas import AuditRow
from controlplane.cache.schemas import CachePinList, CachePinned
from controlplane.client_http import ClientError
from controlplane.decisions.schemas import (
    Decision,
    DecodeCandidate,
    Leg,
    Phase,
    PrefillCandidate,
)
from controlplane.doctor.schemas import DoctorReport
from controlplane.fleet.schemas import Worker
from controlplane.gateways.running_schemas import RunningList
from controlplane.gateways.schemas import Gateway
from controlplane.jobs.schemas import Job
from controlplane.ledger.schemas import FalseRejects, LedgerList, LedgerSummary
from controlplane.nodes.pool_schemas import PoolReport
from controlplane.nodes.schemas import Node
from controlplane.policies.schemas import (
    CacheSpec,
    PolicyRevision,
    SchedulingSpec,
    SloSpec,
)
from controlplane.schema_base import Problem
from controlplane.stats.schemas import (
    Attention,
    Change,
    Matrix,
    Overview,
    Pair,
    RoleSummary,
    Series,
    SeriesReply,
)
from controlplane.transfers.schemas import NodeTransferList

NOW = 1_796_130_450.0  # 2026-12-01 14:07:30 UTC, on a bucket's edge
AT = datetime.fromtimestamp(NOW, UTC)
GIB = 2**30


def make_node(number: int, **changes: object) -> Node:
    values: dict[str, object] = {
        "id": f"node-{number:02d}",
        "state": "ready",
        "incarnation": 1,
        "joined_at": AT - timedelta(hours=2),
        "last_heartbeat_at": AT,
        "heartbeat_age_seconds": 0.4,
        "block_tokens": 256,
        "slab_bytes": 160 * GIB,
        "used_blocks": 4512,
        "capacity_blocks": 5120,
        "pinned_blocks": 31,
        "block_bytes": 32 * 2**20,
        "rss_bytes": 80 * 2**20,
        "write_queue_blocks": 118,
        "write_queue_bound": 500,
    }
    return Node.model_validate(values | changes)


def make_worker(name: str, node: str, role: str, **changes: object) -> Worker:
    values: dict[str, object] = {
        "id": name,
        "node_id": node,
        "role": role,
        "model": "llama-8b",
        "url": "http://127.0.0.1:8101",
        "state": "ready",
        "pid": 4711,
        "running": 11,
        "waiting": 0,
        "block_tokens": 256,
        "rss_bytes": 3 * GIB,
        "age_seconds": 0.3,
    }
    return Worker.model_validate(values | changes)


def make_decision(number: int, **changes: object) -> Decision:
    values: dict[str, object] = {
        "request_id": f"{number:08x}cafe4711",
        "at": AT - timedelta(seconds=300 - number),
        "gateway_id": "gw-1",
        "tenant": "acme",
        "model": "llama-8b",
        "status": "finished_stop",
        "policy_revisions": {"slo/default": 41, "scheduling/default": 9},
        "balancing_threshold": 1.5,
        "prompt_tokens": 12288,
        "hit_tokens": 8192,
        "output_tokens": 214,
        "prefill_candidates": [
            PrefillCandidate(
                worker_id="p3", node_id="node-03", own_prefix_tokens=4096,
                used_prefix_tokens=8192, queue_seconds=0.041, transfer_seconds=0.054,
                prefill_seconds=0.118, ttft_seconds=0.213, verdict="chosen",
            ),
            PrefillCandidate(
                worker_id="p1", node_id="node-01", own_prefix_tokens=0,
                used_prefix_tokens=8192, queue_seconds=0.012, transfer_seconds=0.107,
                prefill_seconds=0.118, ttft_seconds=0.237, verdict="24 ms slower: transfer",
            ),
        ],
        "decode_candidates": [
            DecodeCandidate(
                worker_id="d5", node_id="node-09", running=11, cap=16,
                predicted_tbt_seconds=0.028, verdict="chosen",
            ),
        ],
        "prefill_worker": "p3",
        "decode_worker": "d5",
        "predicted_ttft_seconds": 0.402,
        "ttft_seconds": 4.47,
        "tbt_p95_seconds": 0.031,
        "e2e_seconds": 11.2,
        "http_status": 200,
        "phases": [
            Phase(name="admitted", measured_seconds=0.0006),
            Phase(name="queue", predicted_seconds=0.041, measured_seconds=0.0442),
            Phase(name="transfer", predicted_seconds=0.054, measured_seconds=0.0581, note="16 blocks, 512 MiB"),
            Phase(name="prefill", predicted_seconds=0.118, measured_seconds=0.121, note="4,096 tokens computed"),
            Phase(name="handover", predicted_seconds=0.161, measured_seconds=4.22, note="48 blocks, 1.61 GB"),
            Phase(name="first decode step", predicted_seconds=0.028, measured_seconds=0.0286),
        ],
        "prefill_leg": Leg(worker_id="p3", prompt_tokens=12288, device_hit_tokens=4096, pool_hit_tokens=4096, computed_tokens=4096, loaded_blocks=16, stored_blocks=16, loaded_bytes=512 * 2**20, stored_bytes=512 * 2**20),
        "decode_leg": Leg(worker_id="d5", prompt_tokens=12288, pool_hit_tokens=12287, computed_tokens=1, loaded_blocks=48, loaded_bytes=1610612736, kv_wait_seconds=4.2),
    }  # fmt: skip
    return Decision.model_validate(values | changes)


def make_overview(**changes: object) -> Overview:
    values: dict[str, object] = {
        "cluster": "prod-eu1",
        "at": NOW,
        "window_seconds": 900.0,
        "sample_age_seconds": 0.0,
        "requests_per_minute": 412.0,
        "rejected_ratio": 0.0,
        "hit_ratio": 0.581,
        "hit_tokens": 581_000,
        "prompt_tokens": 1_000_000,
        "used_bytes": int(1.52 * 1024 * GIB),
        "capacity_bytes": int(1.88 * 1024 * GIB),
        "evictions_per_second": 71.0,
        "moved_bytes_per_second": 6.3e9,
        "ttft_p50_seconds": 0.35,
        "ttft_p95_seconds": 3.91,
        "tbt_p50_seconds": 0.024,
        "tbt_p95_seconds": 0.031,
        "slo_attainment_ratio": 0.942,
        "slo_max_ttft_seconds": 2.0,
        "slo_max_tbt_seconds": 0.05,
        "slo_mode": "enforce",
        "kv_wait_ratio": 0.389,
        "roles": [
            RoleSummary(role="prefill", ready=4, total=4, running=6, waiting=3, queue_p95_seconds=0.39, write_queue_blocks=118, write_queue_bound=500),
            RoleSummary(role="decode", ready=8, total=8, running=74, waiting=0, queue_p95_seconds=0.002, write_queue_blocks=22, write_queue_bound=500),
        ],
        "attention": [
            Attention(severity="critical", text="node-03 -> node-09 P95 2.84 s", since=NOW - 380, opens="transfers/p3/d5"),
            Attention(severity="warn", text="TTFT P95 over SLO 2.00 s", since=NOW - 350, opens="requests"),
            Attention(severity="warn", text="local hit rate 41.2 % on node-04", since=NOW - 570, opens="node/node-04"),
        ],
        "changes": [
            Change(at=NOW - 748, text="policy cache/default r16 -> r17", actor="ben", reason="longer decay"),
            Change(at=NOW - 1070, text="node-09 joined, incarnation 4", actor="agent", reason="after kernel update"),
        ],
    }  # fmt: skip
    return Overview.model_validate(values | changes)


def make_policy(
    kind: str, revision: int, spec: dict[str, object], **changes: object
) -> PolicyRevision:
    values: dict[str, object] = {
        "kind": kind, "scope": "default", "revision": revision, "spec": spec, "author": "ana",
        "reason": "tighter", "created_at": AT - timedelta(hours=5), "active": True,
    }  # fmt: skip
    return PolicyRevision.model_validate(values | changes)


def make_pair(source: str, target: str, seconds: float, **changes: object) -> Pair:
    values: dict[str, object] = {
        "source": source, "destination": target, "path": "shm", "transfers": 27,
        "bytes": 28_800_000_000, "seconds": 75.0, "p50_seconds": seconds * 0.9,
        "p95_seconds": seconds,
    }  # fmt: skip
    return Pair.model_validate(values | changes)


@dataclass
class World:
    """What the control plane would say, and a source that says it."""

    nodes: list[Node] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)
    policies: list[PolicyRevision] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)
    matrix: Matrix = field(default_factory=lambda: Matrix(window_seconds=300, pairs=[]))
    overview: Overview = field(default_factory=make_overview)
    pool: PoolReport | None = None
    pins: CachePinList = field(default_factory=lambda: CachePinList(items=[]))
    jobs: list[Job] = field(default_factory=list)
    doctor: DoctorReport = field(default_factory=DoctorReport)
    transfers: NodeTransferList = field(
        default_factory=lambda: NodeTransferList(rows=[], total=0, links=[], alarms=[])
    )
    running: RunningList = field(default_factory=lambda: RunningList(items=[]))
    ledger: LedgerList = field(default_factory=lambda: LedgerList(items=[]))
    summary: LedgerSummary = field(
        default_factory=lambda: make_summary(
            rejected=0, shed=0, probes=0, false_rejects=FalseRejects(), classes=[]
        )
    )
    node_pair = staticmethod(make_node_pair)
    report = staticmethod(make_report)
    pair_transfers = staticmethod(make_transfers)
    slow = staticmethod(make_slow)
    link = staticmethod(make_link)
    check = staticmethod(make_check)
    doctor_of = staticmethod(make_doctor)
    pool_of = staticmethod(make_pool)
    pool_node = staticmethod(make_pool_node)
    tier = staticmethod(make_tier)
    group = staticmethod(make_group)
    job = staticmethod(make_job)
    node = staticmethod(make_node)
    worker = staticmethod(make_worker)
    decision = staticmethod(make_decision)
    policy = staticmethod(make_policy)
    pair = staticmethod(make_pair)
    make_overview = staticmethod(make_overview)
    now: float = NOW
    at: datetime = AT

    @classmethod
    def busy(cls, num_decisions: int = 30) -> World:
        """Twelve nodes, four prefill and eight decode workers, one slow destination."""
        nodes = [make_node(number) for number in range(1, 13)]
        workers = [make_worker(f"p{i}", f"node-{i:02d}", "prefill") for i in range(1, 5)]
        workers += [make_worker(f"d{i}", f"node-{i + 4:02d}", "decode") for i in range(1, 9)]
        pairs = [
            make_pair(f"p{p}", f"d{d}", 2.7 if d == 5 else 0.04 * d)
            for p in range(1, 5)
            for d in range(1, 9)
            if (p + d) % 4
        ]
        pairs.append(make_pair("p3", "d5", 2.84))
        pairs += [
            make_node_pair(f"node-{p:02d}", f"node-{d:02d}", 2.61 if d == 9 else 0.03 * d)
            for p in range(1, 5)
            for d in range(5, 13)
            if (p + d) % 4
        ]
        slo = SloSpec(mode="enforce", max_ttft_ms=2000, max_tbt_ms=50).model_dump(mode="json")
        return cls(
            nodes=nodes,
            workers=workers,
            decisions=[make_decision(number) for number in range(num_decisions)],
            audit=[
                AuditRow(id=n, at=AT - timedelta(minutes=20 - n), actor="ana", verb="policy.put", target="slo/default", before='{"max_ttft_ms": 2000}', after='{"max_ttft_ms": 1}', reason=f"try {n}")
                for n in range(1, 6)
            ],
            policies=[
                make_policy("slo", 41, slo),
                make_policy("scheduling", 9, SchedulingSpec().model_dump(mode="json")),
                make_policy("cache", 17, CacheSpec().model_dump(mode="json") | {"eviction": "decay"}, author="ben"),
            ],
            doctor=make_doctor(AT, tuple(node.id for node in nodes), ("node-02", "node-09")),
            transfers=make_report("node-02", "node-09"),
            running=make_running(AT),
            ledger=make_ledger(AT),
            summary=make_summary(),
            gateways=make_gateways(AT),
            pool=make_pool(),
            pins=CachePinList(items=[
                CachePinned(name="system-prompt", node=f"node-{i:02d}", blocks=48, bytes=48 * 32 * 2**20, share=0.009, chains=2, expires_at=AT + timedelta(minutes=20))
                for i in (1, 2)
            ]),
            jobs=[
                make_job(118),
                make_job(117, kind="pin", target="acme", state="done", progress={"done": 96, "total": 96}, finished_at=AT - timedelta(minutes=5), undo={"possible": True, "how": "ends the pin pin-3f"}),
            ],
            matrix=Matrix(window_seconds=300, pairs=list({(p.source, p.destination): p for p in pairs}.values())),
        )  # fmt: skip

    def series(self, end: float) -> SeriesReply:
        """Fifteen minutes of 10 s buckets that end with the one that holds `end`."""
        last = math.floor(end / 10)
        start = last - 90
        found: list[Series] = []
        for place, node in enumerate(self.nodes):
            asked = [100_000.0 + 100 * ((i + place) % 7) for i in range(91)]
            share = [max(0.05, 0.97 - 0.08 * place - 0.001 * i) for i in range(91)]
            found += [
                Series(metric="prompt_tokens", source=f"node:{node.id}", values=list(asked)),
                Series(metric="hit_tokens", source=f"node:{node.id}", values=[a * s for a, s in zip(asked, share, strict=True)]),
                Series(metric="evicted_capacity", source=f"node:{node.id}", values=[float((i // 9 + place) % 6) * 10 for i in range(91)]),
                Series(metric="evicted_corrupt", source=f"node:{node.id}", values=[0.0] * 91),
            ]  # fmt: skip
        for metric, low, high in (
            ("requests", 60, 75), ("rejected", 0, 0), ("ttft_p95_seconds", 0.4, 3.9),
            ("tbt_p95_seconds", 0.03, 0.031), ("queue_p95_seconds", 0.1, 0.4), ("prompt_tokens", 9e5, 1e6),
            ("hit_tokens", 5e5, 5.8e5), ("kv_wait_seconds", 1, 30), ("decode_seconds", 70, 80),
            ("slo_met", 60, 50), ("slo_missed", 1, 12),
        ):  # fmt: skip
            values: list[float | None] = [low + (high - low) * i / 90 for i in range(91)]
            found.append(Series(metric=metric, source="cluster", values=values))
        return SeriesReply(start=start * 10, step_seconds=10, series=found)


@pytest.fixture
def world() -> World:
    """A busy cluster."""
    return World.busy()


@pytest.fixture
def empty_world() -> World:
    """A control plane that nobody has joined."""
    return World(
        overview=make_overview(
            requests_per_minute=0.0,
            rejected_ratio=None,
            hit_ratio=None,
            hit_tokens=0,
            prompt_tokens=0,
            used_bytes=0,
            capacity_bytes=0,
            evictions_per_second=0.0,
            moved_bytes_per_second=0.0,
            ttft_p50_seconds=None,
            ttft_p95_seconds=None,
            tbt_p50_seconds=None,
            tbt_p95_seconds=None,
            slo_attainment_ratio=None,
            kv_wait_ratio=None,
            roles=[],
            attention=[],
            changes=[],
        )
    )


@pytest.fixture
def make_source() -> Callable[[World], FakeSource]:
    """Turns a world into a source."""
    return FakeSource


@pytest.fixture
def problem() -> Callable[..., ClientError]:
    """A refusal of the control plane."""

    def build(status: int, detail: str = "no", **more: object) -> ClientError:
        return ClientError(
            Problem.model_validate({"title": "x", "status": status, "detail": detail, **more})
        )

    return build
