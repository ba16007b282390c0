"""The agent's pool: made for the first worker's blocks, or taken over from a former agent; fed with
the live policy; and tied to what keeps its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from msgspec import UNSET
from msgspec.structs import replace

from workers.agent.cache_policy import CachePolicy
from workers.agent.settings import AgentSettings
from workers.core.blocks import slot_bytes_of
from workers.core.clock import Clock
from workers.core.errors import ConfigError
from workers.core.policies.base import EvictionPolicy
from workers.core.policies.registry import DEFAULT_POLICY, make_policy
from workers.core.pool_adoption import adopt_in_memory, adopt_on_disk
from workers.core.pool_base import PoolLimits
from workers.core.pool_state import PoolState
from workers.core.tiers import Outcome
from workers.pool.arena import Slab
from workers.pool.journal import Recovered
from workers.pool.records import RECORD_BYTES
from workers.pool.tier import TierFacts, TierOpened

GIB: Final = 1 << 30
_GENERATION_SHIFT: Final = 16
_GENERATION_MASK: Final = (1 << 62) - 1


class Storage(Protocol):
    """Keeps the bytes of one pool: the slab with its journal, and the SSD tier.

    `numa_nodes` are the memory nodes that the slab is spread over; [] where that is not known.
    """

    numa_nodes: list[int]

    def attach(self, slot_bytes: int) -> Slab | None:
        """The slab as this process has it mapped, cut into slots; None: it has not."""

    def recover(self) -> Recovered | None:
        """What a former agent left in the slab; None where nothing is of use."""

    def open(self, pool: PoolState, slot_bytes: int) -> None:
        """A pool begins: have a journal for it, and begin to open the SSD tier."""

    def settle(self, pool: PoolState) -> None:
        """Note which slots changed, and begin the disk's jobs. Before any reply leaves."""

    def drop(self) -> None:
        """The pool is given up; another one may begin."""

    def tier_facts(self) -> TierFacts | None:
        """None without an SSD tier."""


class NoStorage:
    """For a node without files: tests and simulations."""

    def __init__(self) -> None:
        self.numa_nodes: list[int] = []

    def attach(self, slot_bytes: int) -> Slab | None:
        return None

    def recover(self) -> Recovered | None:
        return None

    def open(self, pool: PoolState, slot_bytes: int) -> None:
        pass

    def settle(self, pool: PoolState) -> None:
        pool.changed_slots.clear()
        pool.disk.take_jobs()

    def drop(self) -> None:
        pass

    def tier_facts(self) -> TierFacts | None:
        return None


class PoolHost:
    """`pool` is None until a worker brought a namespace, or a former agent's was adopted."""

    def __init__(
        self,
        settings: AgentSettings,
        clock: Clock,
        incarnation: int,
        storage: Storage | None = None,
    ) -> None:
        self.settings = settings
        self.storage: Storage = storage or NoStorage()
        self.slab_bytes = settings.slab_bytes
        self.limits = PoolLimits(settings.lease_seconds, settings.write_queue_blocks)
        self.pool: PoolState | None = None
        self.policy_revision = 0
        self.policy_error = ""
        self.num_adopted = self.num_lost = 0
        self._clock = clock
        self._generation = (incarnation << _GENERATION_SHIFT) & _GENERATION_MASK
        self._policy = CachePolicy(eviction=DEFAULT_POLICY, eviction_params={})

    # --- beginnings -------------------------------------------------------------------------

    def adopt_left(self) -> None:
        """Go on with the blocks that a former agent left in the slab, if there are any."""
        left = self.storage.recover()
        if left is None:
            return
        geometry = left.geometry
        if slot_bytes_of(geometry.block_bytes) != geometry.slot_bytes:
            return
        pool = self._make(geometry.block_bytes, geometry.num_slots)
        self.num_adopted = adopt_in_memory(pool, left.stored, left.writing, self._now)
        self.num_lost = left.num_lost + len(left.stored) - self.num_adopted
        self._begin(pool, geometry.slot_bytes)

    def begin(self, block_bytes: int) -> None:
        """Cut the slab for blocks of this size."""
        slot_bytes = slot_bytes_of(block_bytes)
        self._begin(self._make(block_bytes, self.slab_bytes // slot_bytes), slot_bytes)

    def give_up(self) -> None:
        """Withdraw every block of a pool that nobody uses, so that another can begin."""
        pool = self.pool
        if pool is not None:
            for head in [block for block in pool.blocks.values() if block.parent is None]:
                pool._withdraw(head, "purge")
            self.storage.drop()

    def shrink_slab(self, slab_bytes: int) -> None:
        """The machine cannot back more than this: use no slot beyond it, then or later."""
        self.slab_bytes = slab_bytes
        if self.pool is not None:
            self.pool.slots.shrink(slab_bytes // slot_bytes_of(self.pool.block_bytes))

    # --- as time goes by --------------------------------------------------------------------

    def settle(self) -> None:
        """After each change: demote ahead, and let the storage know."""
        if self.pool is not None:
            self.pool.serve_wanted()
            self.pool.demote_ahead(self._now)
            self.storage.settle(self.pool)

    def tick(self) -> int:
        """End what outlived its lease and trim what is over its limit; how many owners ended."""
        if self.pool is None:
            return 0
        num_expired = self.pool.expire(self._now)
        self.pool.trim(self._now)
        return num_expired

    def disk_opened(self, opened: TierOpened) -> int:
        """The SSD tier can be used; how many blocks of a former life it brought."""
        if self.pool is None:
            return 0
        num_adopted = adopt_on_disk(self.pool, opened.records, opened.num_slots, self._now)
        self._apply_to_pool(self.pool, self._policy)
        return num_adopted

    def disk_grown(self, num_slots: int) -> None:
        if self.pool is not None:
            self.pool.disk.slots.grow(num_slots)
            self.pool.whatif.capacity_blocks = self.pool.capacity_blocks

    def disk_full(self, full: bool) -> None:
        if self.pool is not None:
            self.pool.disk.takes_writes = not full

    def disk_done(self, outcome: Outcome) -> None:
        if self.pool is None:
            return
        self.pool.disk_done(outcome, self._now)
        if outcome.problem in ("full", "io"):
            self.pool.disk.takes_writes = False  # until the tier says that it is well again

    # --- settings ---------------------------------------------------------------------------

    def apply(self, policy: CachePolicy, revision: int) -> None:
        """Take a policy in, live. What cannot work is left out, and said in `policy_error`: the
        control plane validates, an older one may not."""
        merged = _merged(self._policy, policy)
        if revision == self.policy_revision and merged == self._policy:
            return
        self.policy_revision = revision
        self.policy_error = ""
        self._apply_limits(merged)
        try:
            self._apply_eviction(merged)
        except ConfigError as error:
            self.policy_error = str(error)
            kept = self._policy
            merged = replace(merged, eviction=kept.eviction, eviction_params=kept.eviction_params)
        self._policy = merged
        if self.pool is not None:
            self._apply_to_pool(self.pool, merged)

    def _apply_limits(self, policy: CachePolicy) -> None:
        limits = self.limits
        if policy.lease_seconds is not None and policy.lease_seconds > 0:
            limits.lease_seconds = policy.lease_seconds
        if policy.write_queue_blocks is not None and policy.write_queue_blocks > 0:
            limits.write_queue_blocks = policy.write_queue_blocks
        if policy.pin_active_share is not None and 0 <= policy.pin_active_share <= 1:
            limits.pin_active_share = policy.pin_active_share
        if policy.pin_active_tokens is not None and policy.pin_active_tokens >= 0:
            limits.pin_active_blocks = -(-policy.pin_active_tokens // self.settings.block_tokens)

    def _apply_eviction(self, policy: CachePolicy) -> None:
        """ConfigError, with nothing changed."""
        known = self._policy
        if (policy.eviction, policy.eviction_params) == (known.eviction, known.eviction_params):
            return
        made = _policy_of(policy)
        if self.pool is None:
            return
        if policy.eviction == known.eviction:
            self.pool.tune_policy(made.params, self._now)
        else:
            self.pool.set_policy(made, self._now)

    def _apply_to_pool(self, pool: PoolState, policy: CachePolicy) -> None:
        tenants = _in_blocks(policy.tenant_quota_gib or {}, pool.block_bytes)
        namespaces = _in_blocks(policy.namespace_quota_gib or {}, pool.block_bytes)
        pool.set_quotas(tenants, namespaces, self._now)
        cap = policy.ssd_cap_gib
        each = slot_bytes_of(pool.block_bytes) + RECORD_BYTES
        pool.disk.cap_blocks = None
        if isinstance(cap, int | float):
            pool.disk.cap_blocks = max(0, int(cap * GIB) // each)
        pool.whatif.capacity_blocks = pool.capacity_blocks
        pool.history.node = self.settings.node_id
        pool.history.under(pool.policy.policy.name, self.policy_revision)
        pool.active.limit(int(self.limits.pin_active_share * pool.slots.num_slots))

    # --- inside -----------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._clock.monotonic()

    def _make(self, block_bytes: int, num_slots: int) -> PoolState:
        try:
            policy = _policy_of(self._policy)
        except ConfigError as error:
            self.policy_error = str(error)
            policy = make_policy(DEFAULT_POLICY)
        return PoolState(
            num_slots,
            policy,
            self.limits,
            block_bytes=block_bytes,
            first_generation=self._generation,
        )

    def _begin(self, pool: PoolState, slot_bytes: int) -> None:
        self.pool = pool
        self._apply_to_pool(pool, self._policy)
        self.storage.open(pool, slot_bytes)


def _policy_of(policy: CachePolicy) -> EvictionPolicy:
    return make_policy(policy.eviction or DEFAULT_POLICY, policy.eviction_params or {})


def _in_blocks(gib: Mapping[str, float], block_bytes: int) -> dict[str, int]:
    return {name: int(value * GIB) // block_bytes for name, value in gib.items() if value >= 0}


def _merged(known: CachePolicy, given: CachePolicy) -> CachePolicy:
    fields = {name: getattr(given, name) for name in CachePolicy.__struct_fields__}
    cap = fields.pop("ssd_cap_gib")
    if cap is not UNSET:
        known = replace(known, ssd_cap_gib=cap)
    return replace(known, **{name: v for name, v in fields.items() if v is not None})
