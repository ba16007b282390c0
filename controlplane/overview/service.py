"""Overview: the answer to "is it fine, what is not, what changed"."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.audit.service import AuditTrail
from controlplane.clock import Clock
from controlplane.db.session import Database
from controlplane.fleet.schemas import Worker
from controlplane.fleet.service import WorkerRegistry
from controlplane.gateways.service import GatewayRegistry
from controlplane.nodes.pool_service import PoolReporter
from controlplane.nodes.service import NodeRegistry
from controlplane.overview.attention import Since, findings
from controlplane.overview.changes import changes
from controlplane.overview.pool_attention import POOL_WINDOW_SECONDS, pool_findings
from controlplane.policies.service import DEFAULT_SCOPE, PolicyStore
from controlplane.stats.bucket import Bucket, new_bucket
from controlplane.stats.pool_values import EVICTION_CAUSES, NO_EVICTIONS
from controlplane.stats.schemas import Overview, RoleSummary
from controlplane.stats.service import StatsService

MAX_WINDOWS = 16
TICK_WINDOW_SECONDS = 900.0
"""The tick's overview covers the same window as GET /api/v1/overview does by default."""


@dataclass(slots=True)
class OverviewService:
    cluster: str
    clock: Clock
    db: Database
    nodes: NodeRegistry
    fleet: WorkerRegistry
    gateways: GatewayRegistry
    policies: PolicyStore
    stats: StatsService
    audit: AuditTrail
    pool: PoolReporter
    _since: dict[float, Since] = field(default_factory=dict)

    async def build(self, window: float) -> Overview:
        """Totals over the window; gauges as of now. What is lost counts in a role's total alone."""
        total = (await self.stats.totals(self.db, "cluster", window)).get("cluster", new_bucket())
        minute = (await self.stats.totals(self.db, "cluster", 60)).get("cluster", new_bucket())
        now = self.clock.now().timestamp()
        workers = [w for w in self.fleet.list() if w.state != "lost"]
        values = {
            **self._rates(total, window, now),
            # one request within the last minute is 1, however long the rest of the window is
            "requests_per_minute": minute.counters.get("requests"),
            **self._gauges(),
            **self._slo(),
            "roles": self._roles(self.fleet.list(), total),
            "emulated": any(worker.engine == "emulated" for worker in workers),
        }
        overview = Overview.model_validate(
            {"cluster": self.cluster, "at": now, "window_seconds": window, **values}
        )
        found = [
            *findings(self.nodes.list(), self.fleet.list(), self.gateways.list(), overview),
            *pool_findings(await self.pool.build(POOL_WINDOW_SECONDS)),
        ]
        return overview.model_copy(
            update={
                "attention": self._since_of(window).lines(found, now),
                "changes": changes(self.audit.recent, self.nodes.list(), now),
            }
        )

    def _since_of(self, window: float) -> Since:
        """What holds over a minute need not hold over a day: each window remembers its own."""
        if window not in self._since and len(self._since) >= MAX_WINDOWS:
            self._since.pop(next(iter(self._since)))
        return self._since.setdefault(window, Since())

    def _rates(self, total: Bucket, window: float, now: float) -> dict[str, object]:
        count = total.counters.get
        first = self.stats.window.first_at(now - window)
        # a young cluster is judged by the time that it has been watched
        watched = window if first is None or window > 900 else min(window, max(1.0, now - first))
        requests, rejected = count("requests"), count("rejected")
        met, missed = count("slo_met", 0.0), count("slo_missed", 0.0)
        evicted = [count(f"evicted_{c}") for c in EVICTION_CAUSES if c not in NO_EVICTIONS]
        known = [value for value in evicted if value is not None]
        moved = count("moved_bytes")
        prompt, hits = count("prompt_tokens"), count("hit_tokens")
        return {
            "rejected_ratio": _ratio(rejected, requests),
            "hit_ratio": _ratio(hits, prompt),
            "hit_tokens": None if hits is None else int(hits),
            "prompt_tokens": None if prompt is None else int(prompt),
            "evictions_per_second": sum(known) / watched if known else None,
            "moved_bytes_per_second": None if moved is None else moved / watched,
            "slo_attainment_ratio": _ratio(met, met + missed),
            "kv_wait_ratio": _ratio(count("kv_wait_seconds"), count("decode_seconds")),
            **{name: total.value(name) for name in _LATENCIES},
        }

    def _gauges(self) -> dict[str, object]:
        live = [node for node in self.nodes.live() if node.stats]
        used = [n.stats.used_blocks * n.stats.block_bytes for n in live if n.stats]
        capacity = [n.stats.capacity_blocks * n.stats.block_bytes for n in live if n.stats]
        mono = self.clock.monotonic()
        ages = [mono - n.seen for n in live] + [mono - g.seen for g in self.gateways.live()]
        stats = [g.stats for g in self.gateways.live() if g.stats]
        return {
            "used_bytes": sum(used) if live else None,
            "capacity_bytes": sum(capacity) if live else None,
            "sample_age_seconds": round(max(0.0, min(ages)), 3) if ages else None,
            "tokenizer_mismatch_total": sum(s.tokenizer_mismatch_total for s in stats),
        }

    def _slo(self) -> dict[str, object]:
        policy = self.policies.active.get(("slo", DEFAULT_SCOPE))
        if policy is None:
            return {}
        spec = policy.spec
        return {
            "slo_mode": spec["mode"],
            "slo_max_ttft_seconds": float(str(spec["max_ttft_ms"])) / 1000,
            "slo_max_tbt_seconds": float(str(spec["max_tbt_ms"])) / 1000,
        }

    def _roles(self, workers: list[Worker], total: Bucket) -> list[RoleSummary]:
        live = [node.stats for node in self.nodes.live() if node.stats]
        roles = []
        for role in ("prefill", "decode", "both"):
            of_role = [w for w in workers if w.role == role]
            if not of_role:
                continue
            writes = role != "decode" and live  # prefill workers fill the write queue
            roles.append(
                RoleSummary(
                    role=role,
                    ready=sum(w.state == "ready" for w in of_role),
                    total=len(of_role),
                    running=_sum([w.running for w in of_role if w.state != "lost"]),
                    waiting=_sum([w.waiting for w in of_role if w.state != "lost"]),
                    queue_p95_seconds=total.value("queue_p95_seconds")
                    if role != "decode"
                    else None,
                    write_queue_blocks=sum(s.write_queue_blocks for s in live) if writes else None,
                    write_queue_bound=sum(s.write_queue_bound for s in live) if writes else None,
                )
            )
        return roles


_LATENCIES = ("ttft_p50_seconds", "ttft_p95_seconds", "tbt_p50_seconds", "tbt_p95_seconds")


def _ratio(part: float | None, whole: float | None) -> float | None:
    """Null without a whole: no traffic is no ratio, not 0 %."""
    if part is None or not whole:
        return None
    return min(1.0, part / whole)


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
