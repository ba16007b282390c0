"""What an operator sets of transfers acts on running agents, on what is under way too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fetching import Node, fetch, settled, store
from heartbeats import ControlPlane

from controlplane.nodes.schemas import HeartbeatReply
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_stats import LinkStats

Eventually = Callable[[Callable[[], bool]], None]
Pair = tuple[Node, Node]


@pytest.fixture
def pair(make_following_pair: Callable[[str], Pair]) -> Pair:
    return make_following_pair("shm,tcp")


@pytest.fixture
def chain(spec: NamespaceSpec) -> tuple[bytes, list[bytes]]:
    namespace = namespace_digest(spec)
    keys = block_hashes(root_hash(namespace, None, None), list(range(64 * 40)), 64)
    return namespace, [bytes(key) for key in keys]


def put(control_plane: ControlPlane, nodes: Pair, eventually: Eventually, **spec: Any) -> None:
    """A new revision, and wait until both act on it."""
    revision = control_plane.reply.transfer_policy_revision + 1
    control_plane.reply = HeartbeatReply(transfer_policy_revision=revision, transfer_policy=spec)
    for node in nodes:
        eventually(lambda node=node: node.client.stats().transfers.policy_revision == revision)


def links(node: Node) -> dict[str, LinkStats]:
    return {link.transport: link for link in node.client.stats().transfers.links}


def test_r23_the_rate_of_a_transfer_under_way_follows_a_changed_cap(
    pair: Pair,
    control_plane: ControlPlane,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    eventually: Eventually,
) -> None:
    one, two = pair
    namespace, keys = chain
    store(one, namespace, keys, spec.block_bytes)
    bytes_per_second = len(keys) * spec.block_bytes / 8  # eight seconds for all of it
    put(
        control_plane, pair, eventually,
        cap_gbps=bytes_per_second * 8e-9, transport_overrides={"n1>n2": "tcp"},
    )  # fmt: skip
    fetch(two, one.holder, namespace, keys)
    eventually(lambda: two.client.stats().transfers.links != [])
    assert links(two)["tcp"].cap_bytes_per_second == pytest.approx(bytes_per_second)
    time.sleep(1.0)
    assert two.client.stats().transfers.pairs[0].in_flight > 0, "it is held back"
    lifted = time.monotonic()
    put(control_plane, pair, eventually, transport_overrides={"n1>n2": "tcp"})
    assert settled(two, namespace, keys).num_held == len(keys)
    assert time.monotonic() - lifted < 5.0, "under the cap it would have taken longer"
    assert links(two)["tcp"].cap_bytes_per_second == 0


def test_the_transport_of_a_pair_is_what_the_policy_says_and_the_stats_say_why(
    pair: Pair,
    control_plane: ControlPlane,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    eventually: Eventually,
) -> None:
    one, two = pair
    namespace, keys = chain
    store(one, namespace, keys, spec.block_bytes)
    fetch(two, one.holder, namespace, keys[:4])
    assert settled(two, namespace, keys[:4]).num_held == 4
    assert links(two)["shm"].chosen
    assert links(two)["shm"].why.startswith("cost of 1 MiB: shm ")
    put(control_plane, pair, eventually, transport_overrides={"n1>n2": "tcp", "n2>n1": "rdma"})
    fetch(two, one.holder, namespace, keys[:8])
    assert settled(two, namespace, keys[:8]).num_held == 8
    found = links(two)
    assert (found["tcp"].chosen, found["tcp"].override) == (True, True)
    assert found["tcp"].why == "set for this pair"
    assert not found["shm"].chosen
    moved = {pair.transport: pair.bytes_total for pair in two.client.stats().transfers.pairs}
    assert moved == {"shm": 4 * spec.block_bytes, "tcp": 4 * spec.block_bytes}
