"""The live cache policy at the agent: taken in at once, and what cannot work left out by name."""

from pathlib import Path

import msgspec
import pytest

from workers.agent.cache_policy import CachePolicy
from workers.agent.pool_host import PoolHost
from workers.agent.settings import AgentSettings
from workers.agent.tier_stats import eviction_stats, group_stats, tier_stats, whatif_curve
from workers.core.clock import ManualClock
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import PoolState
from workers.core.slots import SlotTable
from workers.pool.tier import TierFacts, TierOpened

BLOCK_BYTES = 1 << 20


@pytest.fixture
def host() -> PoolHost:
    settings = AgentSettings("n1", Path("/nowhere/a.sock"), "slab", 64 << 20, 64)
    made = PoolHost(settings, ManualClock(), 1)
    made.begin(BLOCK_BYTES)
    return made


def pool_of(host: PoolHost) -> PoolState:
    assert host.pool is not None
    return host.pool


def test_policy_is_switched_and_tuned_live(host: PoolHost) -> None:
    pool = pool_of(host)
    assert pool.policy.policy.name == "decay"
    host.apply(CachePolicy(eviction="lru"), 2)
    assert pool.policy.policy.name == pool.disk.evictor.policy.name == "lru"
    host.apply(CachePolicy(eviction="decay", eviction_params={"half_life_seconds": 60.0}), 3)
    assert eviction_stats(pool).params["half_life_seconds"] == 60.0
    host.apply(CachePolicy(eviction_params={}), 4)
    assert eviction_stats(pool).params["half_life_seconds"] != 60.0
    stats = eviction_stats(pool)
    assert (stats.policy, stats.policy_revision) == ("decay", 4)


@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(eviction="mru"),
        CachePolicy(eviction_params={"wings": 2.0}),
        CachePolicy(eviction_params={"half_life_seconds": -1.0}),
    ],
)
def test_what_cannot_work_is_left_out_and_said(host: PoolHost, policy: CachePolicy) -> None:
    host.apply(CachePolicy(lease_seconds=7.0), 1)
    host.apply(msgspec.structs.replace(policy, write_queue_blocks=9), 2)
    assert pool_of(host).policy.policy.name == "decay"
    assert host.policy_error
    assert (host.limits.write_queue_blocks, host.limits.lease_seconds) == (9, 7.0)
    host.apply(CachePolicy(eviction="lru", eviction_params={}), 3)
    assert host.policy_error == ""


def test_absurd_limits_are_left_out(host: PoolHost) -> None:
    before = (host.limits.lease_seconds, host.limits.write_queue_blocks)
    host.apply(CachePolicy(lease_seconds=-1, write_queue_blocks=0, pin_active_share=7.0), 1)
    assert (host.limits.lease_seconds, host.limits.write_queue_blocks) == before
    assert host.limits.pin_active_share == 0.0


def test_quotas_shares_and_cap_come_in_gib_and_tokens(host: PoolHost) -> None:
    pool = pool_of(host)
    pool.disk.open(SlotTable(100))
    policy = CachePolicy(
        pin_active_share=0.2, pin_active_tokens=500, ssd_cap_gib=0.0625,
        tenant_quota_gib={"a": 0.03125, "default": 1.0}, namespace_quota_gib={"ff": 0.0},
    )  # fmt: skip
    host.apply(policy, 5)
    assert host.limits.pin_active_blocks == 8
    quotas = {(g.kind, g.name): g.quota_bytes for g in group_stats(pool)}
    assert quotas == {
        ("tenant", "a"): 32 << 20, ("tenant", "default"): 1 << 30, ("namespace", "ff"): 0,
    }  # fmt: skip
    assert pool.disk.cap_blocks is not None
    assert 60 <= pool.disk.cap_blocks <= 64
    host.apply(CachePolicy(tenant_quota_gib={}, namespace_quota_gib={}), 6)
    assert not pool.groups.has_quotas
    assert pool.disk.cap_blocks is not None, "what is not named stays"
    host.apply(CachePolicy(ssd_cap_gib=None), 7)
    assert pool.disk.cap_blocks is None
    check_integrity(pool)


def test_policy_from_before_the_pool_holds_for_it() -> None:
    settings = AgentSettings("n1", Path("/nowhere/a.sock"), "slab", 64 << 20, 64)
    host = PoolHost(settings, ManualClock(), 1)
    host.apply(CachePolicy(eviction="lfu", tenant_quota_gib={"a": 1.0}), 3)
    host.apply(CachePolicy(eviction="mru"), 4)
    assert "mru" in host.policy_error
    host.begin(BLOCK_BYTES)
    pool = pool_of(host)
    assert (pool.policy.policy.name, pool.groups.has_quotas) == ("lfu", True)
    assert eviction_stats(pool).policy_revision == 4


def test_tiers_are_shown_nearest_first_with_what_is_wrong(host: PoolHost) -> None:
    pool = pool_of(host)
    assert tier_stats(None, None, []) == []
    assert [tier.tier for tier in tier_stats(pool, None, [0, 1])] == ["dram"]
    facts = TierFacts("ok", "/ssd/f", 1 << 30, 1 << 20, 5)
    host.disk_opened(TierOpened(10, 20))
    host.disk_grown(12)
    dram, ssd = tier_stats(pool, facts, [0, 1])
    assert (dram.capacity_blocks, dram.numa_nodes) == (pool.slots.num_slots, [0, 1])
    assert (ssd.capacity_blocks, ssd.state, ssd.free_device_bytes) == (12, "ok", 5)
    host.disk_full(True)
    assert tier_stats(pool, facts, [])[1].state == "full"
    host.disk_full(False)
    assert tier_stats(pool, facts, [])[1].state == "ok"
    assert len(whatif_curve(pool)) == 5


def test_what_moved_between_the_tiers_is_told(host: PoolHost) -> None:
    pool = pool_of(host)
    told = eviction_stats(pool)
    assert (told.demoted_blocks_total, told.promoted_blocks_total) == (0, 0)
    pool.counters.demoted_blocks_total = 5
    pool.counters.promoted_blocks_total = 3
    pool.counters.dropped_undemoted_total = 2
    pool.counters.count_eviction(4, 4)
    pool.counters.count_eviction(4, 1)
    told = eviction_stats(pool)
    assert (told.demoted_blocks_total, told.promoted_blocks_total) == (5, 3)
    assert told.dropped_undemoted_blocks_total == 2
    assert (told.attempts_total, told.successes_total) == (2, 1)
