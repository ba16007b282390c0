"""How agents ask one another for blocks, and how a client on a network proves that it may ask.

On a Unix socket the file's mode says who may speak. Over TCP an agent that has the cluster secret
answers `Hello` with `Challenge`; `Prove` follows, then `Welcome`. Neither side learns the secret.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class HolderRef(msgspec.Struct, frozen=True):
    """A node that has blocks: where its agent answers, and which life of it is meant (0: any)."""

    node_id: str
    endpoint: str
    incarnation: int = 0


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Bring what this node lacks of a chain, from its head, out of another node's pool.

    Answered at once by `LookupReply`: what is under way counts as pending until it can be loaded,
    and stops to where it cannot be had. What is here or under way is pinned for `owner`.
    """

    owner: str
    namespace: bytes
    block_hashes: list[bytes]
    holder: HolderRef
    tenant: str = ""
    urgency: Literal["first_token", "batch"] = "first_token"


class Prove(msgspec.Struct, tag=True, frozen=True):
    """The client's answer to a challenge."""

    proof: bytes


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The agent has proved that it knows the secret; now the client has to."""

    node_id: str
    nonce: bytes
    fingerprint: str
    proof: bytes


TransferRequests = Fetch | Prove
TransferReplies = Challenge
