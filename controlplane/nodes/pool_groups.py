"""Tenants and namespaces over all nodes, the largest by name and the rest in one row. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controlplane.nodes.pool_schemas import PoolGroup
from workers.core.stats_messages import GroupStats, PoolStats

MAX_GROUPS = 50
"""Of each kind, by name; over them one row says how many more there are."""
OTHER = "other"


def groups_of(heard: Sequence[PoolStats]) -> list[PoolGroup]:
    """Tenants first, each kind by bytes held; those without blocks or quota are left out."""
    models = {i.digest.hex(): i.spec.model_id for stats in heard for i in stats.namespaces}
    by_name: dict[tuple[str, str], list[GroupStats]] = {}
    for stats in heard:
        for group in stats.groups:
            by_name.setdefault((group.kind, group.name), []).append(group)
    rows = [_sum(parts, models.get(name, "")) for (_, name), parts in by_name.items()]
    kept = [row for row in rows if row.used_blocks or row.quota_bytes is not None]
    return [*_largest(kept, "tenant"), *_largest(kept, "namespace")]


def _sum(parts: Sequence[GroupStats], label: str) -> PoolGroup:
    quotas = [part.quota_bytes for part in parts if part.quota_bytes is not None]
    shares = [part.used_bytes / part.quota_bytes for part in parts if part.quota_bytes]
    return PoolGroup(
        kind=parts[0].kind,
        name=parts[0].name,
        label=label,
        nodes=len(parts),
        used_blocks=sum(part.used_blocks for part in parts),
        used_bytes=sum(part.used_bytes for part in parts),
        quota_bytes=sum(quotas) if quotas else None,
        fullest=max(shares) if shares else None,
        evicted_blocks_total=sum(part.evicted_blocks_total for part in parts),
        refused_blocks_total=sum(part.refused_blocks_total for part in parts),
    )


def _largest(rows: Iterable[PoolGroup], kind: str) -> list[PoolGroup]:
    """Those with a quota come before larger ones without: somebody watches them."""
    ordered = sorted(
        (row for row in rows if row.kind == kind),
        key=lambda row: (row.quota_bytes is None, -row.used_bytes, row.name),
    )
    shown, rest = ordered[:MAX_GROUPS], ordered[MAX_GROUPS:]
    shown.sort(key=lambda row: (-row.used_bytes, row.name))
    return [*shown, *([_others(rest)] if rest else [])]


def _others(rest: Sequence[PoolGroup]) -> PoolGroup:
    return PoolGroup(
        kind=rest[0].kind,
        name=OTHER,
        others=len(rest),
        nodes=max(row.nodes for row in rest),
        used_blocks=sum(row.used_blocks for row in rest),
        used_bytes=sum(row.used_bytes for row in rest),
        evicted_blocks_total=sum(row.evicted_blocks_total for row in rest),
        refused_blocks_total=sum(row.refused_blocks_total for row in rest),
    )
