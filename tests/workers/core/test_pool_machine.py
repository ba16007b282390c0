"""Everything a pool can meet, in any order: its invariants and a simple model must hold."""

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
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef, PoolLimits, PoolState
from workers.core.pool_views import stored_runs
from workers.core.prefix_index import Applied, PrefixIndex

SPACE = b"s" * 32
NUM_SLOTS = 9
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
        self.pool = PoolState(NUM_SLOTS, LruPolicy(), PoolLimits(30.0, MAX_WRITING), block_bytes=10)
        self.index = PrefixIndex()
        self.sequence = 0
        self.contents: dict[tuple[int, int], BlockHash] = {}  # (slot, generation) -> key
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
            lengths = set(self.index.held_lengths(SPACE, keys).values())
            assert lengths <= {held.num_held}
            assert set(fresh.held_lengths(SPACE, keys).values()) == {held.num_held}
            assert not any(self.pool._is_stored(SPACE, key) for key in keys[held.num_held :])

    @invariant()
    def numbers_are_possible(self) -> None:
        counters = self.pool.counters
        assert 0 <= counters.lookup_hit_blocks_total <= counters.lookup_blocks_total
        assert all(count >= 0 for count in counters.evicted_by_cause.values())
        assert set(counters.evicted_by_cause) <= {"capacity", "corrupt", "failed_write"}
        assert counters.evicted_by_cause["capacity"] <= counters.stored_blocks_total

    def _prepare(
        self, chain: bytes, first: int, length: int, owner: OwnerId, client: ClientRef
    ) -> list[SlotRef]:
        keys = CHAINS[chain]
        parent = keys[first - 1] if first else b""
        asked = keys[first : first + length]
        fresh = [key for key in asked if key not in self.pool.blocks]
        reply = self.pool.prepare_store(client, owner, SPACE, parent, asked, self.now)
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
        check_integrity(self.pool)
        assert self.pool.num_pinned == 0
        held = sum(len(run.block_hashes) for run in stored_runs(self.pool))
        assert self.pool.slots.num_free == NUM_SLOTS - held, "something leaked"


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
