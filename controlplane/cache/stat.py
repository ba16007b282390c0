"""What the nodes' last heartbeats say of their pools. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.cache.schemas import (
    CacheGroup,
    CacheNamespace,
    CacheNode,
    CacheStat,
    CacheTier,
)
from controlplane.cache.weights import used_blocks
from controlplane.nodes.schemas import Node
from workers.core.stats_messages import NamespaceInfo, PoolStats


def cache_stat(nodes: Iterable[tuple[Node, PoolStats | None]]) -> CacheStat:
    """One row a node and one a namespace, by name."""
    pairs = list(nodes)
    pools = {node.id: stats for node, stats in pairs if stats is not None}
    return CacheStat(
        nodes=[_node(node, stats) for node, stats in pairs], namespaces=_namespaces(pools)
    )


def _node(node: Node, stats: PoolStats | None) -> CacheNode:
    row = CacheNode(node=node.id, state=node.state)
    if stats is None:
        return row
    return row.model_copy(
        update={
            "capacity_blocks": stats.capacity_blocks,
            "used_blocks": stats.used_blocks,
            "pinned_blocks": stats.pinned_blocks,
            "block_bytes": stats.block_bytes,
            "hit_tokens_total": stats.hit_tokens_total,
            "prompt_tokens_total": stats.prompt_tokens_total,
            "evicted_blocks_total": stats.evicted_blocks_total,
            "policy": stats.eviction.policy,
            "tiers": _tiers(stats),
            "groups": [
                CacheGroup(
                    kind=group.kind,
                    name=group.name,
                    used_blocks=group.used_blocks,
                    used_bytes=group.used_bytes,
                    quota_bytes=group.quota_bytes,
                )
                for group in stats.groups
            ],
        }
    )


def _tiers(stats: PoolStats) -> list[CacheTier]:
    return [
        CacheTier(
            tier=tier.tier,
            state=tier.state,
            capacity_blocks=tier.capacity_blocks,
            used_blocks=tier.used_blocks,
            capacity_bytes=tier.capacity_bytes,
            used_bytes=tier.used_bytes,
            evicted_blocks_total=tier.evicted_blocks_total,
        )
        for tier in stats.tiers
    ]


def _namespaces(pools: dict[str, PoolStats]) -> list[CacheNamespace]:
    infos: dict[str, NamespaceInfo] = {}
    nodes: dict[str, list[str]] = {}
    workers: dict[str, set[str]] = {}
    for node_id, stats in pools.items():
        for info in stats.namespaces:
            digest = info.digest.hex()
            infos[digest] = info
            nodes.setdefault(digest, []).append(node_id)
            workers.setdefault(digest, set()).update(info.workers)
    return [
        CacheNamespace(
            namespace=digest,
            model=infos[digest].spec.model_id,
            weights_version=infos[digest].spec.weights_version,
            kv_dtype=infos[digest].spec.kv_dtype,
            block_tokens=infos[digest].spec.block_tokens,
            block_bytes=infos[digest].spec.block_bytes,
            nodes=nodes[digest],
            workers=sorted(workers[digest]),
            used_blocks=used_blocks(pools.values(), digest),
        )
        for digest in sorted(infos, key=lambda digest: (infos[digest].spec.model_id, digest))
    ]
