"""Cache operations at a real agent: who may, what is read and written, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from workers.client import AgentClient
from workers.core.cache_messages import (
    MAX_PIECE_BYTES,
    BlockPiece,
    BlockPieces,
    ChainKeys,
    ChainPage,
    GetChain,
    ListChains,
    ListPins,
    PinChains,
    PinList,
    PurgeChains,
    ReadBlocks,
    Selection,
    Slice,
    UnpinChains,
    WriteBlocks,
    WrittenBlocks,
)
from workers.core.errors import RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import (
    PreparedStore,
    PrepareStore,
    ReplyBody,
    RequestBody,
    SlotRef,
    StoredSlot,
)
from workers.core.stats_messages import NamespaceSpec
from workers.pool.arena import Slab, checksum_of

EMPTY: list[tuple[RequestBody, type[ReplyBody]]] = [
    (ListChains(), ChainPage),
    (GetChain(b"k" * 16), ChainKeys),
    (ListPins(), PinList),
    (PinChains("p", Selection()), Slice),
    (UnpinChains("p"), Slice),
    (PurgeChains(Selection()), Slice),
    (ReadBlocks(b"n" * 32, [b"k" * 16]), BlockPieces),
    (WriteBlocks([]), WrittenBlocks),
]
MISPLACED: list[dict[str, Any]] = [
    {"slot": 50},
    {"slot": 10**9},
    {"slot": -1},
    {"generation": 1},
    {"key": b"?" * 16},
    {"offset": 1},
    {"offset": -1},
    {"block_bytes": 20_000},
]


class Side:
    """One agent with a worker's client, an operator's client, and its slab mapped."""

    def __init__(self, agent, spec: NamespaceSpec, name: str = "p1") -> None:  # type: ignore[no-untyped-def]
        self.spec = spec
        self.namespace = namespace_digest(spec)
        self.worker: AgentClient = agent.worker(name, spec)
        self.operator: AgentClient = agent.client("cli", "operator")
        welcome = agent.connect(self.operator)
        self.slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)

    def chain(self, num_blocks: int = 4) -> list[bytes]:
        root = root_hash(self.namespace, None, None)
        return [*block_hashes(root, range(64 * num_blocks), 64)]

    def payload(self, key: bytes) -> bytes:
        size = self.spec.block_bytes
        return (key * (size // len(key) + 1))[:size]

    def store(self, keys: Sequence[bytes]) -> None:
        reply = self.worker.prepare_store("store:1", self.namespace, b"", keys)
        stored = []
        for ref, key in zip(reply.slots, keys, strict=True):
            assert ref is not None
            checksum = self.slab.write_block(ref.slot, ref.generation, key, self.payload(key))
            stored.append(StoredSlot(ref.slot, ref.generation, checksum))
        assert self.worker.complete_store("store:1", stored) == len(keys)
        self.worker.release("store:1")

    def held(self, keys: Sequence[bytes]) -> int:
        return self.worker.lookup(self.namespace, keys).num_held

    def read(self, keys: Sequence[bytes], offset: int = 0) -> list[BlockPiece]:
        body = ReadBlocks(self.namespace, list(keys), offset)
        return self.operator.call(body, BlockPieces).pieces

    def prepare(self, keys: Sequence[bytes]) -> list[SlotRef]:
        body = PrepareStore("replicate:1", self.namespace, b"", list(keys))
        slots = self.operator.call(body, PreparedStore).slots
        assert all(slots)
        return [slot for slot in slots if slot is not None]

    def write(self, *pieces: BlockPiece) -> WrittenBlocks:
        return self.operator.call(WriteBlocks(list(pieces)), WrittenBlocks)


def piece(key: bytes, ref: SlotRef, data: bytes, **changes: object) -> BlockPiece:
    values = {
        "key": key,
        "slot": ref.slot,
        "generation": ref.generation,
        "checksum": checksum_of(data),
        "block_bytes": len(data),
        "offset": 0,
        "data": data,
    }
    return BlockPiece(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def side(agent, spec: NamespaceSpec) -> Side:  # type: ignore[no-untyped-def]
    return Side(agent, spec)


class TestWho:
    def test_an_agent_without_a_namespace_has_nothing(self, agent) -> None:  # type: ignore[no-untyped-def]
        operator = agent.client("cli", "operator")
        for body, reply in EMPTY:
            assert isinstance(operator.call(body, reply), reply)

    def test_workers_may_not(self, side: Side) -> None:
        for body, reply in EMPTY:
            with pytest.raises(RefusedError, match=rf"{type(body).__name__} from a worker"):
                side.worker.call(body, reply)


class TestOperations:
    def test_list_pin_purge(self, side: Side) -> None:
        keys = side.chain()
        side.store(keys)
        page = side.operator.call(ListChains(), ChainPage)
        assert [(chain.tip, chain.num_blocks) for chain in page.chains] == [(keys[-1], 4)]
        assert side.operator.call(GetChain(keys[2]), ChainKeys).block_hashes == keys[:3]
        body = PinChains("sys", Selection(key=keys[1]))
        assert side.operator.call(body, Slice).num_blocks == 2
        reply = side.operator.call(PurgeChains(Selection(side.namespace)), Slice)
        assert (reply.num_blocks, reply.num_skipped) == (2, 2)
        assert side.operator.call(UnpinChains("sys"), Slice).num_blocks == 2
        assert side.operator.call(PurgeChains(Selection(side.namespace)), Slice).num_blocks == 2
        assert side.held(keys) == 0

    def test_a_pin_outlives_the_operators_connection(self, side: Side) -> None:
        keys = side.chain()
        side.store(keys)
        side.operator.call(PinChains("sys", Selection(key=keys[-1])), Slice)
        side.operator.close()
        pins = side.operator.call(ListPins(), PinList)
        assert [(info.name, info.num_blocks) for info in pins.pins] == [("sys", 4)]
        assert side.worker.stats().pinned_blocks == 4

    def test_too_much_is_refused_with_its_code(self, side: Side) -> None:
        side.store(side.chain(12))
        body = PinChains("all", Selection(side.namespace), max_share=0.1)
        with pytest.raises(RefusedError, match=r"max_share = 0\.1") as caught:
            side.operator.call(body, Slice)
        assert caught.value.code == "pin_share"


class TestBytes:
    def test_a_copy_is_the_same_bytes(self, make_agent, spec: NamespaceSpec) -> None:  # type: ignore[no-untyped-def]
        here, there = Side(make_agent().start(), spec), Side(make_agent().start(), spec)
        keys = here.chain()
        here.store(keys)
        slots = there.prepare(keys)
        pieces = here.read(keys)
        assert [p.key for p in pieces] == keys
        assert len({p.slot for p in pieces}) == 4
        for found, slot in zip(pieces, slots, strict=True):
            sent = piece(found.key, slot, found.data, checksum=found.checksum)
            assert there.write(sent) == WrittenBlocks(1, 0)
        assert there.held(keys) == 4
        refs = there.worker.prepare_load("load:p1:1", there.namespace, keys)
        for ref, key in zip(refs, keys, strict=True):
            assert there.slab.read_block(ref.slot, ref.generation, key) == here.payload(key)

    def test_a_block_larger_than_a_piece(self, make_agent, spec_with) -> None:  # type: ignore[no-untyped-def]
        spec = spec_with(page_bytes=(MAX_PIECE_BYTES, 300_000))
        agents = [make_agent(slab_bytes=16 << 20).start() for _ in range(2)]
        here, there = Side(agents[0], spec), Side(agents[1], spec)
        [key] = keys = here.chain(1)
        here.store(keys)
        [slot] = there.prepare(keys)
        offset = 0
        while offset < spec.block_bytes:
            [found] = here.read(keys, offset)
            assert len(found.data) <= MAX_PIECE_BYTES
            assert there.held(keys) == 0
            sent = piece(
                key, slot, found.data, checksum=found.checksum, offset=offset,
                block_bytes=found.block_bytes,
            )  # fmt: skip
            offset += len(found.data)
            assert there.write(sent) == WrittenBlocks(int(offset == spec.block_bytes), 0)
        assert there.held(keys) == 1
        assert b"".join(p.data for o in (0, 1 << 20, 2 << 20) for p in there.read(keys, o)) == (
            here.payload(key)
        )

    def test_damaged_bytes_are_not_read_and_leave_the_index(self, side: Side) -> None:
        keys = side.chain()
        side.store(keys)
        [first, second, *_] = side.read(keys)
        side.slab.payload(second.slot)[5:6] = b"\xff"
        assert [p.key for p in side.read(keys)] == keys[:1]
        assert side.held(keys) == 1
        assert side.worker.stats().corrupt_total == 1
        assert side.read(keys[:1]) == [first]

    def test_an_offset_outside_the_block(self, side: Side) -> None:
        side.store(side.chain())
        for offset in (-1, 16384, 1 << 40):
            assert side.read(side.chain(), offset) == []
        assert side.held(side.chain()) == 4

    def test_unknown_blocks_and_other_namespaces(self, side: Side) -> None:
        side.store(side.chain())
        assert side.read([b"?" * 16]) == []
        body = ReadBlocks(b"n" * 32, side.chain())
        assert side.operator.call(body, BlockPieces).pieces == []

    def test_a_piece_that_is_not_in_its_place_changes_nothing(self, side: Side) -> None:
        [key] = keys = side.chain(1)
        [slot] = side.prepare(keys)
        data = side.payload(key)
        right = piece(key, slot, data)
        for changes in MISPLACED:
            assert side.write(structs.replace(right, **changes)) == WrittenBlocks(0, 1), changes
        assert side.write(right) == WrittenBlocks(1, 0)
        assert side.held(keys) == 1

    def test_bytes_that_differ_from_their_checksum_are_no_block(self, side: Side) -> None:
        [key] = keys = side.chain(1)
        [slot] = side.prepare(keys)
        data = side.payload(key)
        assert side.write(piece(key, slot, data, checksum=7)) == WrittenBlocks(0, 1)
        assert side.held(keys) == 0
        assert side.worker.stats().used_blocks == 0
        assert side.write(piece(key, slot, data)) == WrittenBlocks(0, 1)

    def test_nobody_fills_anothers_slot(self, side: Side) -> None:
        [key] = keys = side.chain(1)
        reply = side.worker.prepare_store("store:1", side.namespace, b"", keys)
        [slot] = reply.slots
        assert slot is not None
        data = side.payload(key)
        assert side.write(piece(key, slot, data)) == WrittenBlocks(0, 1)
        checksum = side.slab.write_block(slot.slot, slot.generation, key, data)
        done = side.worker.complete_store(
            "store:1", [StoredSlot(slot.slot, slot.generation, checksum)]
        )
        assert done == 1
