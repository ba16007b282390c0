"""Quotas of tenants and namespaces, and the order in which groups lose blocks."""

from __future__ import annotations

from typing import Any

import pytest

from workers.core.hashing import block_hashes
from workers.core.ids import OwnerId
from workers.core.policies.registry import make_policy
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef
from workers.core.quotas import MAX_GROUPS_A_KIND, OTHERS, Groups

SPACE = b"s" * 32
P1 = ClientRef(1, "p1")
A = block_hashes(b"a", range(20), 1)
B = block_hashes(b"b", range(20), 1)
C = block_hashes(b"c", range(20), 1)


class TestQuotas:
    def test_a_group_at_its_quota_evicts_its_own(self, bench: Any) -> None:
        bench.pool.set_quotas({"a": 4}, {}, 0.0)
        bench.store(B[:3], "b")
        bench.store(A[:4], "a")
        bench.store(C[:3], "a")
        assert (bench.tiers(B[:3]), bench.tiers(A[:4]), bench.tiers(C[:3])) == (
            "ddd",
            "d---",
            "ddd",
        )
        tenant = bench.pool.groups.tenant("a")
        assert (tenant.used_blocks, tenant.evicted_blocks_total) == (4, 3)
        assert bench.pool.history.by_trigger["quota"] == 3

    def test_active_sequences_of_a_group_at_its_quota_give_way_to_its_own(
        self, make_bench: Any
    ) -> None:
        """A quota below the share for active sequences was wholly kept, and all else refused."""
        bench = make_bench(16, 0, pin_active_share=1.0, pin_active_blocks=8)
        bench.pool.set_quotas({"a": 4}, {}, 0.0)
        bench.store(A[:4], "a")
        assert bench.pool.active.num_kept == 4
        assert bench.store(B[:3], "a") == 3
        assert bench.pool.groups.tenant("a").used_blocks == 4
        check_integrity(bench.pool)

    def test_what_does_not_fit_a_quota_is_refused_and_counted(self, bench: Any) -> None:
        bench.pool.set_quotas({}, {SPACE.hex(): 3}, 0.0)
        assert bench.store(A[:5]) == 3
        assert bench.pool.groups.namespace(SPACE.hex()).refused_blocks_total == 2
        bench.pool.set_quotas({}, {}, 0.0)
        assert bench.store(A[:5]) == 2

    def test_quota_counts_over_both_tiers_and_takes_from_disk_first(self, bench: Any) -> None:
        bench.pool.set_quotas({"default": 8}, {}, 0.0)
        bench.store(A[:8])
        bench.demote()
        bench.store(B[:2])
        assert bench.tiers(A[:8]) == "ddddss--"
        assert bench.pool.groups.tenant("").used_blocks == 8

    def test_groups_over_a_lowered_quota_go_first_then_one_order(self, bench: Any) -> None:
        bench.store(B[:4], "b")
        bench.store(A[:4], "a")
        bench.pool.disk.takes_writes = False
        bench.pool.set_quotas({"a": 2}, {}, 0.0)
        bench.store(C[:3], "c")
        assert (bench.tiers(A[:4]), bench.tiers(B[:4])) == ("dd--", "ddd-")

    def test_lowered_quotas_are_taken_in_as_time_goes_by(self, bench: Any) -> None:
        bench.store(A[:6], "a")
        bench.pool.set_quotas({"a": 2}, {}, 0.0)
        assert bench.pool.trim(bench.now) == 4
        assert bench.tiers(A[:6]) == "dd----"

    def test_groups_are_bounded_and_idle_ones_give_way(self) -> None:
        groups = Groups()
        for i in range(2 * MAX_GROUPS_A_KIND):
            groups.tenant(f"t{i}").used_blocks = 1
        assert len(groups.all()) == MAX_GROUPS_A_KIND
        assert groups.tenant("another").name == OTHERS
        groups.tenant("t3").used_blocks = 0
        assert groups.tenant("another").name == "another"

    @pytest.mark.parametrize("name", ["lru", "decay", "lfu", "score", "credit", "lru2"])
    def test_a_switch_of_policy_loses_no_block_and_no_order(self, bench: Any, name: str) -> None:
        bench.store(A[:4], "a")
        bench.store(B[:4], "b")
        bench.pool.set_quotas({"a": 8}, {}, bench.now)
        bench.pool.set_policy(make_policy(name), bench.now)
        check_integrity(bench.pool)
        assert bench.pool.policy.policy.name == name
        bench.pool.disk.takes_writes = False
        bench.store(C[:4])
        assert bench.tiers(C[:4]) == "dddd"
        assert bench.pool.counters.evicted_by_cause.total() == 4

    def test_eviction_of_n_is_all_or_nothing(self, bench: Any) -> None:
        bench.pool.set_quotas({"a": 8}, {}, 0.0)
        bench.store(A[:3], "a")
        bench.store(B[:3], "b")
        bench.pool.pin_prefix(P1, OwnerId("transfer:x"), SPACE, B[:2], bench.now)
        evictor = bench.pool.policy
        assert evictor.evict(5, bench.pool._uncovers(), bench.now) == []
        check_integrity(bench.pool)
        assert bench.tiers(A[:3]) == "ddd"
