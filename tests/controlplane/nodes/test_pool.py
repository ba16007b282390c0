"""The pool's report: sums over nodes, unknown stays unknown, bounded groups."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.nodes.pool import NodeFacts, report
from controlplane.nodes.pool_groups import MAX_GROUPS, groups_of
from controlplane.overview.pool_attention import pool_findings
from controlplane.stats.bucket import new_bucket
from workers.core.stats_messages import EvictionStats, GroupStats, PoolStats, TierStats, WhatIfPoint

MIB = 2**20


def stats_of(node: str = "n1", **changes: object) -> PoolStats:
    base = PoolStats(node, 1, 5.0, 100, 80, 10, 0, MIB, 100 * MIB, 0, 30, 500)
    return msgspec.structs.replace(base, **changes)


def tier(name: str = "dram", **changes: object) -> TierStats:
    return msgspec.structs.replace(TierStats(name, 100, 80, 100 * MIB, 80 * MIB), **changes)


def facts(stats: PoolStats | None, state: str = "ready", **counters: float) -> NodeFacts:
    bucket = new_bucket()
    bucket.count(counters)
    return NodeFacts(stats.node_id if stats else "n9", state, stats, bucket, bucket)


def texts(*nodes: NodeFacts) -> list[str]:
    return [f"{severity} {text}" for _, severity, text, _ in pool_findings(report(nodes, 0, 300))]


class TestReport:
    def test_an_agent_that_says_nothing_of_tiers_leaves_them_unknown(self) -> None:
        node = report([facts(stats_of())], 0.0, 900.0).nodes[0]
        health = node.eviction
        assert (node.used_bytes, node.tiers, health.policy) == (80 * MIB, [], None)
        assert (health.attempts, health.wanted_again, health.age_p50_seconds) == (None, None, None)

    def test_a_lost_node_has_no_numbers_and_is_in_no_sum(self) -> None:
        found = report([facts(None, "lost", pool_asked_tokens=9.0)], 0.0, 900.0)
        assert found.nodes[0].state == "lost"
        assert (found.nodes[0].used_bytes, found.asked_tokens) == (None, None)
        assert found.measured_hit_rate is None

    def test_rates_are_of_the_last_minute(self) -> None:
        stats = stats_of(tiers=[tier("ssd", state="ok")])
        shown = report([facts(stats, ssd_read_bytes=600.0)], 0.0, 900.0).nodes[0].tiers[0]
        assert (shown.read_bytes_per_second, shown.written_bytes_per_second) == (10.0, None)

    def test_the_curve_weighs_nodes_by_their_lookups(self) -> None:
        busy = stats_of("a", whatif=[WhatIfPoint(1.0, 100, 0.8), WhatIfPoint(2.0, 200, 0.9)])
        idle = stats_of("b", whatif=[WhatIfPoint(1.0, 100, 0.2), WhatIfPoint(2.0, 200, None)])
        found = report(
            [facts(busy, lookup_blocks=899.0, pool_asked_tokens=900.0, pool_hit_tokens=450.0), facts(idle, lookup_blocks=99.0, pool_asked_tokens=100.0)],
            0.0, 900.0,
        )  # fmt: skip
        once, twice = found.curve
        assert (once.capacity_bytes, once.hit_rate) == (200 * MIB, pytest.approx(0.74))
        assert twice.hit_rate == pytest.approx(0.9)
        assert found.measured_hit_rate == pytest.approx(0.45)

    def test_no_lookups_is_no_hit_rate(self) -> None:
        assert (
            report([facts(stats_of(), pool_asked_tokens=0.0)], 0.0, 9.0).measured_hit_rate is None
        )


class TestGroups:
    def test_sums_over_nodes_and_the_fullest_share_of_a_quota(self) -> None:
        parts = [
            stats_of("a", groups=[GroupStats("tenant", "acme", 10, 10 * MIB, 20 * MIB)]),
            stats_of("b", groups=[GroupStats("tenant", "acme", 19, 19 * MIB, 20 * MIB)]),
        ]
        (row,) = groups_of(parts)
        assert (row.used_bytes, row.quota_bytes, row.fullest) == (29 * MIB, 40 * MIB, 0.95)

    def test_beyond_the_largest_one_row_says_how_many(self) -> None:
        groups = [GroupStats("tenant", f"t{i:03}", i, i * MIB) for i in range(1, 80)]
        groups.append(GroupStats("tenant", "watched", 0, 0, 5 * MIB))
        rows = groups_of([stats_of(groups=groups)])
        assert len(rows) == MAX_GROUPS + 1
        assert (rows[-1].name, rows[-1].others) == ("other", 80 - MAX_GROUPS)
        assert "watched" in [row.name for row in rows]
        assert sum(row.used_blocks for row in rows) == sum(range(1, 80))


class TestAlarms:
    def test_nothing_is_wrong_with_a_pool_at_rest(self) -> None:
        assert texts(facts(stats_of(tiers=[tier(), tier("ssd", state="off")]))) == []

    def test_b08_nothing_evictable_is_an_alarm(self) -> None:
        stats = stats_of(tiers=[tier()], eviction=EvictionStats(pinned_bytes=30 * MIB))
        starved = facts(stats, starved_by_pins=7.0, evict_successes=0.0)
        assert texts(starved) == [
            "critical nothing evictable on n1: 7 attempts in the last 5 min found only pinned"
            " blocks, 30 MiB pinned"
        ]
        assert texts(facts(stats, starved_by_pins=7.0, evict_successes=9.0))[0][:4] == "warn"

    def test_b18_a_full_disk_and_a_stopped_tier(self) -> None:
        full = stats_of(tiers=[tier("ssd", state="full", free_device_bytes=3 * MIB)])
        assert texts(facts(full)) == [
            "warn SSD tier of n1 is full: 3 MiB free on its device; blocks are evicted without a copy"
        ]
        broken = stats_of(tiers=[tier("ssd", state="write failed: EIO")])
        assert texts(facts(broken)) == ["critical SSD tier of n1 stopped: write failed: EIO"]

    def test_evicted_then_wanted_again(self) -> None:
        stats = stats_of(tiers=[tier()])
        few = facts(stats, wanted_again=9.0, evicted_capacity=10.0)
        many = facts(stats, wanted_again=90.0, evicted_capacity=300.0, evicted_purge=500.0)
        assert texts(few) == []
        assert texts(many) == [
            "warn 30.0 % of the blocks evicted on n1 were wanted again within 5 min, alarm 20.0 %"
        ]

    def test_hit_rate_zero_only_with_traffic(self) -> None:
        assert texts(facts(stats_of(), prompt_tokens=0.0, hit_tokens=0.0)) == []
        assert texts(facts(stats_of(), prompt_tokens=30_000.0)) == []
        (line,) = texts(facts(stats_of(), prompt_tokens=30_000.0, hit_tokens=0.0))
        assert line.startswith("warn hit rate 0 % on n1: 30,000 prompt tokens")

    def test_stale_claims(self) -> None:
        assert texts(facts(stats_of(), claims_checked=99.0, claims_stale=50.0)) == []
        assert texts(facts(stats_of(), claims_checked=1000.0, claims_stale=25.0)) == [
            "warn 2.5 % of the index's claims about n1 are stale, alarm 1.0 %"
        ]


class TestApi:
    async def test_heartbeats_become_a_report_and_series(self, api) -> None:
        base = {"tiers": [_ssd(0)], "groups": [{"kind": "tenant", "name": "acme", "used_blocks": 3, "used_bytes": 3072}]}  # fmt: skip
        await api.heartbeat("n1", **base)
        api.second()
        await api.heartbeat(
            "n1", **base | {"tiers": [_ssd(5)]}, starved_by_pins_total=4, evicted_by_cause={"quota": 2}
        )  # fmt: skip
        api.second()
        found = await api.get("/cache/pool")
        (node,) = found["nodes"]
        assert node["eviction"]["policy"] == "lru"
        assert node["eviction"]["starved_by_pins"] == 4
        assert node["eviction"]["evicted_by_reason"]["quota"] == 2
        assert node["eviction"]["promoted"] == 5
        assert found["groups"][0]["name"] == "acme"
        reply = await api.get("/stats/series", metric="promoted_blocks,evicted_quota", source="node:n1", window=5, step=1)  # fmt: skip
        values = {s["metric"]: [v for v in s["values"] if v] for s in reply["series"]}
        assert values == {"promoted_blocks": [5.0], "evicted_quota": [2.0]}
        lines = [line["text"] for line in (await api.get("/overview"))["attention"]]
        assert any(line.startswith("nothing evictable on n1") for line in lines)

    async def test_what_moved_is_not_what_the_disk_wrote(self, api) -> None:
        for step in (0, 5):
            tier = _ssd(3 * step) | {"written_blocks_total": 2 * step}
            moves = {"demoted_blocks_total": step, "promoted_blocks_total": step + 1}
            await api.heartbeat("n1", tiers=[tier], eviction=moves)
            api.second()
        (node,) = (await api.get("/cache/pool"))["nodes"]
        assert (node["eviction"]["demoted"], node["eviction"]["promoted"]) == (5, 5)

    async def test_e06_a_restarted_agent_is_a_gap_not_a_negative_rate(self, api) -> None:
        await api.heartbeat("n1", tiers=[_ssd(50)])
        api.second()
        await api.heartbeat("n1", incarnation=2, tiers=[_ssd(1)])
        api.second()
        found = await api.get("/cache/pool")
        assert found["nodes"][0]["eviction"]["promoted"] in (0, None)

    async def test_too_many_groups_are_refused(self, api) -> None:
        group = {"kind": "tenant", "name": "t", "used_blocks": 1, "used_bytes": 1}
        reply = await api.heartbeat("n1", groups=[group] * 5000)
        assert reply.status_code == 422
        assert reply.json()["field"] == "pool_stats.groups"

    async def test_claims_of_the_auditor_are_counted(self, api) -> None:
        await api.heartbeat("n1")
        api.plane.stats.collector.claims("n1", 100, 3)
        api.second()
        found = await api.get("/cache/pool")
        assert (found["claims_checked"], found["claims_stale"]) == (100, 3)


def _ssd(read: int) -> dict[str, object]:
    return {
        "tier": "ssd", "capacity_blocks": 10, "used_blocks": 4, "capacity_bytes": 10240,
        "used_bytes": 4096, "read_blocks_total": read,
    }  # fmt: skip
