"""Room for new blocks: quotas first, then memory; and the settings of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.core.blocks import Block
from workers.core.messages import RemovalCause
from workers.core.policies.base import EvictionPolicy, Victim
from workers.core.pool_tiers import TieredPool
from workers.core.quotas import Group, cells_of
from workers.core.stats_messages import TierName

MAX_TRIM: Final = 512


class RoomyPool(TieredPool):
    """Adds eviction: fair between groups, all or nothing where that is possible."""

    # --- within quotas ----------------------------------------------------------------------

    def _room_in_quotas(self, groups: tuple[Group, ...], num_wanted: int) -> int:
        """How many new blocks these groups may have; a group at its quota evicts its own."""
        room = num_wanted
        for group in groups:
            if group.quota_blocks is None:
                continue
            excess = group.used_blocks + room - group.quota_blocks
            if excess > 0:
                self._evict_of_group(group, excess)
            allowed = max(0, min(room, group.quota_blocks - group.used_blocks))
            group.refused_blocks_total += room - allowed
            room = allowed
        return room

    def _evict_of_group(self, group: Group, num_blocks: int) -> int:
        """Up to so many blocks of this group leave the pool, those on disk first; how many."""
        tier = self.disk.evictor
        victims = tier.evict(
            num_blocks, self._uncovers_on_disk(), self.now,
            among=cells_of(group, tier.cells), some=True,
        )  # fmt: skip
        self._drop(victims, "quota", "ssd")
        self.disk.counters.evicted_blocks_total += len(victims)
        before = group.used_blocks
        missing = num_blocks - len(victims)
        if missing > 0:
            missing -= self._evict_from_memory(group, missing)
        if missing > 0 and self._give_up_active(group):
            self._evict_from_memory(group, missing)
        num_left = len(victims) + before - group.used_blocks
        self.counters.count_eviction(num_blocks, num_left)
        return num_left

    def _evict_from_memory(self, group: Group, num_blocks: int) -> int:
        among = cells_of(group, self.policy.cells)
        victims = self.policy.evict(num_blocks, self._uncovers(), self.now, among=among, some=True)
        self._drop(victims, "quota")
        return len(victims)

    def _give_up_active(self, group: Group) -> bool:
        """End what keeps this group's active sequences; whether that freed any."""
        raise NotImplementedError

    def trim(self, now: float) -> int:
        """Take lowered quotas and a lowered disk cap in, a bounded number of blocks at a time."""
        self.now = max(self.now, now)
        num_left = self.trim_disk(now)
        for group in self.groups.over_quota():
            excess = group.used_blocks - (group.quota_blocks or 0)
            num_left += self._evict_of_group(group, min(excess, MAX_TRIM))
        return num_left

    # --- in memory --------------------------------------------------------------------------

    def _make_room(self, num_wanted: int) -> int:
        """Free slots for up to `num_wanted` blocks, evicting if need be; for how many."""
        missing = num_wanted - self.slots.num_free
        if missing > 0:
            found_all = self._evict(missing)
            self.counters.count_eviction(missing, missing if found_all else 0)
            if not found_all:
                self.counters.starved_by_pins_total += 1
                self._evict(missing, some=True)
        return max(0, min(num_wanted, self.slots.num_free))

    def _evict(self, num_blocks: int, *, some: bool = False) -> bool:
        """Victims of groups over their quota first; else the least of all. True: that many."""
        missing = num_blocks - self._evict_over_quota(num_blocks)
        rest = self.policy.evict(missing, self._uncovers(), self.now, some=some) if missing else []
        self._let_go(rest, "capacity")
        return len(rest) == missing

    def _evict_over_quota(self, most: int) -> int:
        """What groups hold beyond their quota, up to `most` blocks; how many slots that freed."""
        before = self.slots.num_free
        for group in self.groups.over_quota():
            excess = group.used_blocks - (group.quota_blocks or 0)
            wanted = min(excess, most - (self.slots.num_free - before))
            if wanted > 0:
                among = cells_of(group, self.policy.cells)
                victims = self.policy.evict(
                    wanted, self._uncovers(), self.now, among=among, some=True
                )
                self._drop(victims, "quota")
        return self.slots.num_free - before

    def _let_go(self, victims: list[Victim], cause: RemovalCause) -> None:
        """Out of memory: to disk where a copy is there already, else out of the pool."""
        self.counters.evicted_from_memory_total += len(victims)
        self._mark_forgotten(victims)
        gone = [victim for victim in victims if not self._drop_from_memory(victim)]
        if self.disk.takes_writes:
            self.counters.dropped_undemoted_total += len(gone)
        self._drop(gone, cause)

    def _drop(self, victims: list[Victim], cause: RemovalCause, tier: TierName = "dram") -> None:
        """Out of the pool, with whatever hangs on them."""
        self._mark_forgotten(victims)
        self.history.note(victims, self.now, cause, tier)
        for victim in victims:
            block = self.blocks.get(victim.key)
            if block is not None:  # else it went with an ancestor
                self._count_evicted(block)
                self._withdraw(block, cause, noted=True)

    def _mark_forgotten(self, victims: list[Victim]) -> None:
        """The policy forgot them: it must not be told of them again."""
        for victim in victims:
            self.blocks[victim.key].offered = False

    @staticmethod
    def _count_evicted(block: Block) -> None:
        for group in block.groups:
            group.evicted_blocks_total += 1

    # --- settings ---------------------------------------------------------------------------

    def set_quotas(
        self, tenants: Mapping[str, int], namespaces: Mapping[str, int], now: float
    ) -> None:
        """Limits in blocks by tenant ("default" is "") and by namespace (hex digest); live."""
        self.now = max(self.now, now)
        if self.groups.set_quotas(tenants, namespaces):
            self.policy.rebuild(self.policy.policy.sibling(), self.now)
            self.disk.evictor.rebuild(self.policy.policy.sibling(), self.now)

    def set_policy(self, policy: EvictionPolicy, now: float) -> None:
        """Order all blocks by another kind of policy; what is known of their use moves along."""
        self.now = max(self.now, now)
        self.policy.rebuild(policy, self.now)
        self.disk.evictor.rebuild(policy.sibling(), self.now)

    def tune_policy(self, params: Mapping[str, float], now: float) -> None:
        """New parameters for the kind in force. ConfigError, with nothing changed."""
        self.now = max(self.now, now)
        self.policy.tune(params, self.now)
        self.disk.evictor.tune(params, self.now)
