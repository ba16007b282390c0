"""The KV pool's tables: policy in use, tiers, tenants and namespaces, health of eviction.

Everything comes from one `PoolReport`; None means that none has come yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from console.viewmodel import numbers
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell
from controlplane.nodes.pool_schemas import (
    PoolEviction,
    PoolGroup,
    PoolNamespace,
    PoolNode,
    PoolReport,
    PoolTier,
)
from controlplane.policies.schemas import PolicyRevision

WRITE_QUEUE_ALARM = 0.70
WANTED_AGAIN_ALARM = 0.20
STALE_CLAIMS_ALARM = 0.01
QUOTA_FULL = 0.95
NOT_YET = "Waiting for the pool's first report."
SHORT_NAMESPACE = 12
UNSAID = "no data"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Bar:
    """A level against a bound. `share` is None while one of both is unknown."""

    text: str
    share: float | None
    breach: bool = False


@dataclass(frozen=True, slots=True)
class PoolHead:
    """The lines above every view of the cache. `policy` names what the agents run."""

    policy: Text
    params: str
    queue: Bar
    claims: Text


def head(report: PoolReport | None, policies: Sequence[PolicyRevision]) -> PoolHead:
    """Policy, write queue, stale claims of the index."""
    active = next((p for p in policies if (p.kind, p.scope) == ("cache", "default")), None)
    return PoolHead(
        policy=_policy(report, active), params=_params(report), queue=queue(report), claims=claims(report)
    )  # fmt: skip


def _policy(report: PoolReport | None, active: PolicyRevision | None) -> Text:
    wanted = f"cache/default r{active.revision}" if active else "cache/default"
    name = str(active.spec.get("eviction", UNSAID)) if active else UNSAID
    said = [n.eviction for n in report.nodes if n.eviction.policy] if report else []
    if not said:
        return cell(f"{name}, {wanted}; no node says what it runs", "muted")
    behind = [e for e in said if e.policy != name] if active else []
    names = sorted({e.policy or "" for e in said})
    if behind:
        where = ", ".join(e.node for e in behind[:3])
        return cell(f"{name}, {wanted}; not yet on {where} ({', '.join(names)})", "warn")
    return cell(f"{', '.join(names)}, {wanted}, in use on {_of(len(said), report)} nodes")


def _of(part: int, report: PoolReport | None) -> str:
    return f"{part} of {len(report.nodes) if report else 0}"


def _params(report: PoolReport | None) -> str:
    """Parameters as the agents act on them; of the first that says so."""
    first = (
        next((n.eviction.params for n in report.nodes if n.eviction.params), {}) if report else {}
    )
    return ", ".join(f"{name} {value:,g}" for name, value in sorted(first.items()))


def queue(report: PoolReport | None) -> Bar:
    """The fullest write queue: a sum would hide one that is full."""
    known = [
        (n.write_queue_blocks / n.write_queue_bound, n)
        for n in (report.nodes if report else [])
        if n.write_queue_bound and n.write_queue_blocks is not None
    ]
    if not known:
        return Bar(UNSAID, None)
    share, worst = max(known, key=lambda pair: pair[0])
    text = f"{numbers.count(worst.write_queue_blocks)} / {numbers.count(worst.write_queue_bound)}"
    text += f", {numbers.percent(share)}"
    if len(known) > 1:
        text += f", fullest of {len(known)}: {worst.node}"
    return Bar(text, min(1.0, share), share > WRITE_QUEUE_ALARM)


def claims(report: PoolReport | None) -> Text:
    """`0.2 % of 4,100 claims checked`."""
    if report is None or report.claims_checked is None:
        return Text(UNSAID, "muted")
    if not report.claims_checked:
        return Text(numbers.NO_TRAFFIC, "muted")
    rate = (report.claims_stale or 0) / report.claims_checked
    text = f"{numbers.percent(rate)} of {numbers.count(report.claims_checked)} checked"
    return Text(text, "warn" if rate > STALE_CLAIMS_ALARM else "plain")


TIER_COLUMNS = (
    Column("node", "NODE", 10, grow=True),
    Column("tier", "TIER", 5),
    Column("state", "STATE", 10),
    Column("used", "USED", 15, "right"),
    Column("percent", "USED %", 7, "right"),
    Column("read", "READ", 10, "right"),
    Column("written", "WRITTEN", 10, "right"),
    Column("blocks", "BLOCKS", 9, "right", drop=3),
    Column("evicted", "EVICTED", 9, "right", drop=2),
    Column("failed", "FAILED", 7, "right", drop=2),
    Column("free", "DEVICE FREE", 11, "right", drop=1),
)


def tiers(report: PoolReport | None) -> Table:
    """One row a tier and node; rates of the last minute, counts of this incarnation."""
    if report is None:
        return Table(TIER_COLUMNS, (), NOT_YET)
    rows = [row for node in report.nodes for row in _tier_rows(node)]
    return Table(TIER_COLUMNS, tuple(rows), "No nodes have joined, so there is no pool.")


def _tier_rows(node: PoolNode) -> list[Row]:
    if node.tiers:
        return [_tier_row(node, tier) for tier in node.tiers]
    share = _ratio(node.used_bytes, node.capacity_bytes)
    tone: Tone = "critical" if node.state == "lost" else "muted"
    cells = (
        cell(node.node),
        Text("dram"),
        Text(node.state if node.state != "ready" else UNSAID, tone),
        Text(numbers.used_of(node.used_bytes, node.capacity_bytes)),
        Text(numbers.percent(share, unit=False)),
        *(Text(numbers.UNKNOWN) for _ in range(6)),
    )
    return [
        Row(f"{node.node}/dram", cells, {"node": node.node, "tier": "dram"}, f"node/{node.node}")
    ]


def _tier_row(node: PoolNode, tier: PoolTier) -> Row:
    share = _ratio(tier.used_bytes, tier.capacity_bytes)
    old = node.state != "ready"
    tone: Tone = "stale" if old else "plain"
    failed = tier.failed_reads_total + tier.failed_writes_total
    cells = (
        cell(tier.node, tone),
        Text(tier.tier, tone),
        cell(node.state if old else tier.state, tone if old else _state_tone(tier.state)),
        Text(numbers.used_of(tier.used_bytes, tier.capacity_bytes), tone),
        Text(numbers.percent(share, unit=False), tone),
        Text(numbers.moved_rate(tier.read_bytes_per_second), tone),
        Text(numbers.moved_rate(tier.written_bytes_per_second), tone),
        Text(numbers.count(tier.used_blocks), tone),
        Text(numbers.count(tier.evicted_blocks_total), tone),
        Text(numbers.count(failed), "warn" if failed and not old else tone),
        Text(_device(tier), tone),
    )
    facts: dict[str, Fact] = {
        "node": tier.node,
        "tier": tier.tier,
        "state": tier.state,
        "used": float(tier.used_bytes),
    }
    return Row(f"{tier.node}/{tier.tier}", cells, facts, f"node/{tier.node}")


def _device(tier: PoolTier) -> str:
    if tier.free_device_bytes is None:
        return numbers.NO_TRAFFIC if tier.tier == "dram" else numbers.UNKNOWN
    return numbers.stored_bytes(tier.free_device_bytes)


def _state_tone(state: str) -> Tone:
    tones: Mapping[str, Tone] = {"ok": "well", "off": "muted", "rebuilding": "warn", "full": "warn"}
    return tones.get(state, "critical")


GROUP_COLUMNS = (
    Column("name", "TENANT OR NAMESPACE", 20, grow=True),
    Column("kind", "KIND", 9, drop=3),
    Column("used", "HOLDS", 10, "right"),
    Column("percent", "% OF POOL", 9, "right"),
    Column("quota", "QUOTA", 10, "right"),
    Column("bar", "OF QUOTA", 10),
    Column("full", "FULLEST %", 9, "right"),
    Column("blocks", "BLOCKS", 9, "right", drop=2),
    Column("evicted", "EVICTED", 9, "right", drop=1),
    Column("refused", "REFUSED", 8, "right", drop=1),
    Column("nodes", "NODES", 5, "right", drop=4),
)


def groups(report: PoolReport | None) -> Table:
    """Tenants, then namespaces, each by what they hold over all nodes and tiers."""
    if report is None:
        return Table(GROUP_COLUMNS, (), NOT_YET)
    pool = sum(_capacity(node) for node in report.nodes)
    rows = tuple(_group_row(group, pool) for group in report.groups)
    empty = (
        "No node says what tenants and namespaces hold: nothing is stored, or the agents are older."
    )
    return Table(GROUP_COLUMNS, rows, empty)


def _capacity(node: PoolNode) -> int:
    """Over all tiers: a group's bytes are over all of them too."""
    return sum(t.capacity_bytes for t in node.tiers) or node.capacity_bytes or 0


def _group_row(group: PoolGroup, pool: int) -> Row:
    full = group.fullest is not None and group.fullest >= QUOTA_FULL
    cells = (
        cell(group_name(group), "strong"),
        Text(group.kind, "muted"),
        Text(numbers.stored_bytes(group.used_bytes)),
        Text(numbers.percent(_ratio(group.used_bytes, pool), unit=False)),
        Text("none" if group.quota_bytes is None else numbers.stored_bytes(group.quota_bytes), "muted" if group.quota_bytes is None else "plain"),
        Text(bar(group.fullest, 10) if group.fullest is not None else "", "warn" if full else "plain"),
        Text(numbers.NO_TRAFFIC if group.fullest is None else numbers.percent(group.fullest, unit=False) + ("!" if full else ""), "warn" if full else "plain"),
        Text(numbers.count(group.used_blocks)),
        Text(numbers.count(group.evicted_blocks_total)),
        Text(numbers.count(group.refused_blocks_total), "warn" if group.refused_blocks_total else "plain"),
        Text(numbers.count(group.nodes)),
    )  # fmt: skip
    facts: dict[str, Fact] = {
        "kind": group.kind,
        "name": group.name,
        "used": float(group.used_bytes),
        "others": group.others,
    }
    return Row(f"{group.kind}/{group.name}", cells, facts)


def group_name(group: PoolGroup) -> str:
    """`acme`, `smollm2 4f09c1d2e3aa`, `other (12 more)`."""
    if group.others:
        return f"{group.name} ({group.others} more)"
    return f"{group.label} {short_name(group.name)}".strip()


def short_name(name: str) -> str:
    """A digest (of a namespace, of a tenant's hidden salt) by its first digits, a word in full."""
    return name[:SHORT_NAMESPACE] if _DIGEST.fullmatch(name) else name


def bar(share: float | None, width: int) -> str:
    """`#####.....` in ASCII, the same in every terminal; at least one mark for more than nothing."""
    if share is None:
        return ""
    filled = max(1 if share > 0 else 0, min(width, round(share * width)))
    return "#" * filled + "." * (width - filled)


NAMESPACE_COLUMNS = (
    Column("name", "NAMESPACE", 12),
    Column("model", "MODEL", 20, grow=True),
    Column("weights", "WEIGHTS", 12, drop=3),
    Column("dtype", "KV DTYPE", 10, drop=1),
    Column("tokens", "TOKENS", 7, "right", drop=2),
    Column("block", "BLOCK", 9, "right"),
    Column("nodes", "NODES", 6, "right"),
    Column("workers", "WORKERS", 20, grow=True),
)


def namespaces(report: PoolReport | None) -> Table:
    """What must agree before one worker may read another's blocks, and who serves it."""
    if report is None:
        return Table(NAMESPACE_COLUMNS, (), NOT_YET)
    rows = tuple(_namespace_row(namespace) for namespace in report.namespaces)
    return Table(NAMESPACE_COLUMNS, rows, "No worker has told its namespace yet.")


def _namespace_row(namespace: PoolNamespace) -> Row:
    idle: Tone = "plain" if namespace.workers else "warn"
    cells = (
        cell(namespace.name[:SHORT_NAMESPACE], "strong"),
        cell(namespace.model),
        cell(namespace.weights_version[:SHORT_NAMESPACE]),
        cell(namespace.kv_dtype),
        Text(numbers.count(namespace.block_tokens)),
        Text(numbers.stored_bytes(namespace.block_bytes)),
        Text(numbers.count(len(namespace.nodes))),
        cell(", ".join(sorted(namespace.workers)) or "none: nobody can use its blocks", idle),
    )
    return Row(namespace.name, cells)


HEALTH_COLUMNS = (
    Column("node", "NODE", 10, grow=True),
    Column("attempts", "ATTEMPTS", 9, "right"),
    Column("done", "DONE %", 7, "right"),
    Column("starved", "STARVED", 8, "right"),
    Column("evicted", "EVICTED", 9, "right"),
    Column("again", "WANTED AGAIN %", 14, "right"),
    Column("p50", "AGE P50", 11, "right"),
    Column("p99", "AGE P99", 11, "right", drop=1),
    Column("pinned", "PINNED", 9, "right", drop=2),
    Column("leased", "LAPSING", 9, "right", drop=3),
    Column("demoted", "DEMOTED", 8, "right", drop=4),
    Column("promoted", "PROMOTED", 8, "right", drop=4),
    Column("claims", "STALE %", 7, "right", drop=5),
)


def health(report: PoolReport | None) -> Table:
    """Is eviction healthy, by node: counts within the window, ages of victims since last use."""
    if report is None:
        return Table(HEALTH_COLUMNS, (), NOT_YET)
    rows = tuple(_health_row(node) for node in report.nodes)
    return Table(HEALTH_COLUMNS, rows, "No nodes have joined, so nothing is evicted.")


def _health_row(node: PoolNode) -> Row:
    e = node.eviction
    tone: Tone = "plain" if node.state == "ready" else "stale"
    again = wanted_again(e)
    starved: Tone = "critical" if e.starved_by_pins else tone
    cells = (
        cell(node.node, tone),
        Text(numbers.count(e.attempts), tone),
        Text(share_text(e.successes, e.attempts), tone),
        Text(numbers.count(e.starved_by_pins), starved),
        Text(numbers.count(e.evicted), tone),
        Text(share_text(e.wanted_again, e.evicted), "warn" if again is not None and again > WANTED_AGAIN_ALARM else tone),
        Text(_age(e.age_p50_seconds, e), tone),
        Text(_age(e.age_p99_seconds, e), tone),
        Text(numbers.stored_bytes(e.pinned_bytes), tone),
        Text(numbers.stored_bytes(e.leased_bytes), tone),
        Text(numbers.count(e.demoted), tone),
        Text(numbers.count(e.promoted), tone),
        Text(share_text(node.claims_stale, node.claims_checked), tone),
    )  # fmt: skip
    return Row(node.node, cells, {"node": node.node}, f"node/{node.node}")


def worst_first(table: Table) -> Table:
    """Rows by their loudest cell: for tables that are cut."""
    order: Mapping[Tone, int] = {"critical": 0, "warn": 1}

    def rank(row: Row) -> int:
        return min((order.get(text.tone, 2) for text in row.cells), default=2)

    return replace(table, rows=tuple(sorted(table.rows, key=rank)))


def wanted_again(e: PoolEviction) -> float | None:
    """Share of evicted blocks; None where nothing was evicted or nothing is known."""
    ratio = _ratio(e.wanted_again, e.evicted)
    return None if ratio is None else min(1.0, ratio)


def share_text(part: int | None, whole: int | None) -> str:
    """Percent without its sign; `-` of nothing, `--` of the unknown."""
    if part is None or whole is None:
        return numbers.UNKNOWN
    if whole == 0:
        return numbers.NO_TRAFFIC
    return numbers.percent(min(1.0, part / whole), unit=False)


def _age(seconds: float | None, e: PoolEviction) -> str:
    if seconds is None:
        return numbers.UNKNOWN if e.policy is None else numbers.NO_TRAFFIC
    return numbers.duration(seconds)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
