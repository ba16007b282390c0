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


class CancelFetch(msgspec.Struct, tag=True, frozen=True):
    """What was fetched ahead for this owner will not be needed: end what is still on its way, but for
    what somebody else waits for. Answered by `Done` with the number of blocks. Pins stay until they
    are released."""

    owner: str


class Push(msgspec.Struct, tag=True, frozen=True):
    """From a worker to its own agent: this chain goes to that node too, each block once it is stored.

    It ends with the chain, with `Release` of `owner` (`transfer:<id>`), or when nothing comes any
    more. The target may say that it rather pulls.
    """

    owner: str
    namespace: bytes
    block_hashes: list[bytes]
    target: HolderRef
    tenant: str = ""


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """From agent to agent: set slots aside for these finished blocks, which will be pushed.

    `block_hashes` follow `parent` (b"" at a chain's head). What the target then has of them, held or
    on its way, is pinned for `owner`. `num_total` blocks has the whole chain; what pushing costs the
    source is given so that the target can weigh it against pulling, once a chain (`first`).
    """

    owner: str
    namespace: bytes
    parent: bytes
    block_hashes: list[bytes]
    source: str
    first: bool = False
    num_total: int = 0
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    tenant: str = ""


class Unreserve(msgspec.Struct, tag=True, frozen=True):
    """These (slot, generation) will not be filled. `cancelled`: nobody wants them any more."""

    slots: list[tuple[int, int]]
    cancelled: bool = False


class Prove(msgspec.Struct, tag=True, frozen=True):
    """The client's answer to a challenge."""

    proof: bytes


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The agent has proved that it knows the secret; now the client has to."""

    node_id: str
    nonce: bytes
    fingerprint: str
    proof: bytes


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """One entry a key: (slot, generation) to fill within `seconds`, or None where the block is there
    or on its way. It is shorter where there is no room for the rest. With `mode` "pull" the target
    will fetch the chain itself: nothing is to be pushed.
    """

    mode: Literal["pull", "push"] = "push"
    slots: list[tuple[int, int] | None] = []
    transports: list[str] = []  # by which slots can be filled
    seconds: float = 0.0


TransferRequests = Fetch | CancelFetch | Push | Reserve | Unreserve | Prove
TransferReplies = Challenge | Reserved
