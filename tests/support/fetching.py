"""Agents that fetch blocks from one another, as their workers have them do it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from workers.client import AgentClient
from workers.core.messages import LookupReply, StoredSlot
from workers.core.transfer_messages import Fetch, HolderRef
from workers.pool.arena import Slab, checksum_of

WAIT_SECONDS = 30.0


@dataclass
class Node:
    """An agent and one worker of it."""

    agent: Any
    client: AgentClient
    port: int

    @property
    def holder(self) -> HolderRef:
        welcome = self.client.welcome
        assert welcome is not None
        return HolderRef(welcome.node_id, f"tcp:127.0.0.1:{self.port}", welcome.incarnation)

    def slab(self) -> Slab:
        welcome = self.client.welcome
        assert welcome is not None
        return Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)


def content(key: bytes, length: int) -> bytes:
    return (key * (length // len(key) + 1))[:length]


def store(node: Node, namespace: bytes, keys: list[bytes], block_bytes: int) -> None:
    slab = node.slab()
    prepared = node.client.prepare_store("transfer:seed", namespace, b"", keys)
    done = []
    for key, ref in zip(keys, prepared.slots, strict=True):
        assert ref is not None
        checksum = slab.write_block(ref.slot, ref.generation, key, content(key, block_bytes))
        done.append(StoredSlot(ref.slot, ref.generation, checksum))
    node.client.complete_store("transfer:seed", done)
    node.client.release("transfer:seed")
    slab.close()


def fetch(node: Node, holder: HolderRef, namespace: bytes, keys: list[bytes]) -> LookupReply:
    return node.client.call(Fetch("transfer:t", namespace, keys, holder), LookupReply)


def settled(node: Node, namespace: bytes, keys: list[bytes]) -> LookupReply:
    """The first lookup without anything under way."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        found = node.client.lookup(namespace, keys)
        if not found.num_pending:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def check_bytes(node: Node, namespace: bytes, keys: list[bytes]) -> None:
    slab = node.slab()
    refs = node.client.prepare_load("load:check", namespace, keys)
    assert len(refs) == len(keys)
    for key, ref in zip(keys, refs, strict=True):
        block = slab.read_block(ref.slot, ref.generation, key)
        assert block is not None
        assert block == content(key, len(block))
        assert checksum_of(block)
    node.client.release("load:check")
    slab.close()
