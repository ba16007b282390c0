"""Names of things. Each is a NewType, so that mypy tells a node from a worker."""

from typing import NewType

NodeId = NewType("NodeId", str)
WorkerId = NewType("WorkerId", str)
TransferId = NewType("TransferId", str)
OwnerId = NewType("OwnerId", str)
BlockHash = NewType("BlockHash", bytes)
"""Chained content key of one block: 16 bytes of blake3."""
NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32 bytes of blake3 over the canonical encoding of a `NamespaceSpec`."""
Incarnation = NewType("Incarnation", int)
"""Milliseconds since the epoch at an agent's start: a restarted agent is a new one."""
SlotIndex = NewType("SlotIndex", int)


def transfer_owner(transfer_id: str) -> OwnerId:
    """Owner of the pins that keep a prompt's blocks between the prefill and the decode leg."""
    return OwnerId(f"transfer:{transfer_id}")


def load_owner(worker_id: str, request_id: str, transfer_id: str = "") -> OwnerId:
    """Owner of the pins that one request's load holds while a worker reads slots."""
    leg_of = f"#{transfer_id}" if transfer_id else ""
    return OwnerId(f"load:{worker_id}:{request_id}{leg_of}")


def request_of(owner_id: OwnerId) -> str:
    """What both legs of one request have in common, so that their uses of a block are one."""
    kind, _, name = owner_id.partition(":")
    if kind == "transfer":
        return name
    return name.rpartition("#")[2] if kind == "load" and "#" in name else owner_id
