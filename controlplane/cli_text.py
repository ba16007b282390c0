"""Rows of the control plane as plain text for a terminal or a pipe. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from controlplane.audit.schemas import AuditRow
from controlplane.decisions import words
from controlplane.decisions.schemas import Decision
from controlplane.fleet.schemas import Worker
from controlplane.nodes.schemas import Node
from controlplane.policies.schemas import NODE_POLICIES, PolicyPutReply, PolicyRevision
from controlplane.stats.schemas import Pair
from controlplane.tokens.schemas import Key
from workers.core import numbers
from workers.core.error_text import error_text
from workers.core.numbers import count as number
from workers.core.numbers import duration

RIGHT = frozenset({
    "AGE", "RESTARTS", "USED", "CAPACITY", "PINNED", "WRITE QUEUE", "BLOCK", "RUN", "WAIT", "RSS",
    "PROMPT", "HIT %", "TTFT", "SUM", "TBT P95", "TRANSFERS", "BYTES", "SECONDS", "P50", "P95", "FAILURES",
    "PREDICTED", "MEASURED", "OWN", "T_QUEUE", "T_TRANSFER", "T_PREFILL", "RUNNING", "PRED. TBT",
    "DEVICE HIT", "POOL HIT", "COMPUTED", "LOADED", "STORED", "KV WAIT",
    "RETRIES", "IN FLIGHT", "QUEUE P99", "WIRE P50", "WIRE P99", "SUM P99",
    "USED %", "BLOCKS", "HITS", "IDLE", "PINS", "EVICTED", "CHAINS", "SHARE %", "JOB", "DONE", "TOTAL",
})  # fmt: skip
"""Columns of numbers."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> str:
    """Columns padded to their widest cell and never wrapped; `empty` where there is no row."""
    lines = [list(head), *(list(row) for row in rows)]
    if len(lines) == 1:
        return empty
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in RIGHT else cell.ljust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def percent(part: float | None, whole: float | None) -> str:
    """Without its sign, which stands in the head."""
    ratio = part / whole if part is not None and whole else None
    return numbers.percent(ratio, unit=False)


def clock(at: datetime) -> str:
    """UTC, sortable."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def nodes(items: list[Node]) -> str:
    head = (
        "NODE",
        "STATE",
        "AGE",
        "RESTARTS",
        "USED",
        "CAPACITY",
        "PINNED",
        "WRITE QUEUE",
        "BLOCK",
    )
    rows = (
        (
            node.id,
            node.state,
            numbers.age(node.heartbeat_age_seconds),
            str(node.restarts),
            # a lost node's numbers are old: marked, not hidden
            ("~" if node.state == "lost" and node.used_blocks is not None else "")
            + number(node.used_blocks),
            number(node.capacity_blocks),
            number(node.pinned_blocks),
            f"{number(node.write_queue_blocks)} / {number(node.write_queue_bound)}",
            numbers.stored_bytes(node.block_bytes),
        )
        for node in items
    )
    listed = table(head, rows, "No node has joined. perilune up starts one.")
    told = [
        f"{node.id} is not ready: {node.not_ready}" for node in items if node.state == "not_ready"
    ]
    told += [f"{node.id}: {node.transfer_problem}" for node in items if node.transfer_problem and not node.not_ready]  # fmt: skip
    return "\n".join([listed, *told])


def workers(items: list[Worker]) -> str:
    head = ("WORKER", "ROLE", "STATE", "NODE", "MODEL", "RUN", "WAIT", "RESTARTS", "RSS", "URL")
    rows = (
        (
            worker.id,
            worker.role + (" (emulated)" if worker.engine == "emulated" else ""),
            worker.state,
            worker.node_id,
            worker.model,
            number(worker.running),
            number(worker.waiting),
            str(worker.restarts),
            numbers.stored_bytes(worker.rss_bytes),
            worker.url,
        )
        for worker in items
    )
    return table(head, rows, "No worker is known. perilune up starts some.")


def requests(items: list[Decision]) -> str:
    head = (
        "TIME",
        "REQUEST",
        "TENANT",
        "STATUS",
        "PROMPT",
        "HIT %",
        "TTFT",
        "TBT P95",
        "P -> D",
        "WHY",
    )
    rows = (
        (
            clock(d.at),
            d.request_id,
            d.tenant,
            d.status,
            number(d.prompt_tokens),
            _hit(d),
            _latency(d, d.ttft_seconds),
            _latency(d, d.tbt_p95_seconds),
            words.route(d),
            _why(d),
        )
        for d in items
    )
    return table(head, rows, "No request: none is recorded yet, or none matches.")


def _hit(d: Decision) -> str:
    """`-`: it was turned away, or has no tokens to count."""
    never = d.status == "rejected" or d.request_bytes is not None
    if d.hit_tokens is None and never:
        return numbers.NO_TRAFFIC
    return percent(d.hit_tokens, d.engine_prompt_tokens or d.prompt_tokens)


def _latency(d: Decision, seconds: float | None) -> str:
    """`-`: nothing to measure, as the request was not streamed or has not finished."""
    measurable = d.stream and d.status.startswith("finished")
    return numbers.NO_TRAFFIC if seconds is None and not measurable else duration(seconds)


def _why(d: Decision) -> str:
    """What went wrong, in a line, as the consoles say it."""
    if d.status == "rejected":
        return words.rejection(d)
    if not d.error:
        return ""
    status = f"{d.http_status}: " if d.http_status else ""
    retry = d.retry_after_seconds
    after = "" if retry is None else f"; Retry-After {duration(retry)}"
    return status + error_text(d.error)[:80] + after


def transfers(pairs: list[Pair]) -> str:
    head = ("FROM", "TO", "PATH", "TRANSFERS", "BYTES", "SECONDS", "P50", "P95", "FAILURES")
    rows = (
        (
            pair.source,
            pair.destination,
            pair.path,
            number(pair.transfers),
            numbers.moved_bytes(pair.bytes),
            duration(pair.seconds),
            duration(pair.p50_seconds),
            duration(pair.p95_seconds),
            number(pair.failures),
        )
        for pair in pairs
    )
    return table(head, rows, "No KV has travelled in this window.")


def audit(items: list[AuditRow]) -> str:
    head = ("TIME", "ACTOR", "VERB", "TARGET", "BEFORE", "AFTER", "REASON")
    rows = (
        (
            clock(row.at),
            row.actor,
            row.verb,
            row.target,
            row.before[:60] or "-",
            row.after[:60] or "-",
            row.reason or "-",
        )
        for row in items
    )
    return table(head, rows, "Nothing has been changed yet.")


def policies(items: list[PolicyRevision]) -> str:
    head = ("POLICY", "REVISION", "ACTIVE", "AUTHOR", "CREATED", "REASON")
    rows = (
        (
            f"{policy.kind}/{policy.scope}",
            f"r{policy.revision}",
            "yes" if policy.active else "",
            policy.author,
            clock(policy.created_at),
            policy.reason or "-",
        )
        for policy in items
    )
    return table(head, rows, "There is no policy.")


def policy(item: PolicyRevision) -> str:
    state = "active" if item.active else "not active"
    lines = [f"{item.kind}/{item.scope} r{item.revision}, {state}, by {item.author}"]
    if item.reason:
        lines.append(f"reason: {item.reason}")
    lines += [f"  {name} = {value}" for name, value in item.spec.items()]
    return "\n".join(lines)


def difference(old: PolicyRevision, new: PolicyRevision) -> str:
    lines = [f"{new.kind}/{new.scope} r{old.revision} -> r{new.revision}"]
    for name in sorted({*old.spec, *new.spec}):
        before, after = old.spec.get(name, "-"), new.spec.get(name, "-")
        if before != after:
            lines.append(f"  {name}: {before} -> {after}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "  no difference"])


def policy_put(reply: PolicyPutReply, old: PolicyRevision | None) -> str:
    text = difference(old, reply.active) if old else policy(reply.active)
    if reply.active.kind in NODE_POLICIES:
        return f"{text}\nacts on: each node with its next heartbeat, within 2 s"
    acts = ", ".join(reply.acknowledged_gateways) or "no gateway"
    waits = ", ".join(reply.pending_gateways)
    return f"{text}\nacts on: {acts}" + (f"; not yet on: {waits}" if waits else "")


def keys(items: list[Key]) -> str:
    head = ("ID", "KEY", "TENANT", "MAX PRIORITY", "CREATED", "NOTE")
    rows = (
        (
            str(k.id),
            f"{k.prefix}...",
            k.tenant,
            k.max_priority or "-",
            clock(k.created_at),
            k.note or "-",
        )
        for k in items
    )
    return table(head, rows, "No client key. perilune key create TENANT makes one.")
