"""A prefill node's agent pushes blocks to the decode node's, into slots reserved there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fetching import Node, check_bytes, content, fetch, settled, store

from workers.client import AgentClient
from workers.core.errors import RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import Done, LookupReply, StoredSlot
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import HolderRef, Push, Reserve, Reserved, Unreserve

Pair = tuple[Node, Node]
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def pair(make_node: Callable[..., Node]) -> Pair:
    return make_node("n1", "tcp", slab_bytes=4 << 20), make_node("n2", "tcp", slab_bytes=4 << 20)


@pytest.fixture
def block_bytes(spec: NamespaceSpec) -> int:
    return spec.block_bytes


@pytest.fixture
def namespace(spec: NamespaceSpec) -> bytes:
    return namespace_digest(spec)


@pytest.fixture
def keys(namespace: bytes) -> list[bytes]:
    found = block_hashes(root_hash(namespace, None, None), list(range(64 * 40)), 64)
    return [bytes(key) for key in found]


def push(node: Node, target: HolderRef, namespace: bytes, keys: list[bytes]) -> int:
    return node.client.call(Push("transfer:t", namespace, keys, target), Done).count


def store_run(
    node: Node, namespace: bytes, parent: bytes, keys: list[bytes], block_bytes: int
) -> None:
    """As prefill does: for the transfer, which keeps them pinned."""
    slab = node.slab()
    prepared = node.client.prepare_store("transfer:t", namespace, parent, keys)
    done = []
    for key, ref in zip(keys, prepared.slots, strict=True):
        assert ref is not None
        data = content(key, block_bytes)
        checksum = slab.write_block(ref.slot, ref.generation, key, data)
        done.append(StoredSlot(ref.slot, ref.generation, checksum))
    node.client.complete_store("transfer:t", done)
    slab.close()


def held(node: Node, namespace: bytes, keys: list[bytes]) -> int:
    return node.client.lookup(namespace, keys).num_held


def moved(node: Node) -> dict[tuple[str, str, str], int]:
    return {
        (pair.source, pair.destination, pair.mode): pair.bytes_total
        for pair in node.client.stats().transfers.pairs
    }


def test_r26_blocks_are_there_before_anybody_asks_as_they_are_finished(
    pair: Pair, namespace: bytes, keys: list[bytes], block_bytes: int, eventually: Eventually
) -> None:
    one, two = pair
    assert push(one, two.holder, namespace, keys) == 1
    for start in (0, 8, 16):
        parent = keys[start - 1] if start else b""
        store_run(one, namespace, parent, keys[start : start + 8], block_bytes)
        eventually(lambda end=start + 8: held(two, namespace, keys) == end)
    assert fetch(two, one.holder, namespace, keys[:24]) == LookupReply(24)
    check_bytes(two, namespace, keys[:24])
    eventually(lambda: moved(one) == {("n1", "n2", "push"): 24 * block_bytes})
    assert moved(two) == {}
    (mode,) = two.client.stats().transfers.modes
    assert (mode.source, mode.mode, mode.pushed_total, mode.pulled_total) == ("n1", "push", 1, 0)
    assert mode.pull_seconds > mode.push_seconds > 0
    assert two.client.stats().pinned_blocks == 24, "for the transfer, until it ends"
    for node in pair:
        node.client.release("transfer:t")
        eventually(lambda node=node: node.client.stats().pinned_blocks == 0)


def test_what_the_target_has_or_fetches_is_not_sent_again(
    pair: Pair, namespace: bytes, keys: list[bytes], block_bytes: int, eventually: Eventually
) -> None:
    one, two = pair
    store(two, namespace, keys[:6], block_bytes)
    store_run(one, namespace, b"", keys[:20], block_bytes)
    fetch(two, one.holder, namespace, keys[:12])
    push(one, two.holder, namespace, keys[:20])
    eventually(lambda: held(two, namespace, keys) == 20)
    check_bytes(two, namespace, keys[:20])
    eventually(
        lambda: sum(moved(one).values()) + sum(moved(two).values()) == 14 * block_bytes
    )  # fmt: skip


def test_a_released_transfer_pushes_no_more(
    pair: Pair, namespace: bytes, keys: list[bytes], block_bytes: int, eventually: Eventually
) -> None:
    one, two = pair
    push(one, two.holder, namespace, keys)
    store_run(one, namespace, b"", keys[:8], block_bytes)
    eventually(lambda: held(two, namespace, keys) == 8)
    one.client.release("transfer:t")
    store_run(one, namespace, keys[7], keys[8:16], block_bytes)
    assert held(one, namespace, keys) == 16
    time.sleep(1.0)
    assert held(two, namespace, keys) == 8


def test_c09_another_life_of_the_target_is_not_written(
    pair: Pair, namespace: bytes, keys: list[bytes], block_bytes: int, eventually: Eventually
) -> None:
    one, two = pair
    old = msgspec.structs.replace(two.holder, incarnation=two.holder.incarnation - 1)
    store_run(one, namespace, b"", keys[:4], block_bytes)
    push(one, old, namespace, keys[:4])
    eventually(lambda: "push_ended target=n2" in one.agent.log)
    eventually(lambda: two.client.stats().pending_blocks == 0)
    assert held(two, namespace, keys) == 0
    assert moved(one) == {}


@pytest.fixture
def source(pair: Pair, free_port: Callable[[], int]) -> AgentClient:
    """Speaks to n2 as n1's agent would, and writes nothing."""
    return pair[1].agent.client("agent", "n1")  # type: ignore[no-any-return]


def reserve(source: AgentClient, namespace: bytes, keys: list[bytes]) -> Reserved:
    body = Reserve(
        "transfer:t", namespace, b"", keys, "n1", first=True, num_total=len(keys),
        latency_seconds=1e-4, bytes_per_second=4e9,
    )  # fmt: skip
    return source.call(body, Reserved)


def test_what_will_not_be_pushed_after_all_is_pulled_for_who_waits_for_it(
    pair: Pair, source: AgentClient, namespace: bytes, keys: list[bytes], block_bytes: int
) -> None:
    one, two = pair
    store(one, namespace, keys[:8], block_bytes)
    reserved = reserve(source, namespace, keys[:8])
    assert reserved.mode == "push"
    slots = [slot for slot in reserved.slots if slot is not None]
    assert len(slots) == 8
    assert fetch(two, one.holder, namespace, keys[:8]) == LookupReply(0, num_pending=8)
    assert moved(two) == {}, "it waits for the push"
    source.call(Unreserve(slots), Done)
    assert settled(two, namespace, keys[:8]).num_held == 8
    check_bytes(two, namespace, keys[:8])
    assert moved(two) == {("n1", "n2", "pull"): 8 * block_bytes}
    (mode,) = two.client.stats().transfers.modes
    assert mode.failed_pushes_total == 1


def test_a_source_that_goes_leaves_nothing_pending(
    pair: Pair, source: AgentClient, namespace: bytes, keys: list[bytes], eventually: Eventually
) -> None:
    _, two = pair
    assert len(reserve(source, namespace, keys[:8]).slots) == 8
    assert two.client.lookup(namespace, keys).num_pending == 8
    source.close()
    eventually(lambda: two.client.lookup(namespace, keys) == LookupReply(0))
    two.client.release("transfer:t")
    assert two.client.stats().used_blocks == 0


def test_a_stopped_target_costs_bounded_time_and_no_block(
    pair: Pair, namespace: bytes, keys: list[bytes], block_bytes: int, eventually: Eventually
) -> None:
    one, two = pair
    os.kill(two.agent.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        store_run(one, namespace, b"", keys[:8], block_bytes)
        push(one, two.holder, namespace, keys[:8])
        eventually(lambda: "push_ended target=n2" in one.agent.log)
        assert time.monotonic() - began < 20
    finally:
        os.kill(two.agent.pid, signal.SIGCONT)
    assert held(one, namespace, keys) == 8
    fetch(two, one.holder, namespace, keys[:8])
    assert settled(two, namespace, keys[:8]).num_held == 8


def test_only_agents_reserve_and_only_for_transfers(
    pair: Pair, namespace: bytes, keys: list[bytes], source: AgentClient
) -> None:
    _, two = pair
    body = Reserve("transfer:t", namespace, b"", keys[:2], "n1", first=True)
    with pytest.raises(RefusedError, match="from a worker"):
        two.client.call(body, Reserved)
    with pytest.raises(RefusedError, match="operator:x"):
        source.call(msgspec.structs.replace(body, owner="operator:x"), Reserved)


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency_seconds": float("nan"), "bytes_per_second": 1e9},
        {"latency_seconds": 0.001, "bytes_per_second": float("inf")},
        {"num_total": 1 << 60},
        {"num_total": -1},
        {"source": "n" * 1000},
    ],
)
def test_what_would_spoil_every_heartbeat_is_refused(
    pair: Pair,
    namespace: bytes,
    keys: list[bytes],
    source: AgentClient,
    wrong: dict[str, Any],
) -> None:
    body = Reserve("transfer:t", namespace, b"", keys[:2], "n1", first=True)
    with pytest.raises(RefusedError, match=r"^reserve|source and owner|latency_seconds|num_total"):
        source.call(msgspec.structs.replace(body, **wrong), Reserved)
    assert pair[1].client.stats().transfers.modes == []


def test_a_chain_without_blocks_or_to_itself_is_no_push(
    pair: Pair, namespace: bytes, keys: list[bytes]
) -> None:
    one, two = pair
    assert push(one, two.holder, namespace, []) == 0
    assert push(one, one.holder, namespace, keys) == 0
