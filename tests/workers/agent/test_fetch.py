"""One agent pulls another's blocks, over TCP and over shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fetching import WAIT_SECONDS, Node, check_bytes, fetch, settled, store

from workers.client import AgentClient
from workers.client_async import AsyncAgentClient
from workers.core.cache_messages import PinChains, Selection, Slice
from workers.core.errors import RefusedError
from workers.core.framing import LENGTH
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import GetStats, LookupReply
from workers.core.stats_messages import NamespaceSpec, PoolStats
from workers.core.transfer_messages import HolderRef

Pair = tuple[Node, Node]
MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(make_node: Callable[..., Node]) -> MakePair:
    def make(transports: str = "tcp", slab_bytes: int = 4 << 20) -> Pair:
        sizes = {"slab_bytes": slab_bytes}
        return make_node("n1", transports, **sizes), make_node("n2", transports, **sizes)

    return make


@pytest.fixture
def block_bytes(spec: NamespaceSpec) -> int:
    return spec.block_bytes


@pytest.fixture
def chain(spec: NamespaceSpec) -> tuple[bytes, list[bytes]]:
    namespace = namespace_digest(spec)
    keys = block_hashes(root_hash(namespace, None, None), list(range(64 * 40)), 64)
    return namespace, [bytes(key) for key in keys]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_blocks_travel_and_are_the_same(
    make_pair: MakePair, chain: tuple[bytes, list[bytes]], block_bytes: int, transport: str
) -> None:
    one, two = make_pair(transport)
    namespace, keys = chain
    store(one, namespace, keys[:32], block_bytes)
    first = fetch(two, one.holder, namespace, keys)
    assert first.num_held + first.num_pending >= 32
    assert settled(two, namespace, keys).num_held == 32  # the rest nobody has
    check_bytes(two, namespace, keys[:32])
    stats = two.client.stats()
    assert stats.moved_bytes_total == 32 * block_bytes
    (pair,) = stats.transfers.pairs
    assert (pair.source, pair.destination, pair.transport) == ("n1", "n2", transport)
    # The holder's pins go with the fetch; ours stay with the transfer until it is released.
    deadline = time.monotonic() + WAIT_SECONDS
    while one.client.stats().pinned_blocks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert two.client.stats().pinned_blocks == 32
    two.client.release("transfer:t")
    assert two.client.stats().pinned_blocks == 0


def test_without_an_rdma_device_blocks_go_over_tcp_and_the_log_says_why(
    make_pair: MakePair, chain: tuple[bytes, list[bytes]], block_bytes: int
) -> None:
    one, two = make_pair("tcp,rdma")
    namespace, keys = chain
    store(one, namespace, keys[:4], block_bytes)
    fetch(two, one.holder, namespace, keys[:4])
    assert settled(two, namespace, keys[:4]).num_held == 4
    assert "no_rdma error=rdma.devices" in two.agent.log


def test_where_rdma_is_demanded_nothing_takes_its_place(
    make_pair: MakePair, chain: tuple[bytes, list[bytes]], block_bytes: int
) -> None:
    one, two = make_pair("rdma")
    namespace, keys = chain
    store(one, namespace, keys[:4], block_bytes)
    stats = two.client.stats().transfers
    assert stats.not_ready.startswith("rdma.devices = []: no active port (no devices).")
    assert stats.problem == stats.not_ready
    fetch(two, one.holder, namespace, keys[:4])
    assert settled(two, namespace, keys[:4]).num_held == 0
    assert one.client.lookup(namespace, keys[:4]).num_held == 4, "what is here is served here"


def test_what_is_here_is_not_fetched_again(
    make_pair: MakePair, chain: tuple[bytes, list[bytes]], block_bytes: int
) -> None:
    one, two = make_pair()
    namespace, keys = chain
    store(one, namespace, keys[:8], block_bytes)
    store(two, namespace, keys[:6], block_bytes)
    fetch(two, one.holder, namespace, keys[:8])
    assert settled(two, namespace, keys[:8]).num_held == 8
    assert two.client.stats().moved_bytes_total == 2 * block_bytes


def test_the_end_of_a_fetch_is_not_the_end_of_operators_pins(
    make_pair: MakePair, chain: tuple[bytes, list[bytes]], block_bytes: int
) -> None:
    one, two = make_pair()
    namespace, keys = chain
    store(one, namespace, keys[:8], block_bytes)
    store(two, namespace, keys[:4], block_bytes)
    operator = two.agent.client("cli", "operator")
    operator.call(PinChains("kept", Selection(namespace)), Slice)
    fetch(two, one.holder, namespace, keys[:8])
    assert settled(two, namespace, keys[:8]).num_held == 8
    two.client.release("transfer:t")
    deadline = time.monotonic() + WAIT_SECONDS
    while one.client.stats().pinned_blocks:  # the fetch has ended altogether
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    assert two.client.stats().pinned_blocks == 4


def test_a_stopped_holder_is_a_miss_in_bounded_time(
    make_pair: MakePair, chain: tuple[bytes, list[bytes]], block_bytes: int
) -> None:
    one, two = make_pair()
    namespace, keys = chain
    store(one, namespace, keys[:8], block_bytes)
    os.kill(one.agent.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        fetch(two, one.holder, namespace, keys[:8])
        assert settled(two, namespace, keys[:8]) == LookupReply(0)
        assert time.monotonic() - began < 20
    finally:
        os.kill(one.agent.pid, signal.SIGCONT)
    two.client.release("transfer:t")
    assert two.client.stats().used_blocks == 0


def test_c09_another_life_of_the_holder_is_not_read(
    make_pair: MakePair, chain: tuple[bytes, list[bytes]], block_bytes: int
) -> None:
    one, two = make_pair()
    namespace, keys = chain
    store(one, namespace, keys[:8], block_bytes)
    old = HolderRef("n1", one.holder.endpoint, one.holder.incarnation - 1)
    fetch(two, old, namespace, keys[:8])
    assert settled(two, namespace, keys[:8]).num_held == 0
    fetch(two, one.holder, namespace, keys[:8])
    assert settled(two, namespace, keys[:8]).num_held == 8


def test_strangers_cannot_make_an_agent_hold_much(make_pair: MakePair) -> None:
    one, _ = make_pair()
    with socket.create_connection(("127.0.0.1", one.port), timeout=20) as sock:
        sock.sendall(LENGTH.pack(16 << 20))
        assert b"at most" in sock.recv(4096)


async def listens(port: int) -> None:
    """The agent answers on its own socket a moment before."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


async def test_who_has_a_secret_talks_to_no_agent_that_does_not_prove_it(
    make_agent: Callable[..., Any], free_port: Callable[[], int]
) -> None:
    port = free_port()
    agent = make_agent("--node-id", "n1", "--tcp", f"127.0.0.1:{port}")
    agent.start()
    await listens(port)
    client = AsyncAgentClient(f"tcp:127.0.0.1:{port}", agent.hello("agent", "n2"), 10.0, b"s" * 32)
    with pytest.raises(RefusedError, match="n1 did not prove the cluster secret"):
        await client.call(GetStats(), PoolStats)
    await client.close()


def test_nothing_is_told_without_the_cluster_secret(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = make_pair()
    for folder in (tmp_path / "none", tmp_path / "other"):
        folder.mkdir()
        if folder.name == "other":
            (folder / "transfer-secret").write_text("ab" * 32)
            (folder / "transfer-secret").chmod(0o600)
        monkeypatch.setenv("PERILUNE_HOME", str(folder))
        stranger = AgentClient(one.holder.endpoint, one.agent.hello("cli", "x"))
        with pytest.raises(RefusedError, match="cluster secret"):
            stranger.connect()
        stranger.close()
