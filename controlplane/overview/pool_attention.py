"""What of the KV pool needs an operator's attention. Pure.

Counts are of the last `POOL_WINDOW_SECONDS`: what is over leaves the list by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.nodes.pool_schemas import PoolNode, PoolReport, PoolTier
from controlplane.overview.findings import Finding, Severity
from workers.core import numbers

POOL_WINDOW_SECONDS = 300.0
WANTED_AGAIN_ALARM = 0.20
MIN_EVICTED = 100
STALE_CLAIMS_ALARM = 0.01
MIN_CLAIMS = 100
MIN_PROMPT_TOKENS = 20_000
"""Below these counts a share says little."""
QUIET_STATES = frozenset({"ok", "off"})


def pool_findings(report: PoolReport) -> Iterator[Finding]:
    """Every finding; a node that is not ready has one of its own elsewhere."""
    for node in report.nodes:
        if node.state != "ready":
            continue
        for tier in node.tiers:
            yield from _tier(tier)
        yield from _starved(node)
        yield from _wanted_again(node)
        yield from _no_hits(node)
        yield from _corrupt(node)
        yield from _stale_claims(node)


def _tier(tier: PoolTier) -> Iterator[Finding]:
    if tier.state in QUIET_STATES:
        return
    key, name = f"node/{tier.node}/tier/{tier.tier}", f"{tier.tier.upper()} tier of {tier.node}"
    severity: Severity = "warn"
    if tier.state == "full":
        free = numbers.stored_bytes(tier.free_device_bytes)
        text = f"{name} is full: {free} free on its device; blocks are evicted without a copy"
    elif tier.state == "rebuilding":
        text = f"{name} is rebuilding its index; what it holds is not found yet"
    else:
        severity, text = "critical", f"{name} stopped: {tier.state}"[:300]
    yield key, severity, text, "cache/tiers"


def _starved(node: PoolNode) -> Iterator[Finding]:
    """Room was needed and every block was pinned: stores stop. Lookups and loads go on."""
    health = node.eviction
    if not health.starved_by_pins:
        return
    severity: Severity = "warn" if health.successes else "critical"
    text = (
        f"nothing evictable on {node.node}: {numbers.count(health.starved_by_pins)} attempts in the "
        f"last 5 min found only pinned blocks, {numbers.stored_bytes(health.pinned_bytes)} pinned"
    )
    if health.leased_bytes:
        text += f", of these {numbers.stored_bytes(health.leased_bytes)} by lapsing leases"
    yield f"node/{node.node}/starved", severity, text, "cache/evictions"


def _wanted_again(node: PoolNode) -> Iterator[Finding]:
    health = node.eviction
    if health.wanted_again is None or (health.evicted or 0) < MIN_EVICTED:
        return
    share = min(1.0, health.wanted_again / (health.evicted or 1))
    if share > WANTED_AGAIN_ALARM:
        within = numbers.window(health.wanted_within_seconds or POOL_WINDOW_SECONDS)
        text = (
            f"{numbers.percent(share)} of the blocks evicted on {node.node} were wanted again "
            f"within {within}, alarm {numbers.percent(WANTED_AGAIN_ALARM)}"
        )
        yield f"node/{node.node}/wanted_again", "warn", text, "cache/evictions"


def _no_hits(node: PoolNode) -> Iterator[Finding]:
    if (node.prompt_tokens or 0) >= MIN_PROMPT_TOKENS and node.hit_tokens == 0:
        tokens = numbers.count(node.prompt_tokens)
        text = f"hit rate 0 % on {node.node}: {tokens} prompt tokens in the last 5 min, none cached"
        yield f"node/{node.node}/no_hits", "warn", text, "cache/hit_rate"


def _corrupt(node: PoolNode) -> Iterator[Finding]:
    corrupt = node.eviction.corrupt
    if corrupt:
        text = (
            f"{numbers.count(corrupt)} blocks of {node.node} failed verification in the last "
            "5 min; they were dropped and recomputed"
        )
        yield f"node/{node.node}/corrupt", "warn", text, "cache/evictions"


def _stale_claims(node: PoolNode) -> Iterator[Finding]:
    if node.claims_stale is None or (node.claims_checked or 0) < MIN_CLAIMS:
        return
    rate = node.claims_stale / (node.claims_checked or 1)
    if rate > STALE_CLAIMS_ALARM:
        text = (
            f"{numbers.percent(rate)} of the index's claims about {node.node} are stale, "
            f"alarm {numbers.percent(STALE_CLAIMS_ALARM)}"
        )
        yield f"node/{node.node}/stale_claims", "warn", text, "cache/evictions"
