"""How two nodes that know each other connect queue pairs. After the handshake of all transports:

initiator                                         responder
                                            <-    Offer, in `Accepted.extra["rdma"]`
Join(rails: my queue pairs)                 ->    makes its own, connects them
                                            <-    Joined(rails: its queue pairs and keys) or Refused
connects its own, posts work requests

Keys and addresses are of this connection and this incarnation: a new connection asks anew (C09).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from workers.core.errors import ProtocolError, RefusedError
from workers.core.messages import Refused
from workers.core.rdma_choice import (
    GidType,
    Port,
    RailChoice,
    check_types,
    choose_rails,
    leave_out,
)
from workers.transfer.rdma.port import OpenPort
from workers.transfer.rdma.queue_pair import Address

EXTRA: Final = "rdma"
MAX_RAILS: Final = 64
PortPair = tuple[str, str]
"""Names of a port of this node and one of the peer's."""


class PortOffer(msgspec.Struct, frozen=True):
    """A port of the responder."""

    port: Port
    gid: str
    gid_type: GidType
    mtu: int  # active, in bytes
    reads: int  # that it takes at once


class Offer(msgspec.Struct, frozen=True):
    ports: list[PortOffer]
    remote_write: bool


class RailAsk(msgspec.Struct, frozen=True):
    """One queue pair of the initiator's, meant for that port of the responder's."""

    port: int
    address: Address
    mtu: int
    reads: int


class Join(msgspec.Struct, tag=True, frozen=True):
    rails: list[RailAsk]


class RailGrant(msgspec.Struct, frozen=True):
    """`error`: why there is no queue pair for that rail; the first one without it has the messages."""

    address: Address
    rkey: int
    error: str = ""


NO_ADDRESS: Final = Address("", 0, 0, 0)


class Joined(msgspec.Struct, tag=True, frozen=True):
    """`base` is the address of slot 0's header in the responder's memory."""

    rails: list[RailGrant]
    base: int
    num_bytes: int


_offer_decoder: Final = msgspec.msgpack.Decoder(Offer)
_decoder: Final = msgspec.msgpack.Decoder(Join | Joined | Refused)
encode: Final = msgspec.msgpack.Encoder().encode


def offer_of(ports: Sequence[OpenPort], *, remote_write: bool) -> bytes:
    offers = [
        PortOffer(port.port, port.gid.gid, port.gid.type, port.active_mtu, port.queues.reads)
        for port in ports
    ]
    return encode(Offer(offers, remote_write))


def read_offer(extra: dict[str, bytes], peer: str) -> Offer:
    """RefusedError: the peer serves no RDMA there."""
    document = extra.get(EXTRA)
    if document is None:
        raise RefusedError("rdma", f"{peer} offers no RDMA at this address")
    try:
        return _offer_decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no offer of ours: {error}") from error


def decode(document: bytes) -> Join | Joined | Refused:
    try:
        message: Join | Joined | Refused = _decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no message of ours: {error}") from error
    return message


def plan_rails(
    ports: Sequence[OpenPort],
    offer: Offer,
    me: str,
    peer: str,
    queue_pairs: int,
    broken: Collection[PortPair] = (),
) -> RailChoice:
    """Which port speaks to which. RefusedError: they could not understand each other (C05).

    `broken` pairs are passed over where others are left, and said so.
    """
    theirs = offer.ports
    choice = choose_rails([p.port for p in ports], [p.port for p in theirs], peer, queue_pairs)
    indices = {
        (mine, other)
        for mine, port in enumerate(ports)
        for other, offered in enumerate(theirs)
        if (port.name, offered.port.name) in broken
    }
    rails = leave_out(choice.rails, indices)
    for rail in rails:
        problem = check_types(ports[rail.mine].gid.type, theirs[rail.theirs].gid_type, me, peer)
        if problem:
            raise RefusedError("gid_type", problem)
    used = {(rail.mine, rail.theirs) for rail in rails}
    passed = tuple(
        f"{me} cannot reach {peer} over {ports[mine].name} (to {theirs[other].port.name}): passed over"
        for mine, other in sorted(indices - used)
    )
    return RailChoice(rails[:MAX_RAILS], choice.warnings + passed)
