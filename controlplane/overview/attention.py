"""What needs an operator's attention, from what is known now. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from controlplane.fleet.schemas import Worker
from controlplane.gateways.schemas import Gateway
from controlplane.nodes.schemas import Node
from controlplane.overview.findings import Finding, Severity
from controlplane.stats.schemas import Attention, Overview
from workers.core import numbers

WRITE_QUEUE_ALARM = 0.70
KV_WAIT_ALARM = 0.15
REJECTED_ALARM = 0.05
MAX_LINES = 50


@dataclass(slots=True)
class Since:
    """Remembers since when each finding holds."""

    _first: dict[str, float] = field(default_factory=dict)

    def lines(self, findings: Iterable[Finding], now: float) -> list[Attention]:
        """Critical first, then the oldest first."""
        found = list(findings)[:MAX_LINES]
        self._first = {key: self._first.get(key, now) for key, *_ in found}
        lines = [
            Attention(severity=severity, text=text, since=self._first[key], opens=opens)
            for key, severity, text, opens in found
        ]
        return sorted(lines, key=lambda line: (line.severity != "critical", line.since or now))


def findings(
    nodes: list[Node], workers: list[Worker], gateways: list[Gateway], overview: Overview
) -> Iterator[Finding]:
    """Every finding; parts that are lost or failed come first."""
    yield from _node_findings(nodes)
    yield from _worker_findings(workers)
    for gateway in gateways:
        if gateway.state != "ready":
            severity: Severity = "critical" if gateway.state == "lost" else "warn"
            age = numbers.age(gateway.age_seconds)
            text = f"gateway {gateway.id} {gateway.state}, no report for {age}"
            yield f"gateway/{gateway.id}", severity, text, f"gateway/{gateway.id}"
        elif gateway.stats is not None and gateway.stats.stuck:
            stuck = gateway.stats.stuck
            verb = "request is" if stuck == 1 else "requests are"
            text = f"{numbers.count(stuck)} {verb} stuck at {gateway.id}"
            yield f"gateway/{gateway.id}/stuck", "warn", text, "in-flight"
    yield from _service_findings(overview)


def _node_findings(nodes: list[Node]) -> Iterator[Finding]:
    for node in nodes:
        opens = f"node/{node.id}"
        if node.state != "ready":
            severity: Severity = "critical" if node.state == "lost" else "warn"
            age = numbers.age(node.heartbeat_age_seconds)
            text = f"{node.id} {node.state}, no heartbeat for {age}"
            yield f"{opens}/state", severity, text, opens
            continue
        if node.write_queue_bound and node.write_queue_blocks is not None:
            share = node.write_queue_blocks / node.write_queue_bound
            if share > WRITE_QUEUE_ALARM:
                text = f"write queue {numbers.percent(share)} full on {node.id}, alarm {numbers.percent(WRITE_QUEUE_ALARM)}"
                yield f"{opens}/write_queue", "warn", text, opens


def _worker_findings(workers: list[Worker]) -> Iterator[Finding]:
    for worker in workers:
        opens = f"worker/{worker.id}"
        if worker.state == "failed":
            cause = f": {worker.last_error}" if worker.last_error else ""
            yield opens, "critical", f"worker {worker.id} failed{cause}"[:300], opens
        elif _left_out(worker):
            text = f"gateways leave {worker.id} out, its requests fail: {worker.data_path_note}"
            yield f"{opens}/data_path", _left_out_severity(worker, workers), text[:300], opens
    for role in ("prefill", "decode"):
        of_role = [w for w in workers if w.role in {role, "both"}]
        if of_role and not any(w.state == "ready" for w in of_role):
            yield f"role/{role}", "critical", f"no {role} worker is ready", "topology"


def _left_out(worker: Worker) -> bool:
    return worker.state == "ready" and worker.data_path == "ejected"


def _left_out_severity(worker: Worker, workers: list[Worker]) -> Severity:
    """Critical where no other worker of its role serves."""
    others = any(
        other.id != worker.id
        and other.role in (worker.role, "both")
        and other.state == "ready"
        and not _left_out(other)
        for other in workers
    )
    return "warn" if others else "critical"


def _service_findings(overview: Overview) -> Iterator[Finding]:
    ttft, limit = overview.ttft_p95_seconds, overview.slo_max_ttft_seconds
    if overview.slo_mode != "off" and ttft is not None and limit is not None and ttft > limit:
        text = f"TTFT P95 {numbers.duration(ttft)} over SLO {numbers.duration(limit)}"
        yield "slo/ttft", "warn", text, "requests/slow"
    tbt, limit = overview.tbt_p95_seconds, overview.slo_max_tbt_seconds
    if overview.slo_mode != "off" and tbt is not None and limit is not None and tbt > limit:
        text = f"TBT P95 {numbers.duration(tbt)} over SLO {numbers.duration(limit)}"
        yield "slo/tbt", "warn", text, "requests/slow"
    if overview.rejected_ratio is not None and overview.rejected_ratio > REJECTED_ALARM:
        text = f"{numbers.percent(overview.rejected_ratio)} of requests rejected, alarm {numbers.percent(REJECTED_ALARM)}"
        yield "rejected", "warn", text, "rejections"
    if overview.kv_wait_ratio is not None and overview.kv_wait_ratio > KV_WAIT_ALARM:
        text = f"decode waits for KV {numbers.percent(overview.kv_wait_ratio)} of its time, alarm {numbers.percent(KV_WAIT_ALARM)}"
        yield "kv_wait", "warn", text, "kvwait"
    if overview.tokenizer_mismatch_total:
        text = f"{numbers.count(overview.tokenizer_mismatch_total)} prompts tokenised otherwise than by the engine"
        yield "tokenizer", "warn", text, "requests"
