"""Everything a pool can meet, in any order: its invariants and a simple model must hold."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from workers.core.hashing import block_hashes
from workers.core.ids import BlockHash, OwnerId
from workers.core.messages import (
    EventBatch,
    PreparedStore,
    SlotRef,
    Snapshot,
    StoredSlot,
)
from workers.core.policies.lru import LruPolicy
from workers.core.policies.registry import POLICIES, make_policy
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef, PoolLimits, PoolState
from workers.core.pool_views import stored_runs
from workers.core.prefix_index import Applied, PrefixIndex
from workers.core.slots import SlotTable
from workers.core.tiers import Forget, Outcome, ReadIn, WriteOut

SPACE = b"s" * 32
NUM_SLOTS = 9
NUM_DISK_SLOTS = 7
PROBLEMS = ["", "", "", "io", "checksum", "full", "source"]
MAX_WRITING = 6
CHAINS = {
    name: block_hashes(name[:1], list(name), 1) for name in (b"aaaaaaaa", b"aaabbbbb", b"cccccccc")
}
CLIENTS = [ClientRef(1, "p1"), ClientRef(2, "p2"), ClientRef(3, "d1")]
OWNERS = [OwnerId(f"{kind}:{i}") for kind in ("transfer", "load", "store") for i in range(3)]

a_chain = st.sampled_from(sorted(CHAINS))
a_length = st.integers(1, 8)
an_owner = st.sampled_from(OWNERS)
a_client = st.sampled_from(CLIENTS)


class PoolMachine(RuleBasedStateMachine):
    given = Bundle("given")  # slots handed out to be written

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        limits = PoolLimits(
            30.0, MAX_WRITING, pin_active_share=0.2, pin_active_blocks=1, reserve_share=0.5
        )
        self.pool = PoolState(NUM_SLOTS, LruPolicy(), limits, block_bytes=10)
        self.index = PrefixIndex()
        self.sequence = 0
        self.contents: dict[tuple[int, int], BlockHash] = {}  # (slot, generation) -> key
        self.on_disk: dict[int, tuple[int, bytes]] = {}  # disk slot -> (generation, key)
        self.jobs: list[WriteOut | ReadIn] = []
        self.pool.disk.open(SlotTable(NUM_DISK_SLOTS, 50))
        self.promised: dict[OwnerId, set[SlotRef]] = {}  # readers that have not let go

    # --- what clients do --------------------------------------------------------------------

    @rule(chain=a_chain, length=a_length, owner=an_owner, client=a_client, keep=st.booleans())
    def store(
        self, chain: bytes, length: int, owner: OwnerId, client: ClientRef, keep: bool
    ) -> None:
        """The usual: prepare, write, complete; let go or keep the pins."""
        refs = self._prepare(chain, 0, length, owner, client)
        stored = [StoredSlot(ref.slot, ref.generation, 1) for ref in refs]
        assert self.pool.complete_store(self.now, stored) == len(refs)
        if not keep:
            self.pool.release(owner, self.now)
            self.promised.pop(owner, None)
        self.pool.demote_ahead(self.now)

    @rule(
        target=given, chain=a_chain, first=st.integers(0, 3), length=a_length, owner=an_owner,
        client=a_client,
    )  # fmt: skip
    def prepare_store(
        self, chain: bytes, first: int, length: int, owner: OwnerId, client: ClientRef
    ) -> object:
        return multiple(*self._prepare(chain, first, length, owner, client))

    @rule(refs=st.lists(consumes(given), max_size=4), good=st.booleans())
    def complete_store(self, refs: list[SlotRef], good: bool) -> None:
        stored = [StoredSlot(r.slot, r.generation, 1) for r in refs if good]
        self.pool.complete_store(self.now, stored, [] if good else refs)

    @rule(ref=given)
    def complete_store_keeping_the_slot(self, ref: SlotRef) -> None:
        """So that a later completion of the same slot comes twice, or too late."""
        self.pool.complete_store(self.now, [StoredSlot(ref.slot, ref.generation, 1)])

    @rule(chain=a_chain, length=a_length, owner=an_owner, client=a_client)
    def prepare_load(self, chain: bytes, length: int, owner: OwnerId, client: ClientRef) -> None:
        keys = CHAINS[chain][:length]
        held = self.pool.lookup(SPACE, keys).num_held
        refs = self.pool.prepare_load(client, owner, SPACE, keys, self.now)
        assert len(refs) == held
        for ref, key in zip(refs, keys, strict=False):
            assert self.contents[ref.slot, ref.generation] == key, "another block's slot"
        self.promised.setdefault(owner, set()).update(refs)

    @rule(chain=a_chain, length=a_length, owner=an_owner, client=a_client)
    def pin_prefix(self, chain: bytes, length: int, owner: OwnerId, client: ClientRef) -> None:
        self.pool.pin_prefix(client, owner, SPACE, CHAINS[chain][:length], self.now)

    @rule(owner=an_owner)
    def release(self, owner: OwnerId) -> None:
        self.pool.release(owner, self.now)
        assert self.pool.release(owner, self.now) == 0
        self.promised.pop(owner, None)

    @rule(owners=st.lists(an_owner, max_size=3))
    def renew(self, owners: list[OwnerId]) -> None:
        self.pool.renew(owners, self.now)

    @rule(chain=a_chain, at=st.integers(0, 7), late=st.booleans())
    def report_corrupt(self, chain: bytes, at: int, late: bool) -> None:
        keys = CHAINS[chain]
        block = self.pool.blocks.get(keys[at])
        if block is None:
            return
        generation = block.generation - 1 if late else block.generation
        self.pool.report_corrupt(SPACE, keys[at], block.slot, generation)
        held = self.pool.lookup(SPACE, keys).num_held
        assert late or held <= at

    @rule(client=a_client)
    def lose_client(self, client: ClientRef) -> None:
        self.pool.abandon_client(client.connection)
        assert not any(b.client == client.connection for b in self.pool.writing)
        known = {owner.id for owner in self.pool.owners.all()}
        for owner in [o for o in self.promised if o not in known]:
            del self.promised[owner]

    @rule(seconds=st.sampled_from([0.0, 1.0, 15.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.pool.expire(self.now)
        known = {owner.id for owner in self.pool.owners.all()}
        for owner in [o for o in self.promised if o not in known]:
            del self.promised[owner]
        if seconds > self.pool.limits.lease_seconds:
            assert not self.pool.owners.all(), "an owner outlived its lease"
            assert not self.pool.writing
            assert not self.pool.num_pinned

    # --- the second tier --------------------------------------------------------------------

    @rule(chain=a_chain, length=a_length, owner=an_owner, client=a_client)
    def promote(self, chain: bytes, length: int, owner: OwnerId, client: ClientRef) -> None:
        keys = CHAINS[chain][:length]
        reply = self.pool.promote(client, owner, SPACE, keys, "first_token", self.now)
        held = self.pool.holds(SPACE, CHAINS[chain])
        assert reply.num_held + reply.num_on_disk == len(held[:length].rstrip("-"))

    @rule(chain=a_chain, length=a_length, session=st.sampled_from(["continue", "over"]))
    def hint(self, chain: bytes, length: int, session: Any) -> None:
        self.pool.hint(SPACE, CHAINS[chain][:length], session, self.now)

    @rule()
    def serve(self) -> None:
        self.pool.serve_wanted()

    @rule(chain=a_chain, owner=an_owner)
    def come_back(self, chain: bytes, owner: OwnerId) -> None:
        """All that waits for the disk ends; then a chain is used to its end."""
        self.pool.demote_ahead(self.now)
        self.disk_works(list(range(20)), "")
        keys = CHAINS[chain]
        self.pool.promote(CLIENTS[0], owner, SPACE, keys, "batch", self.now)
        self.pool.serve_wanted()
        self.disk_works(list(range(20)), "")
        self.pool.release(owner, self.now)
        self.promised.pop(owner, None)

    @rule(picks=st.lists(st.integers(0, 99), max_size=8), problem=st.sampled_from(PROBLEMS))
    def disk_works(self, picks: list[int], problem: Any) -> None:
        """Some jobs end, in any order, all well or all badly."""
        self._take_jobs()
        for pick in picks:
            if self.jobs:
                self._end_job(self.jobs.pop(pick % len(self.jobs)), problem)

    @rule(
        tenant=st.sampled_from(["", "a"]), limit=st.sampled_from([None, 0, 3]),
        space=st.sampled_from([None, 5]), cap=st.sampled_from([None, 0, 4]),
    )  # fmt: skip
    def set_limits(
        self, tenant: str, limit: int | None, space: int | None, cap: int | None
    ) -> None:
        tenants = {} if limit is None else {tenant or "default": limit}
        spaces = {} if space is None else {SPACE.hex(): space}
        self.pool.set_quotas(tenants, spaces, self.now)
        self.pool.disk.cap_blocks = cap
        self.pool.trim(self.now)

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def switch_policy(self, name: str) -> None:
        self.pool.set_policy(make_policy(name), self.now)

    def _take_jobs(self) -> None:
        for job in self.pool.disk.take_jobs():
            if isinstance(job, Forget):
                generation, _ = self.on_disk.get(job.disk_slot, (0, b""))
                if generation <= job.disk_generation:
                    self.on_disk.pop(job.disk_slot, None)
            else:
                self.jobs.append(job)

    def _end_job(self, job: WriteOut | ReadIn, problem: Any) -> None:
        record = job.record
        if isinstance(job, WriteOut):
            source = self.contents[job.source.slot, job.source.generation]
            assert source == record.key, "the slot is another block's by now"
            assert self._newest(job.source), "the slot was given away under the copy"
            self.on_disk.pop(record.slot, None)
            if not problem:
                self.on_disk[record.slot] = (record.generation, record.key)
        else:
            found = self.on_disk.get(record.slot)
            assert found == (record.generation, record.key), "the disk slot is another's"
            self.contents[job.target.slot, job.target.generation] = BlockHash(record.key)
        self.pool.disk_done(Outcome(job.job, problem), self.now)

    def _newest(self, ref: SlotRef) -> bool:
        return ref.generation == max(g for slot, g in self.contents if slot == ref.slot)

    # --- what must hold ---------------------------------------------------------------------

    @invariant()
    def is_sound(self) -> None:
        check_integrity(self.pool)
        assert len(self.pool.writing) <= MAX_WRITING

    @invariant()
    def events_tell_what_is_held(self) -> None:
        """An index fed by events, one fed by a snapshot and the pool agree, and have no hole."""
        events = self.pool.take_events()
        if events:
            self.sequence += len(events)
            batch = EventBatch("n", 1, self.sequence, events)
            assert self.index.apply(batch) is Applied.APPLIED
        fresh = PrefixIndex()
        fresh.apply(Snapshot("n", 1, self.sequence, True, True, stored_runs(self.pool)))
        for keys in CHAINS.values():
            held = self.pool.lookup(SPACE, keys)
            num_held = held.num_held + held.num_on_disk
            lengths = set(self.index.held_lengths(SPACE, keys).values())
            assert lengths <= {num_held}
            assert set(fresh.held_lengths(SPACE, keys).values()) == {num_held}
            letters = "d" * held.num_held + "s" * held.num_on_disk
            assert self.pool.holds(SPACE, keys) == letters.ljust(len(keys), "-")

    @invariant()
    def numbers_are_possible(self) -> None:
        counters = self.pool.counters
        assert 0 <= counters.lookup_hit_blocks_total <= counters.lookup_blocks_total
        assert all(count >= 0 for count in counters.evicted_by_cause.values())
        causes = {"capacity", "ssd_capacity", "corrupt", "failed_write", "quota", "tier_lost"}
        assert set(counters.evicted_by_cause) <= causes
        left = sum(
            counters.evicted_by_cause[cause] for cause in ("capacity", "quota", "ssd_capacity")
        )
        assert left <= counters.stored_blocks_total + counters.store_failed_total
        assert counters.evict_successes_total <= counters.evict_attempts_total
        assert left == 0 or counters.evict_attempts_total > 0

    def _prepare(
        self, chain: bytes, first: int, length: int, owner: OwnerId, client: ClientRef
    ) -> list[SlotRef]:
        keys = CHAINS[chain]
        parent = keys[first - 1] if first else b""
        asked = keys[first : first + length]
        fresh = [key for key in asked if key not in self.pool.blocks]
        tenant = "a" if chain.startswith(b"c") else ""
        reply = self.pool.prepare_store(client, owner, SPACE, parent, asked, self.now, tenant)
        self._check_store(asked, reply)
        slots = [(ref, key) for ref, key in zip(reply.slots, asked, strict=True) if ref]
        assert [key for _, key in slots] == fresh[: len(slots)]
        for ref, key in slots:
            assert (ref.slot, ref.generation) not in self.contents, "a generation came back"
            in_use = {r.slot for refs in self.promised.values() for r in refs}
            assert ref.slot not in in_use, "a slot that is being read was given away"
            self.contents[ref.slot, ref.generation] = key
        return [ref for ref, _ in slots]

    def _check_store(self, asked: list[BlockHash], reply: PreparedStore) -> None:
        assert len(reply.slots) == len(asked)
        given = [ref is not None for ref in reply.slots]
        assert given == sorted(given[: len(given) - reply.num_refused]) + [False] * (
            reply.num_refused
        ), "held blocks come first, then new ones, then refused ones"

    def teardown(self) -> None:
        self.now += 1000
        self.pool.expire(self.now)
        self._take_jobs()
        for job in self.jobs:
            self._end_job(job, "")
        check_integrity(self.pool)
        assert self.pool.num_pinned == 0
        assert not self.pool.active.num_kept
        letters = "".join(self.pool.holds(SPACE, [key]) for key in self.pool.blocks)
        assert self.pool.slots.num_free == NUM_SLOTS - letters.count("d"), "something leaked"
        on_disk = len(letters) - letters.count("d") + len(self.pool.disk.duplicates)
        assert self.pool.disk.slots.num_used == on_disk, "something leaked on disk"
        self._take_jobs()
        assert len(self.on_disk) == on_disk, "a record of nobody"


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
