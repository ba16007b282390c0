"""Which nodes can pull from which, as their agents report it."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.gateway.paths import Paths
from workers.core.stats_messages import NamespaceInfo, NamespaceSpec, PoolStats
from workers.core.transfer_choice import PRIORS
from workers.core.transfer_stats import LinkStats, TransferStats

SPEC = NamespaceSpec("m", "1", "bf16", "L", "vec", (8192,), 32, 64, 1, "tp1")


def stats(node: str, links: list[LinkStats] | None = None, **changes: Any) -> PoolStats:
    fields: dict[str, Any] = {
        "node_id": node, "incarnation": 7, "uptime_seconds": 1.0, "capacity_blocks": 1,
        "used_blocks": 0, "pinned_blocks": 0, "pending_blocks": 0,
        "block_bytes": SPEC.block_bytes, "slab_bytes": 1, "rss_bytes": 1,
        "write_queue_blocks": 0, "write_queue_bound": 1,
        "endpoint": f"tcp:{node}:7710", "namespaces": [NamespaceInfo(b"d", SPEC)],
        "transfers": TransferStats(links=links or []),
    }  # fmt: skip
    return PoolStats(**{**fields, **changes})


def link(peer: str, transport: str, rate: float | None, breaker: str = "closed") -> LinkStats:
    return LinkStats(peer, transport, "open", breaker, 1, 0, 0, 1, 0, 0, 0, 0,
                     latency_seconds=0.001, bytes_per_second=rate)  # fmt: skip


def test_a_path_has_the_prior_until_it_is_measured() -> None:
    paths = Paths()
    for node in ("n1", "n2", "n1"):
        paths.take(stats(node))
    prior = PRIORS["tcp"]
    per_token = SPEC.block_bytes / SPEC.block_tokens
    assert paths.holders["n1"].endpoint == "tcp:n1:7710"
    cost = paths.costs["n1"]["n2"]
    assert cost.seconds_per_token == pytest.approx(per_token / prior.bytes_per_second)
    paths.take(stats("n2", [link("n1", "tcp", 1e9), link("n1", "shm", 4e9, "open")]))
    cost = paths.costs["n1"]["n2"]
    assert (cost.seconds_per_token, cost.base_seconds) == (per_token / 1e9, 0.001)
    assert "n1" in paths.costs["n2"]


def test_a_node_that_cannot_be_reached_has_no_paths() -> None:
    paths = Paths()
    for node in ("n1", "n2", "n1"):
        paths.take(stats(node))
    paths.take(stats("n2", endpoint=""))
    assert list(paths.holders) == ["n1"]
    assert paths.costs == {}
    paths.take(stats("n1", namespaces=[]))
    assert paths.holders == {}
