"""What was fetched ahead and is not needed any more is not waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fetching import Node, check_bytes, settled, store
from heartbeats import ControlPlane

from controlplane.nodes.schemas import HeartbeatReply
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import Done, LookupReply
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import CancelFetch, Fetch

Pair = tuple[Node, Node]
Eventually = Callable[..., None]
LEAST_GBPS = 0.0001
"""12.5 kB/s: the least that the policy takes."""


@pytest.fixture
def slow_pair(
    control_plane: ControlPlane,
    make_following_pair: Callable[[str], Pair],
    spec: NamespaceSpec,
    eventually: Eventually,
) -> Pair:
    """What is told to travel takes minutes, until the cap is lifted."""
    nodes = make_following_pair("tcp")
    cap(control_plane, nodes, eventually, LEAST_GBPS)
    return nodes


def cap(
    control_plane: ControlPlane, nodes: Any, eventually: Eventually, gbps: float | None
) -> None:
    revision = control_plane.reply.transfer_policy_revision + 1
    policy = {} if gbps is None else {"cap_gbps": gbps}
    control_plane.reply = HeartbeatReply(transfer_policy_revision=revision, transfer_policy=policy)
    for node in nodes:
        eventually(lambda node=node: node.client.stats().transfers.policy_revision == revision)


@pytest.fixture
def chain(spec: NamespaceSpec) -> tuple[bytes, list[bytes]]:
    namespace = namespace_digest(spec)
    keys = block_hashes(root_hash(namespace, None, None), list(range(64 * 20)), 64)
    return namespace, [bytes(key) for key in keys]


def fetch(node: Node, source: Node, owner: str, namespace: bytes, keys: list[bytes]) -> LookupReply:
    return node.client.call(Fetch(owner, namespace, keys, source.holder), LookupReply)


def cancel(node: Node, owner: str) -> int:
    return node.client.call(CancelFetch(owner), Done).count


def test_r15_a_fetch_that_nobody_needs_ends_and_leaves_nothing(
    slow_pair: Pair,
    control_plane: ControlPlane,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    eventually: Eventually,
) -> None:
    one, two = slow_pair
    namespace, keys = chain
    store(one, namespace, keys, spec.block_bytes)
    assert fetch(two, one, "transfer:a", namespace, keys).num_pending == len(keys)
    eventually(lambda: two.client.stats().transfers.pairs != [])
    assert cancel(two, "transfer:other") == 0
    assert two.client.lookup(namespace, keys).num_pending > 0
    assert cancel(two, "transfer:a") == len(keys)
    left = settled(two, namespace, keys)  # long before they could have come
    assert left.num_held < len(keys) // 2
    two.client.release("transfer:a")
    eventually(lambda: two.client.stats().pinned_blocks == 0)
    eventually(lambda: two.client.stats().pending_blocks == 0)
    eventually(lambda: one.client.stats().pinned_blocks == 0)
    cap(control_plane, (one, two), eventually, None)
    fetch(two, one, "transfer:b", namespace, keys)  # and they can be had later
    assert settled(two, namespace, keys).num_held == len(keys)
    check_bytes(two, namespace, keys)
    assert cancel(two, "transfer:b") == 0  # what is here stays


def test_r15_what_another_request_waits_for_goes_on(
    slow_pair: Pair,
    control_plane: ControlPlane,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    eventually: Eventually,
) -> None:
    one, two = slow_pair
    namespace, keys = chain
    store(one, namespace, keys, spec.block_bytes)
    fetch(two, one, "transfer:a", namespace, keys)
    fetch(two, one, "transfer:b", namespace, keys[:5])
    assert cancel(two, "transfer:a") == 0
    other_keys = block_hashes(root_hash(namespace, "salt", None), list(range(64 * 5)), 64)
    others = [bytes(key) for key in other_keys]
    store(one, namespace, others, spec.block_bytes)
    fetch(two, one, "transfer:c", namespace, others)
    assert two.client.pin_prefix("transfer:d", namespace, others) == 5
    assert cancel(two, "transfer:c") == 0
    cap(control_plane, (one, two), eventually, None)
    assert settled(two, namespace, keys).num_held == len(keys)
    assert settled(two, namespace, others).num_held == len(others)
