"""Listing, pinning and purging: bounded slices that leave the pool sound, whatever else happens."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.core.cache_messages import (
    ChainInfo,
    ListChains,
    PinChains,
    PurgeChains,
    Selection,
    Slice,
    UnpinChains,
)
from workers.core.hashing import block_hashes
from workers.core.ids import BlockHash, OwnerId
from workers.core.messages import AllBlocksCleared, BlocksRemoved, SlotRef, StoredSlot
from workers.core.policies.lru import LruPolicy
from workers.core.pool_integrity import check_integrity
from workers.core.pool_ops import (
    OPERATOR_PREFIX,
    PinRefusedError,
    chain_keys,
    list_chains,
    list_pins,
    operators,
    pin,
    purge,
    unpin,
)
from workers.core.pool_state import ClientRef, PoolLimits, PoolState
from workers.core.slots import SlotTable
from workers.core.tiers import Forget, Outcome

ONE, TWO = b"1" * 32, b"2" * 32
P1, D1 = ClientRef(1, "p1"), ClientRef(2, "d1")
LOAD = OwnerId("load:d1:1")


def keys_of(name: str, length: int = 8) -> list[BlockHash]:
    return block_hashes(name[:1].encode(), list(name.encode()), 1)[:length]


class Bench:
    """A pool with a clock of its own, and a disk that works when told to."""

    def __init__(self, num_slots: int = 40, disk_slots: int = 0) -> None:
        self.now = 100.0
        limits = PoolLimits(30.0, 100, reserve_share=0.5)
        self.pool = PoolState(num_slots, LruPolicy(), limits, block_bytes=10)
        if disk_slots:
            self.pool.disk.open(SlotTable(disk_slots, 50))

    def store(self, keys: list[BlockHash], namespace: bytes = ONE, tenant: str = "") -> int:
        owner = OwnerId("store:1")
        reply = self.pool.prepare_store(P1, owner, namespace, b"", keys, self.now, tenant)
        stored = [StoredSlot(ref.slot, ref.generation, 1) for ref in reply.slots if ref]
        self.pool.complete_store(self.now, stored)
        self.pool.release(owner, self.now)
        self.pool.demote_ahead(self.now)
        return len(stored)

    def load(self, keys: list[BlockHash], namespace: bytes = ONE) -> list[SlotRef]:
        return self.pool.prepare_load(D1, LOAD, namespace, keys, self.now)

    def pin(self, name: str = "p", max_share: float = 0.5, **fields: object) -> int:
        """All slices of a pin; how many blocks they pinned."""
        selection = Selection(**fields)  # type: ignore[arg-type]
        total, cursor = 0, 0
        while True:
            body = PinChains(name, selection, None, max_share, cursor, limit=3)
            reply = pin(self.pool, body, self.now)
            total += reply.num_blocks
            if reply.cursor is None:
                return total
            cursor = reply.cursor

    def purge(self, limit: int = 3, *, include_pinned: bool = False, **fields: object) -> int:
        """All slices of one walk; how many blocks went."""
        selection = Selection(**fields)  # type: ignore[arg-type]
        total, cursor = 0, 0
        while True:
            before = len(self.pool.blocks)
            reply = purge(self.pool, PurgeChains(selection, cursor, limit, include_pinned))
            assert before - len(self.pool.blocks) == reply.num_blocks <= limit
            check_integrity(self.pool)
            assert selection.key or reply.num_left == self.num_of(selection)
            total += reply.num_blocks
            if reply.cursor is None:
                return total
            cursor = reply.cursor

    def num_of(self, selection: Selection) -> int:
        """Counted one by one."""
        spaces = [selection.namespace] if selection.namespace else [ONE, TWO]
        blocks = [block for block in self.pool.blocks.values() if block.namespace in spaces]
        return sum(selection.tenant in (None, block.tenant) for block in blocks)

    def chains(self, limit: int = 2, **fields: object) -> list[ChainInfo]:
        """All pages of a list."""
        body = ListChains(Selection(**fields))  # type: ignore[arg-type]
        found: list[ChainInfo] = []
        cursor: int | None = 0
        while cursor is not None:
            page = list_chains(self.pool, body.selection, cursor, limit, self.now)
            found += page.chains
            cursor = page.cursor
        return found

    def work_disk(self) -> None:
        for job in self.pool.disk.take_jobs():
            if not isinstance(job, Forget):
                self.pool.disk_done(Outcome(job.job, ""), self.now)


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.store(keys_of("aaaaaaaa"))
    made.store(keys_of("aaabbbbb"))
    made.store(keys_of("cccc"), tenant="acme")
    made.store(keys_of("dd"), TWO)
    return made


class TestList:
    def test_one_row_a_chain_newest_first(self, bench: Bench) -> None:
        found = bench.chains()
        names = ["dd", "cccc", "aaabbbbb", "aaaaaaaa"]
        assert [chain.tip for chain in found] == [keys_of(name)[-1] for name in names]
        assert [chain.num_blocks for chain in found] == [2, 4, 8, 8]
        assert [chain.tenant for chain in found] == ["", "acme", "", ""]
        assert found[2].head == found[3].head == keys_of("aaaaaaaa")[0]

    def test_filters(self, bench: Bench) -> None:
        assert [c.num_blocks for c in bench.chains(namespace=TWO)] == [2]
        assert [c.num_blocks for c in bench.chains(tenant="acme")] == [4]
        assert len(bench.chains(tenant="")) == 3
        assert len(bench.chains(key=keys_of("aaaaaaaa")[2])) == 2
        assert len(bench.chains(key=keys_of("aaaaaaaa")[3])) == 1
        assert bench.chains(key=b"?" * 16) == []

    def test_uses_age_and_pins(self, bench: Bench) -> None:
        bench.now += 5
        bench.load(keys_of("cccc"))
        bench.now += 3
        [chain] = bench.chains(tenant="acme")
        assert (chain.hits, chain.idle_seconds, chain.pins) == (2, 3.0, 1)
        assert chain.pinned_by == []

    def test_blocks_on_disk_are_told(self) -> None:
        bench = Bench(8, disk_slots=20)
        bench.store(keys_of("aaaaaaaa"))
        for _ in range(4):
            bench.work_disk()
            bench.pool.demote_ahead(bench.now)
        [chain] = bench.chains()
        held = bench.pool.lookup(ONE, keys_of("aaaaaaaa"))
        assert chain.num_on_disk == held.num_on_disk > 0
        assert chain.num_blocks == 8

    def test_all_keys_of_a_chain(self, bench: Bench) -> None:
        keys = keys_of("cccc")
        reply = chain_keys(bench.pool, keys[2])
        assert (reply.block_hashes, reply.tenant, reply.namespace) == (keys[:3], "acme", ONE)
        assert chain_keys(bench.pool, b"?" * 16).block_hashes == []

    def test_a_cursor_that_is_none_of_ours(self, bench: Bench) -> None:
        assert list_chains(bench.pool, Selection(), -5, 100, 0.0).chains
        assert list_chains(bench.pool, Selection(), 10**9, 100, 0.0).cursor is None


class TestPin:
    def test_a_key_pins_the_blocks_up_to_it(self, bench: Bench) -> None:
        assert bench.pin("sys", key=keys_of("aaaaaaaa")[2]) == 3
        [info] = list_pins(bench.pool, Selection(), bench.now).pins
        assert (info.name, info.num_blocks, info.expires_in_seconds) == ("sys", 3, None)
        assert info.tips == [keys_of("aaaaaaaa")[2]]

    def test_pinned_blocks_are_not_evicted(self) -> None:
        bench = Bench(8)
        bench.store(keys_of("aaaa"))
        bench.pin("p", key=keys_of("aaaa")[-1])
        for name in ("bbbbbbbb", "cccccccc", "dddddddd"):
            bench.store(keys_of(name))
        assert bench.pool.lookup(ONE, keys_of("aaaa")).num_held == 4

    def test_a_selection_pins_every_chain_once(self, bench: Bench) -> None:
        assert bench.pin("all-of-one", max_share=0.5, namespace=ONE, tenant="") == 13
        assert bench.pin("all-of-one", max_share=0.5, namespace=ONE, tenant="") == 0

    def test_it_outlives_connections_and_leases_but_not_its_time(self, bench: Bench) -> None:
        body = PinChains("p", Selection(key=keys_of("cccc")[-1]), seconds=100)
        pin(bench.pool, body, bench.now)
        for connection in range(-1, 4):
            if connection >= 0:
                bench.pool.abandon_client(connection)
        bench.now += 99
        bench.pool.expire(bench.now)
        assert list_pins(bench.pool, Selection(), bench.now).num_blocks == 4
        bench.now += 2
        bench.pool.expire(bench.now)
        assert list_pins(bench.pool, Selection(), bench.now).pins == []
        assert not bench.pool.num_pinned

    def test_the_share_is_a_bound_over_all_pins(self, bench: Bench) -> None:
        bench.pin("one", max_share=0.2, key=keys_of("aaaaaaaa")[-1])
        with pytest.raises(PinRefusedError, match=r"may pin 8 of 40 blocks; 8 are pinned and 4"):
            bench.pin("two", max_share=0.2, tenant="acme")
        assert [owner.id for owner in operators(bench.pool)] == ["operator:one"]
        assert bench.pin("same blocks", max_share=0.2, key=keys_of("aaaaaaaa")[0]) == 1

    def test_no_request_may_raise_the_share_beyond_half(self) -> None:
        bench = Bench(8)
        bench.store(keys_of("aaaaa"))
        with pytest.raises(PinRefusedError, match=r"max_share = 0.5"):
            bench.pin("p", max_share=1.0, key=keys_of("aaaaa")[-1])

    def test_nothing_matches(self, bench: Bench) -> None:
        assert bench.pin("p", key=b"?" * 16) == 0
        assert bench.pin("p", tenant="nobody") == 0
        assert bench.pin("p", namespace=TWO, key=keys_of("cccc")[0]) == 0
        assert operators(bench.pool) == []

    def test_unpin_is_idempotent(self, bench: Bench) -> None:
        bench.pin("p", tenant="acme")
        assert unpin(bench.pool, UnpinChains("p", limit=3)) == Slice(3, cursor=0)
        assert unpin(bench.pool, UnpinChains("p", limit=3)) == Slice(1)
        assert unpin(bench.pool, UnpinChains("p")) == Slice(0)

    def test_pins_are_found_by_what_they_hold(self, bench: Bench) -> None:
        bench.pin("acme", tenant="acme")
        bench.pin("other", key=keys_of("dd")[-1])

        def names(**fields: object) -> list[str]:
            selection = Selection(**fields)  # type: ignore[arg-type]
            return [info.name for info in list_pins(bench.pool, selection, 0.0).pins]

        assert names() == ["acme", "other"]
        assert names(tenant="acme") == ["acme"]
        assert names(namespace=TWO) == ["other"]
        assert names(key=keys_of("cccc")[1]) == ["acme"]
        assert names(key=keys_of("aaaaaaaa")[1]) == []


class TestPurge:
    def test_a_namespace_goes_whole_and_says_so(self, bench: Bench) -> None:
        bench.pool.take_events()
        assert bench.purge(namespace=ONE) == 17
        events = bench.pool.take_events()
        gone = [e for e in events if isinstance(e, BlocksRemoved)]
        assert {e.cause for e in gone} == {"purge"}
        assert sum(len(e.block_hashes) for e in gone) == 17
        assert events[-1] == AllBlocksCleared(ONE)
        assert bench.pool.slots.num_used == 2
        assert [chain.namespace for chain in bench.chains()] == [TWO]

    def test_a_tenant_goes_alone(self, bench: Bench) -> None:
        assert bench.purge(tenant="acme") == 4
        assert len(bench.pool.blocks) == 15

    def test_a_key_takes_what_follows_it(self, bench: Bench) -> None:
        assert bench.purge(key=keys_of("aaaaaaaa")[3]) == 5
        assert bench.pool.lookup(ONE, keys_of("aaaaaaaa")).num_held == 3
        assert bench.pool.lookup(ONE, keys_of("aaabbbbb")).num_held == 8

    def test_what_is_left_of_a_selection(self, bench: Bench) -> None:
        def left(**fields: Any) -> int | None:
            return purge(bench.pool, PurgeChains(Selection(**fields), limit=1)).num_left

        assert left(key=keys_of("aaaaaaaa")[4]) == 3
        assert left(tenant="nobody") == 0
        assert left(namespace=b"x" * 32) == 0
        assert left(tenant="acme") == 4
        assert left(tenant="acme", namespace=ONE) == 4
        assert left(tenant="acme", namespace=TWO) == 2, "at most: what either has"

    def test_everything(self, bench: Bench) -> None:
        assert bench.purge() == 19
        assert bench.pool.slots.num_free == 40

    def test_what_a_request_reads_is_free_when_it_lets_go(self, bench: Bench) -> None:
        refs = bench.load(keys_of("cccc"))
        reply = purge(bench.pool, PurgeChains(Selection(tenant="acme")))
        assert (reply.num_blocks, reply.num_in_use) == (4, 4)
        assert bench.pool.lookup(ONE, keys_of("cccc")).num_held == 0
        assert {ref.slot for ref in refs}.isdisjoint(bench.pool.slots.free_slots())
        bench.pool.release(LOAD, bench.now)
        assert {ref.slot for ref in refs} <= bench.pool.slots.free_slots()

    def test_operators_pins_are_left_alone_unless_told(self, bench: Bench) -> None:
        bench.pin("keep", key=keys_of("aaaaaaaa")[4])
        assert bench.purge(namespace=ONE) == 12
        reply = purge(bench.pool, PurgeChains(Selection(namespace=ONE)))
        assert (reply.num_blocks, reply.num_skipped) == (0, 5)
        assert bench.purge(namespace=ONE, include_pinned=True) == 5
        assert operators(bench.pool) == []
        assert bench.pool.slots.num_used == 2

    def test_blocks_being_written_go_too(self, bench: Bench) -> None:
        owner = OwnerId("store:2")
        reply = bench.pool.prepare_store(P1, owner, TWO, b"", keys_of("eee"), bench.now, "")
        assert bench.purge(namespace=TWO) == 5
        stored = [StoredSlot(ref.slot, ref.generation, 1) for ref in reply.slots if ref]
        assert bench.pool.complete_store(bench.now, stored) == 3
        bench.pool.release(owner, bench.now)
        assert bench.pool.lookup(TWO, keys_of("eee")).num_held == 0
        assert bench.pool.slots.num_used == 17

    @given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5), limit=st.integers(1, 9))
    def test_one_walk_finds_all_of_a_pool_that_rests(self, sizes: list[int], limit: int) -> None:
        bench = Bench(40)
        for number, size in enumerate(sizes):
            bench.store(keys_of(f"aa{chr(98 + number)}bbbbb", size), ONE if number % 2 else TWO)
        expected = sum(block.namespace == ONE for block in bench.pool.blocks.values())
        assert bench.purge(limit, namespace=ONE) == expected
        assert all(block.namespace == TWO for block in bench.pool.blocks.values())


class OperatorMachine(RuleBasedStateMachine):
    """An operator at work while requests store, load and let go, over two tiers."""

    names = st.sampled_from(["aaaaaaaa", "aaabbbbb", "cccccccc", "ddd"])

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(9, disk_slots=7)
        self.reading: set[int] = set()

    @rule(name=names, length=st.integers(1, 8))
    def store(self, name: str, length: int) -> None:
        tenant = "acme" if name.startswith("c") else ""
        before = set(self.bench.pool.by_slot)
        self.bench.store(keys_of(name, length), TWO if name == "ddd" else ONE, tenant)
        fresh = set(self.bench.pool.by_slot) - before
        assert fresh.isdisjoint(self.reading), "a slot that is being read was given away"

    @rule(name=names)
    def load(self, name: str) -> None:
        refs = self.bench.load(keys_of(name), TWO if name == "ddd" else ONE)
        self.reading |= {ref.slot for ref in refs}

    @rule()
    def let_go(self) -> None:
        self.bench.pool.release(LOAD, self.bench.now)
        self.reading.clear()

    @rule()
    def disk_works(self) -> None:
        self.bench.work_disk()

    @rule(name=st.sampled_from("pq"), chain=names, at=st.integers(0, 7))
    def pin_chain(self, name: str, chain: str, at: int) -> None:
        keys = keys_of(chain)
        self._pin(name, Selection(key=keys[min(at, len(keys) - 1)]), 0)

    @rule(
        name=st.sampled_from("pq"), tenant=st.sampled_from(["", "acme"]), cursor=st.integers(0, 9)
    )
    def pin_tenant(self, name: str, tenant: str, cursor: int) -> None:
        self._pin(name, Selection(tenant=tenant), cursor)

    def _pin(self, name: str, selection: Selection, cursor: int) -> None:
        body = PinChains(name, selection, 10.0, 0.4, cursor, limit=4)
        with contextlib.suppress(PinRefusedError):  # the share: the invariant looks at it
            pin(self.bench.pool, body, self.bench.now)

    @rule(name=st.sampled_from("pq"), limit=st.integers(1, 4))
    def unpin(self, name: str, limit: int) -> None:
        unpin(self.bench.pool, UnpinChains(name, limit))

    @rule(
        space=st.sampled_from([b"", ONE, TWO]), tenant=st.sampled_from([None, "", "acme"]),
        cursor=st.integers(0, 9), limit=st.integers(1, 9), include=st.booleans(),
    )  # fmt: skip
    def purge(
        self, space: bytes, tenant: str | None, cursor: int, limit: int, include: bool
    ) -> None:
        purge(self.bench.pool, PurgeChains(Selection(space, tenant), cursor, limit, include))

    @rule(chain=names, at=st.integers(0, 2), include=st.booleans())
    def purge_key(self, chain: str, at: int, include: bool) -> None:
        keys = keys_of(chain)
        purge(self.bench.pool, PurgeChains(Selection(key=keys[at]), include_pinned=include))
        pinned = any(owner.pins for owner in operators(self.bench.pool))
        if include or not pinned:
            assert self.bench.pool.holds(TWO if chain == "ddd" else ONE, [keys[at]]) == "-"

    @rule(seconds=st.sampled_from([0.0, 5.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.pool.expire(self.bench.now)
        if seconds > 10:
            assert operators(self.bench.pool) == [], "a pin outlived its time"

    @invariant()
    def is_sound(self) -> None:
        pool = self.bench.pool
        check_integrity(pool)
        pinned = {b for owner in operators(pool) for b in owner.pins}
        assert len(pinned) <= int(0.4 * 9), "operators pin more than their share"
        assert all(block.key in pool.blocks for block in pinned), "a pin on what is gone"
        tips = [chain.tip for chain in self.bench.chains()]
        assert len(set(tips)) == len(tips)
        pool.take_events()

    def teardown(self) -> None:
        self.let_go()
        for owner in operators(self.bench.pool):
            unpin(self.bench.pool, UnpinChains(owner.id.removeprefix(OPERATOR_PREFIX)))
        self.bench.purge(100)
        self.bench.work_disk()
        self.bench.now += 1000
        self.bench.pool.expire(self.bench.now)
        assert not self.bench.pool.blocks
        assert self.bench.pool.slots.num_free == 9, "a slot is lost"
        check_integrity(self.bench.pool)


OperatorMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestOperatorMachine = OperatorMachine.TestCase
